"""Record what must not change by itself: decisions, bits and names.

python -m tests.behaviour            compare with tests/behaviour/recorded.json
python -m tests.behaviour --record   record today's; do so after a change on purpose, and say why

It holds the digest of the command streams of 2,000 seeds of the simulator, the final weights of
each model of tests/train/jobs.py and of each job of option_jobs.py, and the public interface with
all defaults. Weights are recorded for each kind of machine. --only records or compares one of
these.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.behaviour.option_jobs import JOBS, of_one_process
from tests.behaviour.public_api import command_line, public_api
from tests.behaviour.zoo_digests import this_machine, zoo_digest
from tests.simulation.__main__ import attempt
from tests.train.jobs import ZOO

RECORDED = Path(__file__).parent / "recorded.json"
SEEDS = 2000


def simulator_digest(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the sum of the digests of all traces, as `python -m tests.simulation --digest`."""
    outcomes = [attempt(seed, digest=True) for seed in range(seeds)]
    failed = [seed for seed, error, _, _ in outcomes if error]
    total = sum(trace for *_, trace in outcomes) % 2**64
    return {"seeds": seeds, "failed": failed, "digest": f"{total:016x}"}


def weights() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {this_machine(): {name: zoo_digest(name) for name in ZOO}}


def options() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {this_machine(): {name: of_one_process(name) for name in JOBS}}


PARTS: dict[str, Callable[[], Any]] = {
    "api": public_api,
    "command_line": command_line,
    "weights": weights,
    "options": options,
    "simulator": simulator_digest,
}


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.behaviour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    before, now = recorded(), {name: PARTS[name]() for name in arguments.only}
    for name in {"weights", "options"} & now.keys():  # those of other kinds of machines stay
        now[name] = before.get(name, {}) | now[name]
    changed = [name for name in now if before.get(name) != now[name]]
    print("changed: " + ", ".join(changed) if changed else "nothing changed")
    if arguments.record:
        RECORDED.write_text(json.dumps(before | now, indent=1, sort_keys=True) + "\n")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
