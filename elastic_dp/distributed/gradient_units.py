"""The units of a gradient: ranges of elements within one parameter, for its norm and for sharding.

The layout is a function of the parameters' sizes and dtypes alone. It depends neither on the number
of workers nor on the buckets in which gradients travel, so a value per unit means the same on
every worker and in every generation.

A parameter is cut at multiples of `UNIT_BYTES`, which is a multiple of 64 elements in every dtype:
vectorized kernels treat the elements before such a cut as they treat them within the whole tensor.
The elements are counted in the order in which they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from elastic_dp.distributed.local_shards import local_of

UNIT_BYTES = 1 << 20
CUT_ELEMENTS = 64  # each cut is at a multiple of this


class Unit(NamedTuple):
    """The elements `first` up to `last` of a parameter, which has its number in the layout."""

    parameter: int
    first: int
    last: int


class UnitLayout:
    """The units of the parameters of a model, in order."""

    def __init__(self, sizes: Iterable[tuple[int, torch.dtype]]) -> None:
        """`sizes` has the number of elements and the dtype of each parameter, in order."""
        self.units: list[Unit] = []
        self._first_unit = [0]  # of each parameter, and of none after the last
        for number, (numel, dtype) in enumerate(sizes):
            step = elements_per_unit(dtype)
            self.units += [
                Unit(number, first, min(first + step, numel)) for first in range(0, numel, step)
            ]
            self._first_unit.append(len(self.units))

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> UnitLayout:
        return cls((local_of(p).numel(), p.dtype) for p in parameters)

    def of_parameter(self, number: int) -> range:
        """Returns the numbers of a parameter's units. A parameter without elements has none."""
        return range(self._first_unit[number], self._first_unit[number + 1])

    def pieces(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns for each unit a view of shape (last - first,) into the tensor of its parameter.
        `tensors` has a dense tensor for each parameter, such as its gradient, or None."""
        pieces: list[torch.Tensor | None] = []
        for number, tensor in enumerate(tensors):
            units = self._first_unit[number + 1] - self._first_unit[number]
            if tensor is None:
                pieces += [None] * units
            elif units == 1 and tensor.is_contiguous():
                pieces.append(tensor.view(-1))
            elif units:
                pieces += in_memory_order(tensor).split(elements_per_unit(tensor.dtype))
        return pieces


def elements_per_unit(dtype: torch.dtype) -> int:
    """Returns the number of elements of a unit; a parameter's last unit may have fewer."""
    return UNIT_BYTES // dtype.itemsize // CUT_ELEMENTS * CUT_ELEMENTS


def memory_stride(p: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of the gradients of `p`: its own if it is dense."""
    dense = torch._debug_has_internal_overlap(p) == 0 and _is_dense(p)
    return p.stride() if dense else torch.empty(p.shape, device="meta").stride()


def _is_dense(p: torch.Tensor) -> bool:
    """Returns whether the elements fill p.numel() positions without gaps, in any order."""
    if p.numel() == 0:
        return True
    reach = 1 + sum((size - 1) * step for size, step in zip(p.shape, p.stride(), strict=True))
    return reach == p.numel()


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of shape (numel,) of a dense tensor, whatever its strides."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
