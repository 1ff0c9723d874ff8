"""Host memory of a worker in bytes: what it holds before its loop, and the most that it holds
beyond that (VmHWM) over the first steps, and over kills within a step.

Three workers, four virtual workers each, a gradient of 26 MB. One worker is killed, and two steps
later another one, so that one is left of the three, with what it has kept. Replacements are not
counted. Each turn is a run of its own.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import elastic_dp as edp
from benchmarks import models
from benchmarks.paired import serve, start_ray
from benchmarks.recovery import wait_for
from benchmarks.recovery_gpt import WORKERS, Text

SIZE = (256, 8)  # width and depth
GRADIENT_BYTES = 4 * sum(p.numel() for p in models.GPT(*SIZE).parameters())
STEPS = 6  # before the first kill
CASES = {"GPT 6.4M, 3 workers, V = 12": None, "GPT 6.4M, 3 workers, V = 12, clip_norm": 1.0}


def train(ctx: Any) -> None:
    torch.manual_seed(1)
    model = models.GPT(*SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    resident = memory("VmRSS")
    log = open(f"{ctx.config['folder']}/{os.getpid()}", "w", buffering=1)
    for step in ctx.steps(model, optimizer, models.loss_fn, clip_norm=ctx.config["clip_norm"]):
        peak = memory("VmHWM")
        log.write(f"{step.number} {ctx.generation} {ctx.world_size} {resident} {peak}\n")


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(field)


def read(bodies: Path) -> dict[int, list[list[int]]]:
    """By process, of each step: its number, generation, world size, memory before, and peak."""
    return {
        int(path.name): [
            [int(word) for word in line.split()]
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        for path in bodies.iterdir()
    }


def growth(line: list[int]) -> int:
    return line[4] - line[3]


def run(folder: str, name: str) -> None:
    start_ray()

    def turn(number: int) -> dict[str, list[float]]:
        rng, bodies = random.Random(number), Path(folder) / f"bodies-{number}"
        bodies.mkdir()
        job = edp.ElasticTrainer(
            train,
            name=f"memory-{number}",
            storage_path=f"{folder}/storage",
            config={"folder": str(bodies), "clip_norm": CASES[name]},
            data=edp.MapStyleData(Text(100_000), micro_batch_size=2),
            scaling=edp.ScalingConfig(
                max_workers=WORKERS, virtual_workers=4 * WORKERS, threads_per_worker=1
            ),
            max_steps=1_000_000,
        ).start()

        def last(pid: int) -> list[int]:
            return (read(bodies)[pid] or [[0] * 5])[-1]

        def full() -> set[int]:
            found = read(bodies).items()
            return {pid for pid, lines in found if any(line[2] == WORKERS for line in lines)}

        wait_for(lambda: len(full()) == WORKERS, 60, "all workers")
        alive = sorted(full())
        begun = last(alive[0])[0]
        wait_for(lambda: last(alive[0])[0] >= begun + STEPS, 60, "steps", 0.01)
        found = {
            "before the loop": float(max(last(pid)[3] for pid in alive)),
            "over steps": float(max(growth(last(pid)) for pid in alive)),
        }
        for _ in range(WORKERS - 1) if number else ():
            time.sleep(rng.uniform(0.1, 0.4))  # into a step
            killed = alive.pop(rng.randrange(len(alive)))
            os.kill(killed, signal.SIGKILL)
            step = last(alive[0])[0]
            wait_for(lambda to=step + 3: last(alive[0])[0] >= to, 60, "steps", 0.01)
        found["over kills"] = float(growth(last(alive[0])))
        job.stop("measured")
        job.result()
        return {name: [value] for name, value in found.items()}

    serve(folder, turn)


if __name__ == "__main__":
    run(*sys.argv[1:])
