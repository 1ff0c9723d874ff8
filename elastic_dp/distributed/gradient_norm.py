"""The 2-norm of a gradient with the same bits for any number of workers.

Each unit of the gradient (`gradient_units.py`) has a sum of squares, and the sums are added along a
binary tree over the units. Unit 2i is always added to unit 2i + 1, and so on upward. So a worker
may compute the sums of some units only: once all sums are in one tensor, everyone folds it to the
same bits. A unit without a gradient counts 0.

The sums are added in fp64, since their number grows with the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_units import UnitLayout

_NARROW = (torch.float16, torch.bfloat16)  # their norms are computed and returned in fp32


@torch.no_grad()
def squares_of_units(
    pieces: Sequence[torch.Tensor | None], device: torch.device | None = None
) -> torch.Tensor:
    """Returns the sum of squares of each unit, of shape (units,) in fp64.

    `pieces` is what `UnitLayout.pieces` returns. Units that another worker owns are None there, and
    are 0 in the result. The result is on `device`, or on that of the first piece.
    """
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


@torch.no_grad()
def gradient_norm(layout: UnitLayout, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Returns the norm of a gradient, of shape (): in fp64 if a part of it is, else in fp32.

    `gradients` has one dense tensor for each parameter of the layout, or None. Nothing waits for a
    device.
    """
    wide = torch.float64 in {g.dtype for g in gradients if g is not None}
    norm = fold_squares(squares_of_units(layout.pieces(gradients))).sqrt()
    return norm if wide else norm.float()


@torch.no_grad()
def gradient_square(layout: UnitLayout, gradients: Sequence[torch.Tensor | None]) -> float:
    """Returns the square of the norm of a gradient, as `gradient_norm` takes it."""
    return float(fold_squares(squares_of_units(layout.pieces(gradients))))
