"""The norm of a gradient of which each member has only its pieces, and clipping by it.

Each primary computes the sums of squares of its units. All members gather them, and everyone folds
them along the tree of `gradient_norm.py`: the norm has the bits of that of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from elastic_dp.distributed.gradient_norm import fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import UnitLayout, elements_per_unit
from elastic_dp.distributed.piece_assignment import Holders
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.train.sharding.pieces import StatePiece


class PieceNorm:
    """Computes norms in one generation."""

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[StatePiece],
        holders: Sequence[Holders],
    ) -> None:
        self._group, self._pieces = group, pieces
        self._device = parameters[0].device if parameters else None
        layout = UnitLayout.of(parameters)
        self._mine: dict[int, range] = {}  # by piece of which this rank is the primary: its units
        units_of: list[list[int]] = [[] for _ in range(group.world_size)]
        for number, (piece, holder) in enumerate(zip(pieces, holders, strict=True)):
            if not piece.numel:
                continue
            size = elements_per_unit(parameters[piece.parameter].dtype)
            units = layout.of_parameter(piece.parameter)
            units = units[piece.first // size : -(-piece.last // size)]
            units_of[holder.primary] += units
            if holder.primary == group.rank:
                self._mine[number] = units
        # Of each rank as many numbers are gathered as the one with most units has.
        self._most = max(map(len, units_of))
        places = [0] * len(layout.units)  # of the units in what is gathered
        for rank, found in enumerate(units_of):
            for at, unit in enumerate(found, rank * self._most):
                places[unit] = at
        self._places = torch.tensor(places, dtype=torch.int64).to(self._device)

    @torch.no_grad()
    def launch(
        self, gradients: Mapping[int, torch.Tensor], *, wide: bool, finite: bool | None = None
    ) -> PendingNorm:
        """Begins to add up the norm. Raises GroupError.

        `gradients` has a flat tensor for each piece that this rank holds and that has a gradient.
        `wide`: the gradient of some parameter is in fp64. `finite`: whether all elements of
        `gradients` are; None: not known, and they are on the host.
        """
        parts: list[torch.Tensor | None] = []
        for number, units in self._mine.items():
            flat = gradients.get(number)
            if flat is None:
                parts += [None] * len(units)
            else:
                parts += flat.split(elements_per_unit(flat.dtype))
        squares = squares_of_units(parts, self._device)
        if finite is None:
            # A square may overflow although all elements are finite.
            finite = bool(torch.isfinite(squares).all()) or all(
                bool(torch.isfinite(gradients[n]).all()) for n in gradients
            )
        squares = torch.nn.functional.pad(squares, (0, self._most - len(squares)))
        operation = None
        if self._group.world_size > 1 and self._most:
            mine, squares = squares, squares.new_empty(self._group.world_size * self._most)
            operation = self._group.transport.all_gather(squares, mine)
        return PendingNorm(self._group, squares, self._places, operation, finite, wide)


class PendingNorm(NamedTuple):
    """A norm that the members are adding up."""

    group: ProcessGroup
    squares: torch.Tensor  # of all ranks
    places: torch.Tensor  # of the units in them
    operation: Any  # None: there is nothing to wait for
    finite: bool  # whether each element that this rank holds is
    wide: bool

    def arrive(self) -> torch.Tensor:
        """Returns the norm, as `gradient_norm` does. Call it once. Raises GroupError.

        On a device nothing waits for it but what is launched there later.
        """
        if self.operation is not None:
            self.group.transport.wait(self.operation)
        norm = fold_squares(self.squares[self.places]).sqrt()
        return norm if self.wide else norm.float()

    def agreed(self, norm: torch.Tensor, *, confirms: bool = False) -> float | None:
        """Returns `norm`, which is on the host, or None if an element of the whole gradient is not
        finite; the same on all members. With `confirms` it waits for all of them. Raises
        GroupError."""
        number = float(norm)
        if math.isfinite(number) and not confirms:
            return number
        told = self.group.gather_bytes(b"1" if self.finite else b"0")
        return number if math.isfinite(number) or all(one == b"1" for one in told) else None


def clip(gradients: Iterable[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Scales the gradients as `torch.nn.utils.clip_grads_with_norm_` does parameters'."""
    holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
    torch.nn.utils.clip_grads_with_norm_(holders, limit, norm)
