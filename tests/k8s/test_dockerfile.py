"""k8s/Dockerfile without a Docker daemon: its instructions are read, and its pip steps run in a
clean environment (slow)."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.k8s.manifests import K8S, OVERLAYS, ROOT, build, cluster


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


def parsed() -> list[Instruction]:
    lines = [
        line
        for line in (K8S / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def all_of(word: str) -> list[str]:
    return [instruction.rest for instruction in parsed() if instruction.word == word]


def argument(name: str) -> str:
    [found] = [rest.partition("=")[2] for rest in all_of("ARG") if rest.partition("=")[0] == name]
    return found


def test_dockerfile_versions_are_those_of_constraints():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={argument('TORCH')}" in pins
    assert f"ray=={argument('RAY')}" in pins
    for folder in OVERLAYS:
        assert cluster(build(folder))["rayVersion"] == argument("RAY")


@pytest.mark.slow
def test_dockerfile_steps_in_a_clean_environment(tmp_path):
    """The steps after the system's, as they stand, in a folder that has only what COPY brought and
    an environment that has only what RUN installed. torch comes from the index that pip has here:
    its own one may be out of reach.
    """
    app, venv, tmp = tmp_path / "app", tmp_path / "venv", tmp_path / "tmp"
    app.mkdir()
    tmp.mkdir()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    settings = {
        name: rest.partition("=")[2] for rest in all_of("ARG") if (name := rest.partition("=")[0])
    }
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**inherited, **settings, "PATH": f"{venv}/bin:{os.environ['PATH']}"}
    for instruction in parsed():
        if instruction.word == "COPY":
            *names, target = instruction.rest.split()
            for name in names:
                source = ROOT / name
                if source.is_dir():
                    unwanted = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, app / target, ignore=unwanted)
                else:
                    shutil.copy(source, app / target)
        if instruction.word == "RUN" and "pip" in instruction.rest:
            command = instruction.rest.replace("/tmp/", f"{tmp}/")
            command = re.sub(r" --index-url \S+", "", command)
            bash = ["bash", "-o", "pipefail", "-c", command]
            made = subprocess.run(bash, cwd=app, env=environment, capture_output=True, text=True)
            assert made.returncode == 0, made.stdout + made.stderr
    assert not list(tmp.iterdir())

    def output(*words: str) -> str:
        command = [venv / "bin" / words[0], *words[1:]]
        made = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout

    assert "run" in output("elastic-dp", "--help")
    output("pip", "check")
    where = output(
        "python",
        "-c",
        "import os; os.chdir('/'); import elastic_dp, ray, obstore; "
        "print(elastic_dp.__file__, ray.__version__)",
    )
    assert str(venv) in where and argument("RAY") in where
    output("ray", "kuberay-autoscaler", "--help")
