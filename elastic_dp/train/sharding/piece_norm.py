"""The norm of a gradient of which each member has only its pieces, and clipping by it.

Each primary computes the sums of squares of its units. All members gather them, and everyone folds
them along the tree of `gradient_norm.py`: the norm has the bits of that of the whole gradient.

They are gathered by themselves, or travel with something else that all members gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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

    @property
    def nbytes(self) -> int:
        """What each member gives to a norm."""
        return self._most * torch.float64.itemsize

    @torch.no_grad()
    def begin(
        self, gradients: Mapping[int, torch.Tensor], *, wide: bool, finite: bool | None = None
    ) -> PendingNorm:
        """Begins to add up the norm.

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
        return PendingNorm(self._group, squares, self._places, finite, wide)


@dataclass(slots=True)
class PendingNorm:
    """A norm that the members are adding up."""

    group: ProcessGroup
    mine: torch.Tensor  # the squares of this rank, as many as each one has
    places: torch.Tensor  # of the units in those of all ranks
    finite: bool  # whether each element that this rank holds is
    wide: bool
    _squares: torch.Tensor | None = None  # of all ranks
    _operation: Any = None  # None: there is nothing to wait for

    @property
    def is_open(self) -> bool:
        """Whether the squares of the other ranks are neither here nor on their way."""
        return self._squares is None

    def launch(self) -> None:
        """Gathers the squares of all ranks by themselves. Raises GroupError."""
        self._squares = self.mine
        if self.group.world_size > 1 and self.mine.numel():
            self._squares = self.mine.new_empty(self.group.world_size * self.mine.numel())
            self._operation = self.group.transport.all_gather(self._squares, self.mine)

    def take(self, squares: torch.Tensor) -> None:
        """Takes the squares of all ranks, of shape (world size, n) in bytes, which have come with
        something else, instead of `launch`."""
        self._squares = squares.contiguous().view(torch.float64).view(-1)

    def arrive(self) -> torch.Tensor:
        """Returns the norm, as `gradient_norm` does. Call it once. Raises GroupError.

        On a device nothing waits for it but what is launched there later.
        """
        if self._operation is not None:
            self.group.transport.wait(self._operation)
        assert self._squares is not None
        norm = fold_squares(self._squares[self.places]).sqrt()
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
