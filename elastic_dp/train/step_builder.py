"""What one call of `ctx.steps` makes of its arguments: the state, and what runs steps on it.

An option of training that is an extension is resolved here, by its name: `extend` of its module
puts other parts in the place of the plain ones before they are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.device.gpu import is_gpu, keep_cublas_config
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import GradientClipping
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.gradient_rounding import Wire, check_wire
from elastic_dp.distributed.local_shards import is_sharded
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.generations.gradual_join import GradualJoin
from elastic_dp.train.loop_guard.variables_guard import VariablesGuard
from elastic_dp.train.master_weights import may_write_to_gradients
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.state.train_state import OptimizerHolders, StatePart, TrainState
from elastic_dp.train.step.batch_source import RowSource
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.leaf_runner import LeafRunner, WorkShares
from elastic_dp.train.step.micro_batch import Leaf
from elastic_dp.train.step.participants import (
    DeviceConnections,
    ParameterGroups,
    Results,
    StepParticipant,
    WeightComparison,
    Wishes,
)
from elastic_dp.train.step.precision import new_loss_scale
from elastic_dp.train.step.step_gradient import StepGradient
from elastic_dp.train.step.transaction import Transaction
from elastic_dp.train.step.trial_run import TrialRun
from elastic_dp.train.steps_arguments import StepsArguments, check_steps_arguments

if TYPE_CHECKING:
    from elastic_dp.train.worker_session import WorkerSession


class StepBuilder:
    """What a step of a session is made of. `extend` of an extension gets it when only the arguments
    are there, and may change what makes the other parts. Nothing runs yet."""

    def __init__(self, given: StepsArguments, session: WorkerSession) -> None:
        """Checks the arguments."""
        check_steps_arguments(given)
        self.given, self.session, self.spec = given, session, session.spec
        self.data, self.device, self.gang = session.data, session.device, session.gang
        self.reporter = session.reporter
        self.parameters = dict(self.given.model.named_parameters())
        self.loss_scale = new_loss_scale(self.given.precision)
        self.rows: RowSource = self.data
        self.holders = OptimizerHolders()
        self.previous: StatePart | None = None
        # Hears the number of each parameter that gets a gradient.
        self.note_gradient: Callable[[int], None] | None = None
        self.new_exchange: Callable[..., GradientExchange] = GradientExchange
        self.new_leaf: Callable[[StepBuilder], Leaf] = Leaf
        self.new_gradient: Callable[[StepBuilder], StepGradient] = StepGradient
        self.kind_of: Callable[[str], str] = lambda own: own  # by the kind of this machine
        self.new_participants: list[Callable[[], StepParticipant]] = []
        # What changes with the step in how a job is distributed.
        self.schedules = [StepSchedule(self.spec.scaling.virtual_workers_by_step)]

    @property
    def wire(self) -> Wire:
        """How gradients are rounded."""
        return self.spec.wire if self.given.rounding is None else self.given.rounding

    def has_checkpoint(self, step: int) -> bool:
        """Whether a step that is about to be committed has one, as far as all members know."""
        checkpoints = self.session.checkpoints
        return checkpoints is not None and (self.wishes.checkpoint or checkpoints.planned(step))

    @property
    def _joins_gradually(self) -> bool:
        """Whether the state of a step is all that workers need to make the same update."""
        given, spec = self.given, self.spec
        plain = spec.inner_steps is None and given.noise_scale_every is None
        return spec.exact and plain and self.gang is None and not given.participants

    def make_parts(self) -> None:
        """Checks the arguments with the job, and makes the parts, with those of extensions."""
        given, spec, session = self.given, self.spec, self.session
        if spec.exact:
            keep_cublas_config(given.model, self.device)
        check_wire(spec.wire, self.parameters)
        if given.rounding is not None and (spec.wire is not None or not spec.exact):
            raise SpecError(
                "ctx.steps got rounding, which rounds the sums of exact mode: leave out "
                + (f"wire={spec.wire!r}" if spec.exact else "exact=False")
            )
        if spec.inner_steps is None:
            _refuse_inner_arguments(given)
        if self.gang is None:
            _refuse_shards(self.parameters)
        wanted = {
            "gangs": self.gang is not None,
            "noise_scale": given.noise_scale_every is not None,
            "diloco": spec.inner_steps is not None,
            "sharding": spec.sharding is not None,
            "delayed": spec.delays,
            "spikes": spec.failure.on_spike is not None,
        }
        for name in (name for name, is_wanted in wanted.items() if is_wanted):
            importlib.import_module(f"elastic_dp.extensions.{name}").extend(self)
        state = self.state = TrainState(
            given.model,
            given.optimizer,
            given.scheduler,
            self.loss_scale,
            given.state,
            holders=self.holders,
            previous=self.previous,
        )
        session.at_loop_end.callback(state.model_guard.close)
        compared = spec.failure.compare_weights_every if spec.exact else None
        self.weights = WeightComparison(state.parameters, compared)
        by_speed = spec.scaling.balance == "measured"
        measures = by_speed or is_gpu(self.device)  # where phases do not tell what it computes
        self.speed = ComputeSpeed(self.device, session.status.write_speed if measures else None)
        shares = WorkShares(self.schedules[0], equal=not by_speed)
        buffers = ModuleBuffers(
            state.model, shares.virtual_workers, self.reporter.pass_point, self.gang
        )
        self.exchange = self.new_exchange(
            state.parameters.values(),
            clipping=GradientClipping(given.clip_norm, given.clip_value),
            writes_to_gradients=lambda: may_write_to_gradients(state.optimizer),
        )
        self.gradients = GradientReducer(
            state.parameters, self.wire, self.note_gradient, exchange=self.exchange
        )
        self.leaves = LeafRunner(self, buffers, shares)
        self.joining = GradualJoin(state, shares, allowed=self._joins_gradually)
        self.results = Results(state, self.rows, session.inexact_because, self.gang)
        self.wishes = Wishes(session.control)
        self.gradient = self.new_gradient(self)
        participants = [
            self.wishes,
            ParameterGroups(state.optimizers.all, session.described),
            self.results,
            self.joining,
            self.weights,
            *([DeviceConnections()] if accelerator_of(self.device).asynchronous else ()),
            buffers,
            self.gradient,
            *(make() for make in self.new_participants),
            *given.participants,
        ]
        self.transaction = Transaction(self, participants)
        self.trial = TrialRun(self)
        self.variables_guard = VariablesGuard(state, buffers, given.loss_fn, given.inner_optimizer)


def _refuse_inner_arguments(given: StepsArguments) -> None:
    for name in ("inner_optimizer", "inner_clip_norm"):
        if getattr(given, name) is not None:
            raise SpecError(
                f"ctx.steps got {name}, and the job has no inner steps: pass "
                "ElasticTrainer(inner_steps=…), or leave it out"
            )


def _refuse_shards(parameters: Mapping[str, torch.Tensor]) -> None:
    for name, p in parameters.items():
        if is_sharded(p):
            raise ModelError(
                f"model.{name} is a DTensor, of which other processes hold a part: set "
                "ScalingConfig.processes_per_worker, and shard the model over ctx.mesh"
            )
