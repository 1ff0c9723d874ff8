"""Groups whose members are threads of this process, and steps in which they add up gradients."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elastic_dp.device.accelerator import install
from elastic_dp.distributed import process_group
from elastic_dp.distributed.device_transport import DeviceTransport
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup, connect_devices
from elastic_dp.distributed.reduction_tree import Share, TreeLeaf, fold
from elastic_dp.testing.simulated_device import SimulatedAccelerator, SimulatedDevice
from tests.distributed.meeting import CPU, InMemory, form
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _dropped_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups go with their test, and not on a thread that may outlive the interpreter."""
    left: list[object] = []
    monkeypatch.setattr(process_group._abandoned_groups, "add", left.append)
    yield
    left.clear()


def of_each(world_size: int, act: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What `act` returns for each rank of a group."""
    meet = InMemory()

    def member(rank: int) -> Any:
        group = form(meet, rank, world_size)
        try:
            return act(group)
        finally:
            group.close()

    return told_by_each(world_size, member)


def told_by_each(world_size: int, member: Callable[[int], Any]) -> list[Any]:
    """What `member` returns for each rank, on threads. An error says what the others raised."""
    with ThreadPoolExecutor(world_size) as pool:
        members = [pool.submit(member, rank) for rank in range(world_size)]
    errors = [error for one in members if (error := one.exception()) is not None]
    if errors:
        for other in errors[1:]:
            errors[0].add_note("".join(traceback.format_exception(other)))
        raise errors[0]
    return [one.result() for one in members]


def of_each_on_devices(
    world_size: int,
    act: Callable[[ProcessGroup], Any],
    device: SimulatedDevice | None = None,
    generations: int = 1,
    place: torch.device | None = None,
) -> list[Any]:
    """What `act` returns in the last generation, for each rank. `place`: the device; None: the
    simulated one."""
    if place is None:
        install(SimulatedAccelerator(device))
    meet = InMemory()

    def member(rank: int) -> Any:
        for number in range(generations):
            group = form(meet, rank, world_size, generation=number, device=place or CPU)
            connect_devices(group, meet, number, PATIENCE_S)
            try:
                told = act(group)
            finally:
                transport_of(group).come_to_rest()
                group.close()
        return told

    return told_by_each(world_size, member)


def transport_of(group: ProcessGroup) -> DeviceTransport:
    assert group.on_device is not None
    return group.on_device


def named(parameters: Sequence[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    return {str(number): parameter for number, parameter in enumerate(parameters)}


def leaves_of(share: Share, count: int) -> list[TreeLeaf]:
    return [leaf for one in share for leaf in fold(*one, count)]


def run_and_send(
    gradients: GradientReducer,
    share: Share,
    count: int,
    loss: Callable[[int], torch.Tensor],
    seed: int = 0,
) -> None:
    """Run a share of `count` virtual workers, each with a loss of its own, and launch their sum."""
    gradients.begin(seed)
    leaves = leaves_of(share, count)
    for leaf in leaves:
        gradients.before_leaf(leaf, leaf is leaves[-1])
        gradients.before_backward()
        loss(leaf.virtual_worker).backward()
        gradients.after_leaf(leaf, leaf is leaves[-1])
    gradients.send()


def finish(gradients: GradientReducer, factor: float) -> bool | None:
    """Give all parameters their gradients. Return whether these are finite."""
    exchange = gradients.exchange
    exchange.reduce()
    exchange.finish(factor, [1] * len(gradients.parameters))
    exchange.assign()
    return exchange.finite
