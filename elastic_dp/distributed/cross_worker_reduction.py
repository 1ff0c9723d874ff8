"""The exchange of one bucket of gradients in a generation: its buffers, collectives and finished
sum.

Part r of each subtree sum goes to rank r (all-to-all), which adds up the tree for its part and
sends the finished part to all ranks (all-gather, into the buffer that the first all-to-all
filled). Where members share nodes, sums within a node come first, in a round of their own
(`ReductionRound`); the all-gather is then a ring in the order of ranks, which crosses from node
to node once. Two members with one subtree each exchange the whole bucket instead, since a sum of
two has one order. Fast mode is one all-reduce per bucket.

Where only some members need each element, since they hold the optimizer's state for it, a finished
part goes to those that need it, and not to all (`piece_route`).

With `wire=` (gradient_rounding.py) all of this is with rounded sums, in fewer bytes; the finished
sum is converted last, on each rank.

In exact mode nothing is added or received in the buffers that a worker sends its own sums from. So
when a peer is lost during the exchange, what the survivors have finished is still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from elastic_dp.distributed.gradient_buckets import GradientBucket
from elastic_dp.distributed.piece_assignment import PieceRoute
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.reduction_tree import (
    Node,
    Share,
    add_up,
    cover_share,
    reduction_rounds,
)

_PIECE_NUMEL = 1 << 18  # elements that are added and checked while they are in the cache


class ReductionPlan:
    """The collectives that a generation uses for all of its buckets. `shares[r]` are the ranges of
    virtual workers of rank r, `topology` that of the membership."""

    def __init__(
        self,
        group: ProcessGroup,
        shares: Sequence[Share],
        virtual_workers: int,
        exact: bool,
        topology: Sequence[Sequence[int]] = (),
    ) -> None:
        self.on_host = group
        self.group, self.virtual_workers, self.exact = group.transport, virtual_workers, exact
        self.on_device = group.on_device is not None
        # [rank]: its subtrees
        self.covers = [cover_share(share, virtual_workers) for share in shares]
        one_order = not exact or [len(nodes) for nodes in self.covers] == [1, 1]
        # Gloo then sends the same bytes in one round instead of two, with half the CPU time, and a
        # device adds them itself.
        self.swaps = one_order and group.world_size == 2
        self.all_reduces = one_order and not self.swaps
        summed = group.world_size > 1 and not one_order
        # Empty where no rank adds up its part of the tree.
        self.rounds = (
            reduction_rounds(self.group.rank, shares, virtual_workers, topology) if summed else []
        )

    @property
    def subtrees(self) -> int:
        """The number of sums that this member has for each bucket."""
        return len(self.covers[self.group.rank]) if self.exact else 1

    def first_received(self, bucket: GradientBucket) -> int:
        """Returns the number of elements for what a bucket receives first, and then sends or
        gathers."""
        received = sum(self.rounds[0].received[0]) * self.chunk(bucket)
        # What is received is shorter only where nodes have different numbers of members.
        return max(received, self.group.world_size * self.chunk(bucket))

    def chunk(self, bucket: GradientBucket) -> int:
        """Returns the number of elements in the part of one rank, as they are sent."""
        return self.chunk_blocks(bucket) * bucket.rounding.record

    def chunk_blocks(self, bucket: GradientBucket) -> int:
        """Returns the number of blocks in the part of one rank."""
        return math.ceil(bucket.blocks / self.group.world_size)


class GradientBufferPool:
    """Memory that later generations reuse: touching new memory costs more than a collective."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._in_use: list[tuple[Sequence[torch.Tensor], Callable[[], bool]]] = []

    def preallocate(
        self, buckets: Sequence[GradientBucket], virtual_workers: int, *, receives: bool
    ) -> None:
        """Touches memory for what each bucket sends, and `receives`, before a group needs it."""
        self._free = []
        for b in buckets:
            rounding = b.rounding
            sent = b.wire_numel + virtual_workers * rounding.record, rounding.dtype
            result = b.numel + virtual_workers * rounding.block, b.dtype
            received = [sent, *([result] if b.is_rounded else [])] if receives else []
            for numel, dtype in (sent, *received):
                self._free.append(torch.zeros(numel, dtype=dtype, device=b.device))

    def clear(self) -> None:
        self._free = []

    def keep_host_memory_only(self) -> None:
        """Drops device memory, which the device's allocator caches by itself. The host's allocator
        returns memory to the system, so host memory is kept here."""
        self._free = [memory for memory in self._free if memory.device.type == "cpu"]

    def take(
        self, dtype: torch.dtype, device: torch.device, numel: int, padding: int
    ) -> torch.Tensor:
        """Returns a flat tensor of at least `numel` elements. `padding`: the most elements by which
        those of other world sizes are longer."""
        fitting = [
            t
            for t in self._free
            if (t.dtype, t.device) == (dtype, device) and numel <= t.numel() <= 2 * numel + padding
        ]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [t for t in self._free if t is not memory]
            return memory
        return torch.empty(numel + padding, dtype=dtype, device=device)

    def give_back(self, memory: Sequence[torch.Tensor]) -> None:
        self._free += memory

    def give_back_later(self, memory: Sequence[torch.Tensor], is_over: Callable[[], bool]) -> None:
        """Takes memory that may still be accessed. `collect` asks for it once."""
        self._in_use.append((memory, is_over))

    @property
    def is_withheld(self) -> bool:
        """Whether some memory may still be accessed that `collect` would take otherwise."""
        return any(not is_over() for _, is_over in self._in_use)

    def collect(self) -> None:
        """Takes what is no longer accessed of `give_back_later`, and forgets the rest."""
        for memory, is_over in self._in_use:
            self._free += memory if is_over() else ()
        self._in_use = []


