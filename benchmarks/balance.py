"""Two workers, one of half the speed: a step with virtual workers dealt by measured speed, beside
the ideal split's.

    python -m benchmarks.balance [--repeats 1]

In plain processes. A virtual worker takes 40 ms on the one and 80 ms on the other, which sleep so
long, so it does not matter how many cores there are. Of six, the ideal split is 4 and 2. Compared:
the steps of a run with `balance="measured"` before the change (3 and 3) and after it, and those of
one that begins with the ideal split. And what measuring costs a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from benchmarks.report import write
from elastic_dp.cluster.heartbeat.shared_memory_page import SharedMemoryPage
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.planning import member_selection
from elastic_dp.data import open_data
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.local_run import LocalRun
from elastic_dp.train.step.compute_speed import ComputeSpeed

FAST_S, SLOW_S, VIRTUAL = 0.04, 0.08, 6
IDEAL = ((0, 4), (4, 6))
WARM_UP = 5  # first steps of a generation that do not count
TARGET_RATIO, TARGET_COST_US = 1.1, 5.0


class Points(torch.utils.data.Dataset):
    """Row i is a function of i alone."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:4].argmax()}


def train(ctx: Any) -> None:
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(m: torch.nn.Module, batch: Any) -> torch.Tensor:
        if ctx.config["sleeps"]:
            time.sleep(SLOW_S if ctx.rank == 1 else FAST_S)
        return F.cross_entropy(m(batch["x"]), batch["y"])

    for _ in ctx.steps(model, optimizer, loss_fn):
        if ctx.rank == 0 and ctx.config["sleeps"]:
            with open(ctx.config["file"], "a", encoding="utf-8") as file:
                file.write(f"{ctx.generation} {time.monotonic()}\n")


def job(balance: Any, file: str, sleeps: bool = True) -> JobSpec:
    return JobSpec(
        name="balance",
        data=MapStyleData(Points(), micro_batch_size=4),
        config={"file": file, "sleeps": sleeps},
        scaling=ScalingConfig(
            min_workers=2, max_workers=2, virtual_workers=VIRTUAL, balance=balance
        ),
        max_steps=50,
    )


def steps_ms(balance: str) -> tuple[list[float], str]:
    """The median step of each generation that made enough, and the digest of the final weights."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps"
        with ProcessRun(job(balance, str(file)), train) as run:
            outcome = run.wait()
            membership = run.controller.coordinator.membership
        assert outcome.error is None and membership is not None, outcome.traceback
        assert tuple(one for member in membership.members for one in member.ranges) == IDEAL, (
            membership
        )
        lines = [line.split() for line in file.read_text().splitlines()]
    medians = []
    for _, steps in itertools.groupby(lines, key=lambda line: line[0]):
        at = [float(time_) for _, time_ in steps][WARM_UP:]
        if len(at) > 8:
            took = [b - a for a, b in itertools.pairwise(at)]
            medians.append(round(statistics.median(took) * 1e3, 1))
    return medians, outcome.digest


def alone(spec: JobSpec) -> str:
    """The digest of the weights that the undisturbed run ends with."""
    data = open_data(spec.data, virtual_workers=VIRTUAL)
    run = LocalRun(spec, data, torch.device("cpu"))
    run.run(train)
    return run.digest


def cost_us(virtual_workers: int = 8, steps: int = 2000) -> float:
    """Return the median cost of measuring, in a step on the CPU."""
    speed, taken = ComputeSpeed(torch.device("cpu"), SharedMemoryPage().write_speed), []
    for _ in range(steps):
        began = time.perf_counter()
        speed.begin()
        for _ in range(virtual_workers):
            speed.start_micro_batch()
            speed.end_micro_batch()
        speed.end_step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    repeats = parser.parse_args().repeats
    took: dict[str, list[float]] = {"equal": [], "measured": [], "ideal": []}
    digests = {alone(job("equal", "", sleeps=False))}
    for _ in range(repeats):
        with patch.object(
            member_selection, "assign_ranges", lambda seconds, virtual_workers, nodes: IDEAL
        ):
            (ideal,), digest = steps_ms("equal")
        (equal, *_, measured), other = steps_ms("measured")
        digests |= {digest, other}
        for times, ms in zip(took.values(), (equal, measured, ideal), strict=True):
            times.append(ms)
        print(took, flush=True)
    medians = {way: statistics.median(times) for way, times in took.items()}
    ratio, cost = medians["measured"] / medians["ideal"], cost_us()
    met = ratio <= TARGET_RATIO and len(digests) == 1 and cost <= TARGET_COST_US
    results = {
        "virtual_worker_ms": [FAST_S * 1e3, SLOW_S * 1e3],
        "step_ms": took,
        "step_by_ideal": round(ratio, 3),
        "equal_by_ideal": round(medians["equal"] / medians["ideal"], 3),
        "same_bits": len(digests) == 1,
        "measuring_us_per_step": round(cost, 2),
        "targets": {"step_by_ideal": TARGET_RATIO, "measuring_us_per_step": TARGET_COST_US},
        "met": met,
    }
    print(results, write("balance", results), sep="\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
