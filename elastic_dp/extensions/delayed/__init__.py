"""Gradients that are applied one step late, so that their sum travels meanwhile (`staleness=1`)."""

from __future__ import annotations

from functools import partial

from elastic_dp.extensions.delayed.delayed_gradient import DelayedGradient
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.state.previous_step import PreviousStep
from elastic_dp.train.step_builder import StepBuilder


def extend(build: StepBuilder) -> None:
    staleness = StepSchedule(build.spec.staleness_by_step)
    build.schedules.append(staleness)
    build.previous = PreviousStep(build.given.model, build.loss_scale)
    build.new_gradient = partial(
        DelayedGradient,
        previous=build.previous,
        staleness=staleness,
        parameters=build.parameters,
        wire=build.wire,
    )
