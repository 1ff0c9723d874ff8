"""The parameters that take part in a gradient sum, and the buckets in which their gradients travel.

Parameters that require a gradient are taken in reverse order of registration, about the order in
which backward computes their gradients, and cut into buckets by dtype and device. A view into a
bucket has the strides of its parameter. Of a sharded parameter all of this is its local part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_rounding import wire_dtype
from elastic_dp.distributed.local_shards import local_of

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first collective starts early
LAST_BUCKET_BYTES = 8 << 20  # small, since no computing hides it; those before halve what is left
UNCUT_BYTES = 4 << 20  # a model up to this size goes in one: a collective costs more than it hides


class GradientBucket:
    """Consecutive parameters of one dtype and device: `first` up to `last` of the layout.

    `wire_dtype` is that in which their gradients are added and sent.
    """

    def __init__(
        self, number: int, first: int, parameters: list[torch.nn.Parameter], wire: str | None = None
    ) -> None:
        self.number = number
        self.first, self.last = first, first + len(parameters)
        self.parameters = parameters
        self.numel = sum(local_of(p).numel() for p in parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.wire_dtype = wire_dtype(wire, self.dtype)

    @property
    def is_rounded(self) -> bool:
        return self.wire_dtype != self.dtype

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view into `flat`, of shape (numel or more,), for each parameter."""
        views, offset = [], 0
        for p in map(local_of, self.parameters):
            dense = torch._debug_has_internal_overlap(p) == 0 and _is_dense(p)
            stride = p.stride() if dense else torch.empty(p.shape, device="meta").stride()
            views.append(flat.as_strided(p.shape, stride, offset))
            offset += p.numel()
        return views


class GradientLayout:
    """The buckets for the parameters that require a gradient now."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], wire: str | None = None) -> None:
        """`parameters` are all parameters of the model, in order; `wire` is that of the job."""
        self._requires_grad = [p.requires_grad for p in parameters]
        self.parameters = [p for p in reversed(parameters) if p.requires_grad]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.buckets = _cut(self.parameters, wire)
        self.bucket_of = [bucket for bucket in self.buckets for _ in bucket.parameters]

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        return [p.requires_grad for p in parameters] == self._requires_grad


def _cut(parameters: list[torch.nn.Parameter], wire: str | None) -> list[GradientBucket]:
    buckets: list[GradientBucket] = []
    current: list[torch.nn.Parameter] = []
    total = sum(local_of(p).nbytes for p in parameters)
    size, limit = 0, FIRST_BUCKET_BYTES if total > UNCUT_BYTES else UNCUT_BYTES
    for i, p in enumerate(parameters):
        p_bytes = local_of(p).nbytes
        same = not current or (current[0].dtype, current[0].device) == (p.dtype, p.device)
        if current and (not same or size + p_bytes > limit):
            buckets.append(GradientBucket(len(buckets), i - len(current), current, wire))
            total -= size
            current, size = [], 0
            limit = max(LAST_BUCKET_BYTES, min(BUCKET_BYTES, total // 2))
        current.append(p)
        size += p_bytes
    if current:
        first = len(parameters) - len(current)
        buckets.append(GradientBucket(len(buckets), first, current, wire))
    return buckets


def _is_dense(p: torch.Tensor) -> bool:
    """Returns whether the elements fill p.numel() positions without gaps, in any order."""
    if p.numel() == 0:
        return True
    reach = 1 + sum((size - 1) * step for size, step in zip(p.shape, p.stride(), strict=True))
    return reach == p.numel()
