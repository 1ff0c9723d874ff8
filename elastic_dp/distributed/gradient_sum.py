"""Gradients of V virtual workers, added up across the members of a generation while backward still runs.

Exact mode adds along the fixed tree of reduction_tree.py: the sum has the same bits for every world size. A worker adds its own
subtrees as it goes, each gradient in its own hook; sums that wait are not copied. In the backward pass of its last
leaf, every bucket that is complete is sent: part r of each of my subtree sums to rank r (all-to-all), which adds up the
tree for its part and gives the finished part to all (all-gather, into the buffer that the first one emptied). Two
members with one subtree each do the same with one all-reduce, since a sum of two has one order. Fast mode is one
all-reduce a bucket, whatever the members.

What always holds:
- User code never meets the gradient of another micro-batch: `p.grad` is None when a loss function and its backward pass
  begin. One that a loss function leaves there is an error, and so is a post-accumulate-grad hook other than ours.
- Buckets are launched in index order, on every rank the same. One is launched early only when each of its
  parameters has fired. A parameter that fires twice in one backward (tied weights under reentrant checkpointing
  do) makes the step void (`late`): it may have been sent too early, or been added to its neighbour in parts. From
  then on (`sequential`) nothing is launched before backward has ended, and every leaf is added as a whole.
- An absent gradient travels as -0.0, the neutral element of IEEE addition: x + -0.0 is x, also for x = -0.0.
- A buffer of an operation that was walked away from is never used again, since that may still write into it.
  The others serve the next generation, too: touching new memory costs more than a collective.

Layout: parameters that require a gradient, in reverse order of registration (about the order in which backward
makes them), cut into buckets by dtype and device. A view into a bucket has the strides of its parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_dp.distributed.process_group import Operation, ProcessGroup
from elastic_dp.distributed.reduction_tree import Leaf, Node, add_up, cover
from elastic_dp.errors import GroupError, LossError, ModelError

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first collective starts early
LAST_BUCKET_BYTES = 8 << 20  # small, since no computing hides it; those before halve what is left
UNCUT_BYTES = 4 << 20  # a model up to this size goes in one: a collective costs more than it hides
_PIECE_NUMEL = 1 << 18  # added, and looked at while it is in the cache

Gradients = list[torch.Tensor | None]  # one per parameter, in layout order


class _Bucket:
    """A run of parameters of one dtype and device, and, within a generation, their flat buffers."""

    def __init__(self, first: int, parameters: list[torch.nn.Parameter]) -> None:
        self.first, self.last = first, first + len(parameters)
        self.parameters = parameters
        self.numel = sum(p.numel() for p in parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.memory: list[torch.Tensor] = []  # what the buffers below are cut from
        self.flats: list[torch.Tensor] = []  # one per subtree of this worker: (world_size * chunk,)
        self.views: list[list[torch.Tensor]] = []  # [subtree][parameter]
        self.received: list[torch.Tensor] = []  # [j]: part `rank` of the j-th subtree of every rank
        self.launched: list[Operation] = []
        self.gathering: Operation | None = None
        self.waiting = 0  # parameters that have not fired yet in the last leaf
        self.sums: list[torch.Tensor] = []  # of all elements, piece by piece, where they are known

    @property
    def operations(self) -> list[Operation]:
        return self.launched if self.gathering is None else [*self.launched, self.gathering]


class GradientSum:
    """Adds gradients for one model; buffers and collectives are those of the generation it was opened for."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.sequential = self.late = False
        self._names = {p: name for name, p in parameters.items()}
        self._all = list(self._names)
        self._parameters: list[torch.nn.Parameter] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._requires_grad: list[bool] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[_Bucket] = []
        self._hooks: list[Any] = []
        self._group: ProcessGroup | None = None
        self._covers: list[list[Node]] = []  # [rank]: the subtrees that its range consists of
        self._virtual_workers = 0
        self._exact = True
        self._all_reduces = self._swaps = False
        self._running = False  # hooks act only within a step's backward passes
        self._is_last = False  # ... and launch only in the last one
        self._next = 0  # first bucket that is not launched
        self._stack: list[Gradients] = []  # sums of whole subtrees
        self._merges = 0  # to so many of them this leaf's gradient is added
        self._hand: Gradients = []  # the sum that this leaf completes
        self._fired = bytearray()
        self._used = bytearray()
        self._error: GroupError | None = None
        self._free: list[torch.Tensor] = []  # memory for the buffers of later generations

    # ----------------------------------------------------------------------- generation

    def open(
        self, group: ProcessGroup, shares: Sequence[Node], virtual_workers: int, exact: bool
    ) -> None:
        """Work for this generation. `shares[r]` is the range of virtual workers of rank r."""
        self._group = group
        self._virtual_workers, self._exact = virtual_workers, exact
        self._covers = [cover(*share, virtual_workers) for share in shares]
        one_order = not exact or [len(nodes) for nodes in self._covers] == [1, 1]
        # Of the same bytes Gloo makes one round and not two, with half the processor time.
        self._swaps = one_order and group.world_size == 2 and group.home.type == "cpu"
        self._all_reduces = one_order and not self._swaps
        self._lay_out()

    def close(self) -> None:
        """Forget the generation; what is still in flight keeps its buffers."""
        self._running = False
        group, self._group = self._group, None
        self._stack.clear()
        for bucket in self._buckets:
            if group is not None and all(map(group.is_over, bucket.operations)):
                self._free += bucket.memory
            bucket.memory, bucket.flats, bucket.views, bucket.received = [], [], [], []
            bucket.launched, bucket.gathering = [], None

    def preallocate(self, virtual_workers: int) -> None:
        """Touch memory for buffers before a group waits for it: what each bucket sends, and what it receives."""
        self._virtual_workers = virtual_workers
        self._arrange()
        self._free = [
            torch.zeros(b.numel + virtual_workers, dtype=b.dtype, device=b.device)
            for b in self._buckets * 2
        ]

    def _lay_out(self) -> None:
        self._arrange()
        for bucket in self._buckets:
            self._allocate(bucket)
        # A device's allocator keeps memory by itself. The host's gives it back to the system, so here it is kept.
        self._free = [memory for memory in self._free if memory.device.type == "cpu"]

    def _arrange(self) -> None:
        """Hooks and buckets for the parameters that require a gradient now."""
        requires_grad = [p.requires_grad for p in self._all]
        if requires_grad != self._requires_grad:
            parameters = [p for p in reversed(self._all) if p.requires_grad]
            for hook in self._hooks:
                hook.remove()
            self._parameters, self._requires_grad = parameters, requires_grad
            self._frozen = [p for p in self._all if not p.requires_grad]
            self._refuse_hooks(0)
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._hook(i))
                for i, p in enumerate(parameters)
            ]
            self._buckets = _cut(parameters)
            self._free = []
            self._bucket_of = [b for b in self._buckets for _ in b.parameters]
            self._used = bytearray(len(parameters))

    def _allocate(self, bucket: _Bucket) -> None:
        assert self._group is not None
        world_size, rank = self._group.world_size, self._group.rank
        chunk = self._chunk(bucket)
        mine = len(self._covers[rank]) if self._exact else 1
        bucket.memory = []
        bucket.flats = [self._buffer(bucket, world_size * chunk) for _ in range(mine)]
        for flat in bucket.flats:
            flat[bucket.numel :] = 0.0
        bucket.views = [_views(flat, bucket.parameters) for flat in bucket.flats]
        bucket.received = []
        if self._swaps:
            bucket.received = [self._buffer(bucket, world_size * chunk)]
        elif world_size > 1 and not self._all_reduces:
            bucket.received = [
                self._buffer(bucket, len(ranks) * chunk) for ranks in self._ranks_with_subtree()
            ]

    def _buffer(self, bucket: _Bucket, numel: int) -> torch.Tensor:
        fitting = [
            t
            for t in self._free
            if (t.dtype, t.device) == (bucket.dtype, bucket.device)
            and numel <= t.numel() <= 2 * numel + self._virtual_workers
        ]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [t for t in self._free if t is not memory]
        else:  # with room for the padding of any other world size
            size = numel + self._virtual_workers
            memory = torch.empty(size, dtype=bucket.dtype, device=bucket.device)
        bucket.memory.append(memory)
        return memory[:numel]

    def _chunk(self, bucket: _Bucket) -> int:
        assert self._group is not None
        return math.ceil(bucket.numel / self._group.world_size)

    def _ranks_with_subtree(self) -> list[list[int]]:
        """[j]: the ranks whose range consists of more than j subtrees."""
        counts = [len(nodes) for nodes in self._covers]
        return [[r for r, n in enumerate(counts) if n > j] for j in range(max(counts))]

    # ----------------------------------------------------------------------------- step

    def begin(self) -> None:
        """Before the first leaf of a step. Follows `requires_grad` where the user changed it."""
        assert self._group is not None
        if [p.requires_grad for p in self._all] != self._requires_grad:
            self._lay_out()
        self.drop()
        self.late = False
        self._error = None
        self._used[:] = bytes(len(self._used))
        self._next = 0
        for bucket in self._buckets:
            bucket.launched, bucket.gathering, bucket.sums = [], None, []

    def drop(self) -> None:
        """Forget every gradient, also those of a step that was not committed."""
        self._running, self._hand = False, []
        self._stack.clear()
        for p in self._all:
            p.grad = None

    def before_leaf(self, leaf: Leaf, is_last: bool) -> None:
        """Before the forward pass of `leaf`."""
        self._fired = bytearray(len(self._parameters))
        self._hand = [None] * len(self._parameters)
        self._merges = leaf.merges if self._exact else min(1, len(self._stack))
        self._is_last = is_last
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def before_backward(self) -> None:
        """The loss function has returned. Raises LossError and ModelError."""
        for p in self._all:
            if p.grad is not None:
                raise LossError(
                    f"the loss function left a gradient in model.{self._names[p]}.grad: it called backward(), or assigned it. "
                    "Return the loss, whose backward pass is run for you; within a loss use torch.autograd.grad"
                )
        self._refuse_hooks(1)
        self._running = True

    def after_leaf(self, leaf: Leaf, is_last: bool) -> None:
        """After its backward pass, or after it turned out to contribute nothing."""
        self._running = False
        for p in self._frozen:
            if p.grad is not None:
                raise LossError(
                    f"model.{self._names[p]} did not require a gradient when the step began, and the loss function gave "
                    "it one: call requires_grad_() before the loop over ctx.steps, or in its body"
                )
        if is_last:
            return
        for i, p in enumerate(self._parameters):
            if self.sequential or (self._merges and not self._fired[i]):
                self._hand[i] = self._merged(i, p.grad)
                p.grad = None
        del self._stack[len(self._stack) - self._merges :]
        self._stack.append(self._hand)

    def send(self) -> None:
        """After the last leaf: every bucket that is not on its way yet."""
        while self._next < len(self._buckets):
            self._flush(self._buckets[self._next])
        if self._error is not None:
            raise self._error

    def reduce(self) -> None:
        """Finish the sums of my parts and send them out, bucket by bucket as they arrive."""
        group = self._group
        assert group is not None
        for bucket in self._buckets:
            for operation in bucket.launched:
                group.wait(operation)
            part = self._add_up(bucket)
            if len(part) < len(bucket.flats[0]):
                bucket.gathering = group.all_gather(bucket.flats[0], part)

    def settle(self) -> None:
        """Wait for what was sent, so that the buffers may be filled once more in this generation."""
        assert self._group is not None
        for bucket in self._buckets:
            if bucket.gathering is not None:
                self._group.wait(bucket.gathering)

    def complete(self, factor: float) -> bool:
        """Wait until the finished parts of all have arrived, and take them `factor` times, bucket by bucket.

        Returns whether all is finite, the same on every rank. A sum is not finite if one element is not; one that is
        may still overflow, and only then each is looked at.
        """
        assert self._group is not None
        for bucket in self._buckets:
            if bucket.gathering is not None:
                self._group.wait(bucket.gathering)
            if factor != 1.0:
                bucket.flats[0].mul_(factor)
            if factor != 1.0 or not bucket.sums:
                bucket.sums = [_sum(bucket.flats[0])]  # while the next bucket is on its way
        if all(math.isfinite(x.item()) for bucket in self._buckets for x in bucket.sums):
            return True
        return all(bool(torch.isfinite(bucket.flats[0]).all()) for bucket in self._buckets)

    def assign(self, used: Sequence[int]) -> list[torch.Tensor]:
        """Give every used parameter its gradient, a view into the buckets; the others keep None.

        Returns the gradients; they hold until the next `begin` or `open`.
        """
        given = []
        for bucket in self._buckets:
            for i, p, view in zip(
                range(bucket.first, bucket.last), bucket.parameters, bucket.views[0], strict=True
            ):
                p.grad = view if used[i] else None
                if used[i]:
                    given.append(view)
        return given

    @property
    def used(self) -> bytes:
        """One byte per parameter: whether some virtual worker of mine gave it a gradient."""
        return bytes(self._used)

    # -------------------------------------------------------------------------- private

    def _refuse_hooks(self, ours: int) -> None:
        """Raises ModelError where a parameter has a post-accumulate-grad hook that is not one of ours."""
        for p in self._parameters:
            if len(p._post_accumulate_grad_hooks or ()) > ours:
                raise ModelError(
                    f"model.{self._names[p]} has a post-accumulate-grad hook, which would see sums of as many micro-batches "
                    "as this worker happens to run. Use register_hook, which sees the gradient of each micro-batch, or for "
                    "that of the step clip_norm=, or optimizer.register_step_pre_hook"
                )

    def _hook(self, index: int) -> Any:
        def fired(parameter: torch.nn.Parameter) -> None:
            if not self._running:
                return
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                name = self._names[parameter]
                raise ModelError(f"model.{name} has a sparse gradient; use Embedding(sparse=False)")
            self._used[index] = 1
            if self.sequential:
                return  # `after_leaf` and `send` take it, when it is whole
            if self._fired[index]:
                self.late, parameter.grad = True, None
                return
            self._fired[index] = 1
            if not self._is_last:
                self._hand[index] = self._merged(index, gradient) if self._merges else gradient
                parameter.grad = None
                return
            bucket = self._bucket_of[index]
            # At once, while its gradient is in the cache.
            self._write_last(bucket, index, parameter)
            bucket.waiting -= 1
            if bucket.waiting:
                return
            while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
                self._flush(self._buckets[self._next])

        return fired

    def _flush(self, bucket: _Bucket) -> None:
        """Write this worker's sums of one bucket into its buffers and launch its exchange."""
        aside = self._stack[: len(self._stack) - self._merges]
        for subtree, sums in enumerate(aside):
            for view, one in zip(
                bucket.views[subtree], sums[bucket.first : bucket.last], strict=True
            ):
                self._write(view, one)
        for index, p in enumerate(bucket.parameters, bucket.first):
            if self.sequential or not self._fired[index]:
                self._write_last(bucket, index, p)
        self._next += 1
        try:
            self._launch(bucket)
        except GroupError as error:  # must not pass through autograd; `send` raises it
            self._error = self._error or error

    def _write_last(self, bucket: _Bucket, index: int, p: torch.Tensor) -> None:
        """This parameter's gradient of the last subtree, added up with what was put aside for it."""
        view = bucket.views[-1][index - bucket.first]
        self._write(view, self._merged(index, p.grad, out=view))
        p.grad = None

    def _merged(
        self, index: int, value: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """This leaf's gradient, added to the sums that wait for it; the last of them goes to `out`."""
        for depth in range(1, self._merges + 1):
            one = self._stack[-depth][index]
            if one is None or value is None:
                value = value if one is None else one
            elif out is not None and depth == self._merges:
                value = torch.add(one, value, out=out)
            else:
                value = one.add_(value)
        return value

    def _write(self, view: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None:
            view.fill_(-0.0)
        elif value is not view:
            view.copy_(value)

    def _launch(self, bucket: _Bucket) -> None:
        group = self._group
        assert group is not None
        if group.world_size == 1 or self._error is not None:
            return
        if self._all_reduces:
            bucket.launched = [group.all_reduce(bucket.flats[0])]
            return
        if self._swaps:
            mine = bucket.flats[0]
            sizes = [0, len(mine)] if group.rank == 0 else [len(mine), 0]
            bucket.launched = [group.all_to_all(bucket.received[0], mine, sizes, sizes)]
            return
        chunk = self._chunk(bucket)
        for j, ranks in enumerate(self._ranks_with_subtree()):
            mine = bucket.flats[j] if j < len(bucket.flats) else bucket.flats[0][:0]
            bucket.launched.append(
                group.all_to_all(
                    bucket.received[j],
                    mine,
                    [chunk if r in ranks else 0 for r in range(group.world_size)],
                    [chunk if len(mine) else 0] * group.world_size,
                )
            )

    def _add_up(self, bucket: _Bucket) -> torch.Tensor:
        """My part of the bucket, summed over all virtual workers; where nobody has parts, all of it."""
        assert self._group is not None
        if self._all_reduces:
            return bucket.flats[0]
        if self._swaps:
            received = bucket.received[0].split(_PIECE_NUMEL)
            for mine, theirs in zip(bucket.flats[0].split(_PIECE_NUMEL), received, strict=True):
                bucket.sums.append(_sum(mine.add_(theirs)))
            return bucket.flats[0]
        if self._group.world_size == 1:
            nodes = dict(zip(self._covers[0], bucket.flats, strict=True))
        else:
            nodes = self._received_nodes(bucket)
        return add_up(nodes, self._virtual_workers, lambda a, b: a.add_(b))

    def _received_nodes(self, bucket: _Bucket) -> dict[Node, torch.Tensor]:
        chunk = self._chunk(bucket)
        nodes = {}
        for j, ranks in enumerate(self._ranks_with_subtree()):
            parts = bucket.received[j].split(chunk)
            for part, rank in zip(parts, ranks, strict=True):
                nodes[self._covers[rank][j]] = part
        return nodes


def _sum(flat: torch.Tensor) -> torch.Tensor:
    return flat.sum(dtype=torch.float32 if flat.element_size() < 4 else None)


def _cut(parameters: list[torch.nn.Parameter]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    current: list[torch.nn.Parameter] = []
    total = sum(p.numel() * p.element_size() for p in parameters)
    size, limit = 0, FIRST_BUCKET_BYTES if total > UNCUT_BYTES else UNCUT_BYTES
    for i, p in enumerate(parameters):
        p_bytes = p.numel() * p.element_size()
        same = not current or (current[0].dtype, current[0].device) == (p.dtype, p.device)
        if current and (not same or size + p_bytes > limit):
            buckets.append(_Bucket(i - len(current), current))
            total -= size
            current, size = [], 0
            limit = max(LAST_BUCKET_BYTES, min(BUCKET_BYTES, total // 2))
        current.append(p)
        size += p_bytes
    if current:
        buckets.append(_Bucket(len(parameters) - len(current), current))
    return buckets


def _views(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    views, offset = [], 0
    for p in parameters:
        dense = torch._debug_has_internal_overlap(p) == 0 and _is_dense(p)
        stride = p.stride() if dense else torch.empty(p.shape, device="meta").stride()
        views.append(flat.as_strided(p.shape, stride, offset))
        offset += p.numel()
    return views


def _is_dense(p: torch.Tensor) -> bool:
    """Whether its elements fill p.numel() places without gaps, in whatever order."""
    if p.numel() == 0:
        return True
    reach = 1 + sum((size - 1) * step for size, step in zip(p.shape, p.stride(), strict=True))
    return reach == p.numel()
