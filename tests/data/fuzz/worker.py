"""The process in which inputs are tried: `python -m tests.data.fuzz.worker KINDS FIRST COUNT FOLDER
BEFORE`.

`BEFORE` is code of a test that spoils the reader. Before each input, and before each way of reading
it, a line says so, so that a death or a hang is attributed to it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from pathlib import Path

import pyarrow

ADDRESS_SPACE_BYTES = 4 << 30  # above what the libraries take


def main(kinds: list[str], first: int, count: int, folder: Path, before: str = "") -> None:
    from tests.data.fuzz.judging import Finding, judge
    from tests.data.fuzz.mutations import mutated

    logging.disable()
    pyarrow.set_cpu_count(1)  # on a busy machine, waiting for threads is most of the time
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    exec(before, {"seeds": list(range(first, first + count))})
    for seed in range(first, first + count):
        say(seed=seed, way="mutate")
        kind = kinds[seed % len(kinds)]
        try:
            outcome = judge(
                kind, mutated(kind, seed), folder, seed, lambda way, s=seed: say(seed=s, way=way)
            )
            say(seed=seed, outcome=outcome)
        except Finding as finding:
            say(seed=seed, finding=str(finding))

    # Without freeing what 20,000 inputs left in memory: that may take longer than an input may.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
