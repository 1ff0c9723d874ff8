"""Memory of the buckets for what is received where the finished sums go to some members only.

What is received first of all buckets is in one piece for each dtype. Then it is free until the next
step, for the updated parameters of all members. Sums that are rounded (gradient_rounding.py) lie in
that memory, too. What a member needs of the finished sums is in another piece.

A generation uses the memory of the last one again, unless an operation may still access it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from elastic_dp.distributed.cross_worker_reduction import ReductionPlan
from elastic_dp.distributed.gradient_buckets import GradientBucket
from elastic_dp.distributed.memory_shortage import are_large
from elastic_dp.distributed.piece_routes import HeldRanges, PieceRoute, piece_route
from elastic_dp.distributed.process_group import Operation, ProcessGroup

# What memory is for, and its dtype; that of the generation before, and the operations of that
# which may access it.
_Kind = tuple[str, torch.dtype]
_Before = tuple[torch.Tensor, Collection[Operation]]

# Of a small model so many times what is needed is reserved, since the next generation may need
# more, and touching new memory takes milliseconds in which all wait. What is not touched costs
# none.
_RESERVED = 2

BucketMemory = tuple[torch.Tensor, PieceRoute, torch.Tensor]


class ReceivedMemory:
    """`by_dtype` is empty where all members need all sums."""

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self._pieces: dict[torch.dtype, torch.Tensor] = {}
        self._before: dict[_Kind, _Before] = {}
        self._group: ProcessGroup | None = None
        self._is_small = False

    @property
    def is_withheld(self) -> bool:
        """Whether an operation may still access memory of the generation before."""
        return any(map(_is_accessed, self._before.values()))

    def open(
        self,
        plan: ReductionPlan,
        buckets: Sequence[GradientBucket],
        needed: HeldRanges | None,
    ) -> dict[int, BucketMemory]:
        """Returns for each bucket, by its number, memory for what is received of it first, its
        route, and memory for what this member needs of its finished sum. `needed`: which ranks need
        the sum of which elements; None: all need all."""
        before, self._before, self.by_dtype, self._pieces = self._before, {}, {}, {}
        if needed is None:
            return {}
        self._group = plan.on_host
        self._is_small = not plan.on_device and not are_large(
            p for bucket in buckets for p in bucket.parameters
        )
        routes = {bucket.number: _route(plan, bucket, needed) for bucket in buckets}
        first: dict[int, torch.Tensor] = {}
        for dtype in {bucket.dtype for bucket in buckets}:
            mine = [bucket for bucket in buckets if bucket.dtype == dtype]
            sizes = [_room(plan.first_received(b), b.rounding.dtype, dtype) for b in mine]
            updated = _most_sent_first(plan, dtype, needed) * plan.group.world_size
            numel = max(sum(sizes), updated)
            memory = self._take(before, ("first", dtype), numel, mine[0].device)
            for bucket, part in zip(mine, memory[: sum(sizes)].split(sizes), strict=True):
                first[bucket.number] = part.view(bucket.rounding.dtype)
            self.by_dtype[dtype] = memory
        pieces: dict[int, torch.Tensor] = {}
        for dtype in {bucket.rounding.dtype for bucket in buckets}:
            mine = [bucket for bucket in buckets if bucket.rounding.dtype == dtype]
            sizes = [sum(routes[bucket.number].received) for bucket in mine]
            memory = self._take(before, ("pieces", dtype), sum(sizes), mine[0].device)
            for bucket, part in zip(mine, memory[: sum(sizes)].split(sizes), strict=True):
                pieces[bucket.number] = part
            self._pieces[dtype] = memory
        return {number: (first[number], routes[number], pieces[number]) for number in routes}

    def _take(
        self, before: dict[_Kind, _Before], kind: _Kind, numel: int, device: torch.device
    ) -> torch.Tensor:
        memory = _usable(before.pop(kind, None), numel)
        if memory is None:
            reserved = _RESERVED * numel if self._is_small else numel
            memory = torch.empty(reserved, dtype=kind[1], device=device)
        return memory

    def close(self) -> None:
        """Ends the generation, whose group is still open."""
        if self._group is not None:
            flying = self._group.in_flight  # also of what lies elsewhere
            kept = {("first", dtype): memory for dtype, memory in self.by_dtype.items()}
            if self._is_small:  # or else they are not kept until the next generation
                kept |= {("pieces", dtype): memory for dtype, memory in self._pieces.items()}
            self._before = {kind: (memory, flying) for kind, memory in kept.items()}
        self.by_dtype, self._pieces, self._group = {}, {}, None


def _most_sent_first(plan: ReductionPlan, dtype: torch.dtype, needed: HeldRanges) -> int:
    """Returns the most elements of this dtype of which some rank is the first that needs them."""
    numel = [0] * plan.group.world_size
    for p, ranges in needed.items():
        for one in ranges if p.dtype == dtype else ():
            numel[one.ranks[0]] += one.last - one.first
    return max(numel)


def _route(plan: ReductionPlan, bucket: GradientBucket, needed: HeldRanges) -> PieceRoute:
    """Returns where the finished parts of a bucket go."""
    assert plan.rounds, "a sum that is not divided is needed by all"
    rounding, ranges = bucket.rounding, []
    for p, cut in zip(bucket.parameters, bucket.cuts, strict=False):
        at = cut * rounding.block
        for one in needed.get(p, ()):
            ranges.append(one._replace(first=at + one.first, last=at + one.last))
    return piece_route(
        plan.group.rank,
        plan.group.world_size,
        plan.chunk_blocks(bucket),
        ranges,
        bucket.blocks,
        block=rounding.block,
        record=rounding.record,
    )


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
