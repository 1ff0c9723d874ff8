"""The wheel, installed into an empty environment, trains: nothing of the checkout is imported."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.kit.commands import run

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"

# It installs torch and Ray, and trains: about eight minutes on two cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The `bin` of a new environment, with the wheel and what the README says to install, and
    nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "k8s/")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    pip = ("-m", "pip", "--disable-pip-version-check")
    wheels = folder / "wheels"
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", wheels, folder / "source", cwd=folder)
    (wheel,) = wheels.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    given = ("install", "--quiet", "-c", ROOT / "constraints.txt")
    run(python, *pip, *given, TORCH, cwd=folder)
    run(python, *pip, *given, f"{wheel}[cli]", "scikit-learn", cwd=folder)
    return python.parent


def test_wheel_is_typed_licensed_and_has_no_tests(installed):
    code = (
        "import elastic_dp, importlib.metadata as m; d = m.distribution('elastic_dp'); "
        "print(elastic_dp.__file__, d.metadata['License-Expression'], "
        "sorted({str(f).split('/')[0] for f in d.files}))"
    )
    said = run(installed / "python", "-c", code, cwd=installed.parent)
    assert said.startswith(str(installed.parent)) and "Apache-2.0" in said
    assert not re.search("tests|jobs|benchmarks|k8s", said.partition("[")[2])


def test_wheel_trains_the_digits(installed, tmp_path):
    words = ("--workers", "2", "--epochs", "3", "--data", "digits", "--storage-path", "runs")
    script = tmp_path / "digits.py"
    shutil.copy(ROOT / "jobs" / "digits.py", script)  # so that the checkout is not on the path
    said = run(installed / "python", script, *words, "--name", "a", cwd=tmp_path)
    assert float(re.search(r"test accuracy ([\d.]+)%", said).group(1)) > 90
    alone = run(installed / "python", script, *words, "--name", "b", "--local", cwd=tmp_path)
    assert said.splitlines()[-1] == alone.splitlines()[-1]  # the digest of the weights
    words = ("status", "--storage-path", "runs", "--json")
    listed = run(installed / "elastic-dp", *words, cwd=tmp_path)
    assert {one["name"] for one in json.loads(listed)} == {"a", "b"}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("train", r"final loss 2\.\d+ after 400 steps.*\nweights sha256 [0-9a-f]{64}\n$"),
        ("chaos", r"workers killed.*\n.*\n.*\nequal, to the last bit\n$"),
    ],
)
def test_commands_of_the_quick_start_run_in_a_clean_copy(target, said, installed):
    assert f"\nmake {target} " in (ROOT / "README.md").read_text()
    source = installed.parent.parent / "source"
    if not (source / ".venv").exists():
        (source / ".venv").symlink_to(installed.parent)
        (source / ".venv" / "installed").touch()  # what `make install` leaves
    assert re.search(said, run("make", target, cwd=source, HOME=str(source)))


BEFORE = """
import torch
import elastic_dp

MyModel = lambda: torch.nn.Linear(4, 3)
rows = torch.Generator().manual_seed(0)
dataset = torch.utils.data.TensorDataset(
    torch.randn(512, 4, generator=rows), torch.randint(3, (512,), generator=rows)
)

def loss_fn(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)
"""


def test_job_of_the_first_page_runs_on_processors(installed, tmp_path):
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    job = "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+"))
    job = job.replace('"GPU": 1', '"CPU": 1').replace("\nelastic_dp.", "\nresult = elastic_dp.")
    job += "\nprint(result.step, result.weights_sha256)"
    (tmp_path / "mine.py").write_text(f"{BEFORE}\n{job}\n")
    home = {"HOME": str(tmp_path)}
    said = run(installed / "python", "mine.py", cwd=tmp_path, **home)
    assert re.fullmatch(r"4 [0-9a-f]{64}\n", said.splitlines(keepends=True)[-1])
    again = run(installed / "python", "mine.py", cwd=tmp_path, **home)  # its stored result
    assert again.splitlines()[-1] == said.splitlines()[-1]
