"""How long a group with a sharded optimizer stands still after a loss, beside one without.

    python -m benchmarks.sharding_changes [--pairs 24] [--quick]

Four workers on plain processes train a small GPT; one of them gets SIGKILL, `--pairs` times, in
runs with and without `sharding="optimizer"` in turn. The pause is how much later the first step
behind the loss is committed than it would have been without one: its time after the last commit
before the signal, less the median time of the steps since then. Those that are left complete the
step in flight if the loss comes late in it, and else do it again; so one step or two are counted.
How much they lose depends on how far the step is, so the kills are at evenly spaced points of a
step, and each with sharding is compared with the one without it at the same point. Another worker
starts only after that: it would take processors from those that are left. Quoted: the median of the
differences and its interval, the medians, and the bytes of the optimizer's state that are sent so
that each part has two holders again, beside the least that can be: one copy of each part that the
victim held. The weights are compared with those of an undisturbed run. Ends with 1, and says why,
if a target was missed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import GPT, SIZES, Text, loss_fn
from benchmarks.recovery import wait_for
from benchmarks.report import conclude, median_interval, of_pairs
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import FailureConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.data import open_data
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.local_run import LocalRun

WORKERS = 4
KILLS_IN_A_RUN = 3
STEPS = 6  # that are waited for before a kill, and behind it
MORE_MS = 20.0  # that a pause may take, beside one without sharding
MOST_MOVED = 1.1  # of the least possible


def train(ctx: Any) -> None:
    model = GPT(*SIZES[ctx.config["size"]])
    session, told = ctx._session, set[int]()
    with open(Path(ctx.config["folder"]) / session.worker, "a", encoding="utf-8") as file:
        for step in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss_fn):
            line = {"generation": ctx.generation, "step": step.number, "time": time.time()}
            if ctx.generation not in told:
                told.add(ctx.generation)
                line |= {"workers": ctx.world_size, "received": session.timings[-1].bytes_received}
                sharding = session.state.sharding
                line["held"] = 0 if sharding is None else sharding.held_bytes
            if session.state.sharding is not None:
                line["in_steps"] = session.state.sharding.backup_bytes  # so far
            file.write(json.dumps(line) + "\n")
            file.flush()


def job(size: str, folder: str, sharded: bool, steps: int = 1_000_000) -> JobSpec:
    return JobSpec(
        name="changes",
        data=MapStyleData(Text(100_000), micro_batch_size=4),
        config={"size": size, "folder": folder},
        scaling=ScalingConfig(
            min_workers=2, max_workers=WORKERS, virtual_workers=WORKERS, threads_per_worker=1
        ),
        failure=FailureConfig(max_losses_without_progress=1000),
        sharding="optimizer" if sharded else None,
        max_steps=steps,
    )


def measure(size: str, sharded: bool, phases: Sequence[float]) -> dict[str, Any]:
    """One run, in which workers are killed one after another, each when it has done such a part of
    a step."""
    with tempfile.TemporaryDirectory() as folder:
        done: list[tuple[str, float, int]] = []  # who, when, and in which generation
        with ProcessRun(job(size, folder, sharded), train) as run:
            status = run.controller.status
            group = run.worker_group
            for phase in phases:
                wait_until_trained(status, WORKERS)
                group.allow(WORKERS - 1)
                members = [w for w, stage in status()["workers"].items() if stage == "member"]
                victim = members[len(done) % WORKERS]
                wait_in_step(Path(folder) / victim, phase)
                done.append((victim, time.time(), status()["generation"]))
                group.processes[victim].kill()
                wait_until_trained(status, WORKERS - 1)
                group.allow(WORKERS)
            wait_until_trained(status, WORKERS)
            run.controller.post(StopRequested("enough"))
            outcome = run.wait(120.0)
        lines = [
            json.loads(line) | {"worker": path.name}
            for path in Path(folder).iterdir()
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        spec = job(size, folder, False, outcome.step)
        calm = LocalRun(spec, open_data(spec.data, virtual_workers=WORKERS), torch.device("cpu"))
        calm.run(train)
    return {
        "exact": outcome.error is None and outcome.digest == calm.digest,
        "pauses_ms": [pause_ms(lines, at, generation) for _, at, generation in done],
        "moved_by_least": [moved(lines, *one) for one in done] if sharded else [],
    }


def wait_until_trained(status: Any, workers: int) -> None:
    """Waits until so many workers have made some steps together."""

    def trains() -> bool:
        now = status()
        return bool(now["world_size"] == workers and now["phase"] == "running")

    wait_for(trains, 120, f"{workers} workers")
    step = status()["step"]
    wait_for(lambda: bool(status()["step"] >= step + STEPS), 120, f"{STEPS} steps")


def wait_in_step(path: Path, phase: float) -> None:
    """Waits until the worker that writes this file has done such a part of a step."""

    size = path.stat().st_size
    lines = path.read_text(encoding="utf-8").splitlines()[-6:-1]  # the last may be half written
    times = [json.loads(line)["time"] for line in lines]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times))
    while path.stat().st_size == size:
        time.sleep(0.001)
    time.sleep(phase * step_s)


def after(lines: list[dict[str, Any]], generation: int) -> int:
    """The first generation behind this one."""
    return min(line["generation"] for line in lines if line["generation"] > generation)


def commits_in(lines: list[dict[str, Any]], generation: int) -> dict[int, float]:
    """When the first worker had committed each step of a generation, in order."""
    times: dict[int, float] = {}
    for line in lines:
        if line["generation"] == generation:
            step = line["step"]
            times[step] = min(times.get(step, line["time"]), line["time"])
    return dict(sorted(times.items()))


def pause_ms(lines: list[dict[str, Any]], at: float, generation: int) -> float:
    ended = commits_in(lines, generation)
    before = {step: time for step, time in ended.items() if time <= at}
    behind = commits_in(lines, after(lines, generation))
    step_s, later_step_s = (
        statistics.median(b - a for a, b in itertools.pairwise(times.values()))
        for times in (before, behind)
    )
    (last, since), (first, until) = max(before.items()), min(behind.items())
    assert first - last in (1, 2), "the step in flight is done again, or completed"
    return 1e3 * (until - since - step_s - (first - last - 1) * later_step_s)


def moved(lines: list[dict[str, Any]], victim: str, _: float, generation: int) -> float | None:
    """The bytes received in the generation behind this one, by those that the victim held; None if
    somebody joined that generation."""
    following = after(lines, generation)
    of_it = [x for x in lines if x["generation"] == following]
    began = [x for x in of_it if "received" in x]
    if any(line["workers"] != WORKERS - 1 for line in began):
        return None
    mine = [x for x in lines if (x["worker"], x["generation"]) == (victim, generation)]
    held = next(line["held"] for line in mine if "held" in line)
    in_steps: dict[str, int] = {}
    for line in of_it:
        in_steps[line["worker"]] = max(line["in_steps"], in_steps.get(line["worker"], 0))
    received = sum(line["received"] for line in began) + sum(in_steps.values())
    return float(received / held)


def cases(size: str, kills: int) -> Iterator[dict[str, Any]]:
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    runs = math.ceil(kills / KILLS_IN_A_RUN)
    for number in range(runs):
        phases = [(at + 0.5) / kills for at in range(number, kills, runs)]
        for sharded in (True, False) if number % 2 else (False, True):
            found[sharded].append(measure(size, sharded, phases))
    pauses = {
        sharded: [pause for run in of_kind for pause in run["pauses_ms"]]
        for sharded, of_kind in found.items()
    }
    more = [a - b for a, b in zip(pauses[True], pauses[False], strict=True)]
    for sharded, of_kind in found.items():
        parts = [part for run in of_kind for part in run["moved_by_least"] if part is not None]
        yield {
            "parameters": size,
            "workers": WORKERS,
            "sharded": sharded,
            "exact": all(run["exact"] for run in of_kind),
            "median_pause_ms": round(statistics.median(pauses[sharded]), 1),
            # Median and interval, at the same points of a step.
            "more_ms": [round(x, 1) for x in median_interval(more)] if sharded else None,
            "pauses_ms": [round(pause, 1) for pause in pauses[sharded]],
            "moved_by_least": [round(part, 3) for part in parts],
        }


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    sharded, replicated = results
    return {
        "the weights of an undisturbed run": sharded["exact"] and replicated["exact"],
        f"a pause of at most {MORE_MS:.0f} ms more": sharded["more_ms"][0] <= MORE_MS,
        f"at most {MOST_MOVED} of the least bytes are moved": all(
            part <= MOST_MOVED for part in sharded["moved_by_least"]
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["4.9M"], arguments)
    size, kills = options.sizes[0], min(options.pairs, 24)
    if options.quick:
        size, kills = "0.9M", 1
    prepare_environment(os.environ, 1)
    return conclude("sharding_changes", options, cases(size, kills), targets)


if __name__ == "__main__":
    sys.exit(main())
