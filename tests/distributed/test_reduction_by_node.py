"""Sums that finish within a node before anything crosses it: their bits, and the bytes that cross.
The members are threads of this process."""

from __future__ import annotations

import pytest
import torch

from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from tests.distributed.members import _dropped_here, finish, named, of_each, run_and_send  # noqa: F401
from tests.distributed.test_reduction_rounds import (
    EVERY,
    Shares,
    Topology,
    shares_of,
    shuffled,
)

NUMEL = 43


def gradient(virtual_worker: int) -> torch.Tensor:
    """Return a gradient whose sum over virtual workers depends on the order."""
    drawn = torch.Generator().manual_seed(virtual_worker)
    sizes = torch.logspace(-10, 10, NUMEL)[torch.randperm(NUMEL, generator=drawn)]
    return torch.randn(NUMEL, generator=drawn) * sizes


def bits(group: ProcessGroup, shares: Shares, topology: Topology, steps: int = 2) -> list[int]:
    """Return the bits of the sum, after steps that use the buffers again."""
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    count = max(last for share in shares for _, last in share)
    gradients = GradientReducer(named([parameter]))
    gradients.open(group, shares, count, True, topology)
    for _ in range(steps):
        run_and_send(
            gradients, shares[group.rank], count, lambda v: (parameter * gradient(v)).sum()
        )
        assert finish(gradients, 0.5)
    assert parameter.grad is not None
    return parameter.grad.view(torch.int32).tolist()


@pytest.mark.parametrize(
    ("world_size", "topology"),
    [
        # The rounds of each are followed in test_reduction_rounds.py.
        pytest.param(*one, marks=pytest.mark.slow if number % 3 else ())
        for number, one in enumerate(EVERY)
    ],
    ids=str,
)
def test_sum_has_the_same_bits_on_any_nodes(world_size: int, topology: Topology) -> None:
    for virtual_workers in (8, 11):
        (alone,) = of_each(1, lambda group, v=virtual_workers: bits(group, [[(0, v)]], ()))
        contiguous = shares_of(world_size, virtual_workers, topology)
        for shares in (contiguous, shuffled(contiguous, 1)):
            of_all = of_each(world_size, lambda group, s=shares: bits(group, s, topology))
            assert of_all == [alone] * world_size
