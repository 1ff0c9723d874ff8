"""Run the simulator by hand.

python -m tests.simulation --seed 17          replay one case, with its weather and a trace
python -m tests.simulation --seeds 0 5000     a range, on all cores
"""

from __future__ import annotations

import argparse
import datetime
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

from tests.simulation.world import World

RESULTS = pathlib.Path("benchmarks/results/simulation.json")


def attempt(seed: int) -> tuple[int, str, Counter[str]]:
    world = World(seed)
    try:
        marks = world.run().marks
    except Exception:
        return seed, traceback.format_exc(limit=-2), Counter()
    marks["finished" if world.check.finish else "failed"] += 1
    marks["generations"] += len(world.check.memberships)
    return seed, "", marks


def replay(seed: int) -> None:
    world = World(seed, talk=print)
    print(world.weather, world.rules, sep="\n")
    world.run()
    print(world.check.finish or world.check.failure)


def sweep(first: int, last: int, processes: int, record: bool) -> int:
    began, failed, marks = time.monotonic(), [], Counter[str]()
    head = ["git", "rev-parse", "--short", "HEAD"]  # of what is loaded now
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    with multiprocessing.Pool(processes) as pool:
        results = pool.imap_unordered(attempt, range(first, last), chunksize=20)
        for done, (seed, error, seen) in enumerate(results, 1):
            marks += seen
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
    if record:
        rate = (last - first) / (time.monotonic() - began)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(
            json.dumps(
                {
                    "seeds": [first, last],
                    "failed": failed,
                    "seeds_per_s": round(rate, 1),
                    "processes": processes,
                    "python": platform.python_version(),
                    "date": datetime.date.today().isoformat(),
                    "commit": commit,
                    "seen": dict(marks),
                },
                indent=2,
            )
            + "\n"
        )
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    if arguments.seeds:
        return sweep(*arguments.seeds, arguments.processes, arguments.record)
    replay(arguments.seed or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
