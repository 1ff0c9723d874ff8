"""The parameters that take part in a gradient sum, and the buckets in which their gradients travel.

Parameters that require a gradient are taken in reverse order of registration, about the order in
which backward computes their gradients, and cut into buckets by dtype and device. A view into a
bucket has the strides of its parameter. Of a sharded parameter all of this is its local part.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from elastic_dp.distributed.gradient_rounding import GradientRounding, Wire, rounding_of
from elastic_dp.distributed.gradient_units import memory_stride
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.distributed.reduction_tree import Node

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first collective starts early
LAST_BUCKET_BYTES = 8 << 20  # small, since no computing hides it; those before halve what is left
UNCUT_BYTES = 4 << 20  # a model up to this size goes in one: a collective costs more than it hides


class GradientBucket:
    """Consecutive parameters of one dtype and device: `first` up to `last` of the layout.
    `rounding` is how their gradients are added and sent: each parameter's as whole blocks, of which
    there are `blocks`. `first_block` is the number of the first one in the layout."""

    def __init__(
        self,
        number: int,
        first: int,
        parameters: list[torch.nn.Parameter],
        rounding: GradientRounding,
        first_block: int,
    ) -> None:
        self.number = number
        self.first, self.last = first, first + len(parameters)
        self.parameters = parameters
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.rounding, self.first_block = rounding, first_block
        blocks = (math.ceil(local_of(p).numel() / rounding.block) for p in parameters)
        # Where the blocks of each parameter begin and end in the bucket.
        self.cuts = list(accumulate(blocks, initial=0))
        self.blocks = self.cuts[-1]
        self.first_blocks = [first_block + cut for cut in self.cuts[:-1]]  # of each parameter

    @property
    def numel(self) -> int:
        """The number of elements, with those that fill up blocks."""
        return self.blocks * self.rounding.block

    @property
    def wire_numel(self) -> int:
        """The number of elements in which they are added and sent."""
        return self.blocks * self.rounding.record

    @property
    def is_rounded(self) -> bool:
        return self.rounding.dtype != self.dtype

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view into `flat`, of shape (numel or more,), for each parameter."""
        return [
            flat.as_strided(p.shape, memory_stride(p), cut * self.rounding.block)
            for p, cut in zip(map(local_of, self.parameters), self.cuts, strict=False)
        ]

    def sum_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view into `flat`, of shape (wire_numel or more,), for each parameter's sum."""
        record = self.rounding.record
        if record == 1:
            return self.views(flat)
        return [flat[a * record : b * record] for a, b in pairwise(self.cuts)]


Gradients = list[torch.Tensor | None]  # one per parameter, in layout order
is_given = functools.partial(operator.is_not, None)


def all_present(gradients: Gradients) -> bool:
    """Returns whether each parameter has a gradient."""
    return all(map(is_given, gradients))


class SumsOfOneKind(NamedTuple):
    """Parameters of one dtype and device, `first` up to `last` of the layout, whose gradients are
    added in one call. `first_blocks`: of each of them, the number of its first block."""

    rounding: GradientRounding
    first: int
    last: int
    first_blocks: list[int]

    def rounded(self, gradients: Gradients, node: Node) -> Gradients:
        """Returns a list in which the gradients of these parameters are rounded."""
        given = gradients[self.first : self.last]
        if all(map(is_given, given)):
            found = self.rounding.round(given, node, self.first_blocks)  # type: ignore[arg-type]
            return [*gradients[: self.first], *found, *gradients[self.last :]]
        there = [i for i in range(self.first, self.last) if gradients[i] is not None]
        found = self.rounding.round(
            [gradient for i in there if (gradient := gradients[i]) is not None],
            node,
            [self.first_blocks[i - self.first] for i in there],
        )
        rounded = [*gradients]
        for i, one in zip(there, found, strict=True):
            rounded[i] = one
        return rounded


def add_present(
    rounding: GradientRounding,
    sums: Gradients,
    gradients: Gradients,
    node: Node,
    blocks: Sequence[int],
) -> None:
    """Adds gradients to sums, where both are there."""
    if all(map(is_given, sums)) and all(map(is_given, gradients)):
        rounding.accumulate(sums, gradients, node, blocks)  # type: ignore[arg-type]
        return
    pairs = zip(sums, gradients, blocks, strict=True)
    both = [(a, b, block) for a, b, block in pairs if a is not None and b is not None]
    if both:
        some, others, firsts = zip(*both, strict=True)
        rounding.accumulate(some, others, node, firsts)


class GradientLayout:
    """The buckets for the parameters that require a gradient now."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], wire: Wire = None) -> None:
        """`parameters` are all parameters of the model, in order; `wire` is that of the job."""
        self._requires_grad = [p.requires_grad for p in parameters]
        self.parameters = [p for p in reversed(parameters) if p.requires_grad]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self._by_dtype = {p.dtype: rounding_of(wire, p.dtype) for p in self.parameters}
        self.buckets: list[GradientBucket] = []
        first = first_block = 0
        for cut in _cut(self.parameters):
            rounding = self._by_dtype[cut[0].dtype]
            bucket = GradientBucket(len(self.buckets), first, cut, rounding, first_block)
            self.buckets.append(bucket)
            first, first_block = bucket.last, first_block + bucket.blocks
        self.kinds: list[SumsOfOneKind] = []
        of_kind = itertools.groupby(self.buckets, lambda bucket: (bucket.dtype, bucket.device))
        for _, found in of_kind:
            buckets = list(found)
            blocks = [block for bucket in buckets for block in bucket.first_blocks]
            ends = buckets[0].first, buckets[-1].last
            self.kinds.append(SumsOfOneKind(buckets[0].rounding, *ends, blocks))

    def begin(self, seed: int) -> None:
        """Starts a step. `seed`: for what is drawn in it to round gradients."""
        for rounding in self._by_dtype.values():
            rounding.begin(seed)

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        return [p.requires_grad for p in parameters] == self._requires_grad


def _cut(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each bucket, in order."""
    cuts: list[list[torch.nn.Parameter]] = []
    current: list[torch.nn.Parameter] = []
    total = sum(local_of(p).nbytes for p in parameters)
    size, limit = 0, FIRST_BUCKET_BYTES if total > UNCUT_BYTES else UNCUT_BYTES
    for p in parameters:
        p_bytes = local_of(p).nbytes
        same = not current or (current[0].dtype, current[0].device) == (p.dtype, p.device)
        if current and (not same or size + p_bytes > limit):
            cuts.append(current)
            total -= size
            current, size = [], 0
            limit = max(LAST_BUCKET_BYTES, min(BUCKET_BYTES, total // 2))
        current.append(p)
        size += p_bytes
    return [*cuts, current] if current else cuts
