"""The longest time between two committed steps of a survivor, around the SIGKILL of one of three
workers, as the loop bodies have it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, recovery
from benchmarks.paired import serve, start_ray
from benchmarks.recovery import Record, wait_for
from benchmarks.recovery_gpt import RAY_NICENESS, WORKERS, Text, whole_at

# The model, the seconds slept in a body, and the niceness of Ray's workers.
CASES = {
    "MLP, bodies of 2 ms": ("MLP", 0.002, 0),
    "GPT of 4 blocks of width 128, full cores": ("GPT", 0.0, RAY_NICENESS),
}


def train(ctx: Any) -> None:
    gpt, folder = ctx.config["model"] == "GPT", Path(ctx.config["folder"])
    torch.manual_seed(1)
    model = models.GPT(128, 4) if gpt else recovery.classifier()
    loss_fn = models.loss_fn if gpt else recovery.loss_fn
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = open(folder / "bodies" / str(os.getpid()), "w", buffering=1)
    for step in ctx.steps(model, optimizer, loss_fn):
        log.write(f"body {time.time():.6f} {step.number} {ctx.generation}\n")
        while (folder / "hold").exists():  # it is the other side's turn
            time.sleep(0.02)
        time.sleep(ctx.config["body_s"])


def run(folder: str, name: str) -> None:
    model, body_s, niceness = CASES[name]
    bodies, hold = Path(folder) / "bodies", Path(folder) / "hold"
    bodies.mkdir()
    start_ray(niceness)
    rows = Text(100_000) if model == "GPT" else recovery.Points()
    how: Any = {"train": train, "data": rows, "model": model, "body_s": body_s}
    job = recovery.trainer("pause", f"{folder}/storage", folder, WORKERS, **how).start()

    def turn(number: int) -> dict[str, list[float]]:
        rng = random.Random(number)
        hold.unlink(missing_ok=True)
        if number == 0:
            wait_for(lambda: whole_at(Record.read(str(bodies)), 0.0) is not None, 60, "all workers")
        time.sleep(rng.uniform(1.5, 2.0))
        record = Record.read(str(bodies))
        newest = max(b.generation for b in record.bodies)
        at, victim = time.time(), rng.choice(sorted(members(record, newest)))
        os.kill(int(victim), signal.SIGKILL)
        wait_for(
            lambda: whole_at(Record.read(str(bodies)), at) is not None, 60, "all workers again", 0.5
        )
        hold.touch()
        return {"pause": [longest_gap(Record.read(str(bodies)), at, victim)]}

    serve(folder, turn)
    hold.unlink(missing_ok=True)
    job.stop("measured")
    job.result()


def members(record: Record, generation: int) -> set[str]:
    return {b.worker for b in record.bodies if b.generation == generation}


def longest_gap(record: Record, at: float, victim: str) -> float:
    """Seconds between two bodies of one survivor: from a second before the kill to the first step
    that is committed without the victim."""
    before = record.generation_at(at)
    first = record.first_commit_after(before, at)
    assert first is not None
    return max(
        b.time - a.time
        for worker in members(record, before) - {victim}
        for a, b in itertools.pairwise([b for b in record.bodies if b.worker == worker])
        if at - 1.0 <= a.time <= first.time and b.step <= first.step
    )


if __name__ == "__main__":
    run(*sys.argv[1:])
