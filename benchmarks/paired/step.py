"""Seconds of a step, from the end of one loop body to the begin of the next one."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

import elastic_dp as edp
from benchmarks import models, recovery
from benchmarks.paired import Turns, start_ray
from benchmarks.recovery_gpt import Text

WARM_UP, SKIPPED = 8, 2  # steps: at the start, and at the start of each turn


@dataclass(frozen=True)
class Case:
    model: str
    workers: int  # 0: fit(local=True)
    virtual: int
    steps: int  # of a turn
    clip_norm: float | None = None
    sharding: Literal["optimizer"] | None = None


_CASES = {
    "MLP, one process, V = 4": Case("MLP", 0, 4, 100),
    "GPT 0.9M, one process, V = 4": Case("GPT", 0, 4, 8),
    "GPT 0.9M, 2 workers, V = 2": Case("GPT", 2, 2, 12),
    "GPT 0.9M, 2 workers, V = 8": Case("GPT", 2, 8, 5),
}
CASES = _CASES | {
    **{f"{name}, clip_norm": replace(case, clip_norm=1.0) for name, case in _CASES.items()},
    "GPT 0.9M, 3 workers, V = 3, sharded": Case("GPT", 3, 3, 8, sharding="optimizer"),
}


def train(ctx: Any) -> None:
    gpt, size = ctx.config["model"] == "GPT", ctx.config["steps"] + SKIPPED
    torch.manual_seed(1)
    model = models.GPT(*models.SIZES["0.9M"]) if gpt else recovery.classifier()
    loss_fn = models.loss_fn if gpt else recovery.loss_fn
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    turns, number, times, ended_at = Turns(ctx.config["folder"]), 0, [], None
    for step in ctx.steps(model, optimizer, loss_fn, clip_norm=ctx.config["clip_norm"]):
        if ended_at is not None:
            times.append(time.perf_counter() - ended_at)
        if step.number >= WARM_UP and (step.number - WARM_UP) % size == 0:
            if ctx.rank == 0:
                turns.answer(number, {"step": times[SKIPPED:]})
            number += 1
            if not turns.wait(number):
                ctx.stop("measured")
            times = []
        ended_at = time.perf_counter()


def run(folder: str, name: str) -> None:
    case = CASES[name]
    gpt, local = case.model == "GPT", case.workers == 0
    rows = Text(100_000) if gpt else recovery.Points()
    trainer = edp.ElasticTrainer(
        train,
        name="step",
        storage_path=f"{folder}/storage",
        config={"folder": folder, **asdict(case)},
        data=edp.MapStyleData(rows, micro_batch_size=4 if gpt else 8),
        scaling=edp.ScalingConfig(
            # At least all: the first group must not be smaller.
            min_workers=max(1, case.workers),
            max_workers=max(1, case.workers),
            virtual_workers=case.virtual,
            threads_per_worker=1,
        ),
        max_steps=1_000_000,
        sharding=case.sharding,
    )
    if local:
        torch.set_num_threads(1)
    else:
        start_ray()
    trainer.fit(local=local)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(*sys.argv[1:])
