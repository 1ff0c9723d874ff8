"""What a thread launches while the simulated device is busy has the effect that it has at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_dp.testing.simulated_device import ReadBeforeEvent, SimulatedAccelerator
from tests.patience import PATIENCE_S, eventually


def while_busy(act: Callable[[], Any]) -> Any:
    """What `act` returns on a device that begins its operations when all are launched, and when the
    host has set another seed."""
    accelerator, free = SimulatedAccelerator(), threading.Event()
    accelerator.stream.put(free.wait)
    accelerator.stream.defer()
    try:
        found = act()
        torch.manual_seed(99)
    finally:
        free.set()
        eventually(accelerator.record().query)
    return found


def forward_and_backward(model: nn.Module, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Seeded before each of three passes, as a worker does before each virtual worker."""
    for seed in range(3):
        torch.manual_seed(seed)
        (model(rows + seed) ** 2).mean().backward()
    yield from (p.grad for p in model.parameters())
    yield from model.buffers()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)),
    "alpha dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.AlphaDropout(0.3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    ),
    "attention with dropout": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2),
}


@pytest.mark.parametrize("name", [*MODELS])
def test_model_on_a_busy_device_has_the_gradients_and_buffers_of_the_processor(name: str) -> None:
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for run in (lambda act: act(), while_busy):
        torch.manual_seed(0)
        model = MODELS[name]()
        found.append(run(lambda model=model: [*forward_and_backward(model, rows)]))
    assert len(found[0]) > 0
    for expected, one in zip(*found, strict=True):
        assert torch.equal(expected, one), name


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal_ of a part": lambda x: x[:, ::2].normal_(0.5, 2.0),
    "uniform_": lambda x: x.uniform_(),
    "random_": lambda x: x.random_(0, 9),
    "exponential_": lambda x: x.exponential_(),
    "rand_like": lambda x: x + torch.rand_like(x),
    "rand": lambda x: x * torch.rand(4, 40),
}


@pytest.mark.parametrize("name", [*DRAWS])
def test_random_numbers_of_a_busy_device_are_those_of_the_launch(name: str) -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.zeros(4, 40)
        return [x.add_(1), DRAWS[name](x), x, torch.randn(3)]

    for expected, found in zip(draw(), while_busy(draw), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    "draw", [torch.bernoulli, lambda x: F.rrelu(x, training=True)], ids=["bernoulli", "rrelu"]
)
def test_draw_that_depends_on_values_of_a_busy_device_is_refused_by_name(draw) -> None:
    with pytest.raises(NotImplementedError, match=r"cannot draw aten::(bernoulli|rrelu)"):
        while_busy(lambda: draw(torch.full((4,), 0.5)))


def test_read_of_a_busy_device_is_refused() -> None:
    with pytest.raises(ReadBeforeEvent):
        while_busy(lambda: torch.ones(2).sum().item())


def test_stream_is_done_with_all_before_an_event_when_that_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its thread gets no processor just then."""
    accelerator, go_on = SimulatedAccelerator(), threading.Event()

    class Slow(threading.Event):
        def set(self) -> None:
            super().set()
            go_on.wait(PATIENCE_S)

    accelerator.stream.defer()
    ones = torch.ones(3) + 0
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", Slow)
        event = accelerator.record()
    try:
        eventually(event.query)
        assert ones.cpu().tolist() == [1, 1, 1]
    finally:
        go_on.set()
