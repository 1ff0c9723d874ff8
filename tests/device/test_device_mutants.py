"""Without any guard of the device path, the test that is named for it fails."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.device_mutants import DEVICE_MUTANTS, DeviceMutant
from tests.simulation.mutants import replaced

LIMIT_S = 120.0


@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_the_device_path_stands_where_its_mutant_says(mutant: DeviceMutant) -> None:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    replaced(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), mutant)
    file, _, test = mutant.caught_by.partition("::")
    assert f"def {test}" in (Path(__file__).parents[2] / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_the_device_path_is_noticed(mutant: DeviceMutant) -> None:
    """A test that hangs without it notices, too."""
    plugin = ["-p", "tests.device.device_mutants", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugin, mutant.caught_by]
    environment = os.environ | {"DEVICE_MUTANT": mutant.name}
    try:
        ended = subprocess.run(
            command,
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return
    tests_failed = 1
    assert ended.returncode == tests_failed, ended.stdout[-2000:] + ended.stderr[-2000:]
