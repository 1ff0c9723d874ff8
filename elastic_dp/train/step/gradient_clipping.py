"""The norm of a step's gradient, and clipping by it.

The norm is added over units of parameters (`gradient_norm.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_norm import gradient_norm
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.train.state.train_state import TrainState


def norm_of(
    state: TrainState, units: UnitLayout, gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    return gradient_norm(units, gradients)


def clip(state: TrainState, units: UnitLayout, limit: float) -> torch.Tensor:
    """Scales the gradients to a norm of at most `limit`. Returns the norm before."""
    parameters = list(state.parameters.values())
    norm = norm_of(state, units, [p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
