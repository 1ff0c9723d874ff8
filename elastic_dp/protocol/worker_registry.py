"""Who works for the run: asked for, at hand, leaving, gone.

Always: an identity is started once; whoever is released or evicted plays no part from that moment on, and one that
does not leave when it is asked to is evicted; a member that was evicted may live until its death is confirmed, and is
a ghost of its generation until then. Losses that nobody asked for are counted (`budget`), with a pause after each.
"""

import math
from dataclasses import replace

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.budget import Budget, Budgets
from elastic_dp.protocol.failure_detector import FailureDetector
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.run_state import RunState
from elastic_dp.protocol.scale_down import choose_departing
from elastic_dp.protocol.state_lineage import StateLineage
from elastic_dp.protocol.worker_state import PROVISIONED_STAGES, Identities, Stage, WorkerState

EXPENDABLE_STAGES = frozenset(
    {Stage.STARTING, Stage.BUILDING, Stage.READY}
)  # holds nothing that anybody needs
DEPARTED_STAGES = frozenset({Stage.LEAVING, Stage.EVICTED})
NOBODY: tuple[WorkerId, int] = ("", -1)  # who, in which generation; "": any, since a member stopped
RELEASED_A_STEP = 2000  # of those who are not needed any more: no event says goodbye to all


class WorkerRegistry:
    def __init__(self, run: RunState, generation: Generation, lineage: StateLineage) -> None:
        self.run, self._generation, self._lineage = run, generation, lineage
        self.failure_detector = FailureDetector(run.config.heartbeat_timeout_s)
        self.budgets = Budgets(run.config)
        self.user_error: m.WorkerFailed | None = None  # the last that was retried
        self.workers: dict[WorkerId, WorkerState] = {}  # the oldest first
        self.identities = Identities()
        self.provisioned: set[WorkerId] = set()  # count towards size + standby
        self.ready: dict[WorkerId, WorkerState] = {}  # void, may be seated now
        self.ready_since = math.inf
        self.retained: dict[WorkerId, WorkerState] = {}  # without a seat, kept for their state
        self.building: set[WorkerId] = set()  # may be ready soon
        self.unreported: set[WorkerId] = set()  # of a take-over
        self.notices = 0  # that said something new
        self.asked = 0  # its number: an answer to an earlier one says what was
        self.unfilled = 0  # places given up, since whoever comes does not fit
        self._unexplained: dict[
            WorkerId, tuple[WorkerState, m.WorkerLost]
        ] = {}  # lost since a step
        self._blamed: tuple[WorkerId, int] = NOBODY  # for the last incident
        self._retry_before = -math.inf  # that incident
        self.retry_at = -math.inf  # neither start nor seat anybody before

    @property
    def wanted(self) -> int:
        return self.run.size + self.run.config.standby

    # ------------------------------------------------------------------------------- coming

    def replenish(self, now: float) -> None:
        wanted = self.wanted - self.unfilled
        if len(self.provisioned) >= wanted:
            return
        if now < self.retry_at:
            self.run.timers.wake(self.retry_at)
            return
        while len(self.provisioned) < wanted:
            worker_id, number = self.identities.next()
            self.workers[worker_id] = WorkerState(worker_id, number, Stage.STARTING, now)
            self.provisioned.add(worker_id)
            self.run.emit(m.StartWorker(worker_id))

    def adopt(self, worker_id: WorkerId, now: float) -> None:
        """It is there already, and nothing else is known of it."""
        number = self.identities.next()[1]
        self.workers[worker_id] = WorkerState(worker_id, number, Stage.UNREPORTED, now)
        self.provisioned.add(worker_id)
        self.unreported.add(worker_id)
        self.failure_detector.heard(worker_id, now)
        self.run.emit(m.ReportYourself(worker_id, self.asked))

    def queue(self, worker: WorkerState, now: float) -> None:
        if not self.ready:
            self.ready_since = now
        self.ready[worker.id] = worker

    def seat(self, now: float) -> None:
        """All members of the present generation at once, since there may be thousands."""
        members = self._generation.members
        self.ready = {w.id: w for w in self.ready.values() if w.id not in members}
        self.retained = {w.id: w for w in self.retained.values() if w.id not in members}
        self.ready_since = now if self.ready else math.inf
        member = Stage.MEMBER  # to look it up takes longer than the rest
        for worker in members.values():
            worker.stage, worker.since = member, now
        self.provisioned.update(members)
        self.provisioned.difference_update(self._generation.draining)

    def move(self, worker: WorkerState, stage: Stage, now: float) -> None:
        worker.stage, worker.since = stage, now
        if stage is Stage.BUILDING:
            self.building.add(worker.id)
        else:
            self.building.discard(worker.id)
        if stage in PROVISIONED_STAGES and not worker.draining:
            self.provisioned.add(worker.id)
        else:
            self.provisioned.discard(worker.id)

    # ------------------------------------------------------------------------------ leaving

    def lost(self, event: m.WorkerLost, now: float) -> None:
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            self._learn_why(event, now)
            return
        self._generation.unconfirmed_dead.discard(worker.id)
        if worker.stage is Stage.EVICTED:
            return
        expected = worker.draining or worker.stage in (Stage.LEAVING, Stage.RETAINED)
        self._remove(worker, f"{worker.id} is lost: {event.reason}")
        if not expected:
            self._count_loss(worker, event, now)

    def _learn_why(self, event: m.WorkerLost, now: float) -> None:
        """It is known to be lost, and was counted as if nobody knew why, or in which micro-batch."""
        if event.worker not in self._unexplained:
            return
        worker, said = self._unexplained[event.worker]
        if event.cause is not m.Cause.UNKNOWN:
            del self._unexplained[event.worker]
            if said.micro_batch is not None:
                self.budgets.did_not_die_in(*said.micro_batch)
            at = said.micro_batch or event.micro_batch
            self._count_loss(worker, replace(event, micro_batch=at), now)
        elif said.micro_batch is None and event.micro_batch is not None:
            self._unexplained[event.worker] = worker, event
            self.budgets.died_in(*event.micro_batch)

    def _count_loss(self, worker: WorkerState, event: m.WorkerLost, now: float) -> None:
        if event.cause is m.Cause.UNKNOWN:
            self._unexplained[worker.id] = worker, event
        elif self._blamed in ((worker.id, worker.entered), ("", worker.entered)):
            self.budgets.losses.take_back()
            self._blamed, self.retry_at = NOBODY, self._retry_before
        if event.cause is m.Cause.PREEMPTED:
            return
        if event.micro_batch is not None:
            self.budgets.died_in(*event.micro_batch)
        short = event.cause is m.Cause.OUT_OF_MEMORY
        self.count(worker, now, self.budgets.memory if short else None, worker.id)

    def failed(self, worker: WorkerState, event: m.WorkerFailed, now: float) -> None:
        """Its user's code raised, and another may try again."""
        self.user_error = event
        self.evict(worker, f"user code raised {event.error}", now, self.budgets.errors)

    def evict(
        self,
        worker: WorkerState,
        reason: str,
        now: float,
        budget: Budget | None = None,
        stuck: bool = False,
    ) -> None:
        member = worker.stage in (Stage.MEMBER, Stage.UNREPORTED)
        unexpected = worker.id in self.provisioned
        worker.stuck = stuck
        self.run.emit(m.EvictWorker(worker.id, reason, stuck))
        self.run.explain(f"{worker.id} evicted: {reason}")
        self._remove(worker, f"{worker.id} evicted: {reason}")
        if member:
            self._generation.unconfirmed_dead.add(worker.id)
        self.move(worker, Stage.EVICTED, now)
        if unexpected:
            self.count(worker, now, budget)

    def release(self, worker: WorkerState, reason: str, now: float) -> None:
        self.run.emit(m.ReleaseWorker(worker.id, reason))
        self._remove(worker, f"{worker.id} released: {reason}")
        self.move(worker, Stage.LEAVING, now)
        self.run.timers.wake(now + self.run.config.release_timeout_s, "leave", worker.id)

    def _remove(self, worker: WorkerState, reason: str) -> None:
        """It plays no part any more."""
        self.failure_detector.forget(worker.id)
        self.ready.pop(worker.id, None)
        self.retained.pop(worker.id, None)
        self.provisioned.discard(worker.id)
        self.building.discard(worker.id)
        self.unreported.discard(worker.id)
        self._lineage.forget(worker.id)
        self._generation.drop(worker, reason)

    def count(
        self,
        worker: WorkerState,
        now: float,
        budget: Budget | None = None,
        blamed: WorkerId | None = None,
    ) -> None:
        """`blamed`: who may turn out to be innocent; "": any who was lost, as a stop does not say."""
        budget = budget or self.budgets.losses
        if budget.counts(self._generation.number, worker.number, self.identities.given):
            if budget is self.budgets.losses:
                self._retry_before = self.retry_at
                self._blamed = NOBODY if blamed is None else (blamed, worker.entered)
            self.retry_at = max(self.retry_at, now + budget.pause_s)

    def progressed(self, step: int, now: float) -> None:
        """A step was made: losses are forgiven, and the state of the leavers is covered by it."""
        if self.budgets.progressed(step):
            self.retry_at = -math.inf
            self._unexplained.clear()
            self._blamed = NOBODY
        covered = [*self.retained.values()] if self.run.in_flight else []
        for leaver in covered[:RELEASED_A_STEP]:
            self.release(leaver, leaver.leave_reason, now)

    def drain(
        self,
        worker: WorkerState,
        deadline: float | None,
        now: float,
        why: str = "its node goes away",
    ) -> None:
        """It will go; whoever holds state stays until it is covered, or the time has come."""
        if worker.stage in DEPARTED_STAGES:
            return
        known = worker.draining, worker.leave_at
        worker.draining, worker.leave_reason = True, why
        if deadline is not None:
            worker.leave_at = deadline - self.run.config.drain_margin_s
        self.notices += known != (worker.draining, worker.leave_at)
        if worker.stage in EXPENDABLE_STAGES:
            self.release(worker, why, now)
            return
        self.provisioned.discard(worker.id)  # so a replacement is asked for at once
        if worker.stage is Stage.MEMBER:
            self._generation.draining[worker.id] = worker
        self.run.timers.wake(worker.leave_at, "leave", worker.id)

    def resized(self, now: float) -> None:
        """Who is not needed any more goes, unless it holds something."""
        self.unfilled = 0
        surplus = len(self.provisioned) - self.wanted
        if surplus <= 0:
            return
        provisioned = [worker for worker in self.workers.values() if worker.id in self.provisioned]
        initial_source = self._lineage.initial_source
        loose = [w for w in provisioned if w.stage in EXPENDABLE_STAGES and w.id != initial_source]
        if not loose:
            return
        held = [
            w for w in provisioned if w.stage not in EXPENDABLE_STAGES or w.id == initial_source
        ]
        going = [worker for worker in self.workers.values() if worker.draining]
        for worker, why in choose_departing(
            loose, surplus, held, self.run.config.min_on_demand, going
        ):
            self.release(worker, f"the size is {self.run.size} now; {why}", now)

    # -------------------------------------------------------------------------------- timers

    def alarm(self, kind: str, worker: WorkerState, now: float) -> None:
        """What was set for this worker, if it still means something."""
        match kind, worker.stage:
            case "leave", Stage.LEAVING:
                if now >= worker.since + self.run.config.release_timeout_s:
                    self.evict(worker, "did not leave", now)
            case "leave", Stage.RETAINED if self._is_held_by_others(worker):
                self.release(worker, worker.leave_reason, now)
            case "rejoin", Stage.READY if worker.id not in self.ready:
                self.queue(worker, now)

    def _is_held_by_others(self, leaver: WorkerState) -> bool:
        """Its state, or a later one."""
        others = (*self._generation.members.values(), *self.retained.values())
        return any(w.has_state and w.position >= leaver.position for w in others if w is not leaver)

    def excused_until(self, worker_id: WorkerId) -> float:
        """Nobody is evicted for silence while the group makes steps, since it could not without each of them."""
        if self.workers[worker_id].stage in (Stage.MEMBER, Stage.UNREPORTED):
            lived_at = max(self._generation.progress_at, self.failure_detector.awake_since)
            return self.run.config.heartbeat_timeout_s + lived_at
        return -math.inf
