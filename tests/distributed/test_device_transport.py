"""Gradients between simulated devices, and the only way from a device to the host. The members are
threads of this process."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elastic_dp.device.accelerator import install
from elastic_dp.distributed import abort_limit, device_connection, device_transport, process_group
from elastic_dp.distributed.device_transport import DeviceTransport
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import (
    ProcessGroup,
    connect_devices,
)
from elastic_dp.distributed.record_gather import RecordGather
from elastic_dp.distributed.reduction_tree import fold
from elastic_dp.errors import CollectiveFailed, GroupAborted
from elastic_dp.testing.simulated_device import (
    ReadBeforeEvent,
    SimulatedAccelerator,
    SimulatedDevice,
)
from elastic_dp.train.generations.worker_control import WorkerControl
from tests.distributed.hanging_device import Keys, OfHanging, connection
from tests.distributed.meeting import InMemory, form
from tests.patience import PATIENCE_S, eventually

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _dropped_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups go with their test, and not on a thread that may outlive the interpreter."""
    left: list[object] = []
    monkeypatch.setattr(process_group._abandoned_groups, "add", left.append)
    yield
    install(None)
    left.clear()


def of_each(
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

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, range(world_size)))


def transport_of(group: ProcessGroup) -> DeviceTransport:
    assert group.on_device is not None
    return group.on_device


def switch(group: ProcessGroup) -> None:
    """Switch as all members do when a header says that all are connected."""
    eventually(lambda: transport_of(group).connected)
    group.gather_bytes(b"")
    transport_of(group).switch()


def values_of(virtual_worker: int, step: int) -> torch.Tensor:
    """Gradients whose sum depends on the order: of all sizes, denormal ones included."""
    generator = torch.Generator().manual_seed(97 * step + virtual_worker)
    sizes = torch.logspace(-44, 10, 40)
    return torch.randn(40, generator=generator) * sizes[torch.randperm(40, generator=generator)]


def finish_on_device(gradients: GradientReducer, group: ProcessGroup, factor: float) -> bool | None:
    """Give the parameter its gradient. Return whether it is finite."""
    exchange = gradients.exchange
    exchange.reduce()
    exchange.take(transport_of(group).read(exchange.unread()))
    exchange.finish(factor, [1])
    exchange.assign()
    return exchange.finite


def steps_of(
    group: ProcessGroup,
    shares: Sequence[tuple[int, int]],
    steps: int,
    *,
    switches_at: int,
    topology: Sequence[Sequence[int]] = (),
    wire: str | None = None,
) -> list[list[int]]:
    """The bits of the sum of each step. The device's communicator is used from step `switches_at`
    on."""
    parameter, count, bits = torch.nn.Parameter(torch.zeros(40)), shares[-1][1], []
    gradients = GradientReducer({"weight": parameter}, wire)
    gradients.open(group, [[one] for one in shares], count, True, topology)
    for step in range(steps):
        if step == switches_at and group.world_size > 1:
            switch(group)
        gradients.begin()
        leaves = fold(*shares[group.rank], count)
        for leaf in leaves:
            gradients.before_leaf(leaf, leaf is leaves[-1])
            gradients.before_backward()
            (parameter * values_of(leaf.virtual_worker, step)).sum().backward()
            gradients.after_leaf(leaf, leaf is leaves[-1])
        gradients.send()
        assert finish_on_device(gradients, group, 0.5)
        assert parameter.grad is not None
        bits.append(parameter.grad.view(torch.int32).tolist())
    gradients.close()
    return bits


@pytest.mark.parametrize("shares", [[(0, 2), (2, 4)], [(0, 3), (3, 4)], [(0, 2), (2, 3), (3, 4)]])
def test_sums_have_the_same_bits_over_either_transport_and_alone(shares):
    (alone,) = of_each(1, lambda group: steps_of(group, [(0, 4)], 4, switches_at=9))
    of_all = of_each(len(shares), lambda group: steps_of(group, shares, 4, switches_at=2))
    assert of_all == [alone] * len(shares)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_rounded_sums_have_the_same_bits_over_either_transport_and_alone(wire):
    shares, how = [(0, 2), (2, 3), (3, 4)], {"wire": wire}
    (alone,) = of_each(1, lambda group: steps_of(group, [(0, 4)], 4, switches_at=9, **how))
    assert of_each(3, lambda group: steps_of(group, shares, 4, switches_at=2, **how)) == [alone] * 3
    assert alone != of_each(1, lambda group: steps_of(group, [(0, 4)], 4, switches_at=9))[0]


