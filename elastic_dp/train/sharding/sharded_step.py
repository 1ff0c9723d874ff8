"""What a step does before its commit where each member holds a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.train.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.state.weight_comparison import WeightComparison


def prepare_step(
    sharding: ShardedOptimizer,
    gradients: GradientReducer,
    weights: WeightComparison,
    step: int,
    factor: float,
    used: Sequence[int],
    clip_norm: float | None,
    pass_point: Callable[[str, int], None],
    extremes: Sequence[torch.Tensor] | None,
    *,
    keeps: bool,
) -> float | None:
    """Updates copies of this member's parameters, and gathers those of all members.

    `used`: numbers of the parameters that have a gradient. `extremes`: see
    `GradientReducer.finish`; None: the gradients are on the host. `keeps`: the step goes into a
    checkpoint. Returns the norm of the gradient, or None if it is not finite. Raises GroupError,
    also where the two members that update a piece have computed other bits.
    """
    if extremes is None:
        held, finite = gradients.complete_held(factor), None
    else:
        finite = gradients.finish(factor, extremes)
        held = gradients.held()
    parameters, memory = gradients.used_parameters(used), gradients.received_memory
    if not sharding.prepare(step, held, parameters, clip_norm, memory, finite=finite):
        return None
    pass_point("prepared", step)
    compares = weights.compares_updates(step, keeps=keeps)
    norm, differing = sharding.gather(compares=compares)
    if norm is None:
        return None
    weights.compare_updates(step, differing)
    pass_point("gathered", step)
    return norm
