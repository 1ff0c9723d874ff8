"""The norm of a gradient of which each member has only its pieces, and clipping by it.

Each primary computes the sums of squares of its units. They are added by an all-reduce in which
each unit has one summand that is not zero, so the sums are exact, and everyone folds them along the
tree of `gradient_norm.py`: the norm has the bits of that of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        layout = UnitLayout.of(parameters)
        self._count = len(layout.units)
        self._units: dict[int, range] = {}  # of the pieces of which this rank is the primary
        for number, (piece, holder) in enumerate(zip(pieces, holders, strict=True)):
            if holder.primary == group.rank and piece.numel:
                size = elements_per_unit(parameters[piece.parameter].dtype)
                units = layout.of_parameter(piece.parameter)
                self._units[number] = units[piece.first // size : -(-piece.last // size)]

    @torch.no_grad()
    def norm(self, gradients: Mapping[int, torch.Tensor], *, wide: bool) -> torch.Tensor:
        """Returns the norm, as `gradient_norm` does, the same on all members. Raises GroupError.

        `gradients` has a flat tensor for each piece that this rank holds and that has a gradient.
        `wide`: the gradient of some parameter is in fp64.
        """
        of_units: list[torch.Tensor | None] = [None] * self._count
        for number, units in self._units.items():
            if number in gradients:
                flat = gradients[number]
                parts = flat.split(elements_per_unit(flat.dtype))
                for unit, part in zip(units, parts, strict=True):
                    of_units[unit] = part
        squares = squares_of_units(of_units)
        if self._group.world_size > 1 and squares.numel():
            self._group.wait(self._group.all_reduce(squares))
        norm = fold_squares(squares).sqrt()
        return norm if wide else norm.float()

    def all_finite(self, norm: torch.Tensor, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Returns whether each element of the whole gradient is finite, the same on all members.

        `norm` is what `norm` returned. It may overflow although all elements are finite. Raises
        GroupError.
        """
        if torch.isfinite(norm):
            return True
        mine = all(bool(torch.isfinite(gradients[n]).all()) for n in gradients)
        return all(told == b"1" for told in self._group.gather_bytes(b"1" if mine else b"0"))


def clip(gradients: Iterable[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Scales the gradients as `torch.nn.utils.clip_grads_with_norm_` does parameters'."""
    holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
    torch.nn.utils.clip_grads_with_norm_(holders, limit, norm)