def test_sums_by_node_have_the_same_bits_over_either_transport_and_alone():
    shares, topology = [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7)], ((2, 1, 2), (3, 2))
    (alone,) = of_each(1, lambda group: steps_of(group, [(0, 7)], 4, switches_at=9))
    how = {"switches_at": 2, "topology": topology}
    assert of_each(5, lambda group: steps_of(group, shares, 4, **how)) == [alone] * 5


def test_gradients_that_are_not_finite_are_seen_by_all_members():
    def finite(group):
        found = []
        for value, factor in [(1e38, 9.0), (torch.nan, 1.0), (1e38, 1.0), (torch.inf, 1.0)]:
            parameter = torch.nn.Parameter(torch.zeros(5))
            gradients = GradientReducer({"weight": parameter})
            gradients.open(group, [[(0, 1)], [(1, 2)]], 2, exact=True)
            gradients.begin()
            (leaf,) = fold(group.rank, group.rank + 1, 2)
            gradients.before_leaf(leaf, True)
            gradients.before_backward()
            (parameter[3] * value * 0.5).backward()
            gradients.after_leaf(leaf, True)
            gradients.send()
            found.append(finish_on_device(gradients, group, factor))
        return found

    assert of_each(2, finite) == [[False, False, True, False]] * 2


def test_an_output_is_not_read_on_the_host_before_its_event():
    def act(group):
        switch(group)
        transport, output = transport_of(group), torch.zeros(2)
        given = torch.full((1,), group.rank + 1.0)
        transport.wait(transport.all_gather(output, given))
        for read in (lambda: output.sum().item(), output.cpu, output.tolist, output.numpy):
            with pytest.raises(ReadBeforeEvent):
                read()
        doubled = output * 2
        return [one.tolist() for one in transport.read([output, doubled])]

    assert of_each(2, act) == [[[1.0, 2.0], [2.0, 4.0]]] * 2


def test_tensors_of_several_types_are_read_at_once():
    """What follows a byte is not aligned where it arrives."""
    tensors = [torch.tensor([7], dtype=torch.uint8), torch.full((2, 1), 1.5), torch.tensor(-9)]
    (read,) = of_each(1, lambda group: transport_of(group).read(tensors))
    for told, tensor in zip(read, tensors, strict=True):
        assert told.dtype == tensor.dtype and torch.equal(told, tensor)


def test_an_aborted_collective_is_not_read():
    """The peer never enters the collective, as if it had died."""
    entered, aborted = threading.Event(), threading.Event()

    def act(group):
        switch(group)
        if group.rank == 1:
            entered.wait(PATIENCE_S)
            group.abort()
            return aborted.set()
        transport, output = transport_of(group), torch.ones(2)
        transport.wait(transport.all_gather(output, torch.ones(1)))
        entered.set()
        aborted.wait(PATIENCE_S)
        threading.Timer(0.0, group.abort).start()
        with pytest.raises(GroupAborted):
            transport.read([output])
        transport.come_to_rest()
        return output.isnan().all().item()

    assert of_each(2, act) == [True, None]


def test_failure_of_the_communicator_is_noticed_while_the_host_waits():
    """The collective never ends, and no member is lost: its connection is."""
    noticed = threading.Event()

    def act(group):
        switch(group)
        if group.rank == 1:
            return noticed.wait(PATIENCE_S)
        transport, output = transport_of(group), torch.ones(2)
        transport.wait(transport.all_gather(output, torch.ones(1)))
        transport._connection.communicator.failure = lambda: "NCCL reports REMOTE_ERROR"
        otherwise = threading.Timer(PATIENCE_S, group.abort)
        otherwise.start()
        with pytest.raises(CollectiveFailed, match="NCCL reports REMOTE_ERROR"):
            transport.read([output])
        otherwise.cancel()
        noticed.set()
        return True

    assert of_each(2, act) == [True, True]


