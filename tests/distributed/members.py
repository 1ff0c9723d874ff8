"""Groups whose members are threads of this process, and steps in which they add up gradients."""

import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_dp.device.accelerator import install
from elastic_dp.distributed import abandoned_groups
from elastic_dp.distributed.process_group import connect_devices
from elastic_dp.distributed.reduction_tree import fold
from tests.distributed.meeting import CPU, InMemory, form
from tests.kit.simulated_device import SimulatedAccelerator
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _dropped_here(monkeypatch):
    """Groups go with their test, and not on a thread that may outlive the interpreter."""
    left = []
    monkeypatch.setattr(abandoned_groups, "abandon", left.append)
    yield
    left.clear()


def of_each(world_size, act):
    """What `act` returns for each rank of a group."""
    meet = InMemory()

    def member(rank):
        group = form(meet, rank, world_size)
        try:
            return act(group)
        finally:
            group.close()

    return told_by_each(world_size, member)


def told_by_each(world_size, member):
    """What `member` returns for each rank, on threads. An error says what the others raised."""
    with ThreadPoolExecutor(world_size) as pool:
        members = [pool.submit(member, rank) for rank in range(world_size)]
    errors = [error for one in members if (error := one.exception()) is not None]
    if errors:
        for other in errors[1:]:
            errors[0].add_note("".join(traceback.format_exception(other)))
        raise errors[0]
    return [one.result() for one in members]


def of_each_on_devices(world_size, act, device=None, generations=1, place=None):
    """What `act` returns in the last generation, for each rank. `place`: the device; None: the
    simulated one."""
    if place is None:
        install(SimulatedAccelerator(device))
    meet = InMemory()

    def member(rank):
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


def transport_of(group):
    assert group.on_device is not None
    return group.on_device


def named(parameters):
    return {str(number): parameter for number, parameter in enumerate(parameters)}


def leaves_of(share, count):
    return [leaf for one in share for leaf in fold(*one, count)]


def run_and_send(gradients, share, count, loss, seed=0):
    """Run a share of `count` virtual workers, each with a loss of its own, and launch their sum."""
    gradients.begin(seed)
    leaves = leaves_of(share, count)
    for leaf in leaves:
        gradients.before_leaf(leaf, leaf is leaves[-1])
        gradients.before_backward()
        loss(leaf.virtual_worker).backward()
        gradients.after_leaf(leaf, leaf is leaves[-1])
    gradients.send()


def finish(gradients, factor):
    """Give all parameters their gradients. Return whether these are finite."""
    exchange = gradients.exchange
    exchange.reduce()
    exchange.finish(factor, [1] * len(gradients.parameters))
    exchange.assign()
    return exchange.finite
