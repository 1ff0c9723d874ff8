"""Without any guard of the device path, the test that is named for it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.device.device_mutants import DEVICE_MUTANTS, IN_CI
from tests.module_mutants import ModuleMutant, check_stands

ROOT = Path(__file__).parents[2]
Run = Callable[[str, str], dict[str, Any]]


@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_the_device_path_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


def test_mutants_that_ci_runs_exist() -> None:
    assert {one.name for one in DEVICE_MUTANTS} >= IN_CI


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a test without the guard of a mutant; see mutant_server.py."""
    command = [sys.executable, "-m", "tests.device.mutant_server"]
    # Processes that a test starts must find the mutants, too.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def ask(mutant: str, test: str) -> dict[str, Any]:
            print(json.dumps([mutant, test]), file=server.stdin, flush=True)
            answer: dict[str, Any] = json.loads(server.stdout.readline())
            return answer

        yield ask
        server.stdin.close()


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=one.name, marks=() if one.name in IN_CI else pytest.mark.slow)
        for one in DEVICE_MUTANTS
    ],
)
def test_missing_guard_of_the_device_path_is_noticed(mutant: ModuleMutant, run: Run) -> None:
    """A test that hangs without it notices, too."""
    ended = run(mutant.name, mutant.caught_by)
    tests_failed = 1
    assert ended["status"] in (tests_failed, "timeout"), ended["output"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "test", sorted({one.caught_by for one in DEVICE_MUTANTS}), ids=lambda test: test.split("::")[1]
)
def test_guards_of_the_device_path_pass_the_tests_that_notice_their_loss(
    test: str, run: Run
) -> None:
    """In the same way as the mutants are run."""
    ended = run("", test)
    assert ended["status"] == 0, ended["output"]
