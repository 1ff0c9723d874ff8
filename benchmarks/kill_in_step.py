"""What a kill within a long step costs: how much later the step is committed, and how many
micro-batches run again.

    python -m benchmarks.kill_in_step [--kills 21] [--leaf-s 0.25] [--exact-only]

Four workers run 32 virtual workers, whose loss function sleeps for `--leaf-s`, so a step takes
eight times that. A worker gets SIGKILL at an instant that moves through the step from kill to kill.
The workers are plain processes (no Ray), so the start of a replacement is quick; it joins after the
step. In exact mode survivors keep what they have finished; fast mode keeps nothing, and is measured
beside it. Quoted: how much longer the step took than the median step without a kill. Targets in
exact mode, for each kill: three micro-batches (the eight that are lost, by three survivors) and
60 ms; and what runs again is what the lost worker had begun. Ends with 1, and says so, if one was
missed.

A kill close to the end of a micro-batch costs one more: a survivor that hears of the loss just
before its next one waits for another one that has just begun it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.report import each, exit_code
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.local_run import LocalRun

WORKERS, VIRTUAL, BETWEEN = 4, 32, 2  # BETWEEN: steps of the full group before the next kill
MORE_LEAVES, MORE_S = 3, 0.06


class Points(torch.utils.data.Dataset):
    """Row i is a function of i alone."""

    def __len__(self) -> int:
        return 32_000

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:4].argmax(), "i": torch.tensor(i)}


def train(ctx: Any) -> None:
    """Each forward pass leaves a line, and so does each commit."""
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session, folder = ctx._session, ctx.config["folder"]
    log = open(f"{folder}/{session.worker}", "a", buffering=1)

    def loss_fn(m: torch.nn.Module, batch: Any) -> torch.Tensor:
        log.write(f"pass {session.position.step + 1} {int(batch['i'][0])} {time.time():.6f}\n")
        time.sleep(ctx.config["leaf_s"])
        return F.cross_entropy(m(batch["x"]), batch["y"])

    for step in ctx.steps(model, optimizer, loss_fn):
        log.write(f"commit {step.number} {time.time():.6f}\n")


def job(folder: str, leaf_s: float, exact: bool) -> JobSpec:
    return JobSpec(
        name="kill-in-step",
        data=MapStyleData(Points(), micro_batch_size=1),
        config={"folder": folder, "leaf_s": leaf_s},
        scaling=ScalingConfig(
            min_workers=1,
            max_workers=WORKERS,
            virtual_workers=VIRTUAL,
            threads_per_worker=1,
            balance="equal",
        ),
        exact=exact,
        max_steps=100_000,
    )


def commits_of(folder: str) -> dict[int, float]:
    """When each step was committed, on the worker where that was last."""
    found: dict[int, float] = {}
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines(keepends=True):
            kind, step, *rest = line.split()
            if kind == "commit" and line.endswith("\n"):
                found[int(step)] = max(found.get(int(step), 0.0), float(rest[0]))
    return found


def passes_of(folder: str, worker: str = "*") -> Counter[int]:
    """The forward passes of each step, on all workers or on one."""
    return Counter(
        int(line.split()[1])
        for path in Path(folder).glob(worker)
        for line in path.read_text().splitlines(keepends=True)
        if line.startswith("pass") and line.endswith("\n")  # a killed worker may leave a part
    )


def measure(kills: int, leaf_s: float, exact: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spec = job(folder, leaf_s, exact)
        struck: dict[int, str] = {}  # step -> the worker that was killed
        with ProcessRun(spec, train) as run:
            status = run.controller.status
            for number in range(kills):
                begun = _after(status, BETWEEN)
                time.sleep(leaf_s * (0.5 + number * 7.0 / max(1, kills - 1)))  # within the step
                members = run.controller.coordinator.membership.members
                victim = members[number % WORKERS].worker
                run.worker_group.processes[victim].kill()
                struck[begun + 1] = victim
            last = _after(status, BETWEEN)
            run.controller.post(StopRequested("measured"))
            outcome = run.wait()
        assert outcome.error is None, outcome.traceback
        if exact:
            same = dataclasses.replace(spec, max_steps=outcome.step)
            assert outcome.digest == undisturbed(same), "the weights are not the undisturbed run's"
        commits, passes = commits_of(folder), passes_of(folder)
        again = [passes[step] - VIRTUAL for step in struck]
        begun_by_lost = [passes_of(folder, lost)[step] for step, lost in struck.items()]
    took = {step: commits[step] - commits[step - 1] for step in range(2, last) if step in commits}
    calm = statistics.median(
        s for step, s in took.items() if not {step, step - 1, step - 2} & {*struck}
    )
    more = [took[step] - calm for step in struck]
    return {
        "step_s": round(calm, 3),
        "more_s": sorted(round(s, 3) for s in more),
        "more_s_median": round(statistics.median(more), 3),
        "more_s_worst": round(max(more), 3),
        "passes_again": again,
        "begun_by_lost": begun_by_lost,
    }


def undisturbed(spec: JobSpec) -> str:
    from elastic_dp.data import open_data

    with tempfile.TemporaryDirectory() as folder:
        quick = spec.config | {"folder": folder, "leaf_s": 0.0}
        spec = dataclasses.replace(spec, config=quick)
        data = open_data(spec.data, virtual_workers=VIRTUAL)
        run = LocalRun(spec, data, torch.device("cpu"))
        run.run(train)
        return run.digest


def _after(status: Any, steps: int) -> int:
    """Waits until the full group has made `steps` steps. Returns the last one."""
    while status()["world_size"] < WORKERS:
        time.sleep(0.005)
    wanted = status()["step"] + steps
    while (step := status()["step"]) < wanted:
        time.sleep(0.001)
    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=21)
    parser.add_argument("--leaf-s", type=float, default=0.25)
    parser.add_argument("--exact-only", action="store_true")
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    modes = (
        (name, measure(asked.kills, asked.leaf_s, exact))
        for name, exact in (("exact", True), ("fast", False))
        if exact or not asked.exact_only
    )
    results = each("kill_in_step", modes, keep=not asked.no_write)
    limit_s = MORE_LEAVES * asked.leaf_s + MORE_S
    exact = results["exact"]
    return exit_code(
        {
            f"at most {limit_s:.2f} s more, median": exact["more_s_median"] <= limit_s,
            f"at most {limit_s:.2f} s more, each": exact["more_s_worst"] <= limit_s,
            "only what the lost worker had begun runs again": (
                exact["passes_again"] == exact["begun_by_lost"]
            ),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
