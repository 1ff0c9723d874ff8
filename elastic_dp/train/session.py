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
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.transfer import Parcel, send
from elastic_dp.errors import GroupError, Interrupted, LoopError
from elastic_dp.sampling.seeds import body_seed
from elastic_dp.spec import JobSpec
from elastic_dp.train.checkpoints import Checkpoints
from elastic_dp.train.control import ORPHANED, Answer, Control, Form, Keep, Orphaned, Released, Wake
from elastic_dp.train.faults import Faults
from elastic_dp.train.groups import Groups
from elastic_dp.train.handing import received, wrapped
from elastic_dp.train.inputs import check_inputs
from elastic_dp.train.kind import kind_of, software_of, why_inexact
from elastic_dp.train.link import Link, Status, Timing
from elastic_dp.train.members import handing_over
from elastic_dp.train.restoring import decides
from elastic_dp.train.speed import Speed
from elastic_dp.train.state import LossScale, StepRecord, TrainState, types_of
from elastic_dp.train.step import BatchSource, LossFn, Redo, Stepper, StopAgreed
from elastic_dp.train.unpassed import Unpassed
from elastic_dp.train.weights import Weights

_LOOK_AGAIN_S = 0.02


@dataclass
class Session:
    """All of one worker's training; `open` is called by `ctx.steps`."""

    spec: JobSpec
    worker: WorkerId
    data: BatchSource
    device: torch.device
    backend: str
    link: Link
    status: Status
    control: Control
    is_source: bool
    checkpoints: Checkpoints | None = None
    code: str = ""  # code.code_of the train function
    faults: Faults = field(default_factory=Faults)
    timings: list[Timing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.position = TrainingPosition(0)
        self.has_state = False
        self.lineage_id = 0  # the generation whose source gave the initial weights of our state
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
        self._groups = Groups(self.worker, self.device, self.backend, self.control)
        self._phase = "start"
        self._said_bad: set[int] = set()

    # ------------------------------------------------------------------------ facts for the user

    @property
    def rank(self) -> int:
        return 0 if self.membership is None else self.membership.rank(self.worker)

    @property
    def world_size(self) -> int:
        return 0 if self.membership is None else len(self.membership.members)

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
        self.status.write(self.generation, self.position.step, phase)

    def reported(self, asked: int) -> WorkerReported:
        """For a controller that starts anew; called by the control thread."""
        return WorkerReported(
            self.worker,
            self.generation,
            self.position,
            self.has_state,
            self._phase == "wait",
            self._signature if self.opened else None,
            self.is_source or not self.asked_source,
            self.lineage_id,
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
        check_inputs(model, optimizer, loss_fn, scheduler, clip_norm, precision, user_state or {})
        loss_scale = LossScale() if precision == "fp16" else None
        self.state = TrainState(model, optimizer, scheduler, loss_scale, user_state or {})
        passed = [scheduler, *self.state.user.values()]
        self._unpassed = Unpassed(model, self.state.optimizers.all, loss_fn, passed)
        compared = self.spec.failure.compare_weights_every if self.spec.exact else None
        self.weights = Weights(self.state.parameters, compared)
        self.faults.weights = list(self.state.parameters.values())
        by_speed = self.spec.scaling.balance == "measured"
        self.stepper = Stepper(
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
            Speed(self.device, self.status.write_speed if by_speed else None),
        )
        kind = kind_of(self.device, self.spec.exact)
        software = software_of(self.device, self.code)
        layout, lines = self.state.layout()
        self._signature = Signature(layout, self.data.fingerprint, kind, software, lines)
        self.state.kinds = [kind]
        if self.checkpoints is not None:
            told = self.total_steps if self.told_total_steps else None
            self.checkpoints.open(self.state, self._signature, decides(self.spec), told)
        self.opened = True
        can_source = self.is_source or not self.asked_source
        self.stepper.gradients.set_aside(self.spec.scaling.num_virtual_workers)
        if self.is_source:
            self.stepper.probe(self.inexact_because, self.link.say)
        else:
            self.state.set_aside()
            self.stepper.warm_up()
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
            if self.position.ended:
                self._keep()
                self.exhausted = True
                self.evaluations_in_loop = self.evaluations_begun
                self.report("body")
                return None
            reason = self.control.may_attempt(self.position.step + 1)
            if reason is not None:
                self.leave(reason)
                continue
            try:
                outcome = self.stepper.attempt(self.position.step + 1)
            except GroupError as error:
                self.leave(str(error))
                continue
            if isinstance(outcome, StepRecord):
                return self._body_begins(self._committed(outcome))
            if isinstance(outcome, StopAgreed):
                self.ended, self.position = outcome.reason, self.position._replace(ended=1)
            else:
                assert isinstance(outcome, Redo)

    def linger(self) -> NoReturn:
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
            where = self.worker, self.generation, self.position
            why = self.ended or ""
            self.link.post(WorkerFinished(*where, digest, because, why, self.lineage_id))
            self._wait_for_the_end_of_this_generation()

    # -------------------------------------------------------------------------- generations

    def ensure_generation(self) -> StepRecord | None:
        """Be inside a generation, whole. Returns a step's record if the hand-over brought one we had not."""
        while self._groups.main is None:
            self.report("wait")
            call = self.control.wait()
            if isinstance(call, Orphaned):
                self._keep_alone()
                raise Released(ORPHANED)
            if isinstance(call, Answer):
                self._post_stopped(call.generation, "asked")
                continue
            if isinstance(call, Keep):
                self._keep(call.writers)
                continue
            before, had_state = self.position, self.has_state
            try:
                self._enter(call)
            except GroupError as error:
                self.leave(str(error), self._groups.unreachable)
                continue
            if had_state and self.position.step > before.step:
                return self.state.record
        return None

    def _keep_alone(self) -> None:
        """A last checkpoint, where a body has ended and nothing is newer."""
        right = self.has_state and self.opened and self.weights.mismatch is None
        if right and not self.in_body and self.checkpoints is not None:
            self.checkpoints.commit_alone(self.state, self.position.step, self.evaluations)

    def leave(self, reason: str, unreachable: tuple[WorkerId, ...] = ()) -> None:
        """Out of this generation, for good: undo what is not committed, say where we stand."""
        if self.in_body:
            self._finish_record()
        self.stepper.close()
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

    def _enter(self, form: Form) -> None:
        membership = form.membership
        self.membership = membership
        self.report("form")
        self.pass_point("forming")
        members = membership.members
        self.weights.members = tuple(member.worker for member in members)
        involved = handing_over(membership, self.rank, self.position)
        source = members[membership.rank(membership.source)]
        if not membership.restore:  # the rows of virtual workers that come here, meanwhile
            self._read_ahead(source.position.step + 1)
        self._groups.start(form, involved)
        gives = bool(involved) and membership.source == self.worker
        parcel = self._parcel() if gives and not membership.restore else None  # meanwhile
        state_group = self._groups.formed()
        formed_at = time.time()
        taken = 0
        if membership.restore:
            self._restore(state_group or ProcessGroup(None, 0, 1, self.device))
        if membership.restore or membership.source == self.worker:
            self.has_state, self.lineage_id = True, membership.lineage_id
        if state_group is not None and not membership.restore:
            taken = self._hand_over(state_group, membership, parcel)
        copied_at = time.time()
        if membership.restore:
            self._read_ahead(self.position.step + 1)
        assert self._groups.main is not None
        self.stepper.open(self._groups.main, [(s.first, s.last) for s in members])
        self.timings.append(Timing(membership.generation, formed_at, copied_at, taken))
        self.report("compute")

    def _read_ahead(self, next_step: int) -> None:
        assert self.membership is not None
        mine = self.membership.members[self.rank]
        self.data.read_ahead(next_step, range(mine.first, mine.last))

    def _parcel(self) -> Parcel:
        tree = self.state.tree(self.evaluations, self.ended)
        ours = {"position": self.position, "evaluations_in_loop": self.evaluations_in_loop}
        return wrapped(tree | ours | {"agreed": self.weights.agreed})

    def _hand_over(self, group: ProcessGroup, membership: Membership, parcel: Parcel | None) -> int:
        """Give or take state, as the membership says. Returns the bytes taken."""
        if membership.source == self.worker:
            self.report("give")
            self.pass_point("giving_state")
            send(group, parcel or self._parcel())
            return 0
        self.report("receive")
        self.pass_point("taking_state")
        return self._take(group, membership.lineage_id)

    def _restore(self, group: ProcessGroup) -> None:
        """From the newest checkpoint, as all members do."""

        def enters(phase: str) -> None:
            self.report(phase)
            self.pass_point({"restore": "restoring", "receive": "sharing"}[phase])

        assert self.checkpoints is not None
        commit, self.evaluations = self.checkpoints.restore(self.state, group, self.device, enters)
        step = commit.step
        self.data.mark_bad(self.state.bad_row_groups)
        self.stepper.buffers.reload()
        self.evaluations_begun = self.evaluations_in_loop = len(self.evaluations)
        self.weights.agreed = step
        last = self.total_steps and step >= self.total_steps
        self.ended = "the last step" if last else None
        self.position = TrainingPosition(step, int(bool(last)), len(self.evaluations))

    def _take(self, group: ProcessGroup, lineage_id: int) -> int:
        joins = not self.has_state
        targets = self.state.own_tensors if joins else None
        tree, nbytes = received(group, self.device, types_of(self.state), targets)
        self.control.may_continue()
        position = tree["position"]
        if joins or position.step > self.position.step:
            self.state.adopt(tree, body=joins)
            self.data.mark_bad(self.state.bad_row_groups)
            self.stepper.buffers.reload()
            self.evaluations_begun = tree["evaluations_in_loop"] if joins else 0
            self.weights.agreed = tree["agreed"]
            record = self.state.record
            if record is not None and record.kept and not joins:
                self.control.checkpoint_wanted = False  # this is the step that all agreed on
        # Else it was ahead only by an evaluation or the end: hyper-parameters that our body wrote are ours to keep.
        self.evaluations, self.ended = tree["evaluations"], tree["ended"]
        self.position, self.has_state, self.lineage_id = position, True, lineage_id
        return nbytes

    def _finish_record(self) -> None:
        """The gradient norm is computed when first read; a hand-over may come before that."""
        record = self.state.record
        if record is not None and record.grad_norm is None:
            record.grad_norm = self.stepper.grad_norm()

    def _post_stopped(
        self, generation: int, reason: str, unreachable: tuple[WorkerId, ...] = ()
    ) -> None:
        self.link.post(
            WorkerStopped(
                self.worker,
                generation,
                self.position,
                self.has_state,
                reason,
                unreachable,
                at_head=not self.in_body,
                lineage_id=self.lineage_id,
                mismatch=self.weights.mismatch,
            )
        )

    def _wait_for_the_end_of_this_generation(self) -> None:
        ended = Wake()
        self.control.guard(ended)
        self.control.idle = True
        orphaned = False
        while not orphaned and not ended.event.wait(self.control.orphaned_in_s()):
            orphaned = self.control.orphaned_in_s() <= 0
        self.control.idle = False
        if orphaned:
            self.leave(ORPHANED)

    # -------------------------------------------------------------------------------- steps

    def _committed(self, record: StepRecord) -> StepRecord:
        self._say_skipped(record.number)
        last = self.total_steps and record.number >= self.total_steps
        self.position = TrainingPosition(record.number, int(bool(last)))
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
        self.state.untouched.begin()
        self._unpassed.begin()
        self.report("body")
        self.pass_point("body")
        return record

    def _keep(self, writers: tuple[WorkerId, ...] = ()) -> None:
        """At the head of the loop: a checkpoint, if one is due, or these shall make one. It goes on when the state is copied."""
        kept, step = self.checkpoints, self.position.step
        if kept is None or not self.has_state or self.state.record is None or self.in_body:
            return
        if self.weights.mismatch is not None:
            return  # wrong
        record, ended = self.state.record, bool(self.position.ended)
        due = kept.due(step, record.kept or bool(self.control.interrupted), ended)
        if due or (writers and not kept.writing(step)):
            self.report("keep")
            self.pass_point("keeping")
            must = ended or self.control.interrupted
            if must or ((writers or not record.late) and kept.ready(step)):
                members = writers or self.weights.members
                kept.take(self.state, step, self.evaluations, members, self.lineage_id)
            elif due:
                kept.put_off()
                self.control.keep()
            self.weights.compare_after(step)  # others may have taken it
        self.control.checkpoint_late = kept.late

    def _body_ended(self) -> None:
        self.state.untouched.check()
        self.state.optimizers.check_body()
        said = [*self.state.untouched.attributes_set(), *self._unpassed.check()]
        for text in said if self.rank == 0 else ():
            self.link.say(text)
        written = self.stepper.buffers.written_outside()
        if written is not None:
            raise LoopError(
                f"the body of the loop over ctx.steps changed the buffer {written!r}, e.g. by calling the model "
                "in training mode: use ctx.evaluate, or call model.eval() before and model.train() after; "
                "keep an average of buffers in a model of its own and pass it as state="
            )
        self.stepper.buffers.take_extra_state()
        self.in_body = False

    def pass_point(self, name: str, step: int | None = None) -> None:
        """A named instant at which a test may have planned a fault."""
        if self.faults.plan:
            step = self.position.step if step is None else step
            self.faults.point(name, step, self.rank, self.world_size, self.generation)
