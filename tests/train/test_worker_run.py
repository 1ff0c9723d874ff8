"""What a train function finds when it is called."""

import dataclasses
import types

import pytest
import torch

from elastic_dp.errors import LoopError
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.train.worker_run import call_train_function
from tests.runs import spec_of


@pytest.mark.parametrize("seed", [0, 7])
def test_initial_weights_made_on_a_device_follow_the_seed(seed, monkeypatch):
    """Its generator is not there before the device is in use, and is seeded nevertheless."""
    opened, seeds = [], []
    monkeypatch.setattr(torch.cuda, "init", lambda: opened.append(True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(opened))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    spec = spec_of()
    spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=seed))
    session = types.SimpleNamespace(
        spec=spec,
        device=torch.device("cuda", 0),
        loop=types.SimpleNamespace(failure=None, opened=False),
    )
    found = []
    with pytest.raises(LoopError):
        call_train_function(lambda ctx: found.extend(seeds), session)
    assert found == [seed_for(seed, 0, 0) % (1 << 63)]


def test_a_train_function_on_the_cpu_opens_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("opened"))
    session = types.SimpleNamespace(
        spec=spec_of(),
        device=torch.device("cpu"),
        loop=types.SimpleNamespace(failure=None, opened=False),
    )
    with pytest.raises(LoopError):
        call_train_function(lambda ctx: None, session)
