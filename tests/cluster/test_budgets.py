"""What may go wrong, and how often, on real processes: whose fault it was is found out and
named."""

import dataclasses
import functools
import os
import signal

import pytest

from elastic_dp.cluster.controller import controller
from elastic_dp.cluster.heartbeat.heartbeat_server import _lost
from elastic_dp.cluster.heartbeat.heartbeat_sidecar import oom_kills
from elastic_dp.cluster.run_handle import error_of
from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import Cause
from elastic_dp.errors import UserCodeError
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy


def job(**failure):
    spec = spec_of(workers=2, min_workers=2, virtual=4, steps=8)
    failure = dataclasses.replace(spec.failure, **failure)
    return dataclasses.replace(spec, failure=failure, checkpoint=CheckpointConfig(every_steps=1))


def allow(monkeypatch, **limits):
    """Let the controller's limits be these."""
    made = functools.partial(controller.CoordinatorConfig, **limits)
    monkeypatch.setattr(controller, "CoordinatorConfig", made)


def test_a_sample_that_ends_its_process_is_named_and_not_tried_for_ever(monkeypatch):
    poison = 100

    def crashes(model, batch):
        if poison in batch["i"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        return cross_entropy(model, batch)

    allow(monkeypatch, max_losses_of_micro_batch=1)
    spec = job()
    at = next(
        (step, v)
        for step in range(1, 9)
        for v in range(4)
        if poison in data_of(spec).batch(step, v)["i"]
    )
    outcome, _ = group(spec, functools.partial(classify, loss_fn=crashes), fails=True)
    assert (
        f"2 workers died one after another while running virtual worker {at[1]} of step {at[0]}"
        in outcome.error
    )
    # The last words of a sidecar that is slow come when the next has died.
    assert outcome.workers_lost >= 2


def data_of(spec):
    from elastic_dp.data import open_data

    return open_data(spec.data, virtual_workers=spec.scaling.num_virtual_workers)


def raises_once(ctx):
    """In one worker: another that comes to this body later, in the next generation, would raise a
    second time."""
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        if step.number == 4 and is_first(ctx.config["file"]):
            raise ConnectionError("the tracker is away")


def is_first(file):
    try:
        open(file, "x").close()
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize("budget", [0, 1])
def test_an_error_of_user_code_is_tried_again_where_the_job_says_so(budget, tmp_path):
    spec = job(max_user_errors=budget)
    spec = dataclasses.replace(spec, config={"file": str(tmp_path / "raised")})
    outcome, _ = group(spec, raises_once, url=str(tmp_path / "run"), fails=True)
    if budget:
        assert outcome.error is None, outcome.traceback
        assert outcome.digest == local(spec, raises_once).digest
    else:
        error = error_of(outcome)
        assert isinstance(error, UserCodeError) and "the tracker is away" in error.remote_traceback


def test_the_last_words_of_a_worker():
    said = {"step": 7, "phase": "compute 5", "out_of_memory": False}
    assert _lost("w1", said).micro_batch == (8, 5)
    assert _lost("w1", said | {"phase": "data 5"}).micro_batch == (8, 5)
    assert _lost("w1", said).cause is Cause.UNKNOWN
    for phase in ("compute", "collective", "body"):
        assert _lost("w1", said | {"phase": phase}).micro_batch is None
    short = _lost("w1", said | {"out_of_memory": True})
    assert short.cause is Cause.OUT_OF_MEMORY and "memory" in short.reason


def test_oom_kills_are_those_that_the_kernel_counts(tmp_path):
    groups = tmp_path / "cgroup"
    (tmp_path / "pod").mkdir()
    (tmp_path / "memory" / "pod").mkdir(parents=True)
    groups.write_text("1:cpu:/pod\n0::/pod\n")
    assert oom_kills(str(tmp_path), str(groups)) == 0
    (tmp_path / "pod" / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert oom_kills(str(tmp_path), str(groups)) == 3
    control = tmp_path / "memory" / "pod" / "memory.oom_control"
    control.write_text("oom_kill_disable 0\noom_kill 2\n")
    groups.write_text("0::/other\n4:memory:/pod\n")
    assert oom_kills(str(tmp_path), str(groups)) == 2
    assert oom_kills(str(tmp_path), str(tmp_path / "absent")) == 0