def test_members_agree_to_try_again_and_use_what_stands_on_all_of_them(monkeypatch):
    monkeypatch.setattr(device_connection, "FIRST_PAUSE_S", 0.01)

    def act(group):
        transport, step = transport_of(group), 0
        while not transport.switched:
            eventually(lambda: transport.connected or transport.connecting_failure())
            mine = (transport.connected, transport.connecting_failure())
            of_all = [pickle.loads(told) for told in group.gather_bytes(pickle.dumps(mine))]
            connected = all(stands for stands, _ in of_all)
            why_not = next((why for _, why in of_all if why), None)
            transport.agree(step, connected=connected, why_not=why_not)
            step += 1
        output = torch.zeros(2)
        transport.wait(transport.all_gather(output, torch.ones(1)))
        return step, len(transport.news()), transport.read([output])[0].tolist()

    device = SimulatedDevice(connect_fails=2)
    assert of_each(2, act, device) == [(3, 2, [1.0, 1.0])] * 2


def test_gradients_of_a_generation_that_was_left_keep_no_error_of_its_communicator():
    """A traceback would be the last to hold the communicator, and to destroy one blocks."""

    def act(group):
        switch(group)
        communicator = transport_of(group)._connection.communicator
        communicator.all_to_all = lambda *_: (_ for _ in ()).throw(RuntimeError("NCCL error"))
        gradients = GradientReducer({"weight": (parameter := torch.nn.Parameter(torch.zeros(5)))})
        gradients.open(group, [[(0, 1)], [(1, 2)]], 2, exact=True)
        gradients.begin()
        (leaf,) = fold(group.rank, group.rank + 1, 2)
        gradients.before_leaf(leaf, True)
        gradients.before_backward()
        parameter.sum().backward()
        with pytest.raises(CollectiveFailed) as failed:
            gradients.send()
        error = weakref.ref(failed.value)
        del failed
        gradients.close()
        return error() is None

    assert of_each(2, act) == [True, True]


def test_members_change_to_the_communicator_once():
    """Each header says that all are connected, and a change starts a thread."""

    def act(group):
        transport, watches = transport_of(group), []
        eventually(lambda: transport.connected)
        for step in range(3):
            group.gather_bytes(b"")
            transport.agree(step, connected=True, why_not=None)
            watches.append(group._watch)
        return len(set(watches))

    assert of_each(2, act) == [1, 1]


def test_control_bytes_never_use_the_communicator(monkeypatch):
    def act(group):
        switch(group)
        transport = transport_of(group)
        monkeypatch.setattr(transport, "_launch", lambda *_: pytest.fail("on the device"))
        header = RecordGather(group)
        header.launch(bytes([group.rank]) * 2000)
        return [len(header.collect()), group.gather_bytes(b"x" * group.rank)]

    assert of_each(2, act) == [[2, [b"", b"x"]]] * 2


# ------------------------------------------------------------------------------------- aborting


@pytest.fixture
def hanging():
    """A group whose device is connected, and the communicator, whose abort hangs."""
    install(accelerator := OfHanging(hangs=True))
    group = ProcessGroup(None, 0, 2, CPU)
    group.on_device.connect(connection(accelerator, Keys({"connecting/1": "1"})))
    eventually(lambda: group.on_device.connected)
    yield group, accelerator.made
    accelerator.made.may_end.set()


def test_no_lock_is_held_while_an_abort_hangs(hanging):
    group, communicator = hanging
    control = WorkerControl()
    control._generation, control._inside = 1, True
    control.abort_at_end(group)
    control.abort(1)
    assert communicator.aborting.wait(PATIENCE_S)
    assert communicator.thread is not threading.current_thread()
    assert control._changed.acquire(blocking=False)
    control._changed.release()
    with pytest.raises(GroupAborted):
        group.check()


