"""What a generation on a device leaves behind for the next ones: nothing."""

import gc
import threading
import time
import types

import torch

from elastic_dp.device.accelerator import install
from elastic_dp.distributed import abandoned_groups, device_transport
from elastic_dp.distributed.device_connection import DeviceConnection
from elastic_dp.distributed.device_transport import DeviceTransport, StagingMemory
from elastic_dp.distributed.process_group import ProcessGroup
from tests.distributed.meeting import CPU
from tests.distributed.members import of_each_on_devices as of_each
from tests.distributed.members import transport_of
from tests.distributed.test_device_transport import steps_of, switch
from tests.kit.simulated_device import SimulatedAccelerator, SimulatedCommunicator
from tests.patience import PATIENCE_S, eventually

SHARES = [(0, 2), (2, 4)]
KINDS = ProcessGroup, DeviceTransport, DeviceConnection, SimulatedCommunicator
# One for each thread that launches, and one for each store of this test.
LASTING = {"device", "rendezvous"}


def alive():
    """What exists of KINDS, and which threads run that do not last."""
    gc.collect()
    # Not gc.get_objects: it also lists tuples that other threads are making, and spoils them.
    found = {one for one in gc.get_referrers(*KINDS) if type(one) in KINDS}
    return found | {thread for thread in threading.enumerate() if thread.name not in LASTING}


class CountedMemory(StagingMemory):
    """Counts the bytes that are taken."""

    def __init__(self):
        super().__init__()
        self.taken_bytes = 0

    def take(self, accelerator, like):
        memory = super().take(accelerator, like)
        with self._lock:
            self.taken_bytes += memory.untyped_storage().nbytes()
        return memory

    @property
    def free_bytes(self):
        return sum(memory.nbytes for memory in self._free)


def test_generations_leave_no_group_communicator_thread_and_memory(monkeypatch):
    """Every second one ends while a collective waits for a peer that never enters it. What is
    staged in the memory of the host is at most what both members take in one generation, however
    late a peer is."""
    monkeypatch.setattr(abandoned_groups, "REST_S", 0.0)
    monkeypatch.setattr(device_transport, "_staging_memory", staging := CountedMemory())
    numbers, pending, generations = {0: 0, 1: 0}, [], 24

    def act(group):
        numbers[group.rank] += 1
        steps_of(group, SHARES, 3, switches_at=1)
        pending.append(len(group._pending))
        if numbers[group.rank] % 2 == 0:
            if group.rank == 0:
                transport = transport_of(group)
                transport.wait(transport.all_gather(torch.zeros(2), torch.ones(1)))
            group.abort()

    others = alive()
    of_each(2, act, generations=generations)
    install(None)
    eventually(lambda: alive() <= others, lambda: alive() - others)
    assert 0 < staging.free_bytes <= staging.taken_bytes / generations
    assert max(pending) == 0


def test_device_has_nothing_of_a_generation_to_do_when_it_is_left():
    """The collective that it waits in ends by an abort; what was launched behind that is done."""
    left, looked = threading.Event(), threading.Event()

    def looked_at(event):
        query = event.query
        event.query = lambda: (looked.set(), query())[1]
        return event

    def act(group):
        switch(group)
        if group.rank == 1:
            return left.wait(PATIENCE_S)
        transport, done = transport_of(group), threading.Event()
        transport.wait(transport.all_gather(torch.zeros(2), torch.ones(1)))
        # ends when somebody has looked whether it has ended
        transport.accelerator.stream.put(lambda: (looked.wait(PATIENCE_S), done.set()))
        record = transport.accelerator.record
        transport.accelerator.record = lambda: looked_at(record())
        otherwise = threading.Timer(PATIENCE_S, group.abort)  # where nothing else ends it
        otherwise.start()
        begun_at = time.monotonic()
        transport.come_to_rest()
        otherwise.cancel()
        ended = done.is_set()
        left.set()
        looked.set()
        return ended and time.monotonic() < begun_at + PATIENCE_S

    try:
        assert of_each(2, act) == [True, True]
    finally:
        install(None)


def test_staging_memory_serves_groups_of_other_sizes():
    """Each has its own number of elements, and registered memory is not given back."""
    staging, made = StagingMemory(), []
    accelerator = types.SimpleNamespace(
        host_memory=lambda nbytes: made.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8)
    )
    for members in (8, 7, 6, 5, 4, 8):
        numel = members * -(-100_001 // members)
        taken = [staging.take(accelerator, torch.empty(numel)) for _ in range(2)]
        assert all(one.numel() == numel and one.dtype == torch.float32 for one in taken)
        assert taken[0].data_ptr() != taken[1].data_ptr()
        staging.give_back([*taken, taken[0]])
    assert len(made) == 2
    staging.take(accelerator, torch.empty(1000))  # for so little it is too much
    assert len(made) == 3


def test_staging_memory_of_an_operation_in_flight_is_not_used_again():
    """A peer that was late may still send, or be sent to."""
    install(SimulatedAccelerator())
    try:
        transport = transport_of(ProcessGroup(None, 0, 2, CPU))
        tensor, addresses = torch.ones(12345), []
        for completed in (False, True, True):
            operation = transport.all_reduce(tensor)
            addresses.append(operation.sources[0].data_ptr())
            operation.sent = types.SimpleNamespace(is_over=completed)
            transport._unsent.clear()
            kept = operation.sources
            transport.synchronize()
        assert addresses[0] != addresses[1] == addresses[2], kept
    finally:
        install(None)
