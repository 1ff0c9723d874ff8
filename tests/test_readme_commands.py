"""Every command of README.md runs in a clean copy of the project, in the environment that `make
install` makes there. A benchmark runs in its quick form."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
IN_TEST_WHEEL = ""  # runs there, as it stands

# Each command of the page -> what is run for it.
COMMANDS = {
    "make train": IN_TEST_WHEEL,
    "make chaos": IN_TEST_WHEEL,
    "pip install -c constraints.txt '.[cli]'": "pip install -c constraints.txt '.[cli]'",
    "python -m benchmarks.gpu_check": (
        "python -m benchmarks.gpu_check --device cpu --small --output check.json"
    ),
    "python -m benchmarks.picture": "python -m benchmarks.picture --quick",
    "python -m benchmarks.recovery --peers": "python -m benchmarks.recovery --quick",
    "python -m benchmarks.recovery_gpt": "python -m benchmarks.recovery_gpt --quick",
    "python -m benchmarks.join": "python -m benchmarks.join --quick",
    "python -m benchmarks.step_overhead": "python -m benchmarks.step_overhead --quick",
    "python -m benchmarks.spot": "python -m benchmarks.spot --quick",
    "python -m benchmarks.checkpoint": "python -m benchmarks.checkpoint --quick",
}


def commands_of(page: str) -> set[str]:
    """Return the commands of shell blocks, and of code in the text and in tables."""
    blocks = re.findall(r"```bash\n(.*?)```", page, re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    inline = re.findall(r"`((?:elastic-dp|make|pip|pip3|python|python3|ray|bash|sh) [^`]*)`", text)
    return {line for line in [*lines, *inline] if line}


def test_each_command_of_the_readme_is_known_here():
    """A new command gets a line in COMMANDS, with a form of it that takes seconds."""
    assert commands_of(README) == set(COMMANDS)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, after `make install`."""
    folder = tmp_path_factory.mktemp("clean") / "elastic_dp"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    run_in(folder, f"make install PYTHON={shlex.quote(sys.executable)}")
    return folder


def run_in(folder: Path, command: str) -> None:
    settings = {"PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    if "install" not in command:  # pip has its settings and its cache at home
        settings["HOME"] = str(folder)
    run(command, cwd=folder, shell=True, **settings)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [name for name, form in COMMANDS.items() if form])
def test_command_of_the_readme_runs_in_a_clean_environment(command: str, checkout: Path) -> None:
    before = {path: path.read_bytes() for path in checkout.glob("benchmarks/results/*")}
    run_in(checkout, COMMANDS[command])
    now = {path: path.read_bytes() for path in checkout.glob("benchmarks/results/*")}
    assert now == before, "a quick form records nothing"
