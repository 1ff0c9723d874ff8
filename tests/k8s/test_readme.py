"""Commands of k8s/README.md and k8s/docs can be run; verbs, flags and fields in them exist."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

from elastic_dp.cli import app
from elastic_dp.config import JobSpec
from tests.k8s.fields import is_field
from tests.k8s.filled import copy_filled, params
from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    SHARED,
    _kubectl,
    ray_object,
)

PAGES = {path.name: path.read_text() for path in [K8S / "README.md", *(K8S / "docs").glob("*.md")]}
README, CLOUDS = PAGES["README.md"], PAGES["clouds.md"]
ALL = "\n".join(PAGES.values())
MADE_BY_THE_README = {"overlays/wide"}


def found(pattern: str, text: str, flags: int = 0) -> list[Any]:
    """All matches, of which there must be one at least: a loop over none shows nothing."""
    matches = re.findall(pattern, text, flags)
    assert matches, f"nothing in the pages is like {pattern}"
    return matches


def blocks(page: str) -> list[str]:
    """The page's shell commands, a block each."""
    return re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)


def commands() -> Iterator[list[str]]:
    """Each command of ours: `elastic-dp …`, and `edp RUN …` without the run."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", ALL, flags=re.M | re.S))
    lines = "\n".join(block for page in PAGES.values() for block in blocks(page))
    for text in [*lines.replace("\\\n", " ").splitlines(), *inline]:
        for found in re.finditer(r"(?:\belastic-dp|\bedp \w+) ([a-z].*)", text):
            words = shlex.split(re.split(r" (?:&|\||&&) |;", found[1])[0], comments=True)
            if words[0] != "--":
                yield words


def block_with(page: str, text: str) -> str:
    [found] = [block for block in blocks(page) if text in block]
    return found


def test_readme_shell_commands_are_valid_syntax():
    all_blocks = [block for page in PAGES.values() for block in blocks(page)]
    assert len(all_blocks) > 20
    for block in all_blocks:
        made = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert made.returncode == 0, (block, made.stderr)


def test_readme_commands_name_kustomizations_that_exist():
    named = {name.rstrip("/") for name in found(r"(?:-k|kustomize) k8s/([\w/-]+)", ALL)}
    assert named <= {*OVERLAYS, *SHARED, *MADE_BY_THE_README}
    for folder in OVERLAYS:
        assert folder.removeprefix("overlays/") in README, folder
    for folder in SHARED:
        assert f"k8s/{folder}" in ALL, folder


def test_readme_commands_name_verbs_flags_and_fields_that_exist():
    verbs = set()
    for words in commands():
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command = command.commands[words.pop(0)]
        verbs.add(command.name)
        flags = {name for parameter in command.params for name in parameter.opts}
        for place, word in enumerate(words):
            if word == "--":
                break
            assert not word.startswith("--") or word in flags, (command.name, word)
            if word == "--set" and place + 1 < len(words):
                field = words[place + 1].partition("=")[0]
                known = field == "storage_path" or is_field(JobSpec, field.split("."))
                assert known or field == "FIELD", field
    wanted = {"status", "scale", "stop", "run", "logs", "convert", "list", "save"}
    assert wanted <= verbs


@pytest.mark.parametrize("name", PAGES)
def test_readme_links_lead_somewhere(name):
    folder = K8S if name == "README.md" else K8S / "docs"
    for target, anchor in found(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", PAGES[name]):
        page = (folder / (target or name)).resolve()
        assert page.is_file(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors, anchor


@pytest.mark.parametrize("cloud", ["gke", "eks"])
def test_readme_fills_in_each_blank_param_and_the_overlay_then_builds(cloud, tmp_path):
    """The page's own commands, on the files as shipped."""
    k8s = tmp_path / "k8s"
    copy_filled(k8s)
    (k8s / f"params/{cloud}/params.env").write_text(
        (K8S / f"params/{cloud}/params.env").read_text()
    )
    block = block_with(CLOUDS, f"k8s/params/{cloud}/params.env\nkubectl")
    fill = block.partition("kubectl")[0]
    blank = {key for key, value in params(cloud).items() if not value}
    assert set(re.findall(r"s\|\^(\w+)=", fill)) == blank
    settings = {
        **{"IMAGE": "registry.example.com/elastic-dp:1", "BUCKET": "mine", "AWS_ACCOUNT": "1"},
        **{"ACCOUNT": "elastic-dp@mine.iam.gserviceaccount.com", "PATH": os.environ["PATH"]},
    }
    subprocess.run(["bash", "-eu", "-c", fill], cwd=tmp_path, env=settings, check=True)
    for folder in (f"overlays/{cloud}-spot", f"namespaces/{cloud}", f"prepull/{cloud}"):
        made = subprocess.run(
            [_kubectl(), "kustomize", k8s / folder], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
    assert "example-training" not in made.stdout


def test_readme_second_run_builds_as_it_is_written(tmp_path):
    copy_filled(tmp_path / "k8s")
    block = block_with(README, "k8s/overlays/wide").partition("kubectl apply")[0]
    subprocess.run(["bash", "-eu", "-c", block], cwd=tmp_path, check=True)
    made = subprocess.run(
        [_kubectl(), "kustomize", tmp_path / "k8s/overlays/wide"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    job = ray_object(list(yaml.safe_load_all(made.stdout)))
    assert job["metadata"]["name"] == "wide"
    assert "--set name=wide " in job["spec"]["entrypoint"]
    assert job["spec"]["entrypoint"].endswith("--set config.width=512")
