"""A fault of a device costs the worker it happens to, and is no error of the user's code: on real
processes, with the errors that torch raises."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from elastic_dp.coordinator.messages import Cause
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CollectiveFailed
from elastic_dp.train.worker_session import WorkerSession
from tests.cluster.test_budgets import allow, is_first, job
from tests.runs import group, lines_of, local
from tests.train.jobs import adamw, classifier, classify, cross_entropy, hold

ERRORS = {
    2: lambda: torch.AcceleratorError("CUDA error: device-side assert triggered\nadvice"),
    4: lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    6: lambda: dist.DistBackendError("NCCL error: unhandled system error"),
}


def lost(run):
    """How each worker was lost, as its last event says: one may come before its cause is known."""
    found = {}
    for line in lines_of(run):
        if line.get("event") == "WorkerLost" and line["cause"] != Cause.RELEASED:
            found[line["worker"]] = line
    return list(found.values())


def failing(error, when):
    """The loss raises this where `when(ctx, batch)`."""

    def train(ctx):
        def loss_fn(model, batch):
            if when(ctx, batch):
                raise ERRORS[error]()
            return cross_entropy(model, batch)

        classify(ctx, loss_fn)

    return train


def test_a_row_that_trips_a_device_side_assert_is_named_by_its_micro_batch(monkeypatch):
    allow(monkeypatch, max_losses_of_micro_batch=1)
    outcome, _ = group(job(), failing(2, lambda ctx, batch: 100 in batch["i"]), fails=True)
    assert "2 workers died one after another while running virtual worker" in outcome.error


def test_a_worker_out_of_memory_in_its_warm_up_does_not_join(tmp_path):
    spec = dataclasses.replace(job(), config={"file": str(tmp_path / "failed")})
    once = failing(4, lambda ctx, _: not ctx.is_source and is_first(ctx.config["file"]))
    _, run = group(spec, once)
    [line] = lost(run)
    assert line["cause"] == Cause.OUT_OF_MEMORY and "Tried to allocate" in line["reason"]
    ready = [line["worker"] for line in lines_of(run) if line.get("event") == "WorkerReady"]
    assert line["worker"] not in ready and len(ready) == 2


def test_a_model_that_never_fits_uses_up_the_budget_of_memory(monkeypatch):
    allow(monkeypatch, max_out_of_memory=0)
    outcome, _ = group(job(), failing(4, lambda *_: True), fails=True)
    assert "workers ran out of memory 1 time" in outcome.error
    assert "Tried to allocate 2.00 GiB" in outcome.error


class Left(Exception):
    """`leave` has begun."""


class Leaving:
    @property
    def loop(self):
        raise Left


def test_leaving_a_generation_is_refused_where_the_device_made_the_collective_fail():
    broken = CollectiveFailed("device-side assert")
    broken.__cause__ = ERRORS[2]()
    with pytest.raises(CollectiveFailed):
        WorkerSession.leave(Leaving(), broken)
    lost_peer = CollectiveFailed("a peer is gone")
    lost_peer.__cause__ = ERRORS[6]()
    with pytest.raises(Left):
        WorkerSession.leave(Leaving(), lost_peer)


def collective_fails_on_the_device(ctx):
    """Once, in the second step of the worker that comes first."""
    model, done = classifier(), [0]
    launch = ProcessGroup._launch

    def broken(self, *given):
        if done[0] >= 2 and is_first(ctx.config["file"]):
            raise CollectiveFailed("it") from ERRORS[2]()
        return launch(self, *given)

    ProcessGroup._launch = broken
    for step in ctx.steps(model, adamw(model), cross_entropy):
        done[0] = step.number
        hold(ctx, step)


def test_a_collective_that_finds_a_broken_device_ends_the_process(tmp_path):
    """The next generation would fail to form with it, again and again."""
    spec = dataclasses.replace(job(), config={"file": str(tmp_path / "failed")})
    _, run = group(spec, collective_fails_on_the_device)
    [line] = lost(run)
    assert line["cause"] == Cause.DEVICE_FAULT


def fails_before_its_loop(ctx):
    raise ERRORS[ctx.config["step"]]()


@pytest.mark.parametrize("step", ERRORS)
def test_a_device_fault_in_a_local_run_is_raised_as_it_is(step):
    """There is nobody to go on."""
    spec = dataclasses.replace(job(), config={"step": step})
    with pytest.raises(type(ERRORS[step]())):
        local(spec, fails_before_its_loop)
