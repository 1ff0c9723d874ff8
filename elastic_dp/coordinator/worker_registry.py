"""Every worker of the run, from its request to its certain end.

Three things always hold. An identity is started once. A worker that is released or evicted plays no
part from that moment on, and one that does not leave when it is asked to is evicted. A member that
was evicted may live until its death is confirmed; its generation's fence counts it until then.
"""

import math

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.budget import Budget
from elastic_dp.coordinator.failure_detector import FailureDetector
from elastic_dp.coordinator.failure_policy import FailurePolicy
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.scale_down import choose_departing
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.worker_state import PROVISIONED_STAGES, Identities, Stage, WorkerState

# A worker in one of these has nothing that anybody needs.
EXPENDABLE_STAGES = frozenset({Stage.STARTING, Stage.BUILDING, Stage.READY})
DEPARTED_STAGES = frozenset({Stage.LEAVING, Stage.EVICTED})
RELEASED_A_STEP = 2000  # retained workers: no event releases them all


class WorkerRegistry:
    def __init__(
        self,
        run: RunState,
        generation: Generation,
        lineage: StateLineage,
        failures: FailurePolicy,
        identities: Identities,
    ) -> None:
        self.run, self._generation, self._lineage = run, generation, lineage
        self.failures, self.identities = failures, identities
        self.failure_detector = FailureDetector(run.config.heartbeat_timeout_s)
        self.workers: dict[WorkerId, WorkerState] = {}  # the oldest first
        self.provisioned: set[WorkerId] = set()  # count towards size + standby
        self.building: set[WorkerId] = set()  # may be ready soon
        self.ready: dict[WorkerId, WorkerState] = {}  # may become members now
        self.ready_since = math.inf
        self.retained: dict[WorkerId, WorkerState] = {}  # no members, kept for their state
        self.unreported: set[WorkerId] = set()  # of a takeover
        self.inquiry = 0  # its number: an answer to an earlier one says what was
        self.notices = 0  # that said something new
        self.unfilled = 0  # places given up, since whoever comes does not fit

    @property
    def wanted(self) -> int:
        return self.run.size + self.run.config.standby

    # ------------------------------------------------------------------------------- coming

    def replenish(self, now: float) -> None:
        wanted = self.wanted - self.unfilled
        if len(self.provisioned) >= wanted:
            return
        retry_at = self.failures.retry_at
        if now < retry_at:
            self.run.timers.wake(retry_at)
            return
        while len(self.provisioned) < wanted:
            worker_id, number = self.identities.next()
            self.workers[worker_id] = WorkerState(worker_id, number, Stage.STARTING, now)
            self.provisioned.add(worker_id)
            self.run.emit(m.StartWorker(worker_id))

    def inquire(self, number: int) -> None:
        """From now on only answers to this inquiry count."""
        self.inquiry = number

    def adopt(self, worker_id: WorkerId, now: float) -> None:
        """It is there already, and nothing else is known of it."""
        number = self.identities.next()[1]
        self.workers[worker_id] = WorkerState(worker_id, number, Stage.UNREPORTED, now)
        self.provisioned.add(worker_id)
        self.unreported.add(worker_id)
        self.failure_detector.heard(worker_id, now)
        self.run.emit(m.ReportState(worker_id, self.inquiry))

    def reported(self, worker: WorkerState, event: m.WorkerReported) -> None:
        self.unreported.discard(worker.id)
        worker.reported(event)

    def started(self, worker: WorkerState, now: float) -> None:
        """Its process is up."""
        self.move(worker, Stage.BUILDING, now)
        worker.renew(now)  # its first lease runs from its start
        self.failure_detector.heard(worker.id, now)

    def queue(self, worker: WorkerState, now: float) -> None:
        if not self.ready:
            self.ready_since = now
        self.ready[worker.id] = worker

    def unqueue(self, worker: WorkerState) -> None:
        self.ready.pop(worker.id, None)

    def give_up_place(self) -> None:
        """Whoever comes for it does not fit."""
        self.unfilled += 1

    def fill_all_places(self) -> None:
        self.unfilled = 0

    def assign_members(self, now: float) -> None:
        """All members of the present generation at once, since there may be thousands."""
        members = self._generation.members
        self.ready = {w.id: w for w in self.ready.values() if w.id not in members}
        self.retained = {w.id: w for w in self.retained.values() if w.id not in members}
        self.ready_since = now if self.ready else math.inf
        member = Stage.MEMBER  # to look it up takes longer than the rest
        for worker in members.values():
            worker.move(member, now)
        self.provisioned.update(members)
        self.provisioned.difference_update(self._generation.draining)

    def move(self, worker: WorkerState, stage: Stage, now: float) -> None:
        worker.move(stage, now)
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
            self.failures.explained(event, now)
            return
        self._generation.fence.confirm_death(worker.id)
        if worker.stage is Stage.EVICTED:
            return
        expected = worker.draining or worker.stage in (Stage.LEAVING, Stage.RETAINED)
        self._remove(worker, f"{worker.id} is lost: {event.reason}")
        if not expected:
            self.failures.lost(worker, event, now)

    def failed(self, worker: WorkerState, event: m.WorkerFailed, now: float) -> None:
        """User code raised in it, and another worker may try again."""
        self.failures.user_code_raised(event)
        reason = f"user code raised {event.error}"
        self.evict(worker, reason, now, self.failures.budgets.errors)

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
        worker.mark_stuck(stuck)
        self.run.emit(m.EvictWorker(worker.id, reason, stuck))
        self.run.explain(f"{worker.id} evicted: {reason}")
        self._remove(worker, f"{worker.id} evicted: {reason}")
        if member:
            self._generation.fence.evicted(worker.id)
        self.move(worker, Stage.EVICTED, now)
        if unexpected:
            self.failures.count(worker, now, budget)

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

    def retain(self, worker: WorkerState, reason: str, now: float) -> None:
        """It is no member any more, and has state: kept until the others have made a step."""
        worker.retain(reason)
        self.retained[worker.id] = worker
        self.move(worker, Stage.RETAINED, now)
        self.run.timers.wake(worker.leave_at, "leave", worker.id)

    def progressed(self, step: int, now: float) -> None:
        """A step was made: losses are forgiven, and the state of retained workers is covered by
        it."""
        self.failures.progressed(step)
        covered = [*self.retained.values()] if self.run.in_flight else []
        for worker in covered[:RELEASED_A_STEP]:
            self.release(worker, worker.leave_reason, now)

    def drain(
        self,
        worker: WorkerState,
        deadline: float | None,
        now: float,
        why: str = "its node goes away",
    ) -> None:
        """The worker will go. One that has state stays until it is covered, or the time has
        come."""
        if worker.stage in DEPARTED_STAGES:
            return
        margin_s = self.run.config.drain_margin_s
        self.notices += worker.notice(None if deadline is None else deadline - margin_s, why)
        if worker.stage in EXPENDABLE_STAGES:
            self.release(worker, why, now)
            return
        self.provisioned.discard(worker.id)  # so a replacement is requested at once
        if worker.stage is Stage.MEMBER:
            self._generation.drain(worker)
        self.run.timers.wake(worker.leave_at, "leave", worker.id)

    def resized(self, now: float) -> None:
        """Workers that are not needed any more go, unless they have something."""
        self.unfilled = 0
        surplus = len(self.provisioned) - self.wanted
        if surplus <= 0:
            return
        provisioned = [w for w in self.workers.values() if w.id in self.provisioned]
        source = self._lineage.initial_source
        loose = [w for w in provisioned if w.stage in EXPENDABLE_STAGES and w.id != source]
        if not loose:
            return
        held = [w for w in provisioned if w.stage not in EXPENDABLE_STAGES or w.id == source]
        draining = [worker for worker in self.workers.values() if worker.draining]
        floor = self.run.config.min_on_demand
        for worker, why in choose_departing(loose, surplus, held, floor, draining):
            self.release(worker, f"the size is {self.run.size} now; {why}", now)

    def clear(self) -> None:
        """Another controller leads: they are its workers."""
        self.workers.clear()

    def forget(self, worker_id: WorkerId) -> None:
        """It is gone, after the end of the run."""
        self.workers.pop(worker_id, None)

    # -------------------------------------------------------------------------------- timers

    def timer_fired(self, kind: str, worker: WorkerState, now: float) -> None:
        """What was set for this worker, if it still means something."""
        match kind, worker.stage:
            case "leave", Stage.LEAVING:
                if now >= worker.since + self.run.config.release_timeout_s:
                    self.evict(worker, "did not leave", now)
            case "leave", Stage.RETAINED if self._is_held_by_others(worker):
                self.release(worker, worker.leave_reason, now)
            case "rejoin", Stage.READY if worker.id not in self.ready:
                self.queue(worker, now)

    def _is_held_by_others(self, retained: WorkerState) -> bool:
        """Its state, or a later one."""
        others = (*self._generation.members.values(), *self.retained.values())
        return any(
            w.has_state and w.position >= retained.position for w in others if w is not retained
        )

    def excused_until(self, worker_id: WorkerId) -> float:
        """No member is evicted for silence while the group makes steps, since it could not without
        each of them."""
        if self.workers[worker_id].stage in (Stage.MEMBER, Stage.UNREPORTED):
            lived_at = max(self._generation.steps.at, self.failure_detector.awake_since)
            return self.run.config.heartbeat_timeout_s + lived_at
        return -math.inf
