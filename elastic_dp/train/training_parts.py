"""What one call of `ctx.steps` makes of its arguments: the state, and what runs steps on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_dp.config import JobSpec
from elastic_dp.config.field_checks import whole_number
from elastic_dp.device.gpu import keep_cublas_config
from elastic_dp.distributed.gradient_rounding import check_wire
from elastic_dp.errors import SpecError
from elastic_dp.sampling import StepSchedule
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.gang.gang_checks import check_gang
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.loop_guard.inner_arguments import check_inner_steps
from elastic_dp.train.loop_guard.loop_guard import LoopGuard
from elastic_dp.train.loop_guard.steps_arguments import check_steps_arguments
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.sharding.shardable_optimizers import check_shardable
from elastic_dp.train.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.state.previous_step import PreviousStep
from elastic_dp.train.state.skipped_row_groups import SkippedRowGroups
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import BatchSource, RowSource
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.inner_rows import InnerRows
from elastic_dp.train.step.inner_steps import InnerOptimizerFn, InnerSteps
from elastic_dp.train.step.micro_batch import LossFn, MicroBatchRunner
from elastic_dp.train.step.precision import new_loss_scale
from elastic_dp.train.step.step_runner import StepRunner
from elastic_dp.train.step.trial_run import TrialRun


@dataclass(frozen=True)
class StepsArguments:
    """The arguments of `ctx.steps`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    scheduler: Any = None
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    noise_scale_every: int | None = None
    inner_optimizer: InnerOptimizerFn | None = None
    inner_clip_norm: float | None = None

    def check(self) -> None:
        """Raises SpecError, ModelError or StateError for arguments that cannot be used."""
        check_steps_arguments(
            self.model,
            self.optimizer,
            self.loss_fn,
            self.scheduler,
            self.clip_norm,
            self.clip_value,
            self.precision,
            self.state,
        )
        whole_number("noise_scale_every", self.noise_scale_every, 1)


def sharded_optimizer_of(given: StepsArguments) -> ShardedOptimizer:
    """Returns what holds the optimizer's state. Raises SpecError and ModelError."""
    parameters = dict(given.model.named_parameters())
    check_shardable(given.optimizer, parameters, given.precision)
    if given.clip_value is not None:
        raise SpecError(
            'clip_value does not work with sharding="optimizer": use clip_norm, or leave out '
            "sharding="
        )
    if given.noise_scale_every is not None:
        raise SpecError(
            "noise_scale_every needs the whole gradient, of which each worker has a part with "
            'sharding="optimizer": leave out one of the two'
        )
    return ShardedOptimizer(given.optimizer, parameters)


@dataclass(frozen=True)
class TrainingParts:
    """The parts that work on one model, from the start of the loop to its end."""

    state: TrainState
    weights: WeightComparison
    skipped: SkippedRowGroups
    step_runner: StepRunner
    loop_guard: LoopGuard
    trial: TrialRun

    @classmethod
    def build(
        cls,
        given: StepsArguments,
        spec: JobSpec,
        data: BatchSource,
        device: torch.device,
        control: WorkerControl,
        reporter: PhaseReporter,
        write_speed: Callable[[float], None],
        gang: Gang | None = None,
    ) -> TrainingParts:
        """Checks the arguments and builds the parts. Nothing runs yet."""
        given.check()
        if spec.exact:
            keep_cublas_config(given.model, device)
        check_gang(gang, given)
        check_wire(spec.wire, dict(given.model.named_parameters()))
        if spec.delays and given.noise_scale_every is not None:
            raise SpecError(
                "noise_scale_every needs the gradients of virtual workers and their sum in one "
                f"step, and staleness={spec.staleness} has the sum one step later: leave out one "
                "of the two"
            )
        check_inner_steps(spec.inner_steps, given)
        loss_scale = new_loss_scale(given.precision)
        sharding = None if spec.sharding is None else sharded_optimizer_of(given)
        own = given.model, given.optimizer, given.scheduler
        previous = PreviousStep(given.model, loss_scale) if spec.delays else None
        state = TrainState(*own, loss_scale, given.state, sharding=sharding, previous=previous)
        compared = spec.failure.compare_weights_every if spec.exact else None
        weights = WeightComparison(state.parameters, compared)
        by_speed = spec.scaling.balance == "measured"
        speed = ComputeSpeed(device, write_speed if by_speed else None)
        inner_steps = StepSchedule(spec.inner_steps_by_step)
        inner_rows = None if spec.inner_steps is None else InnerRows(data, inner_steps)
        micro_batches = MicroBatchRunner(
            state,
            given.loss_fn,
            data,
            device,
            spec.data.seed,
            speed,
            reporter.report,
            exact=spec.exact,
            precision=given.precision,
            gang=gang,
            inner=inner_rows,
        )
        inner: InnerSteps | None = None
        if inner_rows is not None:
            assert given.inner_optimizer is not None  # it is checked above
            inner = InnerSteps(
                given.model,
                given.optimizer,
                micro_batches,
                inner_rows,
                speed,
                given.inner_optimizer,
                given.inner_clip_norm,
                spec.data.seed,
            )
        rows: RowSource = inner_rows or data
        step_runner = StepRunner(
            state,
            weights,
            micro_batches,
            rows,
            StepSchedule(spec.scaling.virtual_workers_by_step),
            StepSchedule(spec.staleness_by_step),
            inner_steps,
            not by_speed,
            spec.exact,
            given.clip_norm,
            spec.data.seed,
            control,
            reporter.report,
            reporter.pass_point,
            speed,
            given.noise_scale_every,
            spec.wire,
            gang,
            inner,
            clip_value=given.clip_value,
        )
        trial = TrialRun(
            state,
            given.loss_fn,
            rows,
            micro_batches,
            step_runner.gradients,
            step_runner.buffers,
            spec.scaling.num_virtual_workers,
            device,
            reporter.report,
            gang,
            inner,
            exact=spec.exact,
        )
        skipped = SkippedRowGroups(state, data)
        guard = LoopGuard(state, step_runner.buffers, given.loss_fn)
        return cls(state, weights, skipped, step_runner, guard, trial)
