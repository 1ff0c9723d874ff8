"""Groups that were left, and the memory that they keep.

An operation in flight may write to its buffers until the connections of its group are closed, which
takes about 4 ms for every peer. So that is done on a thread for each group, before the group is
dropped: Gloo's destructor would close them, too, but it holds the GIL and waits for the operations.

A group rests first: others may still receive what this member has sent. It also waits a while for
its operations: one may be with a worker that is frozen. If that worker thaws, it finishes them, and
then finds that it was left. In the middle of a send it may not notice a closed connection. Where
memory is needed, nothing rests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from elastic_dp.device.faults import FaultKind, fault_of
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.errors import ClusterError
from elastic_dp.threads import background

REST_S = 3.0  # from the end of a group until it is dropped
LARGE_BYTES = 64 << 20  # of buffers: touching new memory takes longer than dropping a group
_NEVER_SENT_TAG = 2
_IN_FLIGHT_S = 60.0  # how long operations may end by themselves
_LOOK_AGAIN_S = 0.005
_LOOK_S = 0.1  # for operations that end by themselves
_SOON_S = 0.5  # where buffers are large
_LIMIT_S = 10.0  # where memory was refused

# A backend, its operations in flight, which keep their buffers, and what else it needs.
Abandoned = tuple[Any, Collection[Any], Any]

_lock = threading.Lock()
# Of the groups that are not gone yet: what ends its rest, and the thread that drops it. One thread
# each: destroying the communicator of a device may block.
_dropping: list[tuple[threading.Event, threading.Thread]] = []
_one_has_gone = False  # since `drop_abandoned_groups` was called last


def abandon(handed: list[Abandoned]) -> None:
    """Takes the one group out of this list, of which the caller keeps nothing else. Any thread may
    call it."""
    if handed[0][0] is None:
        return
    rested = threading.Event()
    thread = background("drop-group", partial(_drop, handed, rested))
    with _lock:
        _forget_gone()
        thread.start()
        _dropping.append((rested, thread))


def drop_abandoned_groups(limit_s: float, waits: Callable[[], bool] = lambda: True) -> bool:
    """Ends the rest of all groups that this process has left, and waits until they are gone: as
    long as `waits` says so, which may raise, and for `limit_s`. Returns whether one has gone, by
    now or since the last call."""
    global _one_has_gone
    with _lock:
        dropping = list(_dropping)
    for rested, _ in dropping:
        rested.set()
    until = time.monotonic() + limit_s
    for _, thread in dropping:
        while thread.is_alive() and time.monotonic() < until and waits():
            thread.join(_LOOK_AGAIN_S)
    with _lock:
        _forget_gone()
        told, _one_has_gone = _one_has_gone, False
    return told


def _forget_gone() -> None:
    global _one_has_gone
    left = [one for one in _dropping if one[1].is_alive()]
    _one_has_gone |= len(left) < len(_dropping)
    _dropping[:] = left


def _drop(handed: list[Abandoned], rested: threading.Event) -> None:
    backend, operations, _kept = handed.pop()
    until = time.monotonic() + _IN_FLIGHT_S
    while not all(one.is_over for one in operations) and time.monotonic() < until:
        if rested.wait(_LOOK_S):
            break
    rested.wait(REST_S)
    close_connections(backend)
    # Collectives last: one may be stuck, for the same reason for which a send may be.
    for operation in sorted(operations, key=lambda one: not one.between_pairs):
        operation.connections_are_closed()


def close_connections(backend: Any) -> None:
    """Closes all connections of a group of Gloo at this end, so that all operations end. Gloo does
    when a receive has timed out (`Context::signalException`); its `abort()` does nothing."""
    for peer in {*range(backend.size())} - {backend.rank()}:
        with contextlib.suppress(RuntimeError):  # it times out, or the connection is closed by now
            received = torch.zeros(1, dtype=torch.uint8)
            backend.recv([received], peer, _NEVER_SENT_TAG).wait(timedelta(milliseconds=1))


# ------------------------------------------------------------------- memory of the next generation


def are_large(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the buffers for the gradients of these parameters take much memory of the host."""
    local = map(local_of, parameters)
    return sum(p.nbytes for p in local if p.device.type == "cpu") >= LARGE_BYTES


def allocate_buffers(
    allocate: Callable[[], None], check: Callable[[], None], is_withheld: Callable[[], bool]
) -> None:
    """Calls `allocate`, and once more if memory was refused and an abandoned group has kept some.
    Before, it waits a moment for memory that `is_withheld`. `check` is called in waits and may
    raise. Raises ClusterError if the host's memory is too short even so."""

    def waits() -> bool:
        check()
        return True

    if is_withheld():
        drop_abandoned_groups(_SOON_S, lambda: waits() and is_withheld())
    refused = _refused(allocate)
    if refused is not None and drop_abandoned_groups(_LIMIT_S, waits):
        refused = _refused(allocate)
    if refused is None:
        return
    if fault_of(refused) is not None:
        raise refused
    raise ClusterError(
        "a worker has no memory for the buffers in which gradients are exchanged "
        f"({str(refused).splitlines()[0]}). Give each worker more memory, or let each hold less: "
        'more workers with sharding="optimizer", or a smaller model'
    ) from refused


def _refused(allocate: Callable[[], None]) -> Exception | None:
    """Returns the error if memory was refused, without what has been allocated before it."""
    try:
        allocate()
    except (RuntimeError, MemoryError) as error:
        host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if not host and fault_of(error) is not FaultKind.OUT_OF_MEMORY:
            raise
        return error.with_traceback(None)  # whose frames keep memory
    return None
