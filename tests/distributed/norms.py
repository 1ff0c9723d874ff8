"""The norm of a whole gradient, as each member of a group computes it of its own."""

from elastic_dp.distributed.gradient_norm import (
    GradientNorm,
    fold_squares,
    is_wide,
    squares_of_units,
)


def gradient_norm(layout, gradients):
    square = fold_squares(squares_of_units(layout.pieces(gradients)))
    return GradientNorm(lambda: square, wide=is_wide(gradients)).tensor
