"""What is received first of all buckets, in one piece for each dtype, where the finished sums go to
some members only: then it is free until the next step, for the updated parameters of all members,
and for the squares of the gradient's units, which travel with them.
Sums that are rounded (gradient_rounding.py) lie in the memory for the parameters, too.

A generation uses the memory of the last one again, unless an operation may still access it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from elastic_dp.distributed.cross_worker_reduction import ReductionPlan
from elastic_dp.distributed.gradient_buckets import GradientBucket
from elastic_dp.distributed.gradient_units import elements_per_unit
from elastic_dp.distributed.process_group import Operation, ProcessGroup

# Memory of the generation before, and the operations of that which may access it.
_Before = tuple[torch.Tensor, Collection[Operation]]


class ReceivedMemory:
    """`by_dtype` is empty where all members need all sums."""

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self._before: dict[torch.dtype, _Before] = {}
        self._group: ProcessGroup | None = None

    @property
    def is_withheld(self) -> bool:
        """Whether an operation may still access memory of the generation before."""
        return any(map(_is_accessed, self._before.values()))

    def open(
        self, plan: ReductionPlan, buckets: Sequence[GradientBucket]
    ) -> dict[int, torch.Tensor]:
        """Returns the part of each bucket, by its number."""
        before, self._before, self.by_dtype = self._before, {}, {}
        if plan.needed is None:
            return {}
        self._group = plan.on_host
        added_bytes = _most_units(plan) * torch.float64.itemsize
        parts: dict[int, torch.Tensor] = {}
        for dtype in {bucket.dtype for bucket in buckets}:
            mine = [bucket for bucket in buckets if bucket.dtype == dtype]
            sizes = [_room(plan.first_received(b), b.rounding.dtype, dtype) for b in mine]
            added = math.ceil(added_bytes / dtype.itemsize)
            updated = (plan.most_sent_first(dtype) + added) * plan.group.world_size
            numel = max(sum(sizes), updated)
            memory = _usable(before.pop(dtype, None), numel)
            if memory is None:
                memory = torch.empty(numel, dtype=dtype, device=mine[0].device)
            for bucket, part in zip(mine, memory[: sum(sizes)].split(sizes), strict=True):
                parts[bucket.number] = part.view(bucket.rounding.dtype)
            self.by_dtype[dtype] = memory
        return parts

    def close(self) -> None:
        """Ends the generation, whose group is still open."""
        if self._group is not None:
            flying = self._group.in_flight  # also of what lies elsewhere
            self._before = {dtype: (memory, flying) for dtype, memory in self.by_dtype.items()}
        self.by_dtype, self._group = {}, None


def _most_units(plan: ReductionPlan) -> int:
    """Returns the most units of which some rank is the first that needs them. It sends a number for
    each of them with the parameters."""
    assert plan.needed is not None
    units = [0] * plan.group.world_size
    for p, ranges in plan.needed.items():
        size = elements_per_unit(p.dtype)
        for one in ranges:
            units[one.ranks[0]] += math.ceil((one.last - one.first) / size)
    return max(units)


def _room(numel: int, dtype: torch.dtype, room: torch.dtype) -> int:
    """Returns how many elements of the dtype `room` have room for `numel` of `dtype`."""
    return math.ceil(numel * dtype.itemsize / room.itemsize)


def _usable(before: _Before | None, numel: int) -> torch.Tensor | None:
    """Returns this memory if it is large enough and nothing accesses it any more."""
    if before is None or before[0].numel() < numel or _is_accessed(before):
        return None
    return before[0]


def _is_accessed(before: _Before) -> bool:
    memory, operations = before
    return any(one.may_access(memory) for one in operations)
