"""Damaged Parquet, Arrow, CSV, tar and JSON files: no crash, no hang, no untyped error, no row lost
in silence.

    python -m benchmarks.fuzz_data --inputs 100000 --out benchmarks/results/fuzz_data.json
    python -m benchmarks.fuzz_data --kinds csv --first 4711 --inputs 1    # one input again

An input is a function of its kind and its number. Each is read in place, converted and inspected,
in a process of its own, and compared with what the producer's own reader makes of the same bytes.
With `--out`, what was tried is written after every chunk of inputs, and the same command goes on
behind it. Remove the file to try everything again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow

from benchmarks.report import hardware
from tests.data.fuzz.mutations import KINDS
from tests.data.fuzz.running import Tried, run

CODE = ("elastic_dp/data", "elastic_dp/dataprep")
CHUNK = 500  # inputs of one kind, before the next kind's turn


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--inputs", type=int, default=100_000, help="in all, divided among the kinds"
    )
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument(
        "--first", type=int, default=0, help="the number of the first input of each kind"
    )
    options.add_argument("--out", type=Path, help="JSON of what was tried and found")
    chosen = options.parse_args()
    each = -(-chosen.inputs // len(chosen.kinds))
    kinds: dict[str, Any] = {}
    if chosen.out and chosen.out.exists():
        kinds = json.loads(chosen.out.read_text())["results"]["kinds"]
    while turn := [kind for kind in chosen.kinds if _count(kinds, kind) < each]:
        for kind in turn:
            begun, done = time.monotonic(), _count(kinds, kind)
            tried = run(
                kind,
                chosen.first + done,
                min(CHUNK, each - done),
                lambda seed, text, k=kind: print(f"{k} {seed}: {text}", flush=True),
            )
            kinds[kind] = _added(kinds.get(kind), tried, time.monotonic() - begun)
            if chosen.out:
                _write(chosen.out, kinds)
    for kind, tried_of in kinds.items():
        print(
            f"{kind}: {tried_of['inputs']} inputs, {len(tried_of['findings'])} findings, "
            f"{list(tried_of['outcomes'].items())[:6]}"
        )
    return int(any(tried_of["findings"] for tried_of in kinds.values()))


def _count(kinds: dict[str, Any], kind: str) -> int:
    return int(kinds[kind]["inputs"]) if kind in kinds else 0


def _added(before: dict[str, Any] | None, tried: Tried, seconds: float) -> dict[str, Any]:
    """`commits`: how many inputs were tried on each version of the code."""
    before = before or {"inputs": 0, "seconds": 0, "commits": {}, "findings": [], "outcomes": {}}
    commits = Counter(before["commits"])
    commits[_commit()] += tried.inputs
    outcomes = Counter(before["outcomes"]) + tried.outcomes
    return {
        "inputs": before["inputs"] + tried.inputs,
        "seconds": round(before["seconds"] + seconds, 1),
        "commits": dict(commits),
        "findings": [*before["findings"], *tried.findings],
        "outcomes": dict(outcomes.most_common()),
    }


def _commit() -> str:
    """The last one that changed the code under test."""
    commit = _git("log", "-1", "--abbrev=7", "--format=%h", "--", *CODE)
    return commit + "-dirty" * bool(_git("status", "--porcelain", "--", *CODE))


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def _write(path: Path, kinds: dict[str, Any]) -> None:
    content = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "results": {
            "pyarrow": pyarrow.__version__,
            "inputs": sum(kind["inputs"] for kind in kinds.values()),
            "findings": sum(len(kind["findings"]) for kind in kinds.values()),
            "kinds": kinds,
        },
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
