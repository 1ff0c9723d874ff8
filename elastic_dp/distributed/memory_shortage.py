"""Memory for a generation while operations of the last one still keep theirs.

An operation in flight keeps its buffers until all members that it waits for have dropped their
group. They do so a few seconds after the next generation has begun, or at once where the buffers
are large. Then they are used again, and a generation needs no more memory than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from elastic_dp.device.faults import FaultKind, fault_of
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.distributed.process_group import drop_abandoned_groups
from elastic_dp.errors import ClusterError

LARGE_BYTES = 64 << 20  # of buffers: touching new memory takes longer than dropping a group
_SOON_S = 2.0  # for groups that all members drop at once
_LIMIT_S = 10.0  # where memory was refused


def are_large(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the buffers for the gradients of these parameters take much memory of the host."""
    local = map(local_of, parameters)
    return sum(p.nbytes for p in local if p.device.type == "cpu") >= LARGE_BYTES


def allocate_buffers(
    allocate: Callable[[], None], check: Callable[[], None], is_withheld: Callable[[], bool]
) -> None:
    """Calls `allocate`, and once more if memory was refused and an abandoned group has kept some.

    Before, it waits a moment for memory that `is_withheld`. `check` is called in waits and may
    raise. Raises ClusterError if the host's memory is too short even so.
    """

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
