"""The norm of a gradient of which each member has only its pieces.

Each primary computes the sums of squares of its units. All members gather them, and everyone folds
them along the tree of `gradient_norm.py`: the norm has the bits of that of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from elastic_dp.distributed.gradient_norm import GradientNorm, fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import UnitLayout, elements_per_unit
from elastic_dp.distributed.piece_assignment import Holders
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.extensions.sharding.pieces import StatePiece


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
        self._most = max(1, *map(len, units_of))
        places = [0] * len(layout.units)  # of the units in what is gathered
        for rank, found in enumerate(units_of):
            for at, unit in enumerate(found, rank * self._most):
                places[unit] = at
        self._places = torch.tensor(places, dtype=torch.int64).to(self._device)

    @torch.no_grad()
    def launch(
        self, gradients: Mapping[int, torch.Tensor], *, wide: bool, finite: bool | None = None
    ) -> GatheredNorm:
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
        return GatheredNorm(self._group, squares, self._places, finite=finite, wide=wide)


class GatheredNorm(GradientNorm):
    """A norm that the members are adding up. On a device nothing waits for it but what is launched
    there later."""

    def __init__(
        self,
        group: ProcessGroup,
        squares: torch.Tensor,
        places: torch.Tensor,
        *,
        finite: bool,
        wide: bool,
    ) -> None:
        """`squares`: of this rank, as many as each one has. `places`: of the units in those of all
        ranks. `finite`: whether each element that this rank holds is. Raises GroupError."""
        super().__init__(self._arrive, wide=wide)
        self._group, self._places, self._finite = group, places, finite
        self._squares = squares.new_empty(group.world_size * squares.numel())
        self._operation = group.transport.all_gather(self._squares, squares)

    def _arrive(self) -> torch.Tensor:
        self._group.transport.wait(self._operation)
        return fold_squares(self._squares[self._places])

    def agree_finite(self, *, confirms: bool = False) -> bool:
        """Returns whether the whole gradient is finite, the same on all members, once its norm is
        on the host. With `confirms` it waits for all of them. Raises GroupError."""
        assert self.value is not None
        if math.isfinite(self.value) and not confirms:
            return True
        told = self._group.gather_bytes(b"1" if self._finite else b"0")
        return math.isfinite(self.value) or all(one == b"1" for one in told)
