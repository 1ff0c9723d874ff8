"""The pieces into which an optimizer's state is divided: what has one primary and one backup.

A piece is a unit of a parameter (`gradient_units.py`), or a whole parameter where the optimizer
looks at whole ones, or where a try shows that its update of a unit has other bits. The pieces are
the same on all workers and in all generations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from elastic_dp.distributed.gradient_units import UnitLayout, in_memory_order


class StatePiece(NamedTuple):
    """The elements `first` up to `last` of a parameter, in the order in which they lie in memory.

    `parameter` is its number in the model. A whole parameter keeps its shape.
    """

    parameter: int
    first: int
    last: int
    whole: bool

    @property
    def numel(self) -> int:
        return self.last - self.first

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view of a tensor that has the shape and the strides of the parameter."""
        return tensor if self.whole else in_memory_order(tensor)[self.first : self.last]

    def within(self, flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Returns `flat`, of shape (numel,), as a tensor that can take the values of this piece of
        `parameter`."""
        if not self.whole:
            return flat
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def pieces_of(parameters: Sequence[torch.Tensor], whole: Collection[int]) -> list[StatePiece]:
    """Returns the pieces of all parameters, in order. Those with the numbers in `whole` are not
    divided."""
    layout = UnitLayout.of(parameters)
    pieces = []
    for number, p in enumerate(parameters):
        if number in whole or p.dim() == 0 or p.numel() == 0:
            pieces.append(StatePiece(number, 0, p.numel(), True))
        else:
            units = [layout.units[unit] for unit in layout.of_parameter(number)]
            pieces += [StatePiece(number, unit.first, unit.last, False) for unit in units]
    return pieces


def part_of(piece: StatePiece, parameter: torch.Tensor, value: Any) -> Any:
    """Returns a copy of what belongs to a piece of a value of its parameter's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if piece.whole or not value.dim():
        return value.clone()
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return piece.of(value).clone()
