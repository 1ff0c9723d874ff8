"""Guards outside the coordinator, taken out one at a time, each with the test that then fails.

A plugin of pytest (`-p tests.device.device_mutants`) takes a guard out before anything imports its
module; `is_noticed` runs the named test with it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.mutants import Mutant, replaced

LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ModuleMutant(Mutant):
    module: str
    caught_by: str  # file::test


def take_out(mutant: ModuleMutant) -> None:
    """Imports the mutant's module without the guard."""
    assert mutant.module not in sys.modules
    tree, origin = _without(mutant)
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[mutant.module] = module
    exec(compile(tree, origin, "exec"), vars(module))
    package, _, name = mutant.module.rpartition(".")
    setattr(sys.modules[package], name, module)


def check_stands(mutant: ModuleMutant) -> None:
    """Fails unless the guard and the test are where the mutant says."""
    _without(mutant)
    file, _, test = mutant.caught_by.partition("::")
    assert f"def {test}(" in (_ROOT / file).read_text(encoding="utf-8")


def check_noticed(mutant: ModuleMutant, plugin: str, named_by: Mapping[str, str]) -> None:
    """Fails unless the mutant's test fails without the guard. A test that hangs notices, too.

    `named_by` is the environment variable by which `plugin` knows the mutant.
    """
    plugins = ["-p", plugin, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, mutant.caught_by]
    try:
        ended = subprocess.run(
            command,
            env=os.environ | named_by,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return
    tests_failed = 1
    assert ended.returncode == tests_failed, ended.stdout[-2000:] + ended.stderr[-2000:]


_ROOT = Path(__file__).parents[1]


def _without(mutant: ModuleMutant) -> tuple[ast.Module, str]:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    return replaced(ast.parse(source), mutant), spec.origin
