"""The process group of one generation: formed under its own prefix, abortable at any time.

Three invariants hold:

- Every operation is launched asynchronously and waited for on an event that either its completion
  or `abort()` sets. A control thread can therefore free the training thread from a collective whose
  peer is gone, frozen, or late. Gloo's own `abort()` is empty, its destructor blocks until its last
  operation ends, and a send that is in transit is not told that its connection was closed.
- An abandoned operation may still write to its buffers: group, operations and buffers are handed
  together to a background thread, which closes the connections and then drops them.
- Forming happens on a thread that can be abandoned, too, since an absent peer blocks the
  constructor.

The group itself is always Gloo's, among the hosts: what the members agree on never waits for a
device. Gradients travel by `transport`, which for tensors on a device is a `DeviceTransport`.

A process without the run's secret cannot join: addresses travel over the links to the controller,
and each two members prove to each other that they hold the secret before the group is used.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed import abandoned_groups
from elastic_dp.distributed.device_connection import (
    CONNECTING_LIMIT_S,
    DeviceConnection,
    pause_before,
)
from elastic_dp.distributed.device_transport import DeviceTransport
from elastic_dp.distributed.link_times import Connections, connections
from elastic_dp.distributed.rendezvous import GroupName, Rendezvous, RendezvousStore
from elastic_dp.errors import CollectiveFailed, FormingFailed, GroupAborted, MembersMissing
from elastic_dp.threads import background

# An operation may wait for a peer that is in a long loop body, so only aborts end it.
OPERATION_TIMEOUT = timedelta(hours=24)
# For members that are all there to connect, at the first attempt. A stranger that has taken a
# connection costs this time.
_CONNECTING_LIMIT, _CONNECTING_LIMIT_OF_A_RANK = timedelta(seconds=5), timedelta(milliseconds=20)
# What is gathered in one all-to-all: of all ranks, and of each rank where members share no link.
_AT_ONCE_BYTES, _AT_ONCE_BYTES_ALONE = 64 << 10, 128 << 10
_PROOF_BYTES = 32
_GATHER_TAG, _WATCH_TAG = 0, 1
_FOR_EVER = timedelta(days=3650)  # else Gloo takes the time that it had to form
_RING_BYTES = 4 << 20  # of all ranks, in one all-gather of Gloo, which makes room for them
_LENGTH_BYTES, _FIRST_CAPACITY = 4, 512  # of a record that is gathered


class Operation:
    """An exchange in flight, and the tensors that it may still access."""

    __slots__ = ("_ending", "_works", "between_pairs", "buffers", "done", "failure")

    def __init__(self, *buffers: torch.Tensor, between_pairs: bool = False) -> None:
        """`between_pairs`: it consists of sends and receives, and of no collective."""
        self.done = threading.Event()  # set only if a thread waits, or by an abort
        self.failure: Exception | None = None  # the first one
        self.buffers = buffers
        self.between_pairs = between_pairs
        self._works: list[Any] = []  # those that may not have ended
        self._ending = threading.Lock()

    def start(self, launch: Callable[[], Any]) -> None:
        """Adds a part, unless launching it fails."""
        try:
            self._works.append(launch())
        except RuntimeError as error:
            self._fail(error)

    @property
    def is_over(self) -> bool:
        """Whether it can no longer access its buffers; also where it failed. A send or a receive is
        not over before a thread has waited for it."""
        return all(work.is_completed() for work in [*self._works])

    def may_access(self, memory: torch.Tensor) -> bool:
        """Whether the operation is in flight and has a buffer in this memory."""
        address = memory.untyped_storage().data_ptr()
        buffers = (buffer.untyped_storage().data_ptr() for buffer in self.buffers)
        return address in buffers and not self.is_over

    def set_done_at_end(self) -> None:
        """A failure of a part is the end, too."""
        if len(self._works) == 1 and not self.between_pairs:
            # Asked for only now: a callback takes the interpreter's lock from a thread that
            # computes.
            self._works[0].get_future().add_done_callback(lambda _: self.done.set())
        else:  # a send or a receive has no such callback
            background("gather", self.end).start()

    def end(self) -> None:
        """Waits until it is over. One thread at a time does: a send or a receive can be waited for
        once."""
        with self._ending:
            while self._works:
                try:
                    self._works[0].wait(_FOR_EVER)
                except Exception as error:
                    self._fail(error)
                    self.done.set()
                del self._works[:1]
        self.done.set()

    def connections_are_closed(self) -> None:
        """Returns when the operation cannot access its buffers any more. Gloo forgets a send that
        it was transmitting when a connection was closed, so nobody must wait for that."""
        if self.between_pairs:
            self._works = []
        else:
            self.end()

    def check(self) -> None:
        if self.failure is not None:
            raise CollectiveFailed(str(self.failure).splitlines()[0]) from self.failure

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error.with_traceback(None)  # whose frames keep memory


class ProcessGroup:
    """Collectives among the members of one generation, for tensors of the host."""

    def __init__(
        self, backend: Any, rank: int, world_size: int, device: torch.device, store: Any = None
    ) -> None:
        """`store` is kept alive for the backend, since torch holds only its C++ part."""
        self.links: Connections = {}  # of the backend
        self.rank, self.world_size = rank, world_size
        self._backend, self._store = backend, store
        self._aborted = False
        self._pending: set[Operation] = set()
        self._watch: DevicePeerWatch | None = None
        self._shares_links = False  # see `place`
        accelerator = accelerator_of(device)
        # None: the gradients are on the host, too.
        self.on_device = DeviceTransport(self, accelerator) if accelerator.asynchronous else None

    @property
    def transport(self) -> ProcessGroup | DeviceTransport:
        """What gradients travel by."""
        return self if self.on_device is None else self.on_device

    @property
    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        """Frees every thread that waits in this group. Later calls raise GroupAborted. Any thread
        may call it. Returns at once."""
        self._aborted = True
        for operation in list(self._pending):
            operation.done.set()
        if self.on_device is not None:
            self.on_device.abort()

    def check(self) -> None:
        if self._aborted:
            raise GroupAborted("the generation was ended")

    def place(self, topology: Sequence[Sequence[int]]) -> None:
        """Says where the members are; `topology`: of the membership. All call it alike, or none.
        Members share a link where one of several nodes, or zones, has several; see `all_gather`."""
        self._shares_links = any(len(level) > 1 and max(level) > 1 for level in topology)

    def watch_peer(self) -> None:
        """From now on `lost_peer` says that the next rank has ended. For a host that will wait for
        something else than operations of this group. All members do, or none."""
        self._watch = DevicePeerWatch(self._backend, self.rank, self.world_size)

    @property
    def lost_peer(self) -> str | None:
        failure = None if self._watch is None else self._watch.receiving.failure
        return None if failure is None else str(failure).splitlines()[0]

    # ------------------------------------------------------------------------------- collectives

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Sums `tensor` over all ranks in place, with the backend's own algorithm."""
        options = c10d.AllreduceOptions()
        start = partial(self._backend.allreduce, [tensor], options)
        return self._launch(Operation(tensor), start)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> Operation:
        """Sends part r of the flat `input` to rank r, and receives part r of `output` from it."""
        sizes, options = (list(output_sizes), list(input_sizes)), c10d.AllToAllOptions()
        start = partial(self._backend.alltoall_base, output, input, *sizes, options)
        return self._launch(Operation(output, input), start)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Operation:
        """Gathers the flat `input` of all ranks in `output`, one after another. Each rank sends it
        to each other one; little is copied for all of them, to be sent by one all-to-all. Gloo's
        own all-gather is a ring: a hop for each other rank, and twice the processor time. But what
        several members gather leaves their node once."""
        rank, world_size = self.rank, self.world_size
        shared = _AT_ONCE_BYTES // world_size
        if input.nbytes <= (shared if self._shares_links else _AT_ONCE_BYTES_ALONE):
            copies, options = input.repeat(world_size), c10d.AllToAllOptions()
            start = partial(self._backend.alltoall_base, output, copies, [], [], options)
            return self._launch(Operation(output, copies), start)
        rows = output.view(world_size, -1)
        if self._shares_links:
            width = max(1, _RING_BYTES // (world_size * rows.element_size()))
            parts = zip(rows.split(width, dim=1), input.split(width), strict=True)
            pairs = (([[*columns]], [part]) for columns, part in parts)
            gather, around = self._backend.allgather, c10d.AllgatherOptions()
            starts = (partial(gather, *ends, around) for ends in pairs)
            return self._launch(Operation(output, input), *starts)
        if rows[rank].data_ptr() != input.data_ptr():
            rows[rank].copy_(input)
        after = [*range(rank + 1, world_size), *range(rank)]
        receive, send = self._backend.recv, self._backend.send
        return self._launch(
            Operation(output, input, between_pairs=True),
            *(partial(receive, [rows[other]], other, _GATHER_TAG) for other in reversed(after)),
            *(partial(send, [input], other, _GATHER_TAG) for other in after),
        )

    def wait(self, operation: Operation) -> None:
        """Waits until the operation is done. Raises GroupAborted or CollectiveFailed."""
        if not operation.is_over:
            operation.set_done_at_end()
            operation.done.wait()
        self.check()
        if operation.failure is None:
            operation.end()  # returns at once
        if operation.is_over:
            self._pending.discard(operation)
        operation.check()

    def is_over(self, operation: Operation) -> bool:
        """Returns whether the operation can no longer access its buffers. That includes failed
        operations."""
        return operation.is_over

    @property
    def in_flight(self) -> set[Operation]:
        """The operations that may still access their buffers."""
        return {one for one in self._pending if not one.is_over}

    def synchronize(self) -> None:
        """Waits until the device has finished everything launched. Raises GroupAborted."""
        if self.on_device is None:
            self.check()
        else:
            self.on_device.synchronize()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Returns the payload of every rank, of any length, in rank order. Waits for all ranks."""
        records = RecordGather(self)
        records.launch(payload)
        return records.collect()

    def gather_equal(self, payload: bytes) -> list[bytes]:
        """Does what `gather_bytes` does, for payloads of one length, which takes one exchange."""
        if self.world_size == 1 or not payload:
            return [payload] * self.world_size
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = torch.empty(self.world_size * len(mine), dtype=torch.uint8)
        self.wait(self.all_gather(everyone, mine))
        return [row.numpy().tobytes() for row in everyone.view(self.world_size, -1)]

    def _launch(self, operation: Operation, *parts: Callable[[], Any]) -> Operation:
        self._pending.add(operation)
        self.check()
        for part in parts:
            operation.start(part)
        operation.check()
        return operation

    def close(self) -> None:
        """Leaves the group. Returns at once; what is still in flight is dropped when it ends."""
        self.abort()
        goodbye = None if self._watch is None else self._watch.say_goodbye(self._backend)
        kept = None if self.on_device is None else self.on_device.release()
        handed: list[abandoned_groups.Abandoned] = [
            (self._backend, self.in_flight, (self._store, kept, goodbye))
        ]
        # Whoever lets go of it last drops it, which may block. So nothing is kept here.
        self._backend, self._pending, self._store = None, set(), None
        del kept, goodbye
        abandoned_groups.abandon(handed)


class DevicePeerWatch:
    """Notices at once that the process of another member has ended.

    While the hosts poll their devices, Gloo has nothing to do, and a collective of the device only
    waits for a peer that is gone. So each member keeps one receive from the next rank open, on a
    thread that waits for it: Gloo ends it as soon as the connection is closed. A ring is enough:
    one member notices, leaves, and the controller ends the generation for the others.
    """

    def __init__(self, backend: Any, rank: int, world_size: int) -> None:
        """`backend`: Gloo's, among at least two members."""
        self._before, after = (rank - 1) % world_size, (rank + 1) % world_size
        received = torch.zeros(1, dtype=torch.uint8)
        self.receiving = Operation(
            received, between_pairs=True
        )  # fails when the next rank cannot be reached any more
        self.receiving.start(lambda: backend.recv([received], after, _WATCH_TAG))
        background("peer-watch", self.receiving.end).start()

    def say_goodbye(self, backend: Any) -> Operation:
        """Ends the receive at the other end, so that no thread keeps a group that is left."""
        goodbye = torch.ones(1, dtype=torch.uint8)
        operation = Operation(goodbye, between_pairs=True)
        operation.start(lambda: backend.send([goodbye], self._before, _WATCH_TAG))
        return operation


class RecordGather:
    """Gathers one small record of every rank on every rank, in one collective of a fixed size. All
    ranks start with the same size and grow it by the same rule: if a record did not fit, all ranks
    see the length that it needs and gather again with that size. `launch` does not wait, `collect`
    does."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._payload = b""
        self._operation: Operation | None = None
        self._make_room(_FIRST_CAPACITY)

    def launch(self, payload: bytes) -> None:
        self._payload = payload
        if self._group.world_size > 1:
            self._gather()

    def collect(self) -> list[bytes]:
        """Waits for the records and returns them in rank order."""
        if self._group.world_size == 1:
            return [self._payload]
        while True:
            assert self._operation is not None
            self._group.wait(self._operation)
            rows = self._rows.numpy().tobytes()
            heads = range(0, len(rows), len(self._row))
            lengths = [int.from_bytes(rows[h : h + _LENGTH_BYTES], "little") for h in heads]
            capacity = len(self._row) - _LENGTH_BYTES
            if max(lengths) <= capacity:
                starts = [head + _LENGTH_BYTES for head in heads]
                return [rows[at : at + length] for at, length in zip(starts, lengths, strict=True)]
            self._make_room(max(2 * capacity, *lengths))
            self._gather()

    def _make_room(self, capacity: int) -> None:
        """Allocates buffers that are reused for every gather of the group, one at a time."""
        self._row = torch.zeros(_LENGTH_BYTES + capacity, dtype=torch.uint8)
        self._bytes = self._row.numpy().data
        self._rows = torch.empty(self._group.world_size * len(self._row), dtype=torch.uint8)

    def _gather(self) -> None:
        fitting = self._payload[: len(self._row) - _LENGTH_BYTES]
        self._bytes[:_LENGTH_BYTES] = len(self._payload).to_bytes(_LENGTH_BYTES, "little")
        self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(fitting)] = fitting
        self._operation = self._group.all_gather(self._rows, self._row)


# -------------------------------------------------------------------------------------------
# forming


class GroupFormation:
    """Forms one process group on a thread of its own. `wait` returns the group. It raises
    FormingFailed, or GroupAborted after `abort`, and leaves the thread to end by itself."""

    def __init__(
        self,
        rendezvous: Rendezvous | None,
        name: GroupName,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """`rendezvous` may be None for a group of one member."""
        self._rendezvous, self._name = rendezvous, name
        self._rank, self._world_size = rank, world_size
        self._device, self._timeout_s = device, timeout_s
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._aborted = False
        self._group: ProcessGroup | None = None
        self._error: Exception | None = None
        self._store: RendezvousStore | None = None

    def start(self) -> GroupFormation:
        if self._world_size == 1:
            self._group = ProcessGroup(None, 0, 1, self._device)
            self._ended.set()
        else:
            background("forming", self._form).start()
        return self

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            group = self._group
        if group is not None:
            group.abort()
        elif _gloo_device is not None and not self._ended.is_set():
            _gloo_device.spent = True
        self._ended.set()

    def abandon(self) -> None:
        """Aborts, and closes the group if it is formed by now."""
        self.abort()  # from now on no group is set
        if self._group is not None:
            self._group.close()

    def wait(self) -> ProcessGroup:
        self._ended.wait()
        with self._lock:
            if self._aborted:
                raise GroupAborted("the generation was ended while it formed")
            if self._error is not None:
                failed = FormingFailed if self._store is None or self._store.met else MembersMissing
                raise failed(str(self._error).splitlines()[0]) from self._error
            assert self._group is not None
            return self._group

    def _form(self) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        assert self._rendezvous is not None
        rank, world_size = self._rank, self._world_size
        try:
            self._store = self._rendezvous.store(self._name, rank, world_size, timeout)
            before = connections()
            backend = self._form_gloo(self._store, self._rendezvous.secret, timeout)
            group = ProcessGroup(backend, rank, world_size, self._device, self._store)
            group.links = dict(connections().items() - before.items())
        except Exception as error:  # the store's and the backend's errors have many types
            self._error = error
        else:
            with self._lock:
                aborted = self._aborted
                self._group = None if aborted else group
            if aborted:
                group.close()
        self._ended.set()

    def _form_gloo(self, store: RendezvousStore, secret: bytes, timeout: timedelta) -> Any:
        rank, world_size = self._rank, self._world_size
        if _gloo_device is None:
            use_interface(None)
        assert _gloo_device is not None
        if _gloo_device.spent:
            use_interface(_gloo_device.address)
        else:  # the store waits longer: when Gloo waits, all members have registered
            timeout = min(timeout, _CONNECTING_LIMIT + world_size * _CONNECTING_LIMIT_OF_A_RANK)
        listener = _gloo_device
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [listener.device], timeout
        try:
            backend = dist.ProcessGroupGloo(store, rank, world_size, options)
            prove(backend, secret, str(self._name), rank=rank, world_size=world_size)
        except Exception:
            listener.spent = True
            raise
        backend._set_default_timeout(OPERATION_TIMEOUT)
        return backend


class GlooDevice:
    """A listening socket and an event loop, for all generations of this process until forming one
    fails or is aborted: Gloo takes a connection that names a pair for the peer of this pair, now or
    later, so strangers may hold those of its next pairs."""

    def __init__(self, address: str | None) -> None:
        self.address, self.spent = address, False
        backend = dist.ProcessGroupGloo
        if address is None:
            self.device = backend.create_default_device()
        else:
            self.device = backend.create_device(hostname=address)


_gloo_device: GlooDevice | None = None
_gloo_device_lock = threading.Lock()


def use_interface(address: str | None) -> None:
    """Binds Gloo to the interface of this IP address; None: to that of the host's name."""
    global _gloo_device
    with _gloo_device_lock:
        _gloo_device = GlooDevice(address)


def prove(backend: Any, secret: bytes, name: str, *, rank: int, world_size: int) -> None:
    """Has each two members prove the secret to each other, on the connection that they will use. No
    two groups have the same `name`, so a proof is never used again. A process that listens in on a
    connection cannot reuse a proof: the receiver has already accepted the sender's. Returns when
    all members have all proofs: while one lacks some, none has a group, and where that one fails,
    none uses its port again. Raises ConnectionError."""

    def proof(sender: int, receiver: int) -> bytes:
        text = f"elastic_dp member {sender} to {receiver} of {world_size} in {name}"
        return hashlib.blake2b(text.encode(), key=secret, digest_size=_PROOF_BYTES).digest()

    ranks, sizes = range(world_size), [_PROOF_BYTES] * world_size
    given = torch.frombuffer(bytearray(b"".join(proof(rank, r) for r in ranks)), dtype=torch.uint8)
    taken = torch.zeros_like(given)
    backend.alltoall_base(taken, given, sizes, sizes, c10d.AllToAllOptions()).wait()
    for r, got in enumerate(taken.view(world_size, _PROOF_BYTES).numpy()):
        if not hmac.compare_digest(got.tobytes(), proof(r, rank)):
            raise ConnectionError(
                f"the peer that answered as rank {r} does not hold the run's secret"
            )
    backend.barrier(c10d.BarrierOptions()).wait()


def connect_devices(
    group: ProcessGroup,
    rendezvous: Rendezvous,
    generation: int,
    timeout_s: float = CONNECTING_LIMIT_S,
) -> None:
    """Starts to connect the devices of several members; see `DeviceTransport`."""
    if group.on_device is None or group.world_size == 1:
        return
    rank, world_size, timeout = group.rank, group.world_size, timedelta(seconds=timeout_s)

    accelerator = group.on_device.accelerator

    def begin(attempt: int) -> DeviceConnection:
        name = GroupName(generation, f"devices-{attempt}", rendezvous.process)
        return DeviceConnection(
            accelerator,
            lambda: rendezvous.store(name, rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            pause_s=pause_before(attempt),
        ).start()

    group.on_device.connect(begin)