class BucketReduction:
    """The exchange of one bucket within one generation. `views[j][i]` is where this worker writes
    the sum of its subtree j for parameter i of the bucket, `total_views[i]` where the finished sum
    of all workers is afterwards."""

    def __init__(
        self,
        plan: ReductionPlan,
        bucket: GradientBucket,
        pool: GradientBufferPool,
        first: torch.Tensor | None = None,
        route: PieceRoute | None = None,
        pieces: torch.Tensor | None = None,
    ) -> None:
        """`route`: of the plan. With one, the memory `first` for `plan.first_received(bucket)`
        elements, and `pieces` for what this rank needs, are the caller's."""
        self.bucket, self._plan = bucket, plan
        self._memory: list[torch.Tensor] = []  # what the buffers below are cut from
        world_size, chunk = plan.group.world_size, plan.chunk(bucket)
        # One per subtree of this worker: (world_size * chunk,).
        self._flats = [self._buffer(pool, world_size * chunk) for _ in range(plan.subtrees)]
        for flat in self._flats:
            flat[bucket.wire_numel :] = 0.0
        self.views = [bucket.sum_views(flat) for flat in self._flats]
        # [round][j]: this rank's chunks of the j-th sum of every part.
        self._received: list[list[torch.Tensor]] = []
        # Where the finished sum is in the end: (world_size * chunk,).
        self._total = self._flats[0] if self._flats else torch.empty(0)
        if plan.swaps:
            self._total = self._buffer(pool, world_size * chunk)
            self._received = [[self._total]]
        elif plan.rounds:
            received = [[sum(sizes) * chunk for sizes in each.received] for each in plan.rounds]
            # The first is no longer needed when finished parts arrive.
            self._total = (
                self._buffer(pool, plan.first_received(bucket)) if first is None else first
            )
            size, *others = received[0]
            self._received = [
                [self._total[:size], *(self._buffer(pool, numel) for numel in others)],
                *([self._buffer(pool, numel) for numel in sizes] for sizes in received[1:]),
            ]
            self._total = self._total[: world_size * chunk]
        self._route = route
        if route is not None:
            assert pieces is not None
            # What is received is added up at the beginning of its memory, and sent from behind it.
            self._part, self._sending = self._total[:chunk], self._total[chunk:]
            self._sending, self._total = self._sending[: sum(route.sent)], pieces
        # The finished sum in the dtype of the parameters.
        self._result = self._total
        if bucket.is_rounded:
            numel = len(self._total) // bucket.rounding.record * bucket.rounding.block
            self._result = (
                self._buffer(pool, numel, bucket.dtype)
                if route is None
                else torch.empty(numel, dtype=bucket.dtype, device=bucket.device)
            )
        self.total_views = [] if route is not None else bucket.views(self._result)
        # Tensors of all elements of the finished sum. Torch multiplies a tensor without dimensions
        # in another precision than one with some.
        scalars = any(view.dim() == 0 for view in self.total_views)
        self.elementwise = self.total_views if scalars else [self._result]
        self.begin()

    def _buffer(
        self, pool: GradientBufferPool, numel: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rounding = self.bucket.rounding
        padding = self._plan.virtual_workers * (rounding.block if dtype else rounding.record)
        memory = pool.take(dtype or rounding.dtype, self.bucket.device, numel, padding)
        self._memory.append(memory)
        return memory[:numel]

    # ----------------------------------------------------------------------------- step

    def begin(self) -> None:
        """Starts a new step."""
        self._launched: list[list[Any]] = []  # operations of the transport, by round
        self._gathering: list[Any] = []
        self.overwritten = False  # whether this worker's last sum is no longer in its buffer
        # Of the finished sum, piece by piece, once it is known: one number for all elements.
        self._element_totals: list[torch.Tensor] = []

    def launch(self) -> None:
        """Sends what is in the views. Raises GroupError."""
        plan, group = self._plan, self._plan.group
        if group.world_size == 1:
            return
        if plan.all_reduces:
            self._launched = [[group.all_reduce(self._total)]]
            return
        if plan.swaps:
            mine = self._flats[0]
            sizes = [0, len(mine)] if group.rank == 0 else [len(mine), 0]
            self._launched = [[group.all_to_all(self._received[0][0], mine, sizes, sizes)]]
            return
        self._send(self._flats)

    def _send(self, sums: Sequence[torch.Tensor]) -> None:
        """Sends these sums in the next round."""
        number, chunk = len(self._launched), self._plan.chunk(self.bucket)
        current = self._plan.rounds[number]
        self._launched.append([])
        for j, received in enumerate(self._received[number]):
            operation = self._plan.group.all_to_all(
                received,
                sums[j] if j < len(sums) else received[:0],
                [size * chunk for size in current.received[j]],
                [size * chunk for size in current.sent[j]],
            )
            self._launched[-1].append(operation)

    @property
    def has_arrived(self) -> bool:
        """Whether `reduce` need not wait. On a device that is not known, so it is False there."""
        latest = self._launched[-1] if self._launched else ()
        return not self._plan.on_device and all(map(self._plan.group.is_over, latest))

    def reduce(self) -> None:
        """Waits for the parts of other ranks, adds them up, and sends the sums in the next round.
        After the last one, sends this rank's part of the whole sum."""
        for operation in self._launched[-1] if self._launched else ():
            self._plan.group.wait(operation)
        if 0 < len(self._launched) < len(self._plan.rounds):
            self._send(self._received_sums())
            return
        part = self.sum_part()
        if self._route is not None:
            cuts = [part[first:last] for first, last in self._route.cuts]
            torch.cat(cuts or [part[:0]], out=self._sending)
            operation = self._plan.group.all_to_all(
                self._total, self._sending, self._route.received, self._route.sent
            )
            self._gathering = [operation]
        elif len(part) < len(self._total):
            self._gathering = [self._plan.group.all_gather(self._total, part)]

    def sum_part(self) -> torch.Tensor:
        """Returns this rank's part of the sum, or the whole sum if the bucket is not divided."""
        plan, bucket = self._plan, self.bucket
        if plan.swaps:
            if plan.on_device or bucket.is_rounded:
                root, add = (0, plan.virtual_workers), bucket.rounding.add
                return add(self._flats[0], self._total, root, bucket.first_block, self._total)
            received = self._total.split(_PIECE_NUMEL)
            for mine, theirs in zip(self._flats[0].split(_PIECE_NUMEL), received, strict=True):
                both = torch.add(mine, theirs, out=theirs)
                self._element_totals.append(_total_of_elements(both))
        if not plan.rounds:
            return self._total
        if self._route is not None:
            (part,) = self._received_sums(self._part)
            return part
        # Where the all-gather would copy it to, so that it may lie in the output.
        first = plan.group.rank * plan.chunk(bucket)
        (part,) = self._received_sums(self._total[first : first + plan.chunk(bucket)])
        return part

    def _received_sums(self, out: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Adds up what has arrived in the latest round. `out` is for the only sum of the last."""
        number = len(self._launched) - 1
        current = self._plan.rounds[number]
        size = current.owned * self._plan.chunk(self.bucket)
        arrived: dict[Node, torch.Tensor] = {}
        for nodes, received in zip(current.nodes, self._received[number], strict=True):
            arrived |= zip(nodes, received.view(len(nodes), size), strict=True)
        first = self.bucket.first_block + current.first * self._plan.chunk_blocks(self.bucket)

        def add(one: torch.Tensor, other: torch.Tensor, node: Node) -> torch.Tensor:
            to = out if out is not None and node == current.sums[0] else one
            return self.bucket.rounding.add(one, other, node, first, to)

        found = [add_up(arrived, root, add) for root in current.sums]
        if out is not None and current.sums[0] in arrived:
            return [out.copy_(found[0])]
        return found

    def settle(self) -> None:
        """Waits until the finished parts of all ranks have arrived. Raises GroupError."""
        for operation in self._gathering:
            self._plan.group.wait(operation)

    def arrive(self) -> None:
        """Settles, and converts the finished sum to the parameters' dtype. Raises GroupError."""
        self.settle()
        if self.bucket.is_rounded:
            self.bucket.rounding.restore(self._total, self._result)

    def scale(self, factor: float) -> None:
        """Multiplies the finished sum by `factor`."""
        self.scale_on_device(factor)
        if factor != 1.0 or not self._element_totals:  # while the next bucket is on its way
            self._element_totals = [_total_of_elements(self._result)]

    def scale_on_device(self, factor: float) -> None:
        if factor != 1.0:
            self.overwrite()
            self._result.mul_(factor)

    def overwrite(self) -> None:
        """The finished sum is about to be changed in place."""
        self.overwritten |= any(self._result is flat for flat in self._flats[:1])

    def held(self) -> dict[int, torch.Tensor]:
        """Returns the sums of the pieces that this rank needs, each of shape (numel,)."""
        assert self._route is not None
        return {piece: self._result[first:last] for piece, first, last in self._route.held}

    def extremes(self) -> torch.Tensor:
        """Returns the least and the largest element of the finished sum; NaN if there is one."""
        flat = self._result
        return torch.stack(torch.aminmax(flat)) if flat.numel() else flat.new_zeros(2)

    def is_finite(self) -> bool:
        """Returns whether all elements are finite. Their total may overflow although they are."""
        totals = all(math.isfinite(x.item()) for x in self._element_totals)
        return totals or bool(torch.isfinite(self._result).all())

    # ----------------------------------------------------------------------------- end

    def keep_last_subtree(self) -> list[torch.Tensor]:
        """Returns the views of that sum, whose memory is the caller's from now on."""
        address = self._flats[-1].data_ptr()
        self._memory = [memory for memory in self._memory if memory.data_ptr() != address]
        return self.views[-1]

    def release(self, pool: GradientBufferPool) -> None:
        """Returns the buffers to the pool. A buffer of an abandoned operation is not used again
        before the operation is over, since it may still write to it."""
        operations = [*chain.from_iterable(self._launched), *self._gathering]
        group = self._plan.group

        def is_over() -> bool:
            return all(map(group.is_over, operations))

        if is_over():
            pool.give_back(self._memory)
        elif not self._plan.on_device:  # whose communicator nothing else may hold
            pool.give_back_later(self._memory, is_over)


def _total_of_elements(flat: torch.Tensor) -> torch.Tensor:
    """Returns one number, by which a value that is not finite is found."""
    if flat.element_size() >= 4:
        return flat.sum()
    # Torch converts a tensor on a processor as a whole before it adds it up.
    return torch.stack([piece.sum(dtype=torch.float32) for piece in flat.split(_PIECE_NUMEL)]).sum()
