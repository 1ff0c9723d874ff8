"""The search for schedulers and averaged models that are not passed to ctx.steps."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError
from elastic_dp.train.loop_guard.unpassed_state import UnpassedStateGuard


class Halving(LambdaLR):
    """A user's own class, derived from one that is derived from LRScheduler."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 0.5**epoch)


def guard_of(model, optimizer, passed=()):
    return UnpassedStateGuard(model, [optimizer], lambda model, batch: model(batch).sum(), passed)


@pytest.fixture
def model():
    return nn.Linear(2, 2)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [lambda o: torch.optim.lr_scheduler.StepLR(o, 2), Halving])
def test_scheduler_that_is_not_passed_raises_if_it_is_used(model, optimizer, make):
    held = {"deep": [make(optimizer)]}
    guard = guard_of(model, optimizer)
    assert guard.check() == []
    optimizer.step()
    held["deep"][0].step()
    with pytest.raises(LoopError, match="scheduler"):
        guard.check()


def test_scheduler_that_is_passed_and_one_of_another_optimizer_raise_nothing(model, optimizer):
    passed = Halving(optimizer)
    other = Halving(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    guard = guard_of(model, optimizer, [passed])
    for scheduler in (passed, other):
        scheduler.optimizer.step()
        scheduler.step()
    assert guard.check() == []


def test_averaged_model_that_is_not_passed_raises_if_it_is_used(model, optimizer):
    average = AveragedModel(model)
    guard = guard_of(model, optimizer)
    average.update_parameters(model)
    with pytest.raises(LoopError, match="ema"):
        guard.check()


def test_search_spoils_no_tuple_that_another_thread_is_making(model, optimizer):
    """CPython cannot finish a tuple that somebody else holds: `gc.get_objects` lists such ones."""
    stop, errors = threading.Event(), []

    def make_tuples():
        while not stop.is_set():
            try:
                tuple(number for number in range(300))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=make_tuples)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(10):
            guard_of(model, optimizer)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
