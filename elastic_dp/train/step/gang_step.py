"""What is different in a step where a worker has several processes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_norm import gradient_square
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.errors import LossError
from elastic_dp.train.gang.gang import Gang


def refuse_none(gang: Gang | None, step: int, virtual_worker: int) -> None:
    """Raises LossError where a process of a gang has no loss to run backward from: the others would
    wait for it."""
    if gang is not None:
        raise LossError(
            f"virtual worker {virtual_worker} has no gradient in step {step} on process "
            f"{gang.number} of its worker: its weight is 0, its loss is not finite, or its rows "
            "cannot be decoded. The other processes wait for its part of the backward pass, so "
            "each micro-batch needs one; return a loss of 0 that depends on the model"
        )


def clip_gang(
    gang: Gang,
    units: UnitLayout,
    gradients: Sequence[torch.Tensor | None],
    limit: float | None,
) -> float:
    """Returns the norm of a gradient of which each process has a part, and scales the parts to a
    norm of at most `limit`. All processes call it: the squares of their parts are added in order.
    """
    square = struct.pack("<d", gradient_square(units, gradients))
    squares = [struct.unpack("<d", given)[0] for given in gang.exchange(square)]
    norm = torch.tensor(math.sqrt(sum(squares)))
    present = [g for g in gradients if g is not None]
    if limit is not None and present:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch.nn.utils does
        torch._foreach_mul_(present, factor.to(present[0].device))
    return float(norm)
