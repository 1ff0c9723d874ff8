"""One worker's run, generation after generation, behind the step iterator.

The training thread lives here. It is either inside a generation (its group is formed, its state is whole) or
waiting for one. Whatever fails in a collective, or is aborted, brings it back to a boundary: nothing of the
aborted step remains, it reports where it stands (`Place`), and takes part in the next generation. What it then
owes itself (state, because another one was ahead) it takes in the hand-over before the first step.

User code sees none of this: `next_step` returns each committed step once, in order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from elastic_dp.distributed.process_group import Forming, ProcessGroup, Rendezvous
from elastic_dp.distributed.transfer import receive, send
from elastic_dp.errors import FormingFailed, GroupError, LoopError, ModelError, SpecError
from elastic_dp.protocol.messages import (
    Event,
    Membership,
    Place,
    Signature,
    WorkerFinished,
    WorkerId,
    WorkerReady,
    WorkerReported,
    WorkerStopped,
)
from elastic_dp.sampling.seeds import body_seed
from elastic_dp.spec import JobSpec
from elastic_dp.train.control import Answer, Control, Form
from elastic_dp.train.faults import Faults
from elastic_dp.train.kind import kind_of
from elastic_dp.train.state import LossScale, StepRecord, TrainState
from elastic_dp.train.step import (
    BatchSource,
    LossFn,
    Redo,
    Stepper,
    StopAgreed,
    seed_everything,
)


class _Wake:
    """Set when the generation ends."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def abort(self) -> None:
        self.event.set()


