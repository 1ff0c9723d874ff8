"""Gradients between simulated devices, and the only way from a device to the host. The members are
threads of this process."""

import pickle
import threading
import weakref

import pytest
import torch

from elastic_dp.device.accelerator import install
from elastic_dp.distributed import device_connection, device_transport
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup, RecordGather
from elastic_dp.errors import CollectiveFailed, GroupAborted
from elastic_dp.train.generations.worker_control import WorkerControl
from tests.distributed.hanging_device import Keys, OfHanging, connection
from tests.distributed.meeting import CPU
from tests.distributed.members import _dropped_here, run_and_send, transport_of  # noqa: F401
from tests.distributed.members import of_each_on_devices as of_each
from tests.kit.simulated_device import ReadBeforeEvent, SimulatedDevice
from tests.patience import PATIENCE_S, eventually


def switch(group):
    """Switch as all members do when a header says that all are connected."""
    eventually(lambda: transport_of(group).connected)
    group.gather_bytes(b"")
    transport_of(group).switch()


def values_of(virtual_worker, step):
    """Gradients whose sum depends on the order: of all sizes, denormal ones included."""
    generator = torch.Generator().manual_seed(97 * step + virtual_worker)
    sizes = torch.logspace(-44, 10, 40)
    return torch.randn(40, generator=generator) * sizes[torch.randperm(40, generator=generator)]


def finish_on_device(gradients, group, factor):
    """Give the parameter its gradient. Return whether it is finite."""
    exchange = gradients.exchange
    exchange.reduce()
    exchange.take(transport_of(group).read(exchange.unread()))
    exchange.finish(factor, [1])
    exchange.assign()
    return exchange.finite


def steps_of(group, shares, steps, *, switches_at, topology=(), wire=None):
    """The bits of the sum of each step. The device's communicator is used from step `switches_at`
    on."""
    parameter, count, bits = torch.nn.Parameter(torch.zeros(40)), shares[-1][1], []
    gradients = GradientReducer({"weight": parameter}, wire)
    gradients.open(group, [[one] for one in shares], count, True, topology)
    for step in range(steps):
        if step == switches_at and group.world_size > 1:
            switch(group)

        def loss(v, step=step):
            return (parameter * values_of(v, step)).sum()

        run_and_send(gradients, [shares[group.rank]], count, loss)
        assert finish_on_device(gradients, group, 0.5)
        assert parameter.grad is not None
        bits.append(parameter.grad.view(torch.int32).tolist())
    gradients.close()
    return bits


@pytest.mark.parametrize(
    ("shares", "how"),
    [
        ([(0, 2), (2, 4)], {}),
        ([(0, 3), (3, 4)], {}),
        ([(0, 2), (2, 3), (3, 4)], {}),
        ([(0, 2), (2, 3), (3, 4)], {"wire": "bf16"}),
        ([(0, 2), (2, 3), (3, 4)], {"wire": "int8"}),
        ([(0, 1), (1, 3), (3, 4), (4, 6), (6, 7)], {"topology": ((2, 1, 2), (3, 2))}),
    ],
    ids=str,
)
def test_sums_have_the_same_bits_over_either_transport_and_alone(shares, how):
    everything = [(0, shares[-1][1])]
    alone_how = {key: value for key, value in how.items() if key == "wire"}
    (alone,) = of_each(1, lambda group: steps_of(group, everything, 4, switches_at=9, **alone_how))
    of_all = of_each(len(shares), lambda group: steps_of(group, shares, 4, switches_at=2, **how))
    assert of_all == [alone] * len(shares)


def test_gradients_that_are_not_finite_are_seen_by_all_members():
    def finite(group):
        found = []
        for value, factor in [(1e38, 9.0), (torch.nan, 1.0), (1e38, 1.0), (torch.inf, 1.0)]:
            parameter = torch.nn.Parameter(torch.zeros(5))
            gradients = GradientReducer({"weight": parameter})
            gradients.open(group, [[(0, 1)], [(1, 2)]], 2, exact=True)
            share, given = [(group.rank, group.rank + 1)], value * 0.5
            run_and_send(gradients, share, 2, lambda v, p=parameter, x=given: p[3] * x)
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
        with pytest.raises(CollectiveFailed) as failed:
            run_and_send(gradients, [(group.rank, group.rank + 1)], 2, lambda v: parameter.sum())
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


@pytest.fixture
def hanging():
    """A group whose device is connected, and the communicator, whose abort hangs."""
    install(accelerator := OfHanging(hangs=True))
    group = ProcessGroup(None, 0, 2, CPU)
    group.on_device.connect(lambda n: connection(accelerator, Keys({"connecting/1": "1"})))
    eventually(lambda: group.on_device.connected)
    yield group, accelerator.made
    accelerator.made.may_end.set()


def test_no_lock_is_held_while_an_abort_hangs(hanging):
    group, communicator = hanging
    control = WorkerControl()
    control._generation, control._inside = 1, True
    control.at_end(group.abort)
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
    monkeypatch.setattr(device_connection, "ABORT_LIMIT_S", 0.01)
    monkeypatch.setattr(device_connection.os, "_exit", lambda code: exited.set())
    group, _ = hanging
    group.abort()
    assert exited.wait(PATIENCE_S)


def test_a_worker_whose_abort_ends_goes_on(hanging, monkeypatch):
    monkeypatch.setattr(device_connection.os, "_exit", lambda code: pytest.fail("exited"))
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

    monkeypatch.setattr(device_connection.os, "_exit", exits)
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
