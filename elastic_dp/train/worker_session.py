"""One worker's run, generation after generation, behind the step iterator.

The training thread runs here. It is either inside a generation (its group is formed, it holds the
run's state) or waiting for one. A failed or aborted collective brings it back to a boundary:
nothing of the aborted step remains, it reports its position (`WorkerProgress`), and takes part in
the next generation. State that it lacks by then, because another member was ahead, it takes over
before the first step (`StateTransfer`).

User code sees none of this: `next_step` returns each committed step once, in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import (
    Membership,
    PrepareGroup,
    Signature,
    TrainingPosition,
    WorkerFinished,
    WorkerId,
    WorkerReady,
    WorkerReported,
    WorkerStopped,
)
from elastic_dp.device.attention import EXACT_ATTENTION, is_exact_attention
from elastic_dp.device.faults import fault_of
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.rendezvous import Rendezvous
from elastic_dp.errors import GroupError, Interrupted, LoopError, MembersMissing, PiecesLost
from elastic_dp.sampling.seeds import body_seed
from elastic_dp.train.controller_link import ControllerLink, HeartbeatStatus
from elastic_dp.train.exactness.machine_kind import machine_kind, software_versions, why_inexact
from elastic_dp.train.fault_injection import FaultInjector
from elastic_dp.train.gang import Gang
from elastic_dp.train.generations.generation_groups import GenerationGroups
from elastic_dp.train.generations.gradual_join import GradualJoin
from elastic_dp.train.generations.state_transfer import (
    StateTransfer,
    TransferPlan,
    plan_state_transfer,
)
from elastic_dp.train.generations.worker_control import (
    ORPHANED,
    CheckpointState,
    ConfirmLeft,
    Orphaned,
    Released,
    WorkerControl,
)
from elastic_dp.train.generations.worker_progress import WorkerProgress
from elastic_dp.train.interruption import INTERRUPTED_REASON, NO_HANDLERS, handlers
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.state.state_payload import StatePayload
from elastic_dp.train.state.train_state import StepRecord, TrainState
from elastic_dp.train.step.batch_source import BatchSource
from elastic_dp.train.step.participants import RetryStep, StopAgreed, WeightComparison
from elastic_dp.train.step.transaction import Transaction
from elastic_dp.train.step.trial_run import TrialRun
from elastic_dp.train.step_builder import StepBuilder
from elastic_dp.train.steps_arguments import (
    StepsArguments,
    check_schedule_lasts,
    decay_by_epochs,
)

if TYPE_CHECKING:
    from elastic_dp.train.checkpointing.worker_checkpointer import (
        FollowerCheckpoints,
        WorkerCheckpointer,
    )

_LOOK_AGAIN_S = 0.02


@dataclass
class UserLoop:
    """What the train function has done so far with its `TrainContext`."""

    opened: bool = False  # ctx.steps was called with valid arguments
    in_body: bool = False  # between two steps
    exhausted: bool = False  # the loop received the end of the steps
    failure: Exception | None = None  # the first error of ctx.steps; user code may swallow it
    read_is_source: bool = False  # the code may depend on whether its weights count
    read_total_steps: bool = False  # the code may depend on the length of the run
    handlers: Mapping[Any, Any] = field(default_factory=dict)  # of signals, when it was called

    def failed(self, error: Exception) -> Exception:
        """Records an error. Returns the first one."""
        self.failure = self.failure or error
        return self.failure


@dataclass
class WorkerSession:
    """The training of one worker: `open` when `ctx.steps` is called, `next_step` for each step, and
    `serve_until_released` after the train function."""

    spec: JobSpec
    worker: WorkerId
    data: BatchSource
    device: torch.device
    connects_devices: bool
    link: ControllerLink
    status: HeartbeatStatus
    control: WorkerControl
    is_source: bool
    checkpoints: WorkerCheckpointer | None = None
    code: str = ""  # code_fingerprint of the train function
    faults: FaultInjector = field(default_factory=FaultInjector)
    gang: Gang | None = None  # the processes of this worker, if there are several
    rendezvous: Rendezvous | None = None  # None: the run has one worker

    def __post_init__(self) -> None:
        self.inexact_because: list[str] = []  # as far as this process has noted
        self.listen_to_warnings: Callable[[], None] = lambda: None  # of `deterministic_kernels`
        self.loop = UserLoop()
        self.at_loop_end = contextlib.ExitStack()  # takes back what is put into the user's objects
        self.progress = WorkerProgress()
        self._said_skipped = set[int]()  # row groups
        self.groups = GenerationGroups(
            self.worker,
            self.device,
            self.control,
            self.rendezvous,
            connects=self.connects_devices,
        )
        self.reporter = PhaseReporter(self.status, self.faults, self.groups, self.progress)
        self.report, self.pass_point = self.reporter.report, self.reporter.pass_point
        self._opened_checkpoints: WorkerCheckpointer | FollowerCheckpoints | None = None

    # ------------------------------------------------------------------------ facts for the user

    @property
    def membership(self) -> Membership | None:
        return self.groups.membership

    @property
    def rank(self) -> int:
        """The rank among the workers that run micro-batches."""
        return self.groups.rank_that_trains

    @property
    def world_size(self) -> int:
        return self.groups.world_size_that_trains

    @property
    def generation(self) -> int:
        return self.groups.generation

    @property
    def position(self) -> TrainingPosition:
        return self.progress.position

    @property
    def total_steps(self) -> int:
        """The number of steps of the run by steps or epochs; 0 if only time limits it."""
        limits = []
        if self.spec.max_steps is not None:
            limits.append(self.spec.max_steps)
        if self.spec.data.epochs is not None:
            limits.append(self.data.steps_of(self.spec.data.epochs))
        return min(limits, default=0)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The names of the row groups that the run skips because they cannot be decoded."""
        return tuple(map(self.data.describe_row_group, sorted(self.state.bad_row_groups)))

    @property
    def state(self) -> TrainState:
        return self._parts.state

    @property
    def weights(self) -> WeightComparison:
        return self._parts.weights

    @property
    def transaction(self) -> Transaction:
        return self._parts.transaction

    @property
    def _joining(self) -> GradualJoin:
        return self._parts.joining

    def described(self) -> str:
        """Returns who this worker is, for messages."""
        joined = self.progress.joined_after
        since = f"which joined after step {joined}" if joined else "here from the start"
        return f"worker {self.worker}, {since}"

    def report_evaluations(self, *, ended: bool) -> None:
        """Reports how often this worker has called ctx.evaluate in this body, or after the loop."""
        body = 2 * self.position.step + self.loop.exhausted
        self.status.write_evaluations(body, self.progress.evaluations_begun, ended=ended)

    def reported(self, asked: int) -> WorkerReported:
        """Returns the report for a controller that takes over. The control thread calls it."""
        return WorkerReported(
            self.worker,
            self.generation,
            self.position,
            self.progress.has_state,
            self.reporter.phase == "wait",
            self._signature if self.loop.opened else None,
            self._can_source,
            self.progress.lineage_id,
            asked,
        )

    def prepare(self, command: PrepareGroup) -> None:
        """Starts to connect for a generation to come. The control thread calls it."""
        if self.loop.opened:
            self.groups.prepare(command)

    # ------------------------------------------------------------------------------------- life

    def open(self, given: StepsArguments) -> None:
        """Builds what the loop needs and tries it out. Raises what `ctx.steps` raises."""
        if self.loop.opened:
            raise LoopError(
                "ctx.steps was called twice, and a train function has one loop, over all epochs: "
                "write ElasticTrainer(epochs=…) and read step.epoch and step.epoch_end in the body"
            )
        check_schedule_lasts(given.scheduler, self.total_steps)
        decay = decay_by_epochs(given.scheduler, self.data.steps_per_epoch, self.total_steps)
        if decay is not None and self.is_source:
            self.link.say(f"WARNING: {decay}")
        if handlers() != self.loop.handlers:  # in this process, if it is not a worker of Ray
            raise LoopError(NO_HANDLERS)
        self._parts = build = StepBuilder(given, self)
        build.make_parts()
        self.faults.weights = list(self.state.parameters.values())
        self._transfer = StateTransfer(self)
        kind = build.kind_of(machine_kind(self.device, self.spec.exact))
        software = software_versions(self.device, self.code)
        layout = "\n".join(map(" ".join, self.state.layout().items())).encode()
        digest, lines = hashlib.sha256(layout).hexdigest()[:16], zlib.compress(layout)
        self._signature = Signature(digest, self.data.fingerprint, kind, software, lines)
        self.state.kinds = [kind]
        if self.checkpoints is not None:
            self.checkpoints.open(self, self._signature, given)
            self._opened_checkpoints = self.checkpoints
        elif self.gang is not None and self.gang.helps_to_gather:
            from elastic_dp.train.checkpointing.worker_checkpointer import FollowerCheckpoints

            self._opened_checkpoints = FollowerCheckpoints(self.state, self.control, self.reporter)
        self.loop.opened = True
        if self.spec.exact and self.is_source and is_exact_attention(self.device):
            self.link.say(EXACT_ATTENTION)
        can_source = self._can_source  # as of now: the probe may take long
        self._try_out(build.trial)
        build.variables_guard.loss_tried(build.trial.changing)
        self.link.post(WorkerReady(self.worker, self._signature, can_source))

    def _try_out(self, trial: TrialRun) -> None:
        """Runs a micro-batch before the first step, and undoes it."""
        leaves = self.transaction.leaves
        leaves.gradients.preallocate(leaves.shares.least)
        self.listen_to_warnings()
        try:
            if self.is_source:
                trial.probe(self.inexact_because, self.link.say)
            else:
                self.groups.load_kernels()
                trial.warm_up()
                self.state.preallocate()  # behind the trial, whose gradients are free now
        finally:
            self.report("start")

    def next_step(self) -> StepRecord | None:
        """Returns the next committed step, or None after the last. Raises Released."""
        self.listen_to_warnings()
        self._parts.variables_guard.body_ended(self._warn)
        if self.loop.in_body:  # else another worker ran it
            self.report_evaluations(ended=True)
        self.loop.in_body = False
        self._checkpoint_if_requested()
        if self.control.interrupted:
            raise Interrupted(128 + self.control.interrupted)
        while True:
            caught_up = self.ensure_generation()
            if caught_up is not None:
                return self._body_begins(caught_up)
            if self._joining.ranks_now and (self.position.ended or self._joining.is_done):
                try:
                    self._complete_join()
                except GroupError as error:
                    self.leave(error)
                continue
            if self.position.ended:
                if self.progress.ended == INTERRUPTED_REASON and self.checkpoints is not None:
                    self.checkpoints.raise_when_late()
                self._checkpoint_if_requested()
                self.loop.exhausted = True
                self.progress.loop_left()
                self.report("body")
                return None
            reason = self.control.may_attempt(self.position.step + 1)
            if reason is not None:
                self.leave(reason)
                continue
            try:
                if self.groups.on_device is not None:
                    self.groups.on_device.check_connection()
                outcome = self.transaction.attempt(self.position.step + 1)
            except GroupError as error:
                self.leave(error)
                continue
            if isinstance(outcome, StepRecord):
                self._committed(outcome)
                if not self._joining.joins_here:
                    return self._body_begins(outcome)
            elif isinstance(outcome, StopAgreed):
                self.progress.stop_agreed(outcome.reason)
            else:
                assert isinstance(outcome, RetryStep)

    def serve_until_released(self) -> NoReturn:
        """Remains a source of state after the train function returned, until released."""
        digest = self.state.digest()
        self.report_evaluations(ended=True)
        while True:
            self.leave_if_ended()
            self.ensure_generation()
            if self.control.agreed(self.checkpoints is not None and self.checkpoints.busy):
                self.report("keep")  # the last checkpoint is taken before the run ends
                time.sleep(_LOOK_AGAIN_S)
                continue
            self.report("done")
            self.link.skipped(self.skipped)
            because = why_inexact(self.state.inexact_because, self.state.kinds)
            where = self.worker, self.generation, self.position
            why = self.progress.ended or ""
            self.link.post(WorkerFinished(*where, digest, because, why, self.progress.lineage_id))
            if not self.control.wait_until_ended():
                self.leave(ORPHANED)

    # -------------------------------------------------------------------------- generations

    def ensure_generation(self) -> StepRecord | None:
        """Enters a generation, if outside, and gets its state. Returns the record of a step if the
        transfer brought one that this worker had not committed."""
        while self.groups.main is None:
            self.report("wait")
            call = self.control.wait()
            if isinstance(call, Orphaned):
                if self._opened_checkpoints is not None:
                    self._opened_checkpoints.take_without_controller()
                raise Released(ORPHANED)
            if isinstance(call, ConfirmLeft):
                self._post_stopped(call.generation, "asked")
                continue
            if isinstance(call, CheckpointState):
                self._checkpoint_if_requested(call.writers)
                continue
            before, had_state = self.position, self.progress.has_state
            try:
                self._enter(call)
            except GroupError as error:
                self.leave(error)
                continue
            if had_state and self.position.step > before.step:
                return self.state.record
        return None

    def leave(self, reason: str | GroupError) -> None:
        """Out of this generation, for good: undo what is not committed, say where we stand. Raises
        a GroupError whose reason is a fault of our own device: no next generation would work."""
        if isinstance(reason, GroupError) and fault_of(reason) is not None:
            raise reason
        if self.loop.in_body:
            self.transaction.complete_record()
        self.transaction.close()
        membership = self.membership
        assert membership is not None
        self._joining.close(membership.lineage_id, self.position.step)
        self.state.holders.close()
        generation = self.control.leave()
        self.groups.leave()
        self._post_stopped(generation, reason)

    def leave_if_ended(self) -> None:
        if self.groups.main is not None:
            try:
                self.control.may_continue()
            except GroupError as error:
                self.leave(error)

    def _enter(self, membership: Membership) -> None:
        """Forms the groups of a generation, gets its state, and begins. Raises GroupError."""
        self.groups.enter(membership)
        self.report("form")
        self.pass_point("forming")
        plan = plan_state_transfer(membership)
        self._join_gradually(membership, self._joining.ranks(membership, plan))
        if not plan.restores:
            # rows of virtual workers that come here, meanwhile
            self._read_ahead(membership.members[plan.source].position.step + 1)
        self.groups.start()
        receives = plan.restores or membership.rank(self.worker) in plan.receivers
        sends = plan.receivers and not receives
        payload = self._transfer.payload() if sends else None  # meanwhile
        main = self.groups.formed()
        if receives:
            # and its memory, before there is more to hold
            self.transaction.gradient.forget_finished()
        self._get_state(main, membership, plan, payload)
        if plan.restores:
            self._read_ahead(self.position.step + 1)
        self._get_pieces(main, membership)
        self._open_transaction(main)
        self.report("compute")

    def _get_state(
        self,
        main: ProcessGroup,
        membership: Membership,
        plan: TransferPlan,
        payload: StatePayload | None,
    ) -> None:
        """Restores, sends or receives the state, or neither."""
        if plan.restores:
            self._transfer.restore(main)
            check_schedule_lasts(self.state.scheduler, self.total_steps, self.position.step)
        if plan.restores or membership.source == self.worker:
            self.progress.has_initial_state(membership.lineage_id)
        if plan.restores or not plan.receivers:
            return
        lineage_id = membership.lineage_id
        joining = self._joining.ranks_now
        if joining:
            behind = [rank for rank in plan.receivers if rank not in joining]
            if behind:
                to_them = replace(plan, receivers=behind)
                self._transfer.move(main, to_them, payload, lineage_id)
                payload = self._transfer.payload() if main.rank in behind else payload
            plan = replace(plan, receivers=sorted(joining))
            kept = self._joining.kept_of(lineage_id)
            possible, keeps = self._transfer.begin_join(main, plan, payload, kept)
            if self._joining.start(main, plan.source, possible=possible, keeps=keeps):
                return
            self._join_gradually(membership, frozenset())
        if main.rank in plan.receivers:
            self._joining.forget()
        self._transfer.move(main, plan, payload, lineage_id)

    def _join_gradually(self, membership: Membership, ranks: frozenset[int]) -> None:
        """Lets these ranks take the state over while the others train; none: all have it."""
        self.transaction.leaves.shares.open(membership, self.groups.rank, ranks)
        self.groups.join_gradually(ranks)
        members = enumerate(membership.members)
        self.weights.members = tuple(m.worker for rank, m in members if rank not in ranks)

    def _complete_join(self) -> None:
        """Gives those who join what does not travel in parts. Raises GroupError."""
        main, membership = self.groups.main, self.membership
        assert main is not None and membership is not None
        self._joining.finish()
        plan = plan_state_transfer(membership)
        plan = replace(plan, receivers=sorted(self._joining.ranks_now))
        self.link.flush()  # a joiner that counts from here on has logged nothing of what was
        payload = None if self._joining.joins_here else self._transfer.payload()
        self._transfer.complete_join(main, plan, payload, membership.lineage_id)
        self._joining.close(membership.lineage_id, self.position.step)
        self._join_gradually(membership, frozenset())
        if not self.position.ended:
            self._read_ahead(self.position.step + 1)
            self._open_transaction(main)

    def _open_transaction(self, main: ProcessGroup) -> None:
        self.transaction.open(main, self.position.step + 1, self.progress.lineage_id)

    def _get_pieces(self, main: ProcessGroup, membership: Membership) -> None:
        """Receives its pieces of a divided optimizer state."""
        holders = self.state.holders
        if not holders.is_divided:
            return
        self.report("receive")
        self.pass_point("receiving_pieces")
        given = membership.generation, membership.topology
        holders.open(main, *given, at_once=membership.copies_first)
        if self.checkpoints is not None:
            self.checkpoints.has_pieces_among(self.weights.members)

    def _read_ahead(self, next_step: int) -> None:
        leaves = self.transaction.leaves
        leaves.data.read_ahead(next_step, leaves.shares.mine(next_step))

    def _post_stopped(self, generation: int, reason: str | GroupError) -> None:
        self.link.post(
            WorkerStopped(
                self.worker,
                generation,
                self.position,
                self.progress.has_state,
                str(reason),
                at_head=not self.loop.in_body,
                lineage_id=self.progress.lineage_id,
                mismatch=self.weights.mismatch,
                finished=self.transaction.gradient.finished_nodes(self.position.step + 1),
                partial=self.progress.has_state and not self.state.holders.has_all,
                lacks_copies=self.state.holders.lacks_copies(generation),
                pieces_lost=isinstance(reason, PiecesLost),
                members_missing=isinstance(reason, MembersMissing),
            )
        )

    # -------------------------------------------------------------------------------- steps

    def _committed(self, record: StepRecord) -> None:
        new = sorted(self.state.bad_row_groups - self._said_skipped)
        self._said_skipped.update(new)
        if new:  # the whole list follows at the end
            names = ", ".join(map(self.data.describe_row_group, new))
            self._warn(f"from step {record.number} on without what cannot be decoded: {names}")
        for text in self.groups.on_device.news() if self.groups.on_device is not None else ():
            self._warn(text)
        is_last = bool(self.total_steps and record.number >= self.total_steps)
        self.progress.step_committed(record.number, is_last=is_last)

    def _body_begins(self, record: StepRecord) -> StepRecord:
        self.loop.in_body = True
        # Not in the commit: a member that takes the step over runs this body, too.
        seed_everything(body_seed(self.spec.data.seed, record.number))
        self._parts.variables_guard.body_begins(self._warn)
        self.report("body")
        self.pass_point("body")
        return record

    def _warn(self, text: str) -> None:
        if self.rank == 0 and not self._joining.joins_here:  # the others would report the same
            self.link.say(text)

    # -------------------------------------------------------------------------- checkpoints

    @property
    def _can_source(self) -> bool:
        """Returns whether the run may start from this worker's weights. It may not if the worker's
        code made them knowing that they do not count."""
        return self.is_source or not self.loop.read_is_source

    def _checkpoint_if_requested(self, writers: tuple[WorkerId, ...] = ()) -> None:
        if self._opened_checkpoints is not None:
            self._opened_checkpoints.take_if_due(writers)
