"""The 2-norm of a gradient with the same bits for any number of workers, and clipping.

Each unit of the gradient (`gradient_units.py`) has a sum of squares, and the sums are added along a
binary tree over the units. Unit 2i is always added to unit 2i + 1, and so on upward. So a worker
may compute the sums of some units only: once all sums are in one tensor, everyone folds it to the
same bits. A unit without a gradient counts 0.

The sums are added in fp64, since their number grows with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

_NARROW = (torch.float16, torch.bfloat16)  # their norms are computed and returned in fp32


@torch.no_grad()
def squares_of_units(
    pieces: Sequence[torch.Tensor | None], device: torch.device | None = None
) -> torch.Tensor:
    """Returns the sum of squares of each unit, of shape (units,) in fp64. `pieces` is what
    `UnitLayout.pieces` returns. Units that another worker owns are None there, and are 0 in the
    result. The result is on `device`, or on that of the first piece."""
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for number, piece in enumerate(pieces):
        if piece is not None:
            groups.setdefault((piece.device, piece.dtype), {})[number] = piece
    if device is None:
        device = next((on for on, _ in groups), torch.device("cpu"))
    absent = torch.zeros((), dtype=torch.float64, device=device)
    squares = [absent] * len(pieces)
    for (_, dtype), present in groups.items():
        norms = torch._foreach_norm(
            list(present.values()),
            2.0,
            dtype=torch.float32 if dtype in _NARROW else None,
        )
        found = torch.stack(norms).to(device, torch.float64).square_()
        if len(present) == len(pieces):
            return found
        for number, square in zip(present, found.unbind(), strict=True):
            squares[number] = square
    return torch.stack(squares) if squares else absent.new_zeros(0)


def fold_squares(squares: torch.Tensor) -> torch.Tensor:
    """Returns the sum over all units, of shape () in fp64, added along the tree."""
    count = squares.numel()
    if count == 0:
        return squares.new_zeros(())
    leaves = 1 << (count - 1).bit_length()
    squares = torch.nn.functional.pad(squares, (0, leaves - count))  # x + 0 is x
    while squares.numel() > 1:
        squares = squares[0::2] + squares[1::2]
    return squares[0]


def is_wide(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether the norm of these gradients is in fp64."""
    return torch.float64 in {g.dtype for g in gradients if g is not None}


class GradientNorm:
    """The norm of a step's gradient before clipping, computed when it is first needed."""

    def __init__(self, find: Callable[[], torch.Tensor], *, wide: bool) -> None:
        """`find` returns the square of the norm, of shape () in fp64."""
        self._find: Callable[[], torch.Tensor] | None = find
        self._wide = wide
        self._square: torch.Tensor | None = None
        self.value: float | None = None  # once it has been read

    @property
    def square(self) -> torch.Tensor:
        """The square of the norm, of shape () in fp64, which may be on a device."""
        if self._square is None:
            assert self._find is not None, "the gradients are gone"
            self._square, self._find = self._find(), None
        return self._square

    @property
    def tensor(self) -> torch.Tensor:
        """The norm, of shape (): in fp64 if a part of the gradient is, else in fp32."""
        norm = self.square.sqrt()
        return norm if self._wide else norm.float()

    def read(self) -> float | None:
        """Returns the norm, for which the host may wait, or None if the gradients went before."""
        if self.value is None and (self._find is not None or self._square is not None):
            self.value = float(self.tensor)
        return self.value

    def gradients_go(self) -> None:
        """From now on the norm is not computed if it has not been."""
        self._find = None


@dataclass(frozen=True, slots=True)
class GradientClipping:
    """The largest norm of a gradient, the largest absolute value of an element; None: no limit."""

    norm: float | None = None
    value: float | None = None

    @property
    def clips(self) -> bool:
        return self.norm is not None or self.value is not None

    @torch.no_grad()
    def clip(self, gradients: Iterable[torch.Tensor], norm: GradientNorm) -> None:
        """Clips gradients in place, as `clip_grad_norm_` or `clip_grad_value_` does."""
        present = list(gradients)
        if self.norm is not None:
            factor = torch.clamp(self.norm / (norm.tensor + 1e-6), max=1.0)
            groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for one in present:
                groups.setdefault((one.device, one.dtype), []).append(one)
            for (device, _), alike in groups.items():
                here = factor if factor.device == device else factor.to(device)
                torch._foreach_mul_(alike, here)
        if self.value is not None and present:
            torch._foreach_clamp_min_(present, -self.value)
            torch._foreach_clamp_max_(present, self.value)


NO_CLIPPING = GradientClipping()
