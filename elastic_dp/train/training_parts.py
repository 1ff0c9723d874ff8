"""What one call of `ctx.steps` makes of its arguments: the state, and what runs steps on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_dp.config import JobSpec
from elastic_dp.config.field_checks import whole_number
from elastic_dp.device.gpu import keep_cublas_config
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import GradientClipping
from elastic_dp.distributed.gradient_order import GradientOrder
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.gradient_rounding import check_wire
from elastic_dp.errors import SpecError
from elastic_dp.sampling import StepSchedule
from elastic_dp.train.exactness.torch_optimizers import may_write_to_gradients
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.gang.gang_checks import check_gang
from elastic_dp.train.gang.gang_step import GangReduction, GradientOrders, refuses_none
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.loop_guard.inner_arguments import check_inner_steps
from elastic_dp.train.loop_guard.loop_guard import LoopGuard
from elastic_dp.train.loop_guard.steps_arguments import check_steps_arguments
from elastic_dp.train.master_weights import class_of
from elastic_dp.train.noise_scale import NoiseScaleEstimates
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.sharding.piece_reduction import PieceReduction
from elastic_dp.train.sharding.shardable_optimizers import check_shardable
from elastic_dp.train.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.sharding.sharded_update import ShardedUpdate
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.state.previous_step import PreviousStep
from elastic_dp.train.state.skipped_row_groups import SkippedRowGroups
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import BatchSource, RowSource
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.delayed_gradient import DelayedGradient
from elastic_dp.train.step.inner_rows import InnerMicroBatches, InnerRows
from elastic_dp.train.step.inner_steps import InnerOptimizerFn, InnerSteps
from elastic_dp.train.step.leaf_runner import Leaf, LeafRunner, OnePass
from elastic_dp.train.step.micro_batch import LossFn, MicroBatchRunner
from elastic_dp.train.step.participants import (
    BadRowGroups,
    Buffers,
    CheckpointWish,
    DeviceConnections,
    ParameterGroups,
    Participants,
    Results,
    StepParticipant,
    StopWish,
    WeightDigests,
)
from elastic_dp.train.step.precision import new_loss_scale
from elastic_dp.train.step.step_gradient import FiniteGradient, StepGradient
from elastic_dp.train.step.transaction import Transaction
from elastic_dp.train.step.trial_run import TrialRun
from elastic_dp.train.step.work_shares import WorkShares


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
    micro_batches: MicroBatchRunner
    transaction: Transaction
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
        planned_checkpoint: Callable[[int], bool] | None,
        gang: Gang | None = None,
    ) -> TrainingParts:
        """Checks the arguments and builds the parts. Nothing runs yet. `planned_checkpoint`: which
        steps have a checkpoint, as far as all members know before them; None: there is no storage.
        """
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
        shares = WorkShares(StepSchedule(spec.scaling.virtual_workers_by_step), equal=not by_speed)
        inner_steps = StepSchedule(spec.inner_steps_by_step)
        staleness = StepSchedule(spec.staleness_by_step)
        buffers = ModuleBuffers(state.model)
        order = None if gang is None else GradientOrder()

        runs = MicroBatchRunner if spec.inner_steps is None else InnerMicroBatches
        micro_batches = runs(
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
        )
        exchange = _exchange(given, state, gang)
        gradients = GradientReducer(state.parameters, spec.wire, order, exchange=exchange)
        rows: RowSource = data
        leaf: Leaf = OnePass(
            micro_batches, data, _nothing_to_refuse if gang is None else refuses_none(gang)
        )
        if isinstance(micro_batches, InnerMicroBatches):
            assert given.inner_optimizer is not None  # it is checked above
            micro_batches.rows = rows = InnerRows(data, inner_steps)
            leaf = InnerSteps(
                given.model,
                given.optimizer,
                micro_batches,
                micro_batches.rows,
                gradients,
                speed,
                given.inner_optimizer,
                given.inner_clip_norm,
                spec.data.seed,
            )
        leaves = LeafRunner(
            leaf,
            rows,
            state,
            gradients,
            buffers,
            shares,
            control,
            speed,
            reporter.pass_point,
            exact=spec.exact,
            keeps_finished=gang is None,  # its processes have not finished the same
            micro_batches=inner_steps.at,
        )
        results = Results(micro_batches, rows, gang)
        stop, checkpoint = StopWish(control), CheckpointWish(control)
        of_step = leaves, exchange, results, shares, state
        gradient = StepGradient(*of_step, exact=spec.exact, seed=spec.data.seed)
        if previous is not None:
            gradient = DelayedGradient(
                *of_step,
                exact=spec.exact,
                seed=spec.data.seed,
                previous=previous,
                staleness=staleness,
                parameters=state.parameters,
                wire=spec.wire,
            )
        others: list[StepParticipant] = [
            WeightDigests(weights),
            DeviceConnections(),
            BadRowGroups(state, rows, results),
            Buffers(buffers, shares.virtual_workers, reporter.pass_point, gang),
            gradient,
        ]
        if gang is not None and order is not None:
            others.append(GradientOrders(gang, order))
        if sharding is not None and isinstance(exchange, PieceReduction):

            def has_checkpoint(step: int) -> bool:
                planned = planned_checkpoint
                return planned is not None and (checkpoint.agreed or planned(step))

            others.append(
                ShardedUpdate(
                    sharding, exchange, state, weights, has_checkpoint, reporter.pass_point
                )
            )
        if given.noise_scale_every is not None:
            others.append(NoiseScaleEstimates(given.noise_scale_every, gradient, results))
        others.append(FiniteGradient(gradient, state, results))
        groups = ParameterGroups(state.optimizers.all)
        participants = Participants(results, stop, checkpoint, groups, others, gang)
        schedules = StepSchedule(spec.scaling.virtual_workers_by_step), inner_steps, staleness
        transaction = Transaction(
            state, leaves, gradient, participants, schedules, control, reporter, spec.data.seed
        )
        trial = TrialRun(
            state,
            given.loss_fn,
            rows,
            micro_batches,
            leaf,
            gradients,
            buffers,
            spec.scaling.num_virtual_workers,
            device,
            reporter.report,
            exact=spec.exact,
            gang=gang,
        )
        skipped = SkippedRowGroups(state, data)
        guard = LoopGuard(state, buffers, given.loss_fn)
        return cls(state, weights, skipped, micro_batches, transaction, guard, trial)


def _exchange(given: StepsArguments, state: TrainState, gang: Gang | None) -> GradientExchange:
    """Returns how the gradients of the job are exchanged."""
    clipping = GradientClipping(given.clip_norm, given.clip_value)
    parameters = list(state.parameters.values())

    def writes_to_gradients() -> bool:
        return may_write_to_gradients(class_of(state.optimizer), state.optimizer.param_groups)

    if gang is not None:
        return GangReduction(parameters, gang, clipping=clipping)
    if state.sharding is not None:
        return PieceReduction(
            parameters,
            state.sharding,
            clipping=clipping,
            writes_to_gradients=writes_to_gradients,
        )
    return GradientExchange(parameters, clipping=clipping, writes_to_gradients=writes_to_gradients)


def _nothing_to_refuse(step: int, virtual_worker: int) -> None:
    pass
