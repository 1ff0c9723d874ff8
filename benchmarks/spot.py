"""A spot market, in compressed time, against real workers: what is made of the capacity that is
there.

    python -m benchmarks.spot [--seconds 160]    some twelve minutes; `--seconds 20` five
    python -m benchmarks.spot --quick            one short trace; records nothing

A trace says how many places there are, and from when on. One is published (`spot_traces.G4DN`): 17
hours that are compressed into `--seconds`. Two are generated and take a third of that: places are
lost one by one at exponential intervals and come back after a while. All are lost by SIGKILL,
without notice. The same trace is also run as most trainers meet it: every change ends all
processes, and the group restarts from the newest checkpoint. Both run on our own processes and
checkpoints, which start and load in about a second.

Goodput: committed steps, divided by those that calm groups as large as the capacity of each instant
would make, checkpoints included (the median of three, one size after the other). What is missing is
`starting` (a place is there, and its worker does not train yet) or `paused` (nobody trains, a step
is done again, or steps are slower than calm ones); `pauses` has each. Compute is a sleep for each
virtual worker, so few cores are enough if they are idle. A second here is eight minutes of the day.
Cost per step is in places x time at the price of a place: 1 on demand, SPOT_PRICE on spot.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import conclude, parser_of
from benchmarks.spot_traces import PLACES, Trace, generated, published
from elastic_dp.config import CheckpointConfig, FailureConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing.process_worker_group import ProcessRun

VIRTUAL = 12  # divides by every number of places
MICRO_BATCH_S = 0.015
SPOT_PRICE = 0.35  # of on demand; about what is paid for GPUs
CHECKPOINT_S = 2.0
TARGET = 0.97
CALM_S, CALM_TIMES = 10.0, 3  # of each size, where nothing changes
SETTLED_S = 1.0  # after a change such a group is calm
STABILIZATION_S = 0.5  # the default is for a market that is not compressed
PATIENCE_S = 120.0


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4800

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randn(256, generator=torch.Generator().manual_seed(i))


def train(ctx: Any) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(ctx.config["micro_batch_s"])
        return (m(x) - x).square().mean()

    for step in ctx.steps(model, optimizer, loss_fn):
        ctx.log({"world": ctx.world_size, "loss": step.loss})


def spec(micro_batch_s: float = MICRO_BATCH_S, max_steps: int = 10_000_000) -> JobSpec:
    return JobSpec(
        name="spot",
        data=MapStyleData(Rows(), micro_batch_size=4),
        config={"micro_batch_s": micro_batch_s},
        scaling=ScalingConfig(
            max_workers=PLACES,
            virtual_workers=VIRTUAL,
            threads_per_worker=1,
            stabilization_s=STABILIZATION_S,
        ),
        checkpoint=CheckpointConfig(every_s=CHECKPOINT_S),
        failure=FailureConfig(heartbeat_timeout_s=4.0, max_losses_without_progress=1000),
        max_steps=max_steps,
    )


Line = tuple[float, int, int]  # when (of `time.time`), which step, how many made it


def replay(trace: Trace, restart: bool) -> dict[str, Any]:
    lines: list[Line] = []

    def on_line(line: dict[str, Any]) -> None:
        if "world" in line:
            lines.append((line["time"], int(line["step"]), int(line["world"])))

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        journal = Journal(None)
        journal.listen(on_line)
        with ProcessRun(spec(), train, limit=PLACES, journal=journal, url=folder) as run:
            commits = Path(folder, "checkpoints", "seals")  # whoever restarts needs one
            _until(lambda: lines and lines[-1][2] == PLACES and list(commits.glob("step-*")), run)
            begun, first = lines[-1][0], lines[-1][1]
            _blow(trace, run, begun, restart)
            ends = begun + trace.seconds
            _until(lambda: lines[-1][0] > ends, run)  # somebody has the weights that it ends with
            run.controller.post(StopRequested("the day is over"))
            outcome = run.wait(PATIENCE_S)
    assert outcome.error is None, f"{outcome.error}\n{outcome.traceback}"
    inside = [(at - begun, step, n) for at, step, n in lines if 0 <= at - begun <= trace.seconds]
    return {
        "lines": inside,
        "steps": max(step for _, step, _ in inside) - first,
        "generations": outcome.generations,
        "step_at_end": outcome.step,
        "digest": outcome.digest,
    }


def _until(true: Callable[[], Any], run: ProcessRun) -> None:
    """Wait until `true()`, at most PATIENCE_S without a step."""
    step, until = -1, 0.0
    while not true():
        status = run.controller.status()
        if status["step"] != step:
            step, until = status["step"], time.monotonic() + PATIENCE_S
        assert time.monotonic() < until, status
        time.sleep(0.01)


def _blow(trace: Trace, run: ProcessRun, begun: float, restart: bool) -> None:
    """The trace's changes at their times. `restart`: each of them ends everybody."""
    rng = random.Random(1)
    for at, places in trace.changes[1:]:
        time.sleep(max(0.0, begun + at - time.time()))
        run.worker_group.allow(places)
        up = [p for p in run.worker_group.processes.values() if p.is_alive()]
        rng.shuffle(up)
        for process in up if restart else up[: max(0, len(up) - places)]:
            process.kill()


