"""The exchange of gradients where each member updates its pieces: it gets the sums of these alone.

With one member or two, all hold everything, and it is an exchange as without sharding.

What is received first of all buckets is in one piece of memory for each dtype. Then it is free
until the next step, for the updated parameters of all members. A generation uses that of the last
one again, unless an operation may still access it. What a member needs of the finished sums is in
another piece, whose size depends on the number of members.

Each primary computes the sums of squares of its units. All members gather them, and everyone folds
them along the tree of `gradient_norm.py`: the norm has the bits of that of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elastic_dp.distributed.cross_worker_reduction import BucketReduction, GradientBufferPool
from elastic_dp.distributed.gradient_buckets import GradientBucket, GradientLayout
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import GradientNorm, fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import elements_per_unit
from elastic_dp.distributed.piece_assignment import HeldRanges, PieceRoute, piece_route
from elastic_dp.distributed.process_group import Operation, ProcessGroup
from elastic_dp.extensions.sharding.sharded_optimizer import ShardedOptimizer


class PieceReduction(GradientExchange):
    """`norm` is a `GatheredNorm` where this member has pieces only, and `finite` not known then,
    unless the gradient is clipped by it."""

    def __init__(self, holding: ShardedOptimizer, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._holding, self._received_pool = holding, GradientBufferPool()
        # By bucket: memory for what is received first, the route, and memory for what this member
        # needs of the finished sum.
        self._memory: dict[int, tuple[torch.Tensor, PieceRoute, torch.Tensor]] = {}
        # By dtype: memory that is free from `finish` until the next step begins.
        self.received_memory: dict[torch.dtype, torch.Tensor] = {}
        self._own_pieces: list[int] = []  # those of which this rank is the primary
        self._own_units = torch.empty(0)  # their units
        self._held: dict[int, torch.Tensor] = {}
        self.used: set[torch.nn.Parameter] = set()  # those with a gradient

    # ----------------------------------------------------------------------- generation

    def preallocate(self, layout: GradientLayout, virtual_workers: int) -> None:
        # What is received lies in one piece of memory.
        self._pool.preallocate(layout.buckets, virtual_workers, receives=False)

    def close(self) -> None:
        if self._plan is not None:
            flying = self._plan.on_host.in_flight  # also of what lies elsewhere
            for memory in self.received_memory.values():
                self._received_pool.give_back_later(
                    [memory], partial(_is_left_alone, memory, flying)
                )
        self._memory, self.received_memory = {}, {}
        super().close()

    def _is_withheld(self) -> bool:
        return super()._is_withheld() or (self.is_large and self._received_pool.is_withheld)

    def _allocate(self) -> None:
        assert self._plan is not None
        self._buckets, self._memory, self.received_memory = [], {}, {}
        self._received_pool.collect()
        needed = self._holding.needed()
        if needed is not None:
            self._lay_out(needed)
            self._find_own_units()
        self._received_pool.clear()
        super()._allocate()
        if needed is not None:
            self._pool.clear()  # there is other memory to receive in

    def _lay_out(self, needed: HeldRanges) -> None:
        plan, buckets = self._plan, self._layout.buckets
        assert plan is not None
        routes = [self._route(bucket, needed) for bucket in buckets]
        pieces: dict[int, torch.Tensor] = {}
        for dtype in {bucket.rounding.dtype for bucket in buckets}:
            alike = [b for b in buckets if b.rounding.dtype == dtype]
            sizes = {b.number: sum(routes[b.number].received) for b in alike}
            memory = torch.empty(sum(sizes.values()), dtype=dtype, device=alike[0].device)
            pieces |= _cut(memory, sizes)
        first: dict[int, torch.Tensor] = {}
        for dtype in {bucket.dtype for bucket in buckets}:
            alike = [b for b in buckets if b.dtype == dtype]
            # Sums that are rounded lie in that memory, too.
            sizes = {
                b.number: math.ceil(
                    plan.first_received(b) * b.rounding.dtype.itemsize / dtype.itemsize
                )
                for b in alike
            }
            updated = plan.group.world_size * _most_updated(plan.group.world_size, dtype, needed)
            numel = max(sum(sizes.values()), updated)
            memory = self._received_pool.take(dtype, alike[0].device, numel, 0)
            parts = _cut(memory, sizes)
            first |= {n: part.view(buckets[n].rounding.dtype) for n, part in parts.items()}
            self.received_memory[dtype] = memory
        self._memory = {n: (first[n], route, pieces[n]) for n, route in enumerate(routes)}

    def _route(self, bucket: GradientBucket, needed: HeldRanges) -> PieceRoute:
        """Returns where the finished parts of a bucket go."""
        plan = self._plan
        assert plan is not None and plan.rounds, "a sum that is not divided is needed by all"
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

    def _find_own_units(self) -> None:
        assert self._plan is not None
        holding, rank = self._holding, self._plan.group.rank
        own = [n for n, one in enumerate(holding.holders) if one.primary == rank]
        self._own_pieces = [n for n in own if holding.pieces[n].numel]
        units: list[int] = []
        for piece in (holding.pieces[n] for n in self._own_pieces):
            size = elements_per_unit(self._all[piece.parameter].dtype)
            of_parameter = self._units.of_parameter(piece.parameter)
            units += of_parameter[piece.first // size : -(-piece.last // size)]
        self._own_units = torch.tensor(units, dtype=torch.int64).to(self._all[0].device)

    def _reduction(self, bucket: GradientBucket) -> BucketReduction:
        assert self._plan is not None
        first, route, pieces = self._memory.get(bucket.number, (None, None, None))
        return BucketReduction(self._plan, bucket, self._pool, first, route, pieces)

    # ----------------------------------------------------------------------------- step

    def _drop(self) -> None:
        super()._drop()
        self._held, self.used = {}, set()

    @torch.no_grad()
    def finish(self, factor: float, used: Sequence[int]) -> None:
        if self._holding.all_hold_all:
            super().finish(factor, used)
            return
        assert self._plan is not None
        sums, finite = self.sums_of_pieces(factor)
        self.used = {p for p, flag in zip(self._layout.parameters, used, strict=True) if flag}
        pieces = self._holding.pieces
        held = {n: flat for n, flat in sums.items() if self._all[pieces[n].parameter] in self.used}
        self.norm = norm = self._begin_norm(held, finite)
        # A tensor without dimensions is clipped in another way than one of one element.
        self._held = {
            n: pieces[n].within(flat, self._all[pieces[n].parameter]) for n, flat in held.items()
        }
        if self._clipping.norm is not None:
            _ = norm.square
            if not self._plan.on_device:
                norm.read()
                self.finite = norm.agree_finite()
        if self.finite is not False:
            self._clipping.clip(self._held.values(), norm)

    def sums_of_pieces(self, factor: float) -> tuple[dict[int, torch.Tensor], bool | None]:
        """Waits for the sums of the pieces that this member holds. Returns them, multiplied by
        `factor`, each of shape (numel,), and whether they are finite. None: not known, and they are
        on the host."""
        assert self._plan is not None
        finite = None
        if self._plan.on_device:
            finite = self._complete(factor)
        else:
            for one in self._buckets:
                one.arrive()
                one.scale_on_device(factor)
        return {n: flat for one in self._buckets for n, flat in one.held().items()}, finite

    def _begin_norm(self, held: Mapping[int, torch.Tensor], finite: bool | None) -> GatheredNorm:
        """`held`: the gradients of the pieces that have one, of shape (numel,). `finite`: whether
        all their elements are; None: not known, and they are on the host. Raises GroupError."""
        assert self._plan is not None
        parts: list[torch.Tensor | None] = []
        for number in self._own_pieces:
            piece = self._holding.pieces[number]
            size = elements_per_unit(self._all[piece.parameter].dtype)
            flat = held.get(number)
            parts += [None] * -(-piece.numel // size) if flat is None else flat.split(size)
        own = squares_of_units(parts, self._own_units.device)
        if finite is None:
            # A square may overflow although all elements are finite.
            finite = bool(torch.isfinite(own).all()) or all(
                bool(torch.isfinite(flat).all()) for flat in held.values()
            )
        squares = own.new_zeros(max(1, len(self._units.units)))
        squares.index_copy_(0, self._own_units, own)
        wide = any(p.dtype == torch.float64 for p in self.used)
        return GatheredNorm(self._plan.on_host, squares, finite=finite, wide=wide)

    def gradients(self) -> Mapping[Any, torch.Tensor]:
        return super().gradients() if self._holding.all_hold_all else self._held

    def agree_finite(self) -> None:
        """Sets `finite`, once the norm is on the host. Raises GroupError."""
        assert isinstance(self.norm, GatheredNorm) and self._plan is not None
        self.finite = self.norm.agree_finite(confirms=self._plan.on_device)


class GatheredNorm(GradientNorm):
    """A norm that the members are adding up. The host does not wait for a device."""

    def __init__(
        self, group: ProcessGroup, squares: torch.Tensor, *, finite: bool, wide: bool
    ) -> None:
        """`squares`: of all units, 0 where another rank is the primary. `finite`: whether each
        element that this rank holds is. Raises GroupError."""
        super().__init__(self._arrive, wide=wide)
        self._group, self._finite = group, finite
        self._squares = squares.new_empty(group.world_size * squares.numel())
        self._operation = group.transport.all_gather(self._squares, squares)

    def _arrive(self) -> torch.Tensor:
        self._group.transport.wait(self._operation)
        return fold_squares(self._squares.view(self._group.world_size, -1).sum(0))  # x + 0 is x

    def agree_finite(self, *, confirms: bool = False) -> bool:
        """Returns whether the whole gradient is finite, the same on all members, once its norm is
        on the host. With `confirms` it waits for all of them. Raises GroupError."""
        assert self.value is not None
        if math.isfinite(self.value) and not confirms:
            return True
        told = self._group.gather_bytes(b"1" if self._finite else b"0")
        return math.isfinite(self.value) or all(one == b"1" for one in told)


def _most_updated(world_size: int, dtype: torch.dtype, needed: HeldRanges) -> int:
    """Returns the most elements of this dtype of which some rank is the primary."""
    numel = [0] * world_size
    for p, ranges in needed.items():
        for one in ranges if p.dtype == dtype else ():
            numel[one.ranks[0]] += one.last - one.first
    return max(numel)


def _cut(memory: torch.Tensor, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """Returns the parts of these sizes, by bucket, from the beginning of the memory on."""
    parts = memory[: sum(sizes.values())].split([*sizes.values()])
    return dict(zip(sizes, parts, strict=True))


def _is_left_alone(memory: torch.Tensor, operations: Iterable[Operation]) -> bool:
    return not any(one.may_access(memory) for one in operations)
