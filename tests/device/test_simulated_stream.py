"""What a thread launches while the simulated device is busy has the effect that it has at once."""

import threading

import pytest
import torch
from torch.nn import functional as F

from tests.kit.simulated_device import ReadBeforeEvent, SimulatedAccelerator
from tests.patience import eventually


def while_busy(act):
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


@pytest.mark.parametrize(
    "draw", [torch.bernoulli, lambda x: F.rrelu(x, training=True)], ids=["bernoulli", "rrelu"]
)
def test_draw_that_depends_on_values_of_a_busy_device_is_refused_by_name(draw):
    with pytest.raises(NotImplementedError, match=r"cannot draw aten::(bernoulli|rrelu)"):
        while_busy(lambda: draw(torch.full((4,), 0.5)))


def test_read_of_a_busy_device_is_refused():
    with pytest.raises(ReadBeforeEvent):
        while_busy(lambda: torch.ones(2).sum().item())
