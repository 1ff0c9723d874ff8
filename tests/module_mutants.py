"""Guards outside the coordinator, taken out one at a time, each with the test that then fails.

A plugin of pytest (`-p tests.device.device_mutants`) takes a guard out before anything imports its
module, in the process of the tests and in the workers that it starts. `check_noticed` runs the
named test with it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.mutants import Mutant, replaced

LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ModuleMutant(Mutant):
    module: str
    caught_by: str  # file::test
    is_slow: bool = False  # that test is not in the default run


def take_out(mutant: ModuleMutant) -> None:
    """From now on, whoever imports the mutant's module gets it without the guard."""
    assert mutant.module not in sys.modules
    sys.meta_path.insert(0, _Finder(mutant))


def take_out_in_workers(plugin: str) -> None:
    """The server from which a run's workers are forked imports the plugin first."""
    process_worker_group = importlib.import_module("elastic_dp.testing.process_worker_group")
    process_worker_group.preload(plugin, first=True)


def check_stands(mutant: ModuleMutant) -> None:
    """Fails unless the guard and the test are where the mutant says."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    _without(mutant, Path(spec.origin).read_bytes())
    file, _, test = mutant.caught_by.partition("::")
    assert f"def {test.partition('[')[0]}(" in (_ROOT / file).read_text(encoding="utf-8")


def check_noticed(mutant: ModuleMutant, plugin: str, named_by: Mapping[str, str]) -> None:
    """Fails unless the mutant's test fails without the guard. A test that hangs notices, too.

    `named_by` is the environment variable by which `plugin` knows the mutant.
    """
    plugins = ["-p", plugin, "-p", "no:cacheprovider"]
    marks = ["-m", "slow"] if mutant.is_slow else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, *marks, mutant.caught_by]
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


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the mutant's module without the guard."""

    def __init__(self, mutant: ModuleMutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> types.CodeType:
        tree = _without(self._mutant, self.get_data(self.path))
        return compile(tree, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: ModuleMutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None and found.origin is not None
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=_Loader(self._mutant, found.origin)
        )


def _without(mutant: ModuleMutant, source: bytes) -> ast.Module:
    return replaced(ast.parse(source), mutant)
