"""The present generation: its members, which of them have left it, its progress, and its end.

Four things always hold. A member that reported that it has left is never waited for again. Only
heartbeats of members that have not left renew the lease. The next generation may follow only when
this one can make no further step (`Fence.is_closed`). An end is sent to every member that has not
left, and repeated at growing intervals until the member leaves.
"""

import math
from dataclasses import dataclass, field

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Membership, WorkerId
from elastic_dp.coordinator.run_state import Phase, RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.workers.worker_state import WorkerState
from elastic_dp.wording import counted, first_few

BEFORE_TRAINING = frozenset({"start", "wait", "form", "give", "receive", "restore"})
REMIND_BEATS = 32  # at most so many heartbeats between two reminders to a worker
# once a worker has reported "done" again so often, its WorkerFinished counts as lost
LOST_REPORT_BEATS = 2


@dataclass(slots=True)
class Fence:
    """Decides whether a generation can still make a step.

    It cannot once a member has left it, all members are dead, or their lease has expired.
    """

    lease_until: float = -math.inf
    exit_confirmed: bool = False  # a member reported that it has left
    unconfirmed_dead: set[WorkerId] = field(default_factory=set)  # evicted, and perhaps still alive

    def is_closed(self, now: float) -> bool:
        return self.exit_confirmed or not self.unconfirmed_dead or now >= self.lease_until

    def renew(self, until: float) -> None:
        self.lease_until = max(self.lease_until, until)


@dataclass(slots=True)
class StepProgress:
    """The last committed step that a heartbeat reported, and the number of steps per heartbeat
    interval.
    """

    step: int = 0
    at: float = -math.inf
    pace: int = 0
    _paced_step: int = 0
    _paced_at: float = -math.inf

    def restart(self, step: int, now: float) -> None:
        self.step, self.at = step, now
        self._paced_at, self._paced_step, self.pace = now, step, 0

    def note(self, step: int, now: float, interval_s: float) -> bool:
        """Record a reported step. Return whether it is a new one."""
        progressed = step > self.step
        if progressed:
            self.step, self.at = step, now
        if now >= self._paced_at + interval_s:
            self.pace = self.step - self._paced_step
            self._paced_at, self._paced_step = now, self.step
        return progressed


@dataclass(slots=True)
class EvaluationCounts:
    """Compares how often the members call ctx.evaluate in the newest body.

    A member that waits in an evaluation and one that has ended the same body with fewer of them
    would wait for each other for ever.
    """

    _body: int = -1
    _most: tuple[int, WorkerId] = (0, "")  # begun so far
    _fewest: tuple[float, WorkerId] = (math.inf, "")  # in a body that has ended

    def note(self, worker: WorkerId, body: int, count: int, ended: bool) -> str:
        """Record what a member reports. Return how the members differ, or an empty string."""
        if body > self._body:
            self._body, self._most, self._fewest = body, (0, ""), (math.inf, "")
        elif body < self._body:
            return ""
        if ended:
            self._fewest = min(self._fewest, (count, worker))
        else:
            self._most = max(self._most, (count, worker))
        (most, calls), (fewest, lacks) = self._most, self._fewest
        if most <= fewest:
            return ""
        less = f"only {counted(int(fewest), 'time')}" if fewest else "not"
        return (
            f"ctx.evaluate was called {counted(most, 'time')} after step {body // 2} by {calls}, "
            f"but {less} by {lacks}: every worker must call it, since all evaluate together; only "
            "what follows with its result may be for rank 0 alone"
        )


