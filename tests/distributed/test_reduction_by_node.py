"""Sums that finish within a node before anything crosses it: their bits, and the bytes that cross.
The members are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def sent_across(nodes: Sequence[int], topology: Topology) -> int:
    """Bytes that leave any node in a step, where all know of `topology`."""
    world_size = sum(nodes)
    node_of = [number for number, size in enumerate(nodes) for _ in range(size)]
    shares = shares_of(world_size, world_size, topology)

    def counted(group: ProcessGroup) -> int:
        found = 0
        all_to_all, all_gather = group.all_to_all, group.all_gather

        def counts_all_to_all(output: Any, given: Any, got: Any, sizes: Sequence[int]) -> Any:
            nonlocal found
            away = [n for r, n in enumerate(sizes) if node_of[r] != node_of[group.rank]]
            found += sum(away) * given.element_size()
            return all_to_all(output, given, got, sizes)

        def counts_all_gather(output: Any, given: Any) -> Any:
            """Gloo's and NCCL's is a ring: each sends all parts but one to the next rank."""
            nonlocal found
            if node_of[(group.rank + 1) % world_size] != node_of[group.rank]:
                found += given.numel() * given.element_size() * (world_size - 1)
            return all_gather(output, given)

        group.all_to_all, group.all_gather = counts_all_to_all, counts_all_gather
        bits(group, shares, topology, steps=1)
        return found

    return sum(of_each(world_size, counted))


@pytest.mark.parametrize("nodes", [(2, 2), (4, 4)], ids=str)
def test_bytes_between_nodes_fall_by_the_number_of_workers_of_a_node(nodes: Sequence[int]) -> None:
    """All but those of the all-gather, which cross once in either case."""
    members, world_size = nodes[0], sum(nodes)
    gathered = len(nodes) * -(-NUMEL // world_size) * 4 * (world_size - 1)
    before, after = sent_across(nodes, ()), sent_across(nodes, (tuple(nodes),))
    assert before - gathered == members * (after - gathered)
    assert after - gathered == world_size * -(-NUMEL // world_size) * 4
