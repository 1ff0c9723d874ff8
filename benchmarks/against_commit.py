"""The package of this tree beside that of another commit, in pairs.

    python -m benchmarks.against_commit COMMIT [--part step pause data] [--case TEXT …]

`elastic_dp` of COMMIT is exported to a temporary folder. The same workloads (`benchmarks/paired`)
run with it and with this tree's, side by side: both are started, and then take turns, and every
round the other one begins. Quoted: the median of the paired ratios, now by then, of a round's
medians. Both sides run in this Python environment.

The results of each commit and case are kept in `benchmarks/results/against_commit.json`, where a
case that runs again replaces its last result. Ends with 1, and says why, if a target was missed:
what is worse by more than the target with all of its interval.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import Turns
from benchmarks.recovery import outside_load
from benchmarks.report import exit_code, hardware, median_interval, recorded, write

ROOT = Path(__file__).parent.parent
NAME = "against_commit"
ROUNDS = {"step": 30, "pause": 7, "data": 12}
TURN_S = 180.0
TARGET_RATIO = {"step": 1.01, "pause": 1.0, "data": 1.0}


class Side:
    """One workload in a process of its own, which imports `elastic_dp` from `tree`."""

    def __init__(self, module: str, case: str, tree: Path, folder: Path) -> None:
        folder.mkdir()
        self._turns, self._folder, self._number = Turns(str(folder)), folder, 0
        self._output = open(folder / "output", "w+", encoding="utf-8")
        self._tree = tree
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder), case],
            cwd=folder,  # which `python -m` imports from first
            env=os.environ | {"PYTHONPATH": f"{tree}:{ROOT}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def ready(self) -> None:
        """Waits until the workload is warm, and checks that its `elastic_dp` is the tree's."""
        place = Path(self._answer()["elastic_dp"])
        if not place.is_relative_to(self._tree):
            raise RuntimeError(f"elastic_dp is from {place}, not from {self._tree}")

    def turn(self) -> dict[str, float]:
        """Takes the next turn, and returns its medians."""
        self._number += 1
        self._turns.path("go", self._number).touch()
        return {name: statistics.median(values) for name, values in self._answer().items()}

    def end(self) -> None:
        (self._folder / "over").touch()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _answer(self) -> dict[str, Any]:
        path, until = self._turns.path("done", self._number), time.monotonic() + TURN_S
        while not path.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self._output.seek(0)
                lines = self._output.read().splitlines()[-20:]
                raise RuntimeError(f"no answer from {self._tree}:\n" + "\n".join(lines))
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def compare(
    module: str, case: str, trees: Sequence[Path], rounds: int, work: Path
) -> dict[str, list[tuple[float, float]]]:
    """By name of what was measured, the values of each round: (then, now)."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        sides = [Side(module, case, tree, Path(folder) / str(n)) for n, tree in enumerate(trees)]
        found: dict[str, list[tuple[float, float]]] = {}
        try:
            for side in sides:
                side.ready()
            for number in range(rounds):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                turns = {n: sides[n].turn() for n in order}
                for name in turns[0]:
                    found.setdefault(name, []).append((turns[0][name], turns[1][name]))
        finally:
            for side in sides:
                side.end()
    return found


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    then, now = (statistics.median(values) for values in zip(*pairs, strict=True))
    middle, low, high = median_interval([b / a for a, b in pairs])
    compared = {"ratio": round(middle, 4), "interval": [round(low, 4), round(high, 4)]}
    return {"unit": "s", "then": then, "now": now, **compared, "rounds": len(pairs)}


def export(commit: str, folder: Path, repository: Path = ROOT) -> Path:
    """A tree that has `elastic_dp` of that commit, and nothing else."""
    command = ["git", "-C", str(repository), "archive", commit, "elastic_dp"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    tree = folder / "then"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def measured_with() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("ray", "pyarrow")}
    return {
        "date": datetime.date.today().isoformat(),
        "now": git("rev-parse", "--short", "HEAD"),
        "hardware": hardware() | {"python": platform.python_version(), **versions},
    }


def keep(commit: str, part: str, case: str, found: dict[str, Any]) -> None:
    results = recorded(NAME)
    about = {"subject": git("log", "-1", "--format=%s", commit)}
    about["committed"] = git("log", "-1", "--format=%cs", commit)
    one = results.setdefault(commit, about)
    one.setdefault(part, {})[case] = found | measured_with()
    write(NAME, results)


def targets(results: dict[str, Any]) -> dict[str, bool]:
    """Missed is what is worse beyond doubt: with all of its interval."""
    met = {}
    for commit, parts in results.items():
        for part in ROUNDS:
            for case, found in parts.get(part, {}).items():
                for name, one in found["measured"].items():
                    what = f"{commit}, {part}, {case}: {name}, "
                    low = one["interval"][0]
                    limit = TARGET_RATIO[part]
                    met[f"{what}{limit} of then"] = low <= limit
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--part", nargs="*", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--case", nargs="*", default=[""], help="only cases that have this text")
    parser.add_argument("--rounds", type=int, help="of each case; the parts have defaults")
    parser.add_argument("--shards", help="a folder that keeps the data sets for the next time")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    commit = git("rev-parse", "--short", options.commit)
    results: dict[str, Any] = {commit: {}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        trees = (export(commit, work), ROOT)
        for part in options.part:
            module = importlib.import_module(f"benchmarks.paired.{part}")
            if hasattr(module, "prepare"):
                if options.shards:
                    Path(options.shards).mkdir(parents=True, exist_ok=True)
                    (work / "shards").symlink_to(Path(options.shards).absolute())
                module.prepare(work / "shards")
            for case in module.CASES:
                if not any(text in case for text in options.case):
                    continue
                busy = outside_load(1.0)
                rounds = options.rounds or ROUNDS[part]
                pairs = compare(module.__name__, case, trees, rounds, work)
                found = {name: summary(values) for name, values in pairs.items()}
                print(part, case, json.dumps(found, indent=1), flush=True)
                case_found = {"cores_busy_with_other_work": busy, "measured": found}
                results[commit].setdefault(part, {})[case] = case_found
                if not options.no_write:
                    keep(commit, part, case, case_found)
    if not results[commit]:
        parser.error("no case has that text")
    return exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
