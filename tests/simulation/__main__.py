"""Run the simulator by hand.

python -m tests.simulation --seed 17          replay one case, with its faults and a trace
python -m tests.simulation --seeds 0 5000     a range, on all cores

With --digest the sum of all traces is printed: a change of the code that changes no
decision leaves it as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from functools import partial

from tests.simulation.world import World


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


def sweep(first: int, last: int, processes: int, digest: bool) -> int:
    began, failed, marks, traces = time.monotonic(), [], Counter[str](), 0
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
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--digest", action="store_true", help="print the sum of all traces")
    arguments = parser.parse_args()
    if arguments.seeds:
        first, last = arguments.seeds
        return sweep(first, last, arguments.processes, arguments.digest)
    replay(arguments.seed or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
