"""Run the simulator by hand.

python -m tests.simulation --seed 17          replay one case, with its faults and a trace
python -m tests.simulation --seeds 0 5000     a range, on all cores

With --record the outcome is kept in benchmarks/results/simulation.json. A range that begins where
the recorded one ends is added to it if the code is still the same, so a long sweep can be made in
pieces. With --digest the sum of all traces is printed: a change of the code that changes no
decision leaves it as it was.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import pathlib
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import partial
from typing import Any

from tests.simulation.world import World

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "simulation.json"


def attempt(seed: int, digest: bool = False) -> tuple[int, str, Counter[str], int]:
    """(seed, the violation if there is one, what was seen, a digest of the trace)"""
    trace = hashlib.sha256()
    world = World(seed, trace_to=(lambda line: trace.update(line.encode())) if digest else None)
    error, marks = "", Counter[str]()
    try:
        marks = world.run().marks
        marks["finished" if world.check.finish else "failed"] += 1
        marks["generations"] += len(world.check.memberships)
    except Exception:
        error = traceback.format_exc(limit=-2)
    return seed, error, marks, int.from_bytes(trace.digest()[:8]) if digest else 0


def replay(seed: int) -> None:
    world = World(seed, trace_to=print)
    print(world.profile, world.config, sep="\n")
    world.run()
    print(world.check.finish or world.check.failure)


def sweep(first: int, last: int, processes: int, record: bool, digest: bool) -> int:
    began, failed, marks, traces = time.monotonic(), [], Counter[str](), 0
    code, commit = source_digest(), head()  # of what is loaded now
    with multiprocessing.Pool(processes) as pool:
        results = pool.imap_unordered(
            partial(attempt, digest=digest), range(first, last), chunksize=20
        )
        for done, (seed, error, seen, trace) in enumerate(results, 1):
            marks += seen
            traces = (traces + trace) % 2**64
            if error:
                failed.append(seed)
                print(f"\npython -m tests.simulation --seed {seed}\n{error}")
            if done % 500 == 0 or done == last - first:
                rate = done / (time.monotonic() - began)
                print(
                    f"\r{done} of {last - first} seeds, {rate:.0f} seeds/s, {len(failed)} failed",
                    end="",
                )
                sys.stdout.flush()
    print(f"\n{dict(marks)}")
    if digest:
        print(f"digest {traces:016x}")
    if record:
        outcome = {
            "seeds": [first, last],
            "failed": failed,
            "seconds": round(time.monotonic() - began, 1),
            "seen": dict(marks),
            "code": code,
        }
        write(outcome, processes, commit)
    return 1 if failed else 0


def write(outcome: dict[str, Any], processes: int, commit: str) -> None:
    """Record the outcome alone, or added to the recorded range that it extends."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if known.get("code") == outcome["code"] and known["seeds"][1] == outcome["seeds"][0]:
        outcome["seeds"][0] = known["seeds"][0]
        outcome["failed"] = known["failed"] + outcome["failed"]
        outcome["seconds"] = round(known["seconds"] + outcome["seconds"], 1)
        outcome["seen"] = dict(Counter(known["seen"]) + Counter(outcome["seen"]))
    first, last = outcome["seeds"]
    about = {
        "seeds_per_s": round((last - first) / outcome["seconds"], 1),
        "processes": processes,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(outcome | about, indent=2) + "\n")


def sources() -> list[pathlib.Path]:
    """The code that a record is about: the coordinator and the simulator."""
    folders = (ROOT / "elastic_dp" / "coordinator", ROOT / "tests" / "simulation")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [p for p in paths if not p.name.startswith("test_")]


def source_digest() -> str:
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def head() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", action="store_true", help="keep the outcome")
    parser.add_argument("--digest", action="store_true", help="print the sum of all traces")
    arguments = parser.parse_args()
    if arguments.seeds:
        first, last = arguments.seeds
        return sweep(first, last, arguments.processes, arguments.record, arguments.digest)
    replay(arguments.seed or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
