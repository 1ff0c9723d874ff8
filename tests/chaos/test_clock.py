"""The wall clock is set while a run goes on, of a worker or of the controller: nothing happens.

Processes of one machine share its clock, so what is set here is what Python takes for it. What a
record says of times is wrong then, and nothing else: deadlines, leases, heartbeats and pauses go by
clocks that nobody sets.
"""

import dataclasses
import time
from typing import Any

import pytest

from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.patience import PATIENCE_S, eventually
from tests.runs import lines_of, local
from tests.train.checkpointing.test_worker_checkpointer import job, steps_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold

pytestmark = pytest.mark.chaos
SET_AT, STEPS = 10, 30
real = time.time


def train(ctx: Any) -> None:
    """From that step on the second worker has another idea of the time."""
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        if step.number == SET_AT and ctx.rank == 1:
            time.time = lambda: real() + ctx.config["worker_s"]
        ctx.log({"loss": step.loss})
        hold(ctx, step)


@pytest.mark.parametrize("hours", [1, -1])
def test_clocks_are_set(hours, tmp_path, monkeypatch):
    """One worker's to the future and the controller's to the past, or the other way round."""
    both = tmp_path / "both are set"
    spec = job(steps=STEPS, gates={SET_AT + 10: str(both)})
    spec = dataclasses.replace(
        spec, config=spec.config | {"worker_s": 3600 * hours}, max_time_s=600.0
    )
    calm = local(spec, train)
    url = str(tmp_path / "run")
    with ProcessRun(spec, train, journal=Journal(url), url=url) as run:
        eventually(lambda: run.controller.status()["step"] >= SET_AT + 5, run.controller.status)
        monkeypatch.setattr(time, "time", lambda: real() - 3600 * hours)
        both.touch()
        outcome = run.wait(PATIENCE_S)
        monkeypatch.undo()
    assert outcome.error is None, outcome.traceback
    assert (outcome.digest, outcome.step, outcome.workers_lost) == (calm.digest, STEPS, 0)
    evicted = [x for x in lines_of(run) if x.get("command") == "EvictWorker"]
    assert not evicted and steps_of(url)[-1] == STEPS
    again = Journal(url, since=run.controller.state_store.state.started_at)
    again.close()
    lines = [(line["step"], line["loss"]) for line in again.recorded()]
    assert lines == [(line["step"], line["loss"]) for line in calm.logged]
