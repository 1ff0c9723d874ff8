"""How long a group stands still after a kill where the workers fill the machine, beside torchft.

    python -m benchmarks.recovery_gpt [--kills 6] [--rounds 2] [--quick]

Two small GPTs; 3 workers, 3 virtual workers, 8 sequences of 64 bytes each; nothing sleeps, so the
workers want more cores than there are. Ray's workers have its default niceness of 15, those of
torchft the normal one. torch computes with one thread in each process; Ray has 12 CPUs (one for
each worker), no dashboard, and no log in the driver. torchft is tuned as in
`benchmarks/peers/torchft_recovery.py`, and looked for as `benchmarks/peers/__init__.py` says. The
two are measured in turn, from files that the workers write. A pause lasts from SIGKILL to the first
step committed without the victim, less one median step of the two that are left. The group is whole
again once all three workers have committed a step together. There is no standby, and a process
waits for each replacement, as it does 20 s after the last one. Ends with 1, and says why, if a
target was missed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import peers
from benchmarks.models import SMALL, Text
from benchmarks.recovery import (
    Kill,
    Record,
    end,
    kill,
    outside_load,
    start_ray,
    summary,
    trainer,
    wait_for,
    wait_full,
)
from benchmarks.report import each, exit_code, parser_of, run_main

WORKERS = 3
RAY_NICENESS = 15  # Ray's default
OURS = "elastic_dp"
PEER = "torchft 0.2, tuned"


def on_ray(size: str, kills: int, seed: int) -> dict[str, Any]:
    import ray

    start_ray(RAY_NICENESS)
    try:
        return ours(size, kills, seed)
    finally:
        ray.shutdown()


def ours(size: str, kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory() as folder:
        common: Any = {"data": Text(100_000), "gpt": SMALL[size]}
        job = trainer("gpt", storage, folder, WORKERS, **common)
        run = job.start()
        wait_full(run, WORKERS, 20)
        done: list[Kill] = []
        for _ in range(kills):
            wait_full(run, WORKERS)
            time.sleep(rng.uniform(20.0, 22.0))  # a process waits for the next replacement again
            done.append(kill(run.pids(), rng))
            # Asks nothing of the controller while the group recovers.
            wait_for(
                lambda: whole_at(Record.read(folder), done[-1].at) is not None, 120, "3 again", 0.5
            )
        _, record, facts = end(run, job.url, storage, folder, WORKERS, **common)
    return {**judge(record, done), "exact": facts["exact"] and not facts["bodies_out_of_order"]}


def judge(record: Record, kills: Sequence[Kill]) -> dict[str, Any]:
    members = {b.generation: set[str]() for b in record.bodies}
    for body in record.bodies:
        members[body.generation].add(body.worker)

    def step_ms(workers: int) -> float:
        generations = [g for g, found in members.items() if len(found) == workers]
        steps = [
            time
            for g in generations
            for time in Record([b for b in record.bodies if b.generation == g]).step_times()
        ]
        return 1e3 * statistics.median(steps)

    less_ms = step_ms(WORKERS - 1)
    pauses, again = [], []
    for one in kills:
        first = record.first_commit_after(record.generation_at(one.at), one.at)
        whole = whole_at(record, one.at)
        assert first is not None and whole is not None
        pauses.append(1e3 * (first.time - one.at) - less_ms)
        again.append(1e3 * (whole - one.at))
    return {
        "step_ms": step_ms(WORKERS),
        "step_of_two_ms": less_ms,
        "pauses_ms": pauses,
        "kill_to_full_size_ms": again,
    }


def whole_at(record: Record, since: float) -> float | None:
    """When all workers had committed a step together, in a generation after that instant's."""
    before = record.generation_at(since)
    for generation in sorted({b.generation for b in record.bodies if b.generation > before}):
        bodies = [b for b in record.bodies if b.generation == generation]
        seconds = [
            sorted(b.time for b in bodies if b.worker == worker)[1:2]
            for worker in {b.worker for b in bodies}
        ]
        if len(seconds) == WORKERS and all(seconds):
            return max(second for (second,) in seconds)
    return None


def theirs(size: str, kills: int) -> Any:
    python = os.environ.get("TORCHFT_PYTHON", sys.executable)
    script = "torchft_recovery.py"
    return peers.run(python, script, "tuned", str(kills), size, timeout_s=60.0 * kills)


def pieces(options: argparse.Namespace, sizes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    yield "cores_busy_with_other_work", outside_load()
    for size in sizes:
        found: dict[str, list[Any]] = {OURS: [], PEER: []}
        for number in range(options.rounds):
            found[OURS].append(on_ray(size, options.kills, number))
            quick = "not measured: --quick"
            found[PEER].append(quick if options.quick else theirs(size, options.kills))
            print(found, flush=True)
        yield size, {name: joined(rounds) for name, rounds in found.items()}


def joined(rounds: Sequence[Any]) -> Any:
    if any(isinstance(one, str) for one in rounds):
        return next(one for one in rounds if isinstance(one, str))  # why it was not measured
    values = {
        name: [value for one in rounds for value in one[name]]
        for name in ("pauses_ms", "kill_to_full_size_ms")
    }
    return {
        "step_ms": [round(one["step_ms"], 1) for one in rounds],
        "step_of_two_ms": [round(one["step_of_two_ms"], 1) for one in rounds],
        "pause": summary(values["pauses_ms"]),
        "full_size_again": summary(values["kill_to_full_size_ms"]),
        "pauses_ms": sorted(round(value, 1) for value in values["pauses_ms"]),
        **{
            name: over(one[name] for one in rounds)
            for name, over in (("exact", all), ("restarted_from_step_0", sum))
            if name in rounds[0]
        },
    }


def targets(results: dict[str, Any]) -> dict[str, bool]:
    found = {}
    for size in SMALL:
        us, them = results[size][OURS], results[size][PEER]
        found[f"{size}: the weights of the undisturbed run"] = us["exact"]
        if isinstance(them, str):
            found[f"{size}: torchft was {them}"] = False
            continue
        half = us["pause"]["median_ms"] <= 0.5 * them["pause"]["median_ms"]
        found[f"{size}: half the median pause of tuned torchft"] = half
        sooner = us["full_size_again"]["median_ms"] <= 0.6 * them["full_size_again"]["median_ms"]
        found[f"{size}: whole again in 0.6 of torchft's time"] = sooner
    return found


def main() -> int:
    options = parser_of(__doc__, kills=6, rounds=2).parse_args()
    sizes = list(SMALL)
    if options.quick:
        sizes, options.kills, options.rounds, options.no_write = sizes[:1], 1, 1, True
    torch.set_num_threads(1)
    found = each("recovery_gpt", pieces(options, sizes), keep=not options.no_write)
    return 0 if options.quick else exit_code(targets(found))


if __name__ == "__main__":
    run_main("benchmarks.recovery_gpt")
