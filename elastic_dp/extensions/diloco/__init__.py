"""Several steps of an optimizer of its own for each virtual worker in a step (DiLoCo)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from elastic_dp.errors import ModelError, SpecError
from elastic_dp.extensions.diloco.inner_steps import InnerMicroBatches, InnerRows, InnerSteps
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.step_builder import StepBuilder
from elastic_dp.train.steps_arguments import (
    check_clipping,
    check_function,
    check_optimizer,
)


def extend(build: StepBuilder) -> None:
    """Raises SpecError and ModelError."""
    _check(build)
    inner_steps = StepSchedule(build.spec.inner_steps_by_step)
    rows = InnerRows(build.data, inner_steps)
    build.rows, build.micro_batches_of = rows, inner_steps.at
    build.schedules.append(inner_steps)
    build.new_micro_batches = partial(InnerMicroBatches, rows)
    build.new_leaf = lambda: InnerSteps(build, rows)


def _check(build: StepBuilder) -> None:
    given = build.given
    if given.inner_optimizer is None:
        raise SpecError(
            f"inner_steps is {build.spec.inner_steps}, and ctx.steps got no inner_optimizer: pass "
            "inner_optimizer=lambda model, step: torch.optim.AdamW(model.parameters(), lr=…). The "
            "optimizer of ctx.steps is the outer one, such as "
            "SGD(lr=0.7, momentum=0.9, nesterov=True)"
        )
    check_clipping("inner_clip_norm", given.inner_clip_norm)
    if given.precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss of a step, which does not work with inner_steps; '
            'use "bf16"'
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
