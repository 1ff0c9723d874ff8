"""One worker's run, generation after generation, behind the step iterator.

The training thread lives here. It is either inside a generation (its group is formed, its state is whole) or
waiting for one. Whatever fails in a collective, or is aborted, brings it back to a boundary: nothing of the
aborted step remains, it reports where it stands (`TrainingPosition`), and takes part in the next generation. What it then
owes itself (state, because another one was ahead) it takes in the hand-over before the first step.

User code sees none of this: `next_step` returns each committed step once, in order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from elastic_dp.coordinator.messages import (
    Membership,
    Signature,
    TrainingPosition,
    WorkerFinished,
    WorkerId,
    WorkerReady,
    WorkerReported,
    WorkerStopped,
)
from elastic_dp.data.generators import seed_everything
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import StatePayload, send
from elastic_dp.errors import GroupError, Interrupted, LoopError
from elastic_dp.sampling.seeds import body_seed
from elastic_dp.spec import JobSpec
from elastic_dp.train.checkpointing.job_match import job_identity
from elastic_dp.train.checkpointing.worker_checkpointer import WorkerCheckpointer
from elastic_dp.train.controller_link import ControllerLink, GenerationTiming, HeartbeatStatus
from elastic_dp.train.exactness.machine_kind import machine_kind, software_versions, why_inexact
from elastic_dp.train.fault_injection import FaultInjector
from elastic_dp.train.generations.generation_groups import GenerationGroups
from elastic_dp.train.generations.state_payload import receive_state, serialize_state
from elastic_dp.train.generations.state_transfer import state_transfer_ranks
from elastic_dp.train.generations.worker_control import (
    ORPHANED,
    CheckpointState,
    ConfirmLeft,
    FormGroup,
    Orphaned,
    Released,
    WorkerControl,
)
from elastic_dp.train.loop_guard.loop_guard import LoopGuard
from elastic_dp.train.loop_guard.steps_arguments import check_steps_arguments
from elastic_dp.train.state.loss_scale import LossScale
from elastic_dp.train.state.step_record import StepRecord
from elastic_dp.train.state.train_state import TrainState, types_of
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import BatchSource
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.step_runner import LossFn, Redo, StepRunner, StopAgreed

_LOOK_AGAIN_S = 0.02


@dataclass
class Session:
    """All of one worker's training; `open` is called by `ctx.steps`."""

    spec: JobSpec
    worker: WorkerId
    data: BatchSource
    device: torch.device
    backend: str
    link: ControllerLink
    status: HeartbeatStatus
    control: WorkerControl
    is_source: bool
    checkpoints: WorkerCheckpointer | None = None
    code: str = ""  # code_fingerprint of the train function
    faults: FaultInjector = field(default_factory=FaultInjector)
    timings: list[GenerationTiming] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = TrainingPosition(0)
        self.whole = False
        self.founded = 0  # the generation whose source gave the initial weights of our state
        self.asked_source = False
        self.told_total_steps = False  # to the train function
        self.opened = False
        self.exhausted = False
        self.failure: Exception | None = None  # what ctx.steps raised first
        self.inexact_because: list[str] = []
        self.membership: Membership | None = None
        self.evaluations: list[dict[str, float]] = []
        self.evaluations_begun = 0
        self.evaluations_in_loop = 0  # in the last body; those after the loop come behind them
        self.ended: str | None = None
        self.in_body = False
        self.log_calls = 0
        self._groups = GenerationGroups(self.worker, self.device, self.backend, self.control)
        self._phase = "start"
        self._said_bad: set[int] = set()

    # ------------------------------------------------------------------------ facts for the user

    @property
    def rank(self) -> int:
        return 0 if self.membership is None else self.membership.rank(self.worker)

    @property
    def world_size(self) -> int:
        return 0 if self.membership is None else len(self.membership.seats)

    @property
    def generation(self) -> int:
        return 0 if self.membership is None else self.membership.generation

    @property
    def total_steps(self) -> int:
        """Steps this run has, as far as steps or epochs limit it; 0 when only time does."""
        limits = []
        if self.spec.max_steps is not None:
            limits.append(self.spec.max_steps)
        if self.spec.data.epochs is not None:
            limits.append(self.spec.data.epochs * self.data.steps_per_epoch)
        return min(limits, default=0)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The row groups that the run leaves out, since they cannot be decoded."""
        return tuple(map(self.data.describe_row_group, sorted(self.state.bad_row_groups)))

    def report(self, phase: str) -> None:
        self._phase = phase
        self.status.write(self.generation, self.place.step, phase)

    def reported(self, asked: int) -> WorkerReported:
        """For a controller that starts anew; called by the control thread."""
        return WorkerReported(
            self.worker,
            self.generation,
            self.place,
            self.whole,
            self._phase == "wait",
            self._signature if self.opened else None,
            self.is_source or not self.asked_source,
            self.founded,
            asked,
        )

    # ------------------------------------------------------------------------------------- life

    def open(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        scheduler: Any,
        clip_norm: float | None,
        precision: str | None,
        user_state: Mapping[str, Any] | None,
    ) -> None:
        if self.opened:
            raise LoopError("ctx.steps was called twice; a train function has one loop")
        check_steps_arguments(
            model, optimizer, loss_fn, scheduler, clip_norm, precision, user_state or {}
        )
        loss_scale = LossScale() if precision == "fp16" else None
        self.state = TrainState(model, optimizer, scheduler, loss_scale, user_state or {})
        compared = self.spec.failure.compare_weights_every if self.spec.exact else None
        self.weights = WeightComparison(self.state.parameters, compared)
        self.faults.weights = list(self.state.parameters.values())
        by_speed = self.spec.scaling.balance == "measured"
        self.step_runner = StepRunner(
            self.state,
            self.weights,
            loss_fn,
            self.data,
            self.spec.scaling.num_virtual_workers,
            self.device,
            self.spec.exact,
            clip_norm,
            precision,
            self.spec.data.seed,
            self.control,
            self.report,
            self.pass_point,
            ComputeSpeed(self.device, self.status.write_speed if by_speed else None),
        )
        self._loop_guard = LoopGuard(self.state, self.step_runner.buffers, loss_fn)
        kind = machine_kind(self.device, self.spec.exact)
        software = software_versions(self.device, self.code)
        layout, lines = self.state.layout()
        self._signature = Signature(layout, self.data.fingerprint, kind, software, lines)
        self.state.kinds = [kind]
        if self.checkpoints is not None:
            told = self.total_steps if self.told_total_steps else None
            self.checkpoints.open(self.state, self._signature, job_identity(self.spec), told)
        self.opened = True
        can_source = self.is_source or not self.asked_source
        self.step_runner.gradients.preallocate(self.spec.scaling.num_virtual_workers)
        if self.is_source:
            self.step_runner.probe(self.inexact_because, self.link.say)
        else:
            self.state.preallocate()
            self.step_runner.warm_up()
        self.link.post(WorkerReady(self.worker, self._signature, can_source))

    def next_step(self) -> StepRecord | None:
        """The next committed step, or None after the last. Raises Released when this worker must leave."""
        self._body_ended()
        self._keep()
        if self.control.interrupted:
            raise Interrupted(128 + self.control.interrupted)
        while True:
            caught_up = self.ensure_generation()
            if caught_up is not None:
                return self._body_begins(caught_up)
            if self.place.ended:
                self._keep()
                self.exhausted = True
                self.evaluations_in_loop = self.evaluations_begun
                self.report("body")
                return None
            reason = self.control.may_attempt(self.place.step + 1)
            if reason is not None:
                self.leave(reason)
                continue
            try:
                outcome = self.step_runner.attempt(self.place.step + 1)
            except GroupError as error:
                self.leave(str(error))
                continue
            if isinstance(outcome, StepRecord):
                return self._body_begins(self._committed(outcome))
            if isinstance(outcome, StopAgreed):
                self.ended, self.place = outcome.reason, self.place._replace(ended=1)
            else:
                assert isinstance(outcome, Redo)

    def serve_until_released(self) -> NoReturn:
        """After the train function returned: stay a source for those behind, until released."""
        digest = self.state.digest()
        while True:
            self.leave_if_ended()
            self.ensure_generation()
            if self.checkpoints is not None and self.checkpoints.busy:
                self.report("keep")  # the last one is made before the run has ended
                time.sleep(_LOOK_AGAIN_S)
                continue
            self.report("done")
            self.link.skipped(self.skipped)
            because = why_inexact(self.inexact_because, self.state.kinds)
            where = self.worker, self.generation, self.place
            why = self.ended or ""
            self.link.post(WorkerFinished(*where, digest, because, why, self.founded))
            if not self.control.wait_until_ended():
                self.leave(ORPHANED)

    # -------------------------------------------------------------------------- generations

    def ensure_generation(self) -> StepRecord | None:
        """Be inside a generation, whole. Returns a step's record if the hand-over brought one we had not."""
        while self._groups.main is None:
            self.report("wait")
            call = self.control.wait()
            if isinstance(call, Orphaned):
                self._keep_alone()
                raise Released(ORPHANED)
            if isinstance(call, ConfirmLeft):
                self._post_stopped(call.generation, "asked")
                continue
            if isinstance(call, CheckpointState):
                self._keep(call.writers)
                continue
            before, was_whole = self.place, self.whole
            try:
                self._enter(call)
            except GroupError as error:
                self.leave(str(error), self._groups.unreachable)
                continue
            if was_whole and self.place.step > before.step:
                return self.state.record
        return None

    def _keep_alone(self) -> None:
        """A last checkpoint, where a body has ended and nothing is newer."""
        right = self.whole and self.opened and self.weights.disagreement is None
        if right and not self.in_body and self.checkpoints is not None:
            self.checkpoints.seal_alone(self.state, self.place.step, self.evaluations)

    def leave(self, reason: str, unreachable: tuple[WorkerId, ...] = ()) -> None:
        """Out of this generation, for good: undo what is not committed, say where we stand."""
        if self.in_body:
            self._finish_record()
        self.step_runner.close()
        generation = self.control.leave()
        self._groups.leave()
        self._post_stopped(generation, reason, unreachable)

    def leave_if_ended(self) -> None:
        if self._groups.main is not None:
            try:
                self.control.may_continue()
            except GroupError as error:
                self.leave(str(error))

    def side_group(self) -> ProcessGroup:
        """A second group of the same members, for evaluations; formed when first asked for."""
        return self._groups.side()

    def _enter(self, form: FormGroup) -> None:
        membership = form.membership
        self.membership = membership
        self.report("form")
        self.pass_point("forming")
        seats = membership.seats
        self.weights.members = tuple(seat.worker for seat in seats)
        involved = state_transfer_ranks(membership, self.rank, self.place)
        source = seats[membership.rank(membership.source)]
        if not membership.restore:  # the rows of virtual workers that come here, meanwhile
            self._read_ahead(source.place.step + 1)
        self._groups.start(form, involved)
        gives = bool(involved) and membership.source == self.worker
        payload = self._state_payload() if gives and not membership.restore else None  # meanwhile
        state_group = self._groups.formed()
        formed_at = time.time()
        taken = 0
        if membership.restore:
            self._restore(state_group or ProcessGroup(None, 0, 1, self.device))
        if membership.restore or membership.source == self.worker:
            self.whole, self.founded = True, membership.founded
        if state_group is not None and not membership.restore:
            taken = self._hand_over(state_group, membership, payload)
        copied_at = time.time()
        if membership.restore:
            self._read_ahead(self.place.step + 1)
        assert self._groups.main is not None
        self.step_runner.open(self._groups.main, [(s.first, s.last) for s in seats])
        self.timings.append(GenerationTiming(membership.generation, formed_at, copied_at, taken))
        self.report("compute")

    def _read_ahead(self, next_step: int) -> None:
        assert self.membership is not None
        mine = self.membership.seats[self.rank]
        self.data.read_ahead(next_step, range(mine.first, mine.last))

    def _state_payload(self) -> StatePayload:
        tree = self.state.tree(self.evaluations, self.ended)
        ours = {"place": self.place, "evaluations_in_loop": self.evaluations_in_loop}
        return serialize_state(tree | ours | {"agreed": self.weights.agreed})

    def _hand_over(
        self, group: ProcessGroup, membership: Membership, payload: StatePayload | None
    ) -> int:
        """Give or take state, as the membership says. Returns the bytes taken."""
        if membership.source == self.worker:
            self.report("give")
            self.pass_point("giving_state")
            send(group, payload or self._state_payload())
            return 0
        self.report("receive")
        self.pass_point("taking_state")
        return self._take(group, membership.founded)

    def _restore(self, group: ProcessGroup) -> None:
        """From the newest checkpoint, as all members do."""

        def enters(phase: str) -> None:
            self.report(phase)
            self.pass_point({"restore": "restoring", "receive": "sharing"}[phase])

        assert self.checkpoints is not None
        seal, self.evaluations = self.checkpoints.restore(self.state, group, self.device, enters)
        step = seal.step
        self.data.mark_bad(self.state.bad_row_groups)
        self.step_runner.buffers.reload()
        self.evaluations_begun = self.evaluations_in_loop = len(self.evaluations)
        self.weights.agreed = step
        last = self.total_steps and step >= self.total_steps
        self.ended = "the last step" if last else None
        self.place = TrainingPosition(step, int(bool(last)), len(self.evaluations))

    def _take(self, group: ProcessGroup, founded: int) -> int:
        joins = not self.whole
        targets = self.state.own_tensors if joins else None
        tree, nbytes = receive_state(group, self.device, types_of(self.state), targets)
        self.control.may_continue()
        place = tree["place"]
        if joins or place.step > self.place.step:
            self.state.adopt(tree, body=joins)
            self.data.mark_bad(self.state.bad_row_groups)
            self.step_runner.buffers.reload()
            self.evaluations_begun = tree["evaluations_in_loop"] if joins else 0
            self.weights.agreed = tree["agreed"]
            record = self.state.record
            if record is not None and record.kept and not joins:
                self.control.checkpoint_wanted = False  # this is the step that all agreed on
        # Else it was ahead only by an evaluation or the end: hyper-parameters that our body wrote are ours to keep.
        self.evaluations, self.ended = tree["evaluations"], tree["ended"]
        self.place, self.whole, self.founded = place, True, founded
        return nbytes

    def _finish_record(self) -> None:
        """The gradient norm is computed when first read; a hand-over may come before that."""
        record = self.state.record
        if record is not None and record.grad_norm is None:
            record.grad_norm = self.step_runner.grad_norm()

    def _post_stopped(
        self, generation: int, reason: str, unreachable: tuple[WorkerId, ...] = ()
    ) -> None:
        self.link.post(
            WorkerStopped(
                self.worker,
                generation,
                self.place,
                self.whole,
                reason,
                unreachable,
                at_head=not self.in_body,
                founded=self.founded,
                disagreement=self.weights.disagreement,
            )
        )

    # -------------------------------------------------------------------------------- steps

    def _committed(self, record: StepRecord) -> StepRecord:
        self._say_skipped(record.number)
        last = self.total_steps and record.number >= self.total_steps
        self.place = TrainingPosition(record.number, int(bool(last)))
        self.ended = "the last step" if last else None
        self.evaluations = []
        self.evaluations_begun = 0
        return record

    def _say_skipped(self, step: int) -> None:
        """One of the members that saw the step through says it; the whole list comes at the end."""
        new = self.state.bad_row_groups - self._said_bad
        if new and self.rank == 0:
            names = ", ".join(self.data.describe_row_group(group) for group in sorted(new))
            self.link.say(f"from step {step} on without what cannot be decoded: {names}")
        self._said_bad |= new

    def _body_begins(self, record: StepRecord) -> StepRecord:
        self.in_body = True
        self.log_calls = 0
        # Here and not with the commit: a member that takes the step over runs this body, too.
        seed_everything(body_seed(self.spec.data.seed, record.number))
        self._loop_guard.body_begins()
        self.report("body")
        self.pass_point("body")
        return record

    def _keep(self, writers: tuple[WorkerId, ...] = ()) -> None:
        """At the head of the loop: a checkpoint, if one is due, or these shall make one. It goes on when the state is copied."""
        kept, step = self.checkpoints, self.place.step
        if kept is None or not self.whole or self.state.record is None or self.in_body:
            return
        if self.weights.disagreement is not None:
            return  # wrong
        record, ended = self.state.record, bool(self.place.ended)
        due = kept.due(step, record.kept or bool(self.control.interrupted), ended)
        if due or (writers and not kept.writing(step)):
            self.report("keep")
            self.pass_point("keeping")
            must = ended or self.control.interrupted
            if must or ((writers or not record.late) and kept.ready(step)):
                members = writers or self.weights.members
                kept.take(self.state, step, self.evaluations, members, self.founded)
            elif due:
                kept.defer()
                self.control.keep()
            self.weights.compare_after(step)  # others may have taken it
        self.control.checkpoint_late = kept.late

    def _body_ended(self) -> None:
        self._loop_guard.body_ended(self._warn)
        self.in_body = False

    def _warn(self, text: str) -> None:
        if self.rank == 0:  # the others say the same
            self.link.say(text)

    def pass_point(self, name: str, step: int | None = None) -> None:
        """A named instant at which a test may have planned a fault."""
        if self.faults.plan:
            step = self.place.step if step is None else step
            self.faults.point(name, step, self.rank, self.world_size, self.generation)
