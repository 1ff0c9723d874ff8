"""How gradients travel between members whose tensors are on an asynchronous device, and the one way
from the device to the host.

- A generation begins over Gloo: what is sent is copied to the host, and what arrives is copied
  back. The members' devices connect meanwhile. From a step on that all members agree on, the
  device's communicator is used. All sums are added up on the device, along the same tree, so their
  bits do not depend on the transport.
- `read` is the only way to the host: an event, which is polled, a check that the group is not
  aborted and the communicator has not failed, and then a copy. An aborted collective leaves
  anything in its output, and one whose communicator has failed may never end.
- A generation is left only when the device has nothing of it to do any more. So its memory can be
  used again, and no later call blocks behind a collective that waits for a lost member.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from elastic_dp.device.accelerator import Accelerator, Communicator
from elastic_dp.distributed.device_connection import (
    ABORT_LIMIT_S,
    DeviceConnection,
    end_process,
    pause_before,
)
from elastic_dp.errors import CollectiveFailed

if TYPE_CHECKING:
    from elastic_dp.distributed.process_group import Operation, ProcessGroup

_POLL_S = 0.00005
_ROOM = 16  # this part of the memory of an operation is made in addition; see `StagingMemory`
REST_LIMIT_S = ABORT_LIMIT_S  # after an abort, for the same reason


@dataclass(slots=True)
class StagedOperation:
    """A collective over host memory: it starts when what it sends has been copied there."""

    output: torch.Tensor
    received: torch.Tensor
    sources: tuple[torch.Tensor, ...]
    copied: Any
    start: Callable[[], Operation]
    sent: Operation | None = None


class DeviceOperation(NamedTuple):
    """A collective of the device's communicator, and the tensors that it may still access."""

    buffers: tuple[torch.Tensor, ...]
    work: Any


