"""Delays and inner steps that begin later in the run, and end: one digest for any number of
workers, under kills beside the changes, after joins, and for runs that go on before a change, at it
and behind it."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from elastic_dp.config import CheckpointConfig, JobSpec
from elastic_dp.coordinator.generation import Generation
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import formed_of, group, local, resize, spec_of
from tests.train.checkpointing.test_worker_checkpointer import kill_all, when_committed
from tests.train.jobs import batch_norm, classifier, cross_entropy, loop
from tests.train.test_finished_work import counted, dies_last, passes
from tests.train.test_growing_batch import job
from tests.train.test_inner_steps import (
    HOW,
    outer,
    trains_batch_norm,
    trains_with_moments,
    with_inner,
)
from tests.train.test_kills import IN_A_STEP

SLOW = pytest.mark.slow
POINTS = [point for point in IN_A_STEP if not point.startswith("evaluate")]  # nothing evaluates
STEPS = 11
DELAYS, INNER = {0: 0, 4: 1, 8: 0}, {0: 1, 4: 3, 8: 2}
LATE: dict[str, Any] = {"staleness": DELAYS}
INSIDE: dict[str, Any] = {"inner_steps": INNER}
BOTH: dict[str, Any] = {"inner_steps": INNER, "staleness": {0: 0, 5: 1, 8: 0}, "wire": "int8"}
CASES = ((LATE, batch_norm), (INSIDE, trains_batch_norm), (BOTH, trains_batch_norm))
NAMES = ("delays", "inner steps", "both")


def spec_with(schedules: dict[str, Any], **options: Any) -> JobSpec:
    """All workers are there before step 5: the body of step 1 waits until the third has joined, or
    until the end of the generation is planned for it, which is after step 4 at the latest."""
    config = {"hold": dict.fromkeys(range(1, 4), options.get("workers", 3))}
    given = {"growth": {0: 4, 6: 8}, "steps": STEPS, "tail": "short", "config": config} | options
    return dataclasses.replace(job(**given), **schedules)


@pytest.mark.parametrize(
    ("workers", "schedules", "train"),
    [
        (3, LATE, batch_norm),
        (2, INSIDE, trains_batch_norm),
        *(
            pytest.param(workers, *case, marks=SLOW)
            for workers in (1, 2, 3, 4)
            for case in (*CASES, (INSIDE, trains_with_moments))
        ),
    ],
)
def test_any_number_of_workers_has_the_digest_of_one_process(workers, schedules, train):
    """With a batch that grows in between. No change ends a generation."""
    spec = spec_with(schedules, workers=workers, min_workers=workers)
    outcome, run = group(spec, train)
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, train).digest
    assert len(formed_of(run)) == 1


def test_each_row_is_used_once_in_an_epoch_where_the_number_of_inner_steps_changes() -> None:
    used: list[int] = []
    steps_per_epoch: list[int] = []

    def train(ctx: Any) -> None:
        model = classifier()
        steps_per_epoch.append(ctx.steps_per_epoch)
        for step in ctx.steps(model, outer(model), cross_entropy, **HOW):
            ctx.log({"epoch": step.epoch, "ends": step.epoch_end, "weight": step.weight})
            used.append(ctx.inner_steps_before(step.number + 1) - sum(used))

    spec = spec_of(steps=8, virtual={0: 2, 3: 4}, workers=1, rows=140, tail="short")
    logged = local(with_inner(spec, {0: 1, 2: 3, 5: 2}), train).logged
    assert [x["weight"] for x in logged] == [8.0, 8.0, 24.0, 48.0, 48.0, 4.0, 32.0, 32.0]
    assert [x["epoch"] for x in logged] == [0] * 6 + [1] * 2
    assert [x["ends"] for x in logged] == [False] * 5 + [True] + [False] * 2
    assert used == [1, 1, 3, 3, 3, 2, 2, 2]
    assert steps_per_epoch == [6]


def test_delay_of_every_step_or_of_none_is_what_a_single_number_says():
    spec = spec_with({})
    for number in (0, 1):
        one, other = (dataclasses.replace(spec, staleness=s) for s in (number, {0: number}))
        assert local(one, batch_norm).digest == local(other, batch_norm).digest


@pytest.fixture
def _ends_where_bodies_wait(monkeypatch):
    """A generation ends after the step in whose body its members wait. Else it ends some steps
    later, by as many as they made in the last interval of heartbeats and two."""

    def plan_end(generation: Generation, reason: str, at_once: bool = False) -> None:
        generation._after_step = generation.steps.step
        generation._end(reason)

    monkeypatch.setattr(Generation, "plan_end", plan_end)


@pytest.mark.slow
@pytest.mark.usefixtures("_ends_where_bodies_wait")
@pytest.mark.parametrize(
    ("point", "step", "rank", "schedules", "train"),
    [
        pytest.param(point, step, rank, *case, id=f"{point}-{step}-{rank}-{name}")
        for point in POINTS
        for step, rank in ((4, 2), (5, 0), (5, 2), (8, 2), (9, 0), (9, 2))
        for name, case in zip(NAMES, CASES, strict=True)
        # The first delayed step applies no gradient.
        if (point, step, name) != ("optimizer", 5, "delays")
    ],
)
def test_worker_killed_beside_a_change_changes_no_bit(
    point, step, rank, schedules, train, tmp_path
):
    spec = spec_with(schedules, min_workers=2, tail="drop")  # each rank has rows in each step
    dead = WorkerFault(point, step=step, rank=rank, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, train, faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, train).digest


@pytest.mark.parametrize(
    ("step", "again"),
    [(9, 4), *(pytest.param(*pair, marks=SLOW) for pair in ((5, 4), (6, 8), (8, 8)))],
)
def test_lost_worker_beside_a_change_only_the_leaves_that_are_needed_run_again(
    step, again, tmp_path
):
    """In steps 6 to 8 its leaves of the step before are needed, too."""
    spec = spec_with(LATE, growth=12, min_workers=2, tail="drop")  # no step has fewer leaves
    dead = WorkerFault("backward", step=step, rank=2, nth=4, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, dies_last(counted(tmp_path), tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert sum(passes(tmp_path, step).values()) == 12 + again
    assert outcome.digest == local(spec, counted(tmp_path)).digest


def trains_by_sgd(ctx: Any) -> None:
    """With SGD, since the simulated device would queue the steps that Adam counts on the host."""

    def inner(model: nn.Module, step: int) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.05 / step, momentum=0.9)

    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4)
    )
    if ctx.config["inner"]:
        loop(ctx, model, outer(model), inner_optimizer=inner, inner_clip_norm=1.0)
    else:
        loop(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clip_norm=1.0)


@pytest.mark.parametrize(
    ("step", "point", "schedules"),
    [
        (5, "exchange", LATE),
        *(
            pytest.param(*case, marks=SLOW)
            for case in product(
                (5, 9), ("backward", "exchange", "before_commit"), (LATE, INSIDE, BOTH)
            )
            if case != (5, "exchange", LATE)
        ),
    ],
)
def test_change_on_a_simulated_device_has_the_same_bits_after_a_kill(
    step, point, schedules, tmp_path
):
    """Leaves are launched while the device has a sum of the step before to finish."""
    spec = spec_with(schedules, min_workers=2)
    spec.config["inner"] = "inner_steps" in schedules
    dead = WorkerFault(point, step=step, rank=2, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, trains_by_sgd, faults=(dead,), device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, trains_by_sgd).digest


@pytest.mark.slow
@pytest.mark.usefixtures("_ends_where_bodies_wait")
@pytest.mark.parametrize(("schedules", "train"), CASES, ids=NAMES)
@pytest.mark.parametrize("sizes", [{2: 3, 6: 2}, {4: 3, 8: 1}, {5: 3, 9: 2}], ids=str)
def test_joins_and_departures_beside_the_changes_change_no_bit(sizes, schedules, train):
    config = {"body_s": 0.02, "hold": sizes}
    spec = spec_with(schedules, workers=1, growth=4, config=config)
    outcome, _ = group(spec, train, script=[resize(step, size) for step, size in sizes.items()])
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 2
    assert outcome.digest == local(spec, train).digest


@pytest.mark.slow
@pytest.mark.parametrize(("schedules", "train"), CASES, ids=NAMES)
@pytest.mark.parametrize("every", [3, 4, 5, 7, 8, 9])
def test_all_workers_lost_beside_a_change_go_on_from_the_checkpoint(
    every, schedules, train, tmp_path
):
    url, gate = tmp_path / "run", tmp_path / "gate"
    spec = spec_with(schedules, workers=2, growth=4, steps=14)
    spec = dataclasses.replace(
        spec,
        config={"body_s": 0.02, "gates": {every + 1: str(gate)}},
        checkpoint=CheckpointConfig(every_steps=every),
    )

    def open_gate(run: Any) -> None:
        gate.touch()

    script = [(1, when_committed(url, every, kill_all)), (1, open_gate)]
    outcome, _ = group(spec, train, script=script, url=str(url))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost >= 2
    assert outcome.digest == local(dataclasses.replace(spec, config={}), train).digest


def test_memory_for_a_delay_is_there_only_in_delayed_steps():
    """That of the weights and buffers of the step before."""
    held: list[bool] = []

    def train(ctx: Any) -> None:
        model = torch.nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ctx.steps(model, optimizer, lambda m, b: m(b["x"]).square().mean()):
            held.append(bool(ctx._session.state.previous._values))

    local(spec_with(LATE, workers=1), train)
    assert held == [False] * 4 + [True] * 3 + [False] * 4  # the gradient of step 8 is dropped