class Generation:
    """The present generation and its members."""

    def __init__(self, run: RunState, lineage: StateLineage) -> None:
        self.run, self._lineage = run, lineage
        self.number = 0
        self.membership: Membership | None = None
        self.members: dict[WorkerId, WorkerState] = {}  # by rank, without lost and evicted members
        self.draining: dict[WorkerId, WorkerState] = {}  # members whose node goes away
        self.inside: set[WorkerId] = set()  # members that have not reported that they left
        self.not_formed: set[WorkerId] = set()
        self.not_finished: set[WorkerId] = set()
        self.unreachable_pairs: set[tuple[WorkerId, WorkerId]] = set()
        self.mismatch: m.ReplicaMismatch | None = None  # the members hold different weights
        self.pieces_lost = False  # a part of the sharded state
        self.fence = Fence()
        self.steps = StepProgress()
        self.evaluations = EvaluationCounts()

        self.formed = True
        self.lost_while_forming = False
        self._form_by = math.inf
        self._after_step: int | None = None  # planned end; None while ending: abort
        self.first_stop_at = math.inf
        self.joined_at = -math.inf  # when a generation was last formed for joiners, too
        self._waiting_said = False

    @property
    def is_over(self) -> bool:
        """Whether every member has left, finished, or is gone."""
        return self.run.in_flight and not (self.inside and self.not_finished)

    @property
    def must_stop(self) -> bool:
        """Whether every remaining member must leave now: no step can complete any more."""
        told = self.run.phase is Phase.ENDING
        return told and (self._after_step is None or self.first_stop_at < math.inf)

    @property
    def some_lost(self) -> bool:
        """Whether members of this generation may be gone."""
        members = self.membership.members if self.membership else ()
        return not members or any(member.worker not in self.members for member in members)

    @property
    def has_finished(self) -> bool:
        """Whether all its members have finished the run, and there are some."""
        return bool(self.members) and not self.not_finished

    # -------------------------------------------------------------------------- beginning

    def assign(self, membership: Membership, members: list[WorkerState], now: float) -> None:
        """Replace the previous generation by `membership`. `members` are in the order of ranks."""
        config = self.run.config
        self.number, self.membership = membership.generation, membership
        self.members = {worker.id: worker for worker in members}
        self.inside, self.not_formed = set(self.members), set(self.members)
        self.not_finished = {worker.id for worker in members if worker.finished is None}
        self.draining = {worker.id: worker for worker in members if worker.draining}
        if {worker.has_state for worker in members} == {True, False}:
            self.joined_at = now
        self.unreachable_pairs, self.mismatch = set(), None
        self.pieces_lost = False
        self.fence = Fence(max([worker.renewed_at for worker in members]) + config.lease_s)
        self.formed = self.lost_while_forming = False
        self._waiting_said = False
        self.evaluations = EvaluationCounts()
        self._after_step, self.first_stop_at = None, math.inf
        source = self.members[membership.source]
        established = self._lineage.established
        step = source.position.step if established else self._lineage.checkpoint_step or 0
        for worker in members:
            if not worker.has_state:
                worker.progress.first_step = step
        self.steps.restart(step, now)
        self._form_by = now + config.forming_timeout_s + config.gather_timeout_s
        self.run.timers.wake(self._form_by)

    def announce(self, reason: str) -> None:
        """Tell the members to form the generation."""
        assert self.membership is not None
        for worker in self.members.values():
            worker.enter(self.number)
        self.run.emit(m.FormGeneration(self.membership))
        self.tell_to_stop()
        self.run.enter(Phase.FORMING)
        self.run.set_reason(f"generation {self.number}: {reason}")

    def all_formed(self) -> None:
        """Record that all members are past forming."""
        self.run.enter(Phase.RUNNING)
        self.formed = True
        for worker in self.members.values():
            worker.failed_joins = 0

    # --------------------------------------------------------------------------- takeover

    def assume_running(self, highest_claimed: int, now: float) -> None:
        """Assume that `highest_claimed` still runs and that its lease was renewed until now."""
        self.number = highest_claimed
        self.fence.renew(now + self.run.config.lease_s)

    def add_reported_member(self, worker: WorkerState) -> None:
        """Tell a reported worker to leave every generation up to this one, which it may be in."""
        self.members[worker.id] = worker
        self.inside.add(worker.id)
        self.not_finished.add(worker.id)
        self.run.emit(m.AbortGeneration(worker.id, self.number))

    def end_takeover(self) -> None:
        """End the takeover. There may be workers that did not report, so the fence stays open."""
        self.run.enter(Phase.ENDING)
        self.formed = True
        self.fence.unconfirmed_dead.add("")

    # ------------------------------------------------------------------------- heartbeats

    def is_in_earlier_generation(self, event: m.HeartbeatReceived) -> bool:
        """Return whether the worker trains in an earlier generation, so its lease must not be
        renewed.
        """
        return 0 < event.generation < self.number and event.phase != "wait"

    def renewed(self, now: float) -> None:
        """Record that the lease of a worker that may make steps was renewed."""
        self.fence.renew(now + self.run.config.lease_s)

    def heartbeat_received(
        self, worker: WorkerState, event: m.HeartbeatReceived, now: float
    ) -> None:
        """Take a member's heartbeat: renew the lease, update its progress, and repeat what it has
        missed.
        """
        inside = worker.id in self.inside
        if inside:  # a worker that has stopped makes no steps, whatever its lease
            self.renewed(now)
        in_flight = self.run.in_flight
        if event.generation == self.number and in_flight:
            if event.phase not in BEFORE_TRAINING:
                self.not_formed.discard(worker.id)
                self._lineage.established = True
                if event.virtual_s and self.run.config.balances:
                    worker.virtual_s, worker.measured_in = event.virtual_s, self.number
            elif event.phase in ("give", "receive", "restore"):
                self._form_by = max(self._form_by, now + self.run.config.forming_timeout_s)
            if inside and self.run.phase is not Phase.ENDING:
                self._check_lost_report(worker, event.phase)
        if inside and in_flight:
            self._remind(worker)

    def _check_lost_report(self, worker: WorkerState, phase: str) -> None:
        """Abort if the heartbeat shows that the worker has left and its report of that was lost."""
        if phase == "wait":
            self.abort(f"{worker.id} waits, its report was lost")
        elif worker.progress.repeats(self.number, "done") >= LOST_REPORT_BEATS:
            self.abort(f"{worker.id} is done, its report was lost")

    def _remind(self, worker: WorkerState) -> None:
        """Repeat a command that the worker has not acted on.

        The intervals grow, because the worker may be in a long loop body.
        """
        worker.reminded_beats = beats = worker.reminded_beats + 1
        if beats & (beats - 1) and beats % REMIND_BEATS:  # 1, 2, 4, …, 32, 64, 96, …
            return
        if self.run.phase is Phase.ENDING:
            self._tell_end(worker)
        elif self.run.stop is not None:
            self.run.emit(m.StopTraining(worker.id, self.run.stop.reason))

    def tell_to_stop(self) -> None:
        """If a stop was requested, tell every member. The members agree on the step."""
        if self.run.stop is not None:
            for worker in self.members.values():
                worker.reminded_beats = 0
                self.run.emit(m.StopTraining(worker.id, self.run.stop.reason))

    # ---------------------------------------------------------------------------- the end

    def plan_end(self, reason: str, at_once: bool = False) -> None:
        """End the generation after a step that no member has reached yet.

        `at_once`: time is short, so the end lies no further ahead than heartbeats foretell, and a
        step in progress may be lost.
        """
        ahead = 0 if at_once else self.run.config.steps_ahead
        self._after_step = self.steps.step + self.steps.pace + ahead
        self._end(reason)

    def abort(self, reason: str) -> None:
        """End the generation now; a step in progress is rolled back."""
        self._after_step = None
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.run.enter(Phase.ENDING)
        self.run.set_reason(f"generation {self.number} ends: {reason}")
        for worker in self.members.values():
            if worker.id in self.inside:
                worker.progress.restart()  # the time that it waited so far does not count
                worker.reminded_beats = 0
                self._tell_end(worker)

    def _tell_end(self, worker: WorkerState) -> None:
        if self._after_step is None:
            self.run.emit(m.AbortGeneration(worker.id, self.number))
        else:
            self.run.emit(m.EndGeneration(worker.id, self.number, self._after_step))

    def stopped(self, worker: WorkerState | None, event: m.WorkerStopped, now: float) -> bool:
        """Take a WorkerStopped. Return whether the worker left on its own and so ended the
        generation.
        """
        if worker is None or event.generation < self.number or worker.id not in self.inside:
            return False
        self.inside.discard(worker.id)
        worker.stopped(event)
        if event.has_state:
            # after a takeover, this may be the first report of it
            self._lineage.observed(event.lineage_id)
        self.mismatch = self.mismatch or event.mismatch
        self.pieces_lost |= event.pieces_lost
        self.first_stop_at = min(self.first_stop_at, now)
        self.run.timers.wake(now + self.run.config.gather_timeout_s)
        if worker.entered == self.number:  # after a takeover, other workers cannot speak for it
            self.fence.exit_confirmed = True
        self.unreachable_pairs.update((worker.id, other) for other in event.unreachable)
        if self.run.phase in (Phase.FORMING, Phase.RUNNING):
            self.abort(f"{worker.id} stopped: {event.reason}")
            return True
        if self._after_step is not None and (
            event.position < (self._after_step,) or not event.at_head
        ):
            self.abort(f"{worker.id} stopped before the planned end: {event.reason}")
        return False

    def worker_finished(self, event: m.WorkerFinished) -> None:
        """Take a WorkerFinished of a member of this generation."""
        worker = self.members.get(event.worker)
        if worker is None or event.generation != self.number or not self.run.in_flight:
            return
        worker.finish(event)
        self.fence.exit_confirmed = True
        self._lineage.observed(event.lineage_id)  # after a takeover it may be the first to say so
        self.inside.discard(worker.id)
        self.not_formed.discard(worker.id)
        self.not_finished.discard(worker.id)

    def drop(self, worker: WorkerState, reason: str) -> None:
        """Remove a worker that is gone or was told to go, and abort what cannot continue without
        it.
        """
        if self.members.pop(worker.id, None) is None:
            return
        self.draining.pop(worker.id, None)
        for group in (self.inside, self.not_formed, self.not_finished):
            group.discard(worker.id)
        phase, finished = self.run.phase, worker.finished is not None
        if phase is Phase.FORMING or (phase is Phase.RUNNING and not finished):
            self.lost_while_forming = phase is Phase.FORMING
            self.abort(reason)
        elif phase is Phase.ENDING:
            self.lost_while_forming = True
            if self._after_step is not None:
                self.abort(reason)

    def exclude(self, worker: WorkerState) -> None:
        """Leave a healthy worker out of the next generation."""
        del self.members[worker.id]
        self.not_finished.discard(worker.id)
        self.draining.pop(worker.id, None)

    def check_time(self, now: float) -> bool:
        """Act on the generation's own deadlines. Return whether it failed to form in time."""
        phase = self.run.phase
        if phase is Phase.FORMING:
            return self._check_forming(now)
        waited = now >= self.first_stop_at + self.run.config.gather_timeout_s
        if phase is Phase.ENDING and waited:
            if self._after_step is not None:
                self.abort("the planned end takes too long")
            elif self.inside and not self._waiting_said:
                self._waiting_said = True
                self.run.set_reason(f"waiting for {first_few(sorted(self.inside))} to stop")
        return False

    def _check_forming(self, now: float) -> bool:
        if now < self._form_by:
            self.run.timers.wake(self._form_by)
            return False
        inside = [worker for worker in self.members.values() if worker.id in self.inside]
        never = {worker.id for worker in inside if worker.progress.where[0] != self.number}
        if never != self.inside:
            self.unreachable_pairs.update((worker, worker) for worker in never)
        self.abort(f"{counted(len(self.not_formed), 'member')} did not form in time")
        return True
