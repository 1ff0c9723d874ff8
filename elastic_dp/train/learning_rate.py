"""How the learning rate follows the size of the batch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Literal

from elastic_dp.config.field_checks import one_of, whole_number
from elastic_dp.config.schedules import by_step, check_virtual_workers
from elastic_dp.errors import SpecError

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


def batch_lr(
    batch: int | Mapping[int, int],
    *,
    base: float,
    rule: Literal["linear", "sqrt"] = "linear",
    warmup_steps: int = 0,
) -> Callable[[int], float]:
    """Return the factor of the learning rate for `torch.optim.lr_scheduler.LambdaLR`.

    With the optimizer's learning rate tuned for a batch of size `base`, a batch of k times that
    size gets k times the learning rate by the linear rule, which fits SGD (Goyal et al. 2017,
    arXiv:1706.02677), or √k times by the square-root rule, which fits Adam (Malladi et al. 2022,
    arXiv:2205.10287).

    - `batch`: its size, or sizes by the step after which they hold: `ctx.virtual_workers`.
    - `base`: in the same unit as `batch`.
    - `warmup_steps`: the number of steps over which the factor rises linearly: from 0 at the start,
      and from its previous value where the batch grows.

    The function is pure, so several may be multiplied:
    `LambdaLR(optimizer, lambda step: batch_lr_of(step) * decay(step))`.

    Raises SpecError.
    """
    check_virtual_workers(batch, "batch")
    for name, given in (("batch", batch), ("warmup_steps", warmup_steps)):
        if given is None:
            raise SpecError(f"{name} is None, must be a whole number")
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
        raise SpecError(f"base is {base!r}, must be a positive number: the batch of the tuned rate")
    one_of("rule", rule, tuple(_RULES))
    whole_number("warmup_steps", warmup_steps, 0)
    sizes = by_step(batch)
    begins, targets = [*sizes], [_RULES[rule](size / base) for size in sizes.values()]
    starts = [0.0]  # the factor in the step before each stage

    def factor_in(stage: int, steps: int) -> float:
        """The factor of the step after `steps` steps, which is one of `stage`."""
        if steps - begins[stage] + 1 >= warmup_steps:
            return targets[stage]
        done = (steps - begins[stage] + 1) / warmup_steps
        return starts[stage] + (targets[stage] - starts[stage]) * done

    for stage, begin in enumerate(begins[1:]):
        starts.append(factor_in(stage, begin - 1))

    def factor(steps: int) -> float:
        return factor_in(bisect_right(begins, steps) - 1, steps)

    return factor