class Link(Protocol):
    """The way to the controller. Posting never waits and never fails: what is lost is asked for again."""

    def post(self, event: Event) -> None: ...

    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics; all workers send the same, the receiver keeps the first."""
        ...


class Status(Protocol):
    """Where heartbeats look: written by the training thread, read by a process beside it."""

    def write(self, generation: int, step: int, phase: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """When a generation began here, for those who measure pauses (seconds of `time.time`)."""

    generation: int
    formed_at: float
    ready_at: float  # state handed over, first step may begin
    bytes_received: int


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
    faults: Faults = field(default_factory=Faults)
    timings: list[Timing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = Place(0)
        self.whole = False
        self.founded = 0  # the generation whose source gave the initial weights of our state
        self.asked_source = False
        self.opened = False
        self.exhausted = False
        self.inexact_because: list[str] = []
        self.membership: Membership | None = None
        self.evaluations: list[dict[str, float]] = []
        self.evaluations_begun = 0
        self.ended: str | None = None
        self.in_body = False
        self.log_calls = 0
        self._rendezvous: Rendezvous | None = None
        self._group: ProcessGroup | None = None
        self._side_group: ProcessGroup | None = None  # for evaluations
        self._old_groups: list[ProcessGroup] = []
        self._phase = "start"
        self._unreachable: tuple[WorkerId, ...] = ()

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

    def report(self, phase: str) -> None:
        self._phase = phase
        self.status.write(self.generation, self.place.step, phase)

    def reported(self) -> WorkerReported:
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
        if precision not in (None, "fp32", "bf16", "fp16"):
            raise SpecError(f"precision is {precision!r}, must be None, 'fp32', 'bf16' or 'fp16'")
        if clip_norm is not None and not clip_norm > 0:
            raise SpecError(f"clip_norm is {clip_norm}, must be more than 0, or None")
        if not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"ctx.steps got a {type(model).__name__} as model, must be a torch.nn.Module"
            )
        loss_scale = LossScale() if precision == "fp16" else None
        self.state = TrainState(model, optimizer, scheduler, loss_scale, user_state or {})
        self.state.check()
        self.stepper = Stepper(
            self.state,
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
        )
        self._signature = Signature(
            self.state.layout(), self.data.fingerprint, kind_of(self.device, self.spec.exact)
        )
        self.opened = True
        can_source = self.is_source or not self.asked_source
        self.stepper.gradients.set_aside(self.spec.scaling.num_virtual_workers)
        if not self.is_source:
            self.state.set_aside()
            self.stepper.warm_up()
        self.link.post(WorkerReady(self.worker, self._signature, can_source))

    def next_step(self) -> StepRecord | None:
        """The next committed step, or None after the last. Raises Released when this worker must leave."""
        self._body_ended()
        while True:
            caught_up = self.ensure_generation()
            if caught_up is not None:
                return self._body_begins(caught_up)
            if self.place.ended:
                self.exhausted = True
                self.report("body")
                return None
            reason = self.control.may_attempt(self.place.step + 1)
            if reason is not None:
                self.leave(reason)
                continue
            try:
                outcome = self.stepper.attempt(self.place.step + 1)
            except GroupError as error:
                self.leave(str(error))
                continue
            if isinstance(outcome, StepRecord):
                return self._body_begins(self._committed(outcome))
            if isinstance(outcome, StopAgreed):
                self.ended = outcome.reason
                self.place = self.place._replace(ended=1)
            else:
                assert isinstance(outcome, Redo)

    def linger(self) -> NoReturn:
        """After the train function returned: stay a source for those behind, until released."""
        digest = self.state.digest()
        because = tuple(dict.fromkeys(self.inexact_because))
        while True:
            self.leave_if_ended()
            self.ensure_generation()
            self.report("done")
            self.link.post(
                WorkerFinished(self.worker, self.generation, self.place, digest, because)
            )
            self._wait_for_the_end_of_this_generation()

    # -------------------------------------------------------------------------- generations

    def ensure_generation(self) -> StepRecord | None:
        """Be inside a generation, whole. Returns a step's record if the hand-over brought one we had not."""
        while self._group is None:
            self.report("wait")
            call = self.control.wait()
            if isinstance(call, Answer):
                self._post_stopped(call.generation, "asked")
                continue
            before, was_whole = self.place, self.whole
            try:
                self._enter(call)
            except GroupError as error:
                unreachable = self._unreachable
                self.leave(str(error), unreachable)
                continue
            if was_whole and self.place.step > before.step:
                return self.state.record
        return None

    def leave(self, reason: str, unreachable: tuple[WorkerId, ...] = ()) -> None:
        """Out of this generation, for good: undo what is not committed, say where we stand."""
        self.stepper.close()
        generation = self.control.leave()
        # Peers may still be receiving what we sent for the step we both committed, so these close later.
        self._old_groups += [g for g in (self._group, self._side_group) if g is not None]
        self._group = self._side_group = None
        self._post_stopped(generation, reason, unreachable)

    def leave_if_ended(self) -> None:
        if self._group is not None:
            try:
                self.control.may_continue()
            except GroupError as error:
                self.leave(str(error))

    def side_group(self) -> ProcessGroup:
        """A second group of the same members, for evaluations; formed when first asked for."""
        assert self.membership is not None
        if self._side_group is None:
            everyone = range(self.world_size)
            forming = self._forming(self.membership, "side", everyone)
            self._side_group = self._formed(forming, everyone)
        return self._side_group

    def _enter(self, form: Form) -> None:
        membership = form.membership
        self._unreachable = ()
        self._rendezvous = form.rendezvous
        self.membership = membership
        self.report("form")
        self.pass_point("forming")
        seats = membership.seats
        everyone, involved = range(len(seats)), self._in_hand_over(membership)
        main = self._forming(membership, "main", everyone)
        state = self._forming(membership, "state", involved) if involved else None
        try:
            group = self._group = self._formed(main, everyone)
            state_group = None if state is None else self._formed(state, involved)
        except GroupError:
            if state is not None:
                state.abort()
            raise
        formed_at = time.time()
        for old in self._old_groups:
            old.close()
        # Others may still be receiving when we are done: closed with the next forming.
        self._old_groups = [] if state_group is None else [state_group]
        received = 0
        if membership.source == self.worker:
            self.whole, self.founded = True, membership.founded
        if state_group is not None:
            received = self._hand_over(state_group, membership)
        self.stepper.open(group, [(s.first, s.last) for s in seats], self.place.step + 1)
        self.timings.append(Timing(membership.generation, formed_at, time.time(), received))
        self.report("compute")

    def _forming(self, membership: Membership, purpose: str, ranks: Sequence[int]) -> Forming:
        """The making of a group of the members with these ranks (in this order; I am one of them)."""
        assert self._rendezvous is not None
        rendezvous = Rendezvous(
            self._rendezvous.host,
            self._rendezvous.port,
            f"{self._rendezvous.prefix}/{membership.generation}/{purpose}",
        )
        forming = Forming(
            rendezvous,
            rank=ranks.index(membership.rank(self.worker)),
            world_size=len(ranks),
            device=self.device,
            backend=self.backend,
            timeout_s=membership.forming_timeout_s,
        )
        self.control.guard(forming)
        return forming.start()

    def _formed(self, forming: Forming, ranks: Sequence[int]) -> ProcessGroup:
        try:
            return forming.wait()
        except FormingFailed:
            assert self.membership is not None
            seats = self.membership.seats
            self._unreachable = tuple(seats[ranks[r]].worker for r in forming.absent)
            raise

    def _in_hand_over(self, membership: Membership) -> list[int]:
        """The ranks between which state is handed over, the source first; empty if I am not one."""
        seats = membership.seats
        source = membership.rank(membership.source)
        first = not any(seat.whole for seat in seats)
        truth = self.place if first else seats[source].place
        receivers = [
            r
            for r, seat in enumerate(seats)
            if r != source and (not seat.whole or seat.place < truth)
        ]
        involved = [source, *receivers]
        return involved if receivers and membership.rank(self.worker) in involved else []

    def _hand_over(self, group: ProcessGroup, membership: Membership) -> int:
        """Give or take state, as the membership says. Returns the bytes taken."""
        if membership.source == self.worker:
            self.report("give")
            self.pass_point("giving_state")
            self._finish_record()
            send(group, self.state.tree(self.evaluations, self.ended) | {"place": self.place})
            return 0
        self.report("receive")
        self.pass_point("taking_state")
        return self._take(group, membership.founded)

    def _take(self, group: ProcessGroup, founded: int) -> int:
        joins = not self.whole
        tree, received = receive(group, self.device, self.state.own_tensors if joins else None)
        self.control.may_continue()
        place = tree["place"]
        if joins or place.step > self.place.step:
            self.state.adopt(tree, body=joins)
            self.stepper.buffers.reload()
            self.evaluations_begun = 0
        # Else it was ahead only by an evaluation or the end: our own body may have written hyper-parameters
        # since the commit, which are ours to keep.
        self.evaluations, self.ended = tree["evaluations"], tree["ended"]
        self.place, self.whole, self.founded = place, True, founded
        return received

    def _finish_record(self) -> None:
        """The gradient norm is computed when first read; one who takes our state has no gradients to."""
        record = self.state.record
        if record is not None and record.grad_norm is None and self.in_body:
            record.grad_norm = self.stepper.grad_norm()

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
            )
        )

    def _wait_for_the_end_of_this_generation(self) -> None:
        ended = _Wake()
        self.control.guard(ended)
        self.control.idle = True
        ended.event.wait()
        self.control.idle = False

    # -------------------------------------------------------------------------------- steps

    def _committed(self, record: StepRecord) -> StepRecord:
        last = self.total_steps and record.number >= self.total_steps
        self.place = Place(record.number, int(bool(last)))
        self.ended = "the last step" if last else None
        self.evaluations = []
        self.evaluations_begun = 0
        return record

    def _body_begins(self, record: StepRecord) -> StepRecord:
        self.in_body = True
        self.log_calls = 0
        # Here and not with the commit: a member that takes the step over runs this body, too.
        seed_everything(body_seed(self.spec.data.seed, record.number))
        self.report("body")
        self.pass_point("body")
        return record

    def _body_ended(self) -> None:
        self.state.check_body()
        written = self.stepper.buffers.written_outside()
        if written is not None:
            raise LoopError(
                f"the body of the loop over ctx.steps changed the buffer {written!r}, e.g. by calling the model "
                "in training mode: use ctx.evaluate, or call model.eval() before and model.train() after; "
                "keep an average of buffers in a model of its own and pass it as state="
            )
        self.in_body = False

    def pass_point(self, name: str, step: int | None = None) -> None:
        """A named instant at which a test may have planned a fault."""
        if self.faults.plan:
            step = self.place.step if step is None else step
            self.faults.point(name, step, self.rank, self.world_size, self.generation)