def test_a_planned_end_does_not_abort_in_the_training_thread(hanging):
    group, communicator = hanging
    group.on_device.come_to_rest()
    assert not communicator.aborting.is_set()  # a peer may still be reading
    group.close()
    assert communicator.aborting.wait(PATIENCE_S)
    assert communicator.thread is not threading.current_thread()


def test_a_worker_whose_abort_does_not_end_exits(hanging, monkeypatch):
    exited = threading.Event()
    monkeypatch.setattr(abort_limit, "ABORT_LIMIT_S", 0.01)
    monkeypatch.setattr(abort_limit.os, "_exit", lambda code: exited.set())
    group, _ = hanging
    group.abort()
    assert exited.wait(PATIENCE_S)


def test_a_worker_whose_abort_ends_goes_on(hanging, monkeypatch):
    monkeypatch.setattr(abort_limit.os, "_exit", lambda code: pytest.fail("exited"))
    group, communicator = hanging
    communicator.may_end.set()
    group.abort()
    assert communicator.aborting.wait(PATIENCE_S)
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "abort-limit"])


def test_device_that_no_abort_frees_ends_the_process(monkeypatch):
    """The abort returns, and the collective spins on."""
    monkeypatch.setattr(device_transport, "REST_LIMIT_S", 0.01)

    class Exited(BaseException):
        pass

    def exits(code):
        raise Exited

    monkeypatch.setattr(abort_limit.os, "_exit", exits)
    exited = threading.Event()

    def act(group):
        switch(group)
        if group.rank == 1:
            return exited.wait(PATIENCE_S)
        transport, output = transport_of(group), torch.ones(2)
        communicator = transport._connection.communicator
        transport.wait(transport.all_gather(output, torch.ones(1)))
        try:
            with pytest.raises(Exited):
                transport.come_to_rest()
        finally:
            exited.set()
            communicator._aborted.set()
        return True

    assert of_each(2, act, SimulatedDevice(abort_frees=False)) == [True, True]


# --------------------------------------------------------------------------------------- memory


def test_operations_do_not_pile_up_over_a_thousand_steps():
    def act(group):
        switch(group)
        transport, most = transport_of(group), 0
        output, given = torch.zeros(2), torch.ones(1)
        for _ in range(1000):
            transport.wait(transport.all_gather(output, given))
            transport.read([output])
            most = max(most, len(transport._unconfirmed), len(transport._staged))
        return most

    assert of_each(2, act) == [0, 0]


def test_gradient_memory_is_the_same_after_fifty_generations(monkeypatch):
    """Also of generations that end while a collective waits for a peer that is gone."""
    parameter = {rank: torch.nn.Parameter(torch.zeros(100)) for rank in range(2)}
    reducers = {rank: GradientReducer({"weight": p}) for rank, p in parameter.items()}
    addresses = {rank: set() for rank in range(2)}

    def act(group):
        gradients = reducers[group.rank]
        gradients.open(group, [[(0, 1)], [(1, 2)]], 2, exact=True)
        switch(group)
        gradients.begin()
        (leaf,) = fold(group.rank, group.rank + 1, 2)
        gradients.before_leaf(leaf, True)
        gradients.before_backward()
        if group.rank == 0:  # the peer does not take part
            parameter[0].sum().backward()
            gradients.after_leaf(leaf, True)
            gradients.send()
        addresses[group.rank] |= {
            m.data_ptr() for e in gradients.exchange._buckets for m in e._memory
        }
        group.abort()
        gradients.drop()
        gradients.close()

    of_each(2, act, generations=50)
    assert [len(of_rank) for of_rank in addresses.values()] == [2, 2]


def test_staging_memory_is_used_again():
    def act(group):
        transport = transport_of(group)
        addresses = set()
        for _ in range(50):
            output, given = torch.zeros(600), torch.ones(300)
            operation = transport.all_gather(output, given)
            addresses |= {memory.data_ptr() for memory in operation.sources}
            transport.wait(operation)
            transport.read([output])
        return len(addresses)

    assert sum(of_each(2, act)) <= 20  # of 100; a few, where a peer is late
