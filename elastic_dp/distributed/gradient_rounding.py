"""The rounding of gradients in the exact sum, for `wire=`: they travel in fewer bytes, with the
same bits for any number of workers.

Each node of the reduction tree is rounded: a leaf, Q(leaf), and each sum, Q(l + r). Which nodes
travel depends on the workers, so rounding only what is sent would give other bits for each number
of them. Sums are kept as they travel, so to send one rounds nothing, and to round one again changes
nothing.

A `GradientRounding` says how the sums of one dtype of parameters are kept, rounded and added:

- `DtypeRounding`: in one dtype. Without `wire` it is that of the parameters. With "bf16" Q rounds
  to the nearest bfloat16, ties to even. The exponent is that of fp32, so no scale is needed.
- `Int8Rounding` (int8_rounding.py): in whole numbers of 8 bits, with a scale for each block.

The tree has log2(V) levels, so no sum swamps small gradients one after another, and no error
feedback is needed.

Gradients of 16 bits stay as they are. What else travels is not rounded: losses, weights, metrics,
buffers, and the state of a joiner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from elastic_dp.distributed.reduction_tree import Node
from elastic_dp.errors import ModelError

_NARROW = (torch.bfloat16, torch.float16)


class GradientRounding:
    """How sums of gradients are kept, rounded and added. A block of gradients is kept as a record.
    `node` is the subtree whose sum is rounded, `first` the number of a tensor's first block among
    all blocks of the model: with the seed of the step they determine what Q draws at random. Lists
    have one tensor for each parameter."""

    dtype: torch.dtype  # of the tensors that sums are kept in
    block: int  # elements of a gradient
    record: int  # elements of `dtype`; with 1, a sum has the shape of its parameter

    def begin(self, seed: int) -> None:
        """Starts a step."""

    def round(
        self, gradients: Sequence[torch.Tensor], node: Node, firsts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Returns Q of each gradient. One that is a rounded sum already is returned as it is."""
        if not gradients or gradients[0].dtype == self.dtype:
            return list(gradients)
        outs = [self._room_for(gradient) for gradient in gradients]
        self.write(gradients, node, firsts, outs)
        return outs

    def write(
        self,
        gradients: Sequence[torch.Tensor],
        node: Node,
        firsts: Sequence[int],
        outs: Sequence[torch.Tensor],
    ) -> None:
        """Writes what `round` returns to `outs`."""
        raise NotImplementedError

    def accumulate(
        self,
        sums: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        node: Node,
        firsts: Sequence[int],
    ) -> None:
        """Sets each of `sums` to Q(sum + other)."""
        for one, other, first in zip(sums, others, firsts, strict=True):
            self.add(one, other, node, first, one)

    def add(
        self, one: torch.Tensor, other: torch.Tensor, node: Node, first: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Returns Q(one + other) in `out`, which may be the memory of either."""
        raise NotImplementedError

    def restore(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Writes sums to `out` in the dtype of the parameters."""
        raise NotImplementedError

    def _room_for(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.record == 1:
            return torch.empty_like(gradient, dtype=self.dtype)
        records = math.ceil(gradient.numel() / self.block)
        return gradient.new_empty(records * self.record, dtype=self.dtype)


class DtypeRounding(GradientRounding):
    """Sums in one dtype, whose addition rounds them. They have the shape of the parameters."""

    block = record = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def write(
        self,
        gradients: Sequence[torch.Tensor],
        node: Node,
        firsts: Sequence[int],
        outs: Sequence[torch.Tensor],
    ) -> None:
        torch._foreach_copy_(list(outs), list(gradients))

    def accumulate(
        self,
        sums: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        node: Node,
        firsts: Sequence[int],
    ) -> None:
        torch._foreach_add_(list(sums), list(others))

    def add(
        self, one: torch.Tensor, other: torch.Tensor, node: Node, first: int, out: torch.Tensor
    ) -> torch.Tensor:
        return torch.add(one, other, out=out)

    def restore(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(sums)


Wire = str | Callable[[torch.dtype], GradientRounding] | None


def rounding_of(wire: Wire, dtype: torch.dtype) -> GradientRounding:
    """Returns how sums of the gradients of parameters of `dtype` are kept, rounded and added."""
    if callable(wire):
        return wire(dtype)
    if wire is None or dtype in _NARROW:
        return DtypeRounding(dtype)
    if wire == "bf16":
        return DtypeRounding(torch.bfloat16)
    assert wire == "int8", wire
    from elastic_dp.distributed.int8_rounding import Int8Rounding

    return Int8Rounding()


def check_wire(wire: str | None, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises ModelError if a parameter's gradients cannot be rounded for `wire`."""
    for name, p in parameters.items() if wire is not None else ():
        if p.dtype not in (torch.float32, *_NARROW):
            raise ModelError(
                f"model.{name} is of {p.dtype}, and wire={wire!r} rounds gradients of "
                "torch.float32 only: leave wire out, or convert the parameter by .float()"
            )
