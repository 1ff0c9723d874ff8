"""What a train function finds when it is called."""

import asyncio
import dataclasses
import types

import pytest
import torch

from elastic_dp.device import global_generators
from elastic_dp.errors import LoopError
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.train import train_function
from elastic_dp.train.train_function import (
    call_train_function,
    exit_if_device_failed,
    train_until_released,
)
from tests.runs import group, spec_of


def session_on(device, spec=None):
    """A session in which no loop begins."""
    loop = types.SimpleNamespace(failure=None, opened=False)
    return types.SimpleNamespace(spec=spec or spec_of(), device=torch.device(device), loop=loop)


@pytest.mark.parametrize("seed", [0, 7])
def test_initial_weights_made_on_a_device_follow_the_seed(seed, monkeypatch):
    """The generator of a device is not there before the device is in use, and is seeded
    nevertheless."""
    opened, seeds = [], []
    monkeypatch.setattr(torch.cuda, "init", lambda: opened.append(True))
    monkeypatch.setattr(global_generators, "gpus_are_in_use", lambda: bool(opened))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    spec = spec_of()
    spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=seed))
    session, found = session_on("cuda:0", spec), []
    with pytest.raises(LoopError):
        call_train_function(lambda ctx: found.extend(seeds), session)
    assert found == [seed_for(seed, 0, 0) % (1 << 63)]


def test_a_train_function_on_the_cpu_opens_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("opened"))
    with pytest.raises(LoopError):
        call_train_function(lambda ctx: None, session_on("cpu"))


class Exited(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def status(monkeypatch):
    """Where the fault is written down; `written` has what was."""

    def exit_process(code):
        raise Exited(code)

    monkeypatch.setattr(train_function.os, "_exit", exit_process)
    made = types.SimpleNamespace(written=[])
    made.write_fault = lambda kind, text: made.written.append((str(kind), text))
    return made


def test_a_device_that_fails_after_the_loop_ends_the_process(status, monkeypatch):
    """While this worker serves others with its state, or computes its digest."""
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")

    def serve():
        raise error

    monkeypatch.setattr(train_function, "call_train_function", lambda train, session: None)
    session = types.SimpleNamespace(
        spec=types.SimpleNamespace(exact=False),
        device=torch.device("cpu"),
        inexact_because=[],
        status=status,
        serve_until_released=serve,
        checkpoints=None,
    )
    with pytest.raises(Exited):
        train_until_released(lambda ctx: None, session)
    text = "AcceleratorError: CUDA error: unspecified launch failure"
    assert status.written == [("device fault", text)]


def test_any_error_on_a_device_whose_context_is_lost_ends_the_process(status, monkeypatch):
    """Asynchronous faults surface anywhere, or are swallowed by user code."""
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(train_function, "broken_context", lambda: error)
    with pytest.raises(Exited):
        exit_if_device_failed(status, KeyError("tokens"))
    assert "device-side assert" in status.written[0][1]


def test_an_error_of_user_code_on_a_device_that_works_ends_no_process(status):
    exit_if_device_failed(status, KeyError("tokens"))
    assert status.written == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_that_is_no_exception_fails_the_run_at_once(kind):
    """It looked like the loss of the worker, and the step was tried 50 times."""

    def train(ctx):
        raise kind("from a library")

    outcome, _ = group(spec_of(workers=1, virtual=2), train, fails=True)
    assert "from a library" in outcome.error and outcome.workers_lost == 0
