"""Refuses, before the first step, what `sharding="optimizer"` cannot do.

A sharded optimizer must update each parameter from that parameter's gradient and state alone, and
its `step` must do nothing else. That is known of optimizers of `torch.optim` and of two of the
package pytorch_optimizer; the code of others cannot be looked into.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import optimizer as torch_optimizer

from elastic_dp.checkpoint.layout import is_dense
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.train.exactness.torch_optimizers import BY_PARAMETER
from elastic_dp.train.master_weights import MasterWeights, class_of, master_dtype
from elastic_dp.train.state.held_values import refuse_shared_memory

_WAY_OUT = 'or leave sharding="optimizer" out'
# As those of torch.optim, of a package that is not imported here.
SHARDABLE_BY_NAME = frozenset(
    {"pytorch_optimizer.optimizer.lars.LARS", "pytorch_optimizer.optimizer.lamb.Lamb"}
)


def check_shardable(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    precision: str | None,
) -> None:
    """Raises SpecError or ModelError, which name what cannot be sharded."""
    if precision == "fp16":
        raise SpecError(
            'precision is "fp16", whose loss scaling does not work with sharding="optimizer" yet: '
            f'use "bf16", {_WAY_OUT}'
        )
    kind = class_of(optimizer)
    full_name = f"{kind.__module__}.{kind.__qualname__}"
    if kind not in BY_PARAMETER and full_name not in SHARDABLE_BY_NAME:
        names = ", ".join(sorted(one.__name__ for one in BY_PARAMETER))
        raise ModelError(
            f"optimizer is a {full_name}, of which it is not known that "
            'it updates each parameter by itself, as sharding="optimizer" needs: use one of '
            f"torch.optim ({names}), also in MasterWeights, LARS or Lamb of pytorch_optimizer, "
            f"{_WAY_OUT}"
        )
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ModelError(
            "the optimizer's step is not that of its class (torch.compile, a wrapper), which "
            f'sharding="optimizer" cannot run on parts: leave it as it is, {_WAY_OUT}'
        )
    if getattr(optimizer, "pre_norm", False):
        raise ModelError(
            "the optimizer has pre_norm=True, which divides by the norm of the whole gradient, and "
            'with sharding="optimizer" a worker has only a part of it: use clip_norm= of '
            f"ctx.steps, {_WAY_OUT}"
        )
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    if hooks:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ModelError(
            f"the optimizer has a step hook ({name}), which would see only a part of the gradients "
            f'with sharding="optimizer": remove it, {_WAY_OUT}'
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ModelError(
            'a group of the optimizer has differentiable=True, which sharding="optimizer" cannot '
            f"do: leave it out, {_WAY_OUT}"
        )
    if kind is torch.optim.Adafactor:
        _check_epsilon(optimizer)
    if kind is torch.optim.SGD:
        _check_momentum(optimizer)
    _check_memory(optimizer, parameters)


def _check_epsilon(optimizer: torch.optim.Optimizer) -> None:
    """Raises ModelError where Adafactor takes the epsilon of one parameter for another one. For
    eps[0]=None it is that of a dtype: for all parameters of a group that of the first one that has
    a gradient. A worker that updates only a part of them would take another."""
    of_masters = isinstance(optimizer, MasterWeights)
    for number, group in enumerate(optimizer.param_groups):
        dtypes = {master_dtype(p) if of_masters else p.dtype for p in group["params"]}
        if group["eps"][0] is None and len(dtypes) > 1:
            names = " and ".join(sorted(map(str, dtypes)))
            raise ModelError(
                f"group {number} of Adafactor has parameters of {names}, and eps[0]=None, for "
                "which torch takes the epsilon of the first one's dtype for all: give eps[0] a "
                f"number, or make a group for each dtype, {_WAY_OUT}"
            )


def _check_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Raises ModelError where SGD rounds the momentum of a parameter by what the others of its
    group have. With foreach=True a step in which one of them gets its first momentum multiplies
    each by itself, and `_foreach_mul_` rounds bfloat16 and float16 otherwise on a processor."""
    for number, group in enumerate(optimizer.param_groups):
        on_host = [p for p in group["params"] if p.device.type == "cpu"]
        masters = isinstance(optimizer, MasterWeights)
        narrow = {p.dtype for p in on_host if p.element_size() < 4 and not masters}
        if group.get("foreach") and group["momentum"] and narrow:
            raise ModelError(
                f"group {number} of SGD has foreach=True, momentum and parameters of "
                f"{narrow.pop()} on a processor: torch rounds them otherwise while another one of "
                "the group has no momentum yet, which another worker may hold. Leave foreach out, "
                f"{_WAY_OUT}"
            )


def _check_memory(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises ModelError for parameters that do not have memory of their own."""
    names = {id(p): f"model.{name}" for name, p in parameters.items()}
    optimized = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
    for name, p in optimized:
        if not is_dense(p):
            raise ModelError(
                f"{name} has gaps in its memory or uses an element twice, which "
                f'sharding="optimizer" cannot do: make it contiguous, {_WAY_OUT}'
            )
    refuse_shared_memory((name, name, p.detach()) for name, p in optimized)
