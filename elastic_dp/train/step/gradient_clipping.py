"""The norm of a step's gradient, and clipping by it.

The norm is added over units of parameters (`gradient_norm.py`). A run that an early version began
keeps to norms over whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_norm import gradient_norm
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.train.state.train_state import PARAMETERS, TrainState


def norm_of(
    state: TrainState, units: UnitLayout, gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    if state.norm_over == PARAMETERS:
        return torch.nn.utils.get_total_norm([g for g in gradients if g is not None])
    return gradient_norm(units, gradients)


def clip(state: TrainState, units: UnitLayout, limit: float) -> torch.Tensor:
    """Scales the gradients to a norm of at most `limit`. Returns the norm before."""
    parameters = list(state.parameters.values())
    if state.norm_over == PARAMETERS:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    norm = norm_of(state, units, [p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
