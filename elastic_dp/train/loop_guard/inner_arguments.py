"""Checks what `ctx.steps` gets for inner steps, before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_dp.errors import ModelError, SpecError
from elastic_dp.train.loop_guard.steps_arguments import (
    check_clip_norm,
    check_function,
    check_optimizer,
)


def check_inner_steps(inner_steps: int | Mapping[int, int] | None, given: Any) -> None:
    """Checks the `StepsArguments`. `inner_steps`: of the job. Raises SpecError and ModelError."""
    if inner_steps is None:
        for name in ("inner_optimizer", "inner_clip_norm"):
            if getattr(given, name) is not None:
                raise SpecError(
                    f"ctx.steps got {name}, and the job has no inner steps: pass "
                    "ElasticTrainer(inner_steps=…), or leave it out"
                )
        return
    if given.inner_optimizer is None:
        raise SpecError(
            f"inner_steps is {inner_steps}, and ctx.steps got no inner_optimizer: pass "
            "inner_optimizer=lambda model, step: torch.optim.AdamW(model.parameters(), lr=…). The "
            "optimizer of ctx.steps is the outer one, such as "
            "SGD(lr=0.7, momentum=0.9, nesterov=True)"
        )
    check_clip_norm("inner_clip_norm", given.inner_clip_norm)
    if given.precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss of a step, which does not work with inner_steps; '
            'use "bf16"'
        )
    if given.noise_scale_every is not None:
        raise SpecError(
            "noise_scale_every needs the gradients of virtual workers, which have pseudo-gradients "
            "with inner_steps: leave out one of the two"
        )
    check_function("inner_optimizer", given.inner_optimizer, 2, "(model, step)")
    _check_optimizers(given)


def _check_optimizers(given: Any) -> None:
    made, again = (given.inner_optimizer(given.model, 1) for _ in range(2))
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(
            f"inner_optimizer returned a {type(made).__name__}, must return a torch.optim.Optimizer"
        )
    if made is again:
        raise ModelError(
            "inner_optimizer returned the same optimizer twice, must make a new one in each call: "
            "state that it keeps would be lost with a worker"
        )
    check_optimizer("inner optimizer", made, given.model)
    outer = {p for group in given.optimizer.param_groups for p in group["params"]}
    inner = {p for group in made.param_groups for p in group["params"]}
    for name, p in given.model.named_parameters():
        if p in inner and p not in outer:
            raise ModelError(
                f"the inner optimizer trains model.{name}, which the optimizer of ctx.steps does "
                "not have: what the inner steps learn would be lost. Give it to both"
            )
