"""Every worker of the run, from its request to its confirmed end.

Three things always hold. An identity is started once. A worker that is released or evicted takes no
part any more, and one that does not leave when released is evicted. An evicted member may live
until its death is confirmed; until then the fence of its generation counts it.
"""

import math

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.planning.scale_down import choose_departing
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.workers.failure_counter import FailureBudget, FailureCounter
from elastic_dp.coordinator.workers.failure_detector import FailureDetector
from elastic_dp.coordinator.workers.worker_state import (
    PROVISIONED_STAGES,
    Identities,
    Stage,
    WorkerState,
)

# Workers in these stages hold nothing that others need.
EXPENDABLE_STAGES = frozenset({Stage.STARTING, Stage.BUILDING, Stage.READY})
DEPARTED_STAGES = frozenset({Stage.LEAVING, Stage.EVICTED})
MAX_RELEASED_PER_STEP = 2000  # retained workers; a limit, so that no single event takes long


class WorkerRegistry:
    """The workers of a run, by what they are available for."""

    def __init__(
        self,
        run: RunState,
        generation: Generation,
        lineage: StateLineage,
        failures: FailureCounter,
        identities: Identities,
    ) -> None:
        self.run, self._generation, self._lineage = run, generation, lineage
        self.failures, self.identities = failures, identities
        self.failure_detector = FailureDetector(run.config.heartbeat_timeout_s)
        self.workers: dict[WorkerId, WorkerState] = {}  # in the order of their requests
        self.provisioned: set[WorkerId] = set()  # count towards size + standby
        self.building: set[WorkerId] = set()  # may be ready soon
        self.ready: dict[WorkerId, WorkerState] = {}  # may become members now
        self.ready_since = math.inf
        self.retained: dict[WorkerId, WorkerState] = {}  # not members, kept for their state
        self.unreported: set[WorkerId] = set()  # workers of a takeover that have not reported
        self.inquiry = 0  # number of the last question to all workers; earlier answers are outdated
        self.notices = 0  # drain notices that changed something
        self.unfilled = 0  # workers that are not requested, because replacements do not fit

    @property
    def target_size(self) -> int:
        """How many workers the run should have, standby included."""
        return self.run.size + self.run.config.standby

    # ------------------------------------------------------------------------------- coming

    def replenish(self, now: float) -> None:
        """Request workers until there are enough."""
        wanted = self.target_size - self.unfilled
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

    def adopt(self, worker_id: WorkerId, now: float) -> None:
        """Add a worker of the previous controller and ask for its state."""
        number = self.identities.next()[1]
        self.workers[worker_id] = WorkerState(worker_id, number, Stage.UNREPORTED, now)
        self.provisioned.add(worker_id)
        self.unreported.add(worker_id)
        self.failure_detector.heard_from(worker_id, now)
        self.run.emit(m.ReportState(worker_id, self.inquiry))

    @property
    def successors(self) -> int:
        """How many ready workers can take the state from a member. A job with one virtual worker
        has no place for a second one, so there it goes by a checkpoint.
        """
        return len(self.ready) if self.run.config.virtual_workers > 1 else 0

    def started(self, worker: WorkerState, now: float) -> None:
        """Record that the worker's process is up."""
        self.move(worker, Stage.BUILDING, now)
        worker.renewed_at = now  # the first lease runs from the start of the process
        self.failure_detector.heard_from(worker.id, now)

    def queue(self, worker: WorkerState, now: float) -> None:
        """Make a worker available to the next generation."""
        if not self.ready:
            self.ready_since = now
        self.ready[worker.id] = worker

    def mark_members(self, now: float) -> None:
        """Move all members of the present generation to that stage."""
        for worker in self._generation.members.values():
            self.ready.pop(worker.id, None)
            self.retained.pop(worker.id, None)
            self.move(worker, Stage.MEMBER, now)
        self.ready_since = now if self.ready else math.inf

    def move(self, worker: WorkerState, stage: Stage, now: float) -> None:
        """Move a worker to another stage."""
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
        """Remove a worker whose process has ended, and count the loss if it was unexpected."""
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            self.failures.cause_learned(event, now)
            return
        self._generation.fence.unconfirmed_dead.discard(worker.id)
        if worker.stage is Stage.EVICTED:
            return
        expected = worker.draining or worker.stage in (Stage.LEAVING, Stage.RETAINED)
        self._remove(worker, f"{worker.id} is lost: {event.reason}")
        if not expected:
            self.failures.lost(worker, event, now)

    def failed(self, worker: WorkerState, event: m.WorkerFailed, now: float) -> None:
        """Evict a worker in which user code raised, so that another worker may try again."""
        self.failures.user_error = event
        reason = f"user code raised {event.error}"
        self.evict(worker, reason, now, self.failures.errors)

    def evict(
        self,
        worker: WorkerState,
        reason: str,
        now: float,
        budget: FailureBudget | None = None,
        stuck: bool = False,
    ) -> None:
        """Kill a worker. An eviction that was not expected counts against `budget`."""
        member = worker.stage in (Stage.MEMBER, Stage.UNREPORTED)
        unexpected = worker.id in self.provisioned
        worker.stuck = stuck
        self.run.emit(m.EvictWorker(worker.id, reason, stuck))
        self.run.explain(f"{worker.id} evicted: {reason}")
        self._remove(worker, f"{worker.id} evicted: {reason}")
        if member:
            self._generation.fence.unconfirmed_dead.add(worker.id)
        self.move(worker, Stage.EVICTED, now)
        if unexpected:
            self.failures.count(worker, now, budget)

    def release(self, worker: WorkerState, reason: str, now: float) -> None:
        """Ask a worker to leave."""
        self.run.emit(m.ReleaseWorker(worker.id, reason))
        self._remove(worker, f"{worker.id} released: {reason}")
        self.move(worker, Stage.LEAVING, now)
        self.run.timers.wake(now + self.run.config.release_timeout_s, "leave", worker.id)

    def _remove(self, worker: WorkerState, reason: str) -> None:
        """Remove a worker from every part of the coordinator."""
        self.failure_detector.forget(worker.id)
        self.ready.pop(worker.id, None)
        self.retained.pop(worker.id, None)
        self.provisioned.discard(worker.id)
        self.building.discard(worker.id)
        self.unreported.discard(worker.id)
        self._lineage.forget(worker.id)
        self._generation.drop(worker, reason)

    def retain(self, worker: WorkerState, reason: str, now: float) -> None:
        """Keep a worker with state that is no longer a member until the others have made a step."""
        worker.leave_reason = reason
        self.retained[worker.id] = worker
        self.move(worker, Stage.RETAINED, now)
        self.run.timers.wake(worker.leave_at, "leave", worker.id)

    def progressed(self, step: int, now: float) -> None:
        """Act on a committed step: reset budgets, and release retained workers, whose state it
        covers.
        """
        self.failures.progressed(step)
        covered = [*self.retained.values()] if self.run.in_flight else []
        for worker in covered[:MAX_RELEASED_PER_STEP]:
            self.release(worker, worker.leave_reason, now)

    def drain(
        self,
        worker: WorkerState,
        deadline: float | None,
        now: float,
        why: str = "its node goes away",
    ) -> None:
        """Mark a worker as leaving by `deadline` (None: time not known).

        A worker with state stays until a step covers its state, or its time has come.
        """
        if worker.stage in DEPARTED_STAGES:
            return
        margin_s = self.run.config.drain_margin_s
        self.notices += worker.notice(None if deadline is None else deadline - margin_s, why)
        if worker.stage in EXPENDABLE_STAGES:
            self.release(worker, why, now)
            return
        self.provisioned.discard(worker.id)  # so that a replacement is requested at once
        if worker.stage is Stage.MEMBER:
            self._generation.draining[worker.id] = worker
        self.run.timers.wake(worker.leave_at, "leave", worker.id)

    def resized(self, now: float) -> None:
        """Release workers above the new size, unless they have state."""
        self.unfilled = 0
        surplus = len(self.provisioned) - self.target_size
        provisioned = [w for w in self.workers.values() if w.id in self.provisioned]
        source = self._lineage.initial_source
        loose = [w for w in provisioned if w.stage in EXPENDABLE_STAGES and w.id != source]
        held = [w for w in provisioned if w.stage not in EXPENDABLE_STAGES or w.id == source]
        draining = [worker for worker in self.workers.values() if worker.draining]
        for worker, why in choose_departing(loose, surplus, held, draining):
            self.release(worker, f"the size is {self.run.size} now; {why}", now)

    # -------------------------------------------------------------------------------- timers

    def timer_fired(self, kind: str, worker: WorkerState, now: float) -> None:
        """Act on a timer of this worker, if it still has a meaning."""
        match kind, worker.stage:
            case "leave", Stage.LEAVING:
                if now >= worker.since + self.run.config.release_timeout_s:
                    self.evict(worker, "did not leave", now)
            case "leave", Stage.RETAINED if self._state_is_held_by_others(worker):
                self.release(worker, worker.leave_reason, now)
            case "rejoin", Stage.READY if worker.id not in self.ready:
                self.queue(worker, now)

    def _state_is_held_by_others(self, retained: WorkerState) -> bool:
        """Return whether another worker has the same state or a later one."""
        others = (*self._generation.members.values(), *self.retained.values())
        return any(
            w.has_state and w.position >= retained.position for w in others if w is not retained
        )

    def excused_until(self, worker_id: WorkerId) -> float:
        """Return the time before which the worker may not be evicted for silence.

        No member is evicted while the group makes steps, which it could not do without each member.
        """
        if self.workers[worker_id].stage in (Stage.MEMBER, Stage.UNREPORTED):
            lived_at = max(self._generation.steps.at, self.failure_detector.awake_since)
            return self.run.config.heartbeat_timeout_s + lived_at
        return -math.inf