def calm_paces() -> dict[int, float]:
    """Seconds of a step of groups of each size to which nothing happens: the mean, so what
    checkpoints take counts."""
    sizes = range(PLACES, 0, -1)
    fewer = Trace("calm", CALM_S * PLACES, tuple((CALM_S * (PLACES - n), n) for n in sizes))
    lines, found = replay(fewer, restart=False)["lines"], {}
    for at, end, places in fewer.spans:
        own = [line for line in lines if at + SETTLED_S <= line[0] < end and line[2] == places]
        found[places] = (own[-1][0] - own[0][0]) / (own[-1][1] - own[0][1])
    return found


def _ideal_steps(trace: Trace, paces: dict[int, float]) -> float:
    return sum((end - at) / paces[places] for at, end, places in trace.spans)


def _starting(trace: Trace, lines: Sequence[Line], paces: dict[int, float]) -> float:
    """Steps that were not made because fewer trained than there were places."""
    missed = 0.0
    for (at, step, world), (later, next_step, _) in itertools.pairwise(lines):
        if world < trace.places(at) and next_step == step + 1:
            missed += (later - at) * (1 / paces[trace.places(at)] - 1 / paces[world])
    return missed


def _pauses(lines: Sequence[Line], paces: dict[int, float]) -> list[dict[str, float]]:
    """Where steps were late by more than one: when, how many trained before and after, and by how
    much."""
    found = []
    for (at, step, before), (later, next_step, after) in itertools.pairwise(lines):
        late = later - at - (next_step - step) * paces[after]
        if before != after or late > paces[after]:
            found.append({"at": round(at, 2), "from": before, "to": after, "ms": round(1e3 * late)})
    return found


def measure(trace: Trace, paces: dict[int, float]) -> dict[str, Any]:
    """`paces`: of groups to which nothing happens."""
    ours = replay(trace, restart=False)
    print(f"{trace.name}: {ours['steps']} steps, {ours['generations']} generations", flush=True)
    theirs = replay(trace, restart=True)
    print(f"{trace.name}: {theirs['steps']} steps where all are restarted", flush=True)
    with ProcessRun(spec(0.0, ours["step_at_end"]), train) as run:
        undisturbed = run.wait(4 * PATIENCE_S)
    assert undisturbed.error is None, undisturbed.traceback
    on_demand = 1 / paces[PLACES]
    ideal = _ideal_steps(trace, paces)
    starting = _starting(trace, ours["lines"], paces)
    costs = {
        "on demand only": PLACES / on_demand,
        "spot, elastic_dp": SPOT_PRICE * trace.place_seconds / ours["steps"],
        "spot, all restarted": SPOT_PRICE * trace.place_seconds / theirs["steps"],
    }
    return {
        "trace": trace.name,
        "seconds": trace.seconds,
        "changes": len(trace.changes) - 1,
        "mean_places": round(trace.place_seconds / trace.seconds, 3),
        "goodput": round(ours["steps"] / ideal, 4),
        "target": TARGET,
        "starting": round(starting / ideal, 4),
        "paused": round(1 - (ours["steps"] + starting) / ideal, 4),
        "goodput_all_restarted": round(theirs["steps"] / ideal, 4),
        "same_weights_as_undisturbed": ours["digest"] == undisturbed.digest,
        "calm_step_ms": {size: round(1e3 * pace, 1) for size, pace in paces.items()},
        "pauses": _pauses(ours["lines"], paces),
        "cost_per_step": {name: round(cost, 4) for name, cost in costs.items()},
    }


def targets(results: Sequence[dict[str, Any]]) -> dict[str, bool]:
    return {f"{one['trace']}: goodput": one["goodput"] >= one["target"] for one in results}


def main() -> None:
    options = parser_of(__doc__, seconds=160.0).parse_args()
    seconds = 6.0 if options.quick else options.seconds
    # A quick one takes for calm what would be if nothing but the sleeps took time.
    ideal = {places: VIRTUAL / places * MICRO_BATCH_S for places in range(1, PLACES + 1)}
    short = seconds / 3
    traces = (
        published(seconds),
        generated("fair", short, lost_every_s=2 * short, back_after_s=short / 8, seed=3),
        generated("foul", short, lost_every_s=short / 2, back_after_s=short / 8, seed=7),
    )
    chosen = traces[:1] if options.quick else traces
    calm = [ideal] if options.quick else [calm_paces() for _ in range(CALM_TIMES)]
    paces = {size: statistics.median(one[size] for one in calm) for size in ideal}
    found = (measure(one, paces) for one in chosen)
    sys.exit(conclude("spot", options, found, targets))


if __name__ == "__main__":
    main()
