"""How the members of a generation make the gradient of a step from the sums of each.

In a step the methods of a `GradientExchange` are called in this order:

    begin         the step begins
    views         where this member writes its sums of a bucket (`GradientReducer`)
    bucket_ready  they are written: by hooks, while the last backward pass runs
    reduce        this member finishes the sums of its parts, and sends them
    unread        what the host must know of what is on a device, which `take` gets
    finish        waits for the sums, scales them, takes their norm, clips
    assign        gives parameters their gradients

`GradientExchange` itself gives all members all sums: in exact mode added along the fixed tree, in
fast mode by one all-reduce for each bucket. A class that is derived from it may give each member
some pieces only, or take the norm over several processes. There is one norm and one clip for all
of them (gradient_norm.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.distributed.abandoned_groups import allocate_buffers, are_large
from elastic_dp.distributed.cross_worker_reduction import (
    BucketReduction,
    GradientBufferPool,
    ReductionPlan,
)
from elastic_dp.distributed.gradient_buckets import GradientBucket, GradientLayout
from elastic_dp.distributed.gradient_norm import (
    NO_CLIPPING,
    GradientClipping,
    GradientNorm,
    fold_squares,
    is_wide,
    squares_of_units,
)
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.distributed.local_shards import is_sharded, sharded_like


class GradientExchange:
    """All members get the whole gradient. From `finish` on, `finite` is whether the gradient is
    (None: not known yet), and `norm` its norm."""

    divided_by = 1  # what each gradient is divided by already
    norm_is_on_host = False  # where gradients are not

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        clipping: GradientClipping = NO_CLIPPING,
        writes_to_gradients: Callable[[], bool] = lambda: False,
    ) -> None:
        """`parameters`: all of the model, in order. `writes_to_gradients`: whether the optimizer
        may, so that the norm has to be computed before."""
        self._all, self._clipping = list(parameters), clipping
        self._writes_to_gradients = writes_to_gradients
        self._units = UnitLayout.of(self._all)
        self._is_sharded = any(map(is_sharded, self._all))
        self._layout = GradientLayout([])
        self._plan: ReductionPlan | None = None
        self._pool = GradientBufferPool()
        self._buckets: list[BucketReduction] = []  # by number
        self._turns: list[BucketReduction] = []  # in the order in which they are reduced
        self._turns_taken = self._ready = 0
        self._extremes: Sequence[torch.Tensor] = ()
        self._found: dict[torch.nn.Parameter, torch.Tensor] = {}
        # Of a gradient of all parameters of the layout, whose memory is that of the generation.
        self._pieces: list[torch.Tensor | None] | None = None
        self.finite: bool | None = None
        self.norm: GradientNorm | None = None

    # ----------------------------------------------------------------------- generation

    def open(self, plan: ReductionPlan, layout: GradientLayout) -> None:
        """Begins a generation, or one with other parameters. Raises GroupAborted, and ClusterError
        if the host has no memory."""
        self._plan, self._layout = plan, layout
        allocate_buffers(self._allocate, plan.on_host.check, self._is_withheld)

    def close(self) -> None:
        """Ends the generation. Operations in flight keep their buffers."""
        self._drop()
        for one in self._buckets:
            one.release(self._pool)
        self._plan, self._buckets, self._turns, self._pieces = None, [], [], None

    def preallocate(self, layout: GradientLayout, virtual_workers: int) -> None:
        """Touches memory for buffers before a group needs it."""
        self._pool.preallocate(layout.buckets, virtual_workers, receives=True)

    def forget_memory(self) -> None:
        """The buckets are about to have other sizes."""
        self._pool.clear()

    @property
    def is_large(self) -> bool:
        """Whether the buffers take much memory of the host."""
        return are_large(p for p in self._all if p.requires_grad)

    def _is_withheld(self) -> bool:
        return self.is_large and self._pool.is_withheld

    def _allocate(self) -> None:
        assert self._plan is not None
        self._buckets, self._pieces = [], None
        self._pool.collect()
        self._buckets = [self._reduction(bucket) for bucket in self._layout.buckets]
        self._turns = [one for _ in self._plan.rounds or (None,) for one in self._buckets]
        self._turns_taken = self._ready = 0
        self._pool.keep_host_memory_only()

    def _reduction(self, bucket: GradientBucket) -> BucketReduction:
        assert self._plan is not None
        return BucketReduction(self._plan, bucket, self._pool)

    # ----------------------------------------------------------------------------- step

    def begin(self) -> None:
        """Begins a step. What the one before has found is gone."""
        self._drop()
        self._turns_taken = self._ready = 0
        for one in self._buckets:
            one.begin()

    def _drop(self) -> None:
        """What the last step has found is about to be overwritten."""
        if self.norm is not None:
            self.norm.gradients_go()
        self._extremes, self._found = (), {}
        self.finite = self.norm = None

    def views(self, bucket: GradientBucket) -> Sequence[Sequence[torch.Tensor]]:
        """Returns a tensor for each parameter of a bucket, for each subtree of this member."""
        return self._buckets[bucket.number].views

    def bucket_ready(self, bucket: GradientBucket) -> None:
        """Sends a bucket. Called for one after another. Raises GroupError."""
        self._ready += 1
        self._buckets[bucket.number].launch()

    def advance(self) -> None:
        """Does as much of `reduce` as need not wait for other members."""
        turns, is_sent = self._turns, self._ready == len(self._buckets)
        while is_sent and self._turns_taken < len(turns) and turns[self._turns_taken].has_arrived:
            self._take_turn()

    def reduce(self) -> None:
        """Does what is left for this member to do for others. Raises GroupError."""
        while self._turns_taken < len(self._turns):
            self._take_turn()

    def _take_turn(self) -> None:
        self._turns[self._turns_taken].reduce()
        self._turns_taken += 1

    def settle(self) -> None:
        """Waits until nothing is in flight. Raises GroupError."""
        for one in self._buckets:
            one.settle()

    def unread(self) -> list[torch.Tensor]:
        """Returns what `finish` needs on the host. Raises GroupError."""
        if self._plan is None or not self._plan.on_device:
            return []
        for one in self._buckets:
            one.arrive()
        return [one.extremes() for one in self._buckets]

    def take(self, read: Sequence[torch.Tensor]) -> None:
        """Takes what `unread` returned, on the host."""
        self._extremes = read

    @torch.no_grad()
    def finish(self, factor: float, used: Sequence[int]) -> None:
        """Waits for the sums that this member needs, multiplies them by `factor`, and clips them.
        `used`: for each parameter of the layout, whether it has a gradient. Raises GroupError."""
        self.finite = self._complete(factor)
        views = [view for one in self._buckets for view in one.total_views]
        pairs = zip(self._layout.parameters, views, used, strict=True)
        self._found = {p: view for p, view, flag in pairs if flag}
        ordered = [self._found.get(p) for p in self._all]
        self.norm = GradientNorm(lambda: self._square(ordered), wide=is_wide(ordered))
        if self.finite:
            self._clip()

    def _complete(self, factor: float) -> bool:
        """Scales the sums. Returns whether they are finite, the same on every member."""
        assert self._plan is not None
        if self._plan.on_device:
            # The extremes are rounded as all elements are, so where they are finite, all are.
            for one in self._buckets:
                one.scale_on_device(factor)
            return all(
                math.isfinite(x) for pair in self._extremes for x in pair.mul(factor).tolist()
            )
        for one in self._buckets:
            one.arrive()
            one.scale(factor)
        return all(one.is_finite() for one in self._buckets)

    def _square(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns the square of the norm of these gradients, one for each parameter."""
        if len(self._found) < len(self._layout.parameters):
            return fold_squares(squares_of_units(self._units.pieces(gradients)))
        if self._pieces is None:
            self._pieces = self._units.pieces(gradients)
        return fold_squares(squares_of_units(self._pieces))

    def _clip(self) -> None:
        """Computes the norm if it is needed or would be gone later, and clips."""
        assert self.norm is not None
        assert self._plan is not None
        if self._clipping.clips or self._writes_to_gradients():
            _ = self.norm.square
            if self.norm_is_on_host or not self._plan.on_device:
                self.norm.read()
        if self._clipping.clips:
            for one in self._buckets:
                one.overwrite()
            whole = [tensor for one in self._buckets for tensor in one.elementwise]
            self._clipping.clip(whole, self.norm)

    def gradients(self) -> Mapping[Any, torch.Tensor]:
        """Returns what this member updates by."""
        return self._found

    def assign(self) -> None:
        """Gives parameters their gradients, where each member updates all of them: views into the
        buckets, valid until the next `begin` or `open`."""
        for p, view in self._found.items():
            p.grad = sharded_like(view, p) if self._is_sharded else view

    def last_subtree(self) -> list[torch.Tensor] | None:
        """After an abort: returns the sum of this member's last subtree, a tensor for each
        parameter of the layout, which is the caller's from now on. None: it is overwritten."""
        if any(one.overwritten for one in self._buckets):
            return None
        return [view for one in self._buckets for view in one.keep_last_subtree()]
