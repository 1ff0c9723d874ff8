"""The sum of squares of one leaf's gradient, taken from each parameter as its gradient is made.

A leaf's gradient is added to others at once, so it is never there as a whole. The sum is over units
in a fixed tree, as that of the whole gradient (`gradient_norm.py`): its bits depend on the leaf
alone, and not on the worker that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_norm import fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import UnitLayout


class LeafSquare:
    """`parameters`: those that may have a gradient, in the order of their numbers."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._units = [UnitLayout.of([p]) for p in parameters]
        self._squares: dict[int, torch.Tensor] = {}  # by parameter: of its units

    def begin(self) -> None:
        """Starts a leaf."""
        self._squares.clear()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Takes the gradient of parameter `index`; the first one counts."""
        if index not in self._squares:
            self._squares[index] = squares_of_units(self._units[index].pieces([gradient.detach()]))

    def total(self) -> torch.Tensor:
        """Returns the sum over all parameters, of shape () in fp64. One without a gradient counts
        0."""
        device = next((s.device for s in self._squares.values()), torch.device("cpu"))
        absent = [
            torch.zeros(len(u.units), dtype=torch.float64, device=device) for u in self._units
        ]
        each = [self._squares.get(i, zeros).to(device) for i, zeros in enumerate(absent)]
        return fold_squares(torch.cat(each) if each else torch.zeros(0, dtype=torch.float64))