class DeviceTransport:
    """The same collectives as a `ProcessGroup`, for tensors on the device."""

    def __init__(self, group: ProcessGroup, accelerator: Accelerator) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group, self.accelerator = group, accelerator
        self._attempt: Callable[[int], DeviceConnection] | None = None  # begins one
        self._connections: list[DeviceConnection] = []  # of all attempts; the last one counts
        self._switched = False  # all members agreed to use the communicator
        self._news: list[str] = []  # what the user has not been told yet
        self._unsent: deque[StagedOperation] = deque()
        self._staged: list[StagedOperation] = []  # since the last event that has passed
        self._unconfirmed: list[DeviceOperation] = []  # the same

    # ------------------------------------------------------------------------- the communicator

    def connect(self, attempt: Callable[[int], DeviceConnection]) -> None:
        """`attempt` begins the attempt with this number, from 0."""
        self._attempt = attempt
        self._connections.append(attempt(len(self._connections)))
        if self._group.aborted:
            self.abort()

    @property
    def _connection(self) -> DeviceConnection | None:
        return self._connections[-1] if self._connections else None

    @property
    def connected(self) -> bool:
        """Whether the communicator stands on this member."""
        return self._connection is not None and self._connection.communicator is not None

    def agree(self, step: int, *, connected: bool, why_not: str | None) -> None:
        """Acts on the header of a step, as every member does between the same two steps.
        `connected`: the communicator stands on all members. `why_not`: connecting failed on one."""
        if self._attempt is None or self._switched:
            return
        attempts = len(self._connections)
        if connected:
            self.switch()
            if attempts > 1:
                self._news.append(
                    f"the devices are connected, at attempt {attempts}: gradients use them from "
                    f"step {step + 1} on"
                )
        elif why_not is not None:
            self.check_connection()
            self.abort()
            self.connect(self._attempt)
            if attempts == 1:
                self._news.append(
                    f"{why_not}. Gradients travel through the host meanwhile; the next attempt "
                    f"begins in {pause_before(attempts):g} s"
                )

    def switch(self) -> None:
        """Uses the communicator from now on. Every member does, between the same two steps."""
        if self._connection is not None:
            self._switched = True
            self._group.check()  # an abort has taken it away
            self._group.watch_peer()

    @property
    def switched(self) -> bool:
        return self._switched

    def connecting_failure(self) -> str | None:
        """Returns why this member's attempt to connect has failed, if it has."""
        return None if self._connection is None else self._connection.failure()

    def check_connection(self) -> None:
        """Raises FormingFailed if this member's device has failed while it was connected."""
        if self._connection is not None and not self._switched:
            self._connection.check()

    def news(self) -> list[str]:
        """Returns what the user is to be told about the connection, once."""
        news, self._news = self._news, []
        return news

    def abort(self) -> None:
        """Frees the device from collectives that will never end. Returns at once."""
        if self._connection is not None:
            self._connection.abort()

    # ------------------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        if self._switched:
            return self._launch((tensor,), lambda of: of.all_reduce(tensor))
        flat = self._copied(tensor)
        return self._stage(tensor, flat, (flat,), lambda: self._group.all_reduce(flat))

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> Any:
        sizes = output_sizes, input_sizes
        return self._exchange(output, input, lambda of, *ends: of.all_to_all(*ends, *sizes))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        return self._exchange(output, input, lambda of, *ends: of.all_gather(*ends))

    def _exchange(self, output: torch.Tensor, input: torch.Tensor, start: Any) -> Any:
        if self._switched:
            return self._launch((output, input), lambda of: start(of, output, input))
        given, received = self._copied(input), self._host_like(output)
        started = partial(start, self._group, received, given)
        return self._stage(output, received, (given, received), started)

    def wait(self, operation: Any) -> None:
        """Orders what is launched later behind the operation. Raises GroupError."""
        if isinstance(operation, StagedOperation):
            self._send_up_to(operation)
            assert operation.sent is not None
            self._group.wait(operation.sent)
            operation.output.copy_(operation.received, non_blocking=True)
            return
        self._group.check()
        try:
            operation.work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(str(error).splitlines()[0]) from error

    def is_over(self, operation: Any) -> bool:
        """Returns whether what is launched from now on may use the operation's tensors."""
        if isinstance(operation, StagedOperation):
            return True  # only host memory is used by others
        try:
            operation.work.wait()  # an aborted one has ended, too, when what follows begins
        except RuntimeError:
            return False
        return True

    # ------------------------------------------------------------------------------- to the host

    def read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors on the host. Waits once, for everything launched so far. Raises
        GroupAborted, or CollectiveFailed if the communicator has failed meanwhile."""
        flats = [t.detach().reshape(-1).view(torch.uint8) for t in tensors]
        packed = torch.cat(flats) if flats else None
        self.synchronize()
        if packed is None:
            return []
        pieces = packed.cpu().split([flat.numel() for flat in flats])
        return [
            # A clone is aligned; a piece may begin anywhere.
            piece.clone().view(tensor.dtype).view(tensor.shape)
            for tensor, piece in zip(tensors, pieces, strict=True)
        ]

    def synchronize(self) -> None:
        """Waits until the device has done everything launched so far. Raises GroupError."""
        self._poll(self.accelerator.record())
        self._unconfirmed.clear()
        for operation in self._staged:
            if operation.sent is not None and operation.sent.is_over:
                _staging_memory.give_back(operation.sources)
        self._staged.clear()

    def come_to_rest(self) -> None:
        """Waits until the device has nothing of this generation to do, or ends the process."""
        self._unsent.clear()
        self._staged.clear()
        until = math.inf
        if self._unconfirmed:
            self.abort()
            until = time.monotonic() + REST_LIMIT_S
        event = self.accelerator.record()
        while not event.query():
            if time.monotonic() > until:
                end_process(f"the device is still busy {REST_LIMIT_S:g} s after an abort")
            time.sleep(_POLL_S)
        self._unconfirmed.clear()

    def release(self) -> Any:
        """Returns what must be dropped on a thread of its own: to destroy a communicator blocks."""
        kept = self._connections, self._unconfirmed
        self._attempt, self._connections, self._unconfirmed = None, [], []
        return kept

    def _poll(self, event: Any) -> None:
        while not event.query():
            self._check()
            time.sleep(_POLL_S)
        self._check()

    def _check(self) -> None:
        self._group.check()
        communicator = self._connection.communicator if self._connection is not None else None
        failure = communicator.failure() if self._switched and communicator is not None else None
        if failure is not None:
            raise CollectiveFailed(failure)
        if self._unconfirmed and self._group.lost_peer is not None:
            raise CollectiveFailed(self._group.lost_peer)

    # ----------------------------------------------------------------------------------- private

    def _launch(
        self, buffers: tuple[torch.Tensor, ...], start: Callable[[Communicator], Any]
    ) -> DeviceOperation:
        self._group.check()
        assert self._connection is not None
        try:
            with self._connection.in_use() as communicator:
                operation = DeviceOperation(buffers, start(communicator))
        except RuntimeError as error:
            raise CollectiveFailed(str(error).splitlines()[0]) from error
        self._unconfirmed.append(operation)
        return operation

    def _stage(
        self,
        output: torch.Tensor,
        received: torch.Tensor,
        sources: tuple[torch.Tensor, ...],
        start: Callable[[], Operation],
    ) -> StagedOperation:
        operation = StagedOperation(output, received, sources, self.accelerator.record(), start)
        self._unsent.append(operation)
        self._staged.append(operation)
        return operation

    def _send_up_to(self, operation: StagedOperation) -> None:
        """Starts the collectives up to this one, in the order in which they were launched, which is
        the same on all members, and those behind it whose copies have arrived."""
        while self._unsent and (operation.sent is None or self._unsent[0].copied.query()):
            self._poll(self._unsent[0].copied)
            first = self._unsent.popleft()
            first.sent = first.start()

    def _host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return _staging_memory.take(self.accelerator, tensor)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._host_like(tensor)
        self.accelerator.copy_to_host(host, tensor)
        return host


class StagingMemory:
    """Memory of the host that later operations and generations use again: to register it with the
    device takes longer than a step. What an operation sends and receives differs a little by the
    number of members, so memory with some room to spare is used, too."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, accelerator: Accelerator, like: torch.Tensor) -> torch.Tensor:
        nbytes = like.numel() * like.element_size()
        with self._lock:
            fitting = [one for one in self._free if nbytes <= one.numel() <= 2 * nbytes]
            memory = min(fitting, key=torch.Tensor.numel, default=None)
            self._free = [one for one in self._free if one is not memory]
        if memory is None:
            memory = accelerator.host_memory(nbytes + nbytes // _ROOM)
        return memory[:nbytes].view(like.dtype)

    def give_back(self, memory: Sequence[torch.Tensor]) -> None:
        with self._lock:
            for one in {one.data_ptr(): one for one in memory}.values():
                self._free.append(torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()))


_staging_memory = StagingMemory()
