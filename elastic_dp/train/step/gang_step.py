"""What is different in a step where a worker has several processes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import torch

from elastic_dp.distributed.gradient_norm import gradient_square
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.errors import LossError, ModelError
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


def check_replicated(
    gang: Gang | None, step: int, parameters: Mapping[str, torch.Tensor], sums: GradientReducer
) -> None:
    """Raises ModelError if processes of a worker have the same rows, and other gradients for a
    parameter that is not divided among them. All processes call it."""
    if gang is not None and gang.compares:
        names = {p: name for name, p in parameters.items()}
        name = gang.differing({names[p]: sum_ for p, sum_ in sums.totals()}, parameters)
        if name is not None:
            raise ModelError(
                f"the processes of a worker have different gradients for model.{name} in step "
                f"{step}, which tensor parallelism does not shard: it is used on a part of the "
                "features, heads or positions, as a normalization of single heads is. Include it "
                "in the plan of parallelize_module, so that torch adds up its gradient"
            )


def clip_gang(
    gang: Gang,
    units: UnitLayout,
    gradients: Sequence[torch.Tensor | None],
    counts: Sequence[bool],
    limit: float | None,
) -> float:
    """Returns the norm of a gradient of which each process has a part, and scales the parts to a
    norm of at most `limit`. All processes call it: the squares of their parts are added in order.
    `counts` says which gradients this process adds.
    """
    own = [g if one else None for g, one in zip(gradients, counts, strict=True)]
    square = struct.pack("<d", gradient_square(units, own))
    squares = [struct.unpack("<d", given)[0] for given in gang.exchange(square)]
    norm = torch.tensor(math.sqrt(sum(squares)))
    present = [g for g in gradients if g is not None]
    if limit is not None and present:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch.nn.utils does
        torch._foreach_mul_(present, factor.to(present[0].device))
    return float(norm)
