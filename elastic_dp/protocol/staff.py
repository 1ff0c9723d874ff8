"""Who works for the run: asked for, at hand, leaving, gone.

Always: an identity is started once; whoever is released or evicted plays no part from that moment on, and one that
does not leave when it is asked to is evicted; a member that was evicted may live until its death is confirmed, and is
a ghost of its generation until then. Losses that nobody asked for are counted (`budget`), with a pause after each.
"""

import math
from collections.abc import Iterable

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.beginning import Beginning
from elastic_dp.protocol.budget import Budget
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.liveness import Liveness
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.roster import USEFUL, Identities, Stage, Worker
from elastic_dp.protocol.run import Run

LOOSE = frozenset({Stage.STARTING, Stage.BUILDING, Stage.READY})  # holds nothing that anybody needs
GONE = frozenset({Stage.LEAVING, Stage.EVICTED})


class Staff:
    def __init__(self, run: Run, generation: Generation, beginning: Beginning) -> None:
        self.run, self._generation, self._beginning = run, generation, beginning
        self.liveness = Liveness(run.rules.heartbeat_timeout_s)
        self.budget = Budget(run.rules.max_losses_without_progress)
        self.workers: dict[WorkerId, Worker] = {}
        self.identities = Identities()
        self.useful: set[WorkerId] = set()  # count towards size + standby
        self.ready: dict[WorkerId, Worker] = {}  # void, may be seated now
        self.ready_since = math.inf
        self.leavers: dict[WorkerId, Worker] = {}  # without a seat, kept for their state
        self.unreported: set[WorkerId] = set()  # of a take-over
        self.unfilled = 0  # places given up, since whoever comes does not fit
        self.retry_at = -math.inf  # neither start nor seat anybody before

    @property
    def wanted(self) -> int:
        return self.run.size + self.run.rules.standby

    # ------------------------------------------------------------------------------- coming

    def replenish(self, now: float) -> None:
        wanted = self.wanted - self.unfilled
        if len(self.useful) >= wanted:
            return
        if now < self.retry_at:
            self.run.alarms.wake(self.retry_at)
            return
        while len(self.useful) < wanted:
            worker_id, number = self.identities.next()
            self.workers[worker_id] = Worker(worker_id, number, Stage.STARTING, now)
            self.useful.add(worker_id)
            self.run.emit(m.StartWorker(worker_id))

    def adopt(self, worker_id: WorkerId, now: float) -> None:
        """It is there already, and nothing else is known of it."""
        number = self.identities.next()[1]
        self.workers[worker_id] = Worker(worker_id, number, Stage.SURVEYED, now)
        self.useful.add(worker_id)
        self.unreported.add(worker_id)
        self.liveness.heard(worker_id, now)
        self.run.emit(m.ReportYourself(worker_id))

    def queue(self, worker: Worker, now: float) -> None:
        self.ready[worker.id] = worker
        if self.ready_since == math.inf:
            self.ready_since = now

    def move(self, worker: Worker, stage: Stage, now: float) -> None:
        worker.stage, worker.since = stage, now
        if stage in USEFUL and not worker.draining:
            self.useful.add(worker.id)
        else:
            self.useful.discard(worker.id)

    # ------------------------------------------------------------------------------ leaving

    def lost(self, event: m.WorkerLost, now: float) -> None:
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            return
        self._generation.ghosts.discard(worker.id)
        if worker.stage is Stage.EVICTED:
            return
        expected = worker.draining or worker.stage in (Stage.LEAVING, Stage.LEAVER)
        self._remove(worker, f"{worker.id} is lost: {event.reason}")
        if not expected:
            self.count(worker, now)

    def evict(self, worker: Worker, reason: str, now: float) -> None:
        member = worker.stage in (Stage.MEMBER, Stage.SURVEYED)
        unexpected = worker.id in self.useful
        self.run.emit(m.EvictWorker(worker.id, reason))
        self.run.explain(f"{worker.id} evicted: {reason}")
        self._remove(worker, f"{worker.id} evicted: {reason}")
        if member:
            self._generation.ghosts.add(worker.id)
        self.move(worker, Stage.EVICTED, now)
        if unexpected:
            self.count(worker, now)

    def release(self, worker: Worker, reason: str, now: float) -> None:
        self.run.emit(m.ReleaseWorker(worker.id, reason))
        self._remove(worker, f"{worker.id} released: {reason}")
        self.move(worker, Stage.LEAVING, now)
        self.run.alarms.wake(now + self.run.rules.release_timeout_s, "leave", worker.id)

    def _remove(self, worker: Worker, reason: str) -> None:
        """It plays no part any more."""
        self.liveness.forget(worker.id)
        for pool in (self.ready, self.leavers):
            pool.pop(worker.id, None)
        for group in (self.useful, self.unreported):
            group.discard(worker.id)
        self._beginning.forget(worker.id)
        self._generation.drop(worker, reason)

    def count(self, worker: Worker, now: float) -> None:
        if self.budget.counts(self._generation.number, worker.number, self.identities.given):
            self.retry_at = now + self.budget.pause_s

    def progressed(self, now: float) -> None:
        """A new step was made: losses are forgiven, and the state of the leavers is covered by it."""
        self.budget.progressed()
        for leaver in [*self.leavers.values()] if self.run.in_flight else ():
            self.release(leaver, leaver.leave_reason, now)

    def drain(self, worker: Worker, deadline: float | None, now: float) -> None:
        """Its node will go; whoever holds state stays until it is covered, or the time has come."""
        if worker.stage in GONE:
            return
        worker.draining = True
        if deadline is not None:
            worker.leave_at = deadline - self.run.rules.drain_margin_s
        if worker.stage in LOOSE:
            self.release(worker, "its node goes away", now)
            return
        self.useful.discard(worker.id)  # so a replacement is asked for at once
        if worker.stage is Stage.MEMBER:
            self._generation.draining[worker.id] = worker
        self.run.alarms.wake(worker.leave_at, "leave", worker.id)

    def resized(self, now: float) -> None:
        """Who is not needed any more goes, the youngest first, unless it holds something."""
        self.unfilled = 0
        surplus = len(self.useful) - self.wanted
        youngest: Iterable[Worker] = (
            sorted(self.workers.values(), key=lambda w: -w.number) if surplus > 0 else ()
        )
        for worker in youngest:
            if surplus <= 0:
                break
            needed = worker.stage not in LOOSE or worker.id == self._beginning.founder
            if worker.id in self.useful and not needed:
                self.release(worker, f"the size is {self.run.size} now", now)
                surplus -= 1

    # -------------------------------------------------------------------------------- alarms

    def alarm(self, kind: str, worker: Worker, now: float) -> None:
        """What was set for this worker, if it still means something."""
        match kind, worker.stage:
            case "leave", Stage.LEAVING:
                if now >= worker.since + self.run.rules.release_timeout_s:
                    self.evict(worker, "did not leave", now)
            case "leave", Stage.LEAVER:
                self.release(worker, worker.leave_reason, now)
            case "rejoin", Stage.READY if worker.id not in self.ready:
                self.queue(worker, now)

    def excused_until(self, worker_id: WorkerId) -> float:
        """Nobody is evicted for silence while the group makes steps, since it could not without each of them."""
        if self.workers[worker_id].stage in (Stage.MEMBER, Stage.SURVEYED):
            lived_at = max(self._generation.progress_at, self.liveness.awake_since)
            return self.run.rules.heartbeat_timeout_s + lived_at
        return -math.inf
