"""The present generation: its members, which of them are known to be out of it, how far it is, and
its end.

Three things always hold. A member that reported that it is out is never waited for again. Only
heartbeats of members inside renew the lease. The next generation may follow only if this one can
make no further step (`Fence.is_closed`). An end is told to every member that is not known to be
out, and told again until it is, less often each time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Membership, WorkerId
from elastic_dp.coordinator.phases import Phase, Transition
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.worker_state import WorkerState
from elastic_dp.wording import counted

BEFORE_TRAINING = frozenset({"start", "wait", "form", "give", "receive", "restore"})
REMIND_BEATS = 32  # a worker that does not answer is told again after at most so many heartbeats
ODD_BEATS = 3  # "done" heard so often without WorkerFinished: the report was lost


@dataclass(slots=True)
class Fence:
    """Whether a generation can make another step: not once a member is out, or all are dead, or
    their lease ran out."""

    lease_until: float = -math.inf
    exit_confirmed: bool = False  # one of its members said that it is out
    unconfirmed_dead: set[WorkerId] = field(default_factory=set)  # evicted, perhaps alive

    def is_closed(self, now: float) -> bool:
        return self.exit_confirmed or not self.unconfirmed_dead or now >= self.lease_until

    def renew(self, until: float) -> None:
        self.lease_until = max(self.lease_until, until)

    def confirm_exit(self) -> None:
        self.exit_confirmed = True

    def evicted(self, worker: WorkerId) -> None:
        self.unconfirmed_dead.add(worker)

    def confirm_death(self, worker: WorkerId) -> None:
        self.unconfirmed_dead.discard(worker)


@dataclass(slots=True)
class StepProgress:
    """The last committed step that was heard of, and how many steps a heartbeat interval takes."""

    step: int = 0
    at: float = -math.inf
    pace: int = 0
    _paced_step: int = 0
    _paced_at: float = -math.inf

    def restart(self, step: int, now: float) -> None:
        self.step, self.at = step, now
        self._paced_at, self._paced_step, self.pace = now, step, 0

    def note(self, step: int, now: float, interval_s: float) -> bool:
        """Whether it is a new one."""
        progressed = step > self.step
        if progressed:
            self.step, self.at = step, now
        if now >= self._paced_at + interval_s:
            self.pace = self.step - self._paced_step
            self._paced_at, self._paced_step = now, self.step
        return progressed


class Generation:
    def __init__(self, run: RunState, lineage: StateLineage) -> None:
        self.run, self._lineage = run, lineage
        self.number = 0
        self.membership: Membership | None = None
        self.members: dict[WorkerId, WorkerState] = {}  # by rank, without the lost and the evicted
        self.draining: dict[WorkerId, WorkerState] = {}  # members whose node goes away
        self.inside: set[WorkerId] = set()  # not known to be out of it
        self.not_entered: set[WorkerId] = set()  # as far as is known
        self.not_formed: set[WorkerId] = set()
        self.not_finished: set[WorkerId] = set()
        self.unreachable_pairs: set[tuple[WorkerId, WorkerId]] = set()
        self.mismatch: m.ReplicaMismatch | None = None  # of what its members hold
        self.fence = Fence()
        self.steps = StepProgress()

        self.formed = True
        self.lost_while_forming = False
        self._form_by = math.inf
        self._after_step: int | None = None  # planned end; None while ending: abort
        self.first_stop_at = math.inf
        self._waiting_said = False

    @property
    def is_over(self) -> bool:
        """Every member has stopped, finished, or is gone."""
        return self.run.in_flight and not (self.inside and self.not_finished)

    @property
    def must_stop(self) -> bool:
        """Every member was told to leave it now, or one has left it: nobody inside waits for a step
        of the others."""
        told = self.run.phase is Phase.ENDING
        return told and (self._after_step is None or self.first_stop_at < math.inf)

    @property
    def finished(self) -> list[WorkerState]:
        return [worker for worker in self.members.values() if worker.finished is not None]

    # -------------------------------------------------------------------------- beginning

    def assign(self, membership: Membership, members: list[WorkerState], now: float) -> None:
        """Replace the generation before."""
        config = self.run.config
        self.number, self.membership = membership.generation, membership
        self.members = {worker.id: worker for worker in members}
        self.inside, self.not_formed = set(self.members), set(self.members)
        self.not_entered = set(self.members)
        self.not_finished = {worker.id for worker in members if worker.finished is None}
        self.draining = {worker.id: worker for worker in members if worker.draining}
        self.unreachable_pairs, self.mismatch = set(), None
        self.fence = Fence(max([worker.renewed_at for worker in members]) + config.lease_s)
        self.formed = self.lost_while_forming = False
        self._waiting_said = False
        self._after_step, self.first_stop_at = None, math.inf
        source = self.members[membership.source]
        established = self._lineage.established
        step = source.position.step if established else self._lineage.checkpoint_step or 0
        for worker in members:
            if not worker.has_state:
                worker.progress.begin_at(step)
        self.steps.restart(step, now)
        self._form_by = now + config.forming_timeout_s + config.gather_timeout_s
        self.run.timers.wake(self._form_by)

    def announce(self, reason: str) -> None:
        assert self.membership is not None
        for worker in self.members.values():
            worker.enter(self.number)
        self.run.emit(m.FormGeneration(self.membership))
        self.tell_to_stop()
        self.run.take(Transition.ANNOUNCED)
        self.run.say(f"generation {self.number}: {reason}")

    def all_formed(self) -> None:
        self.run.take(Transition.ALL_FORMED)
        self.formed = True
        for worker in self.members.values():
            worker.formed()

    # --------------------------------------------------------------------------- takeover

    def assume(self, highest_claimed: int, now: float) -> None:
        """It may still run, and whoever led before may have renewed its lease until now."""
        self.number = highest_claimed
        self.fence.renew(now + self.run.config.lease_s)

    def found_member(self, worker: WorkerState) -> None:
        """It may hold, or be about to enter, any generation up to this one."""
        self.members[worker.id] = worker
        self.inside.add(worker.id)
        self.not_finished.add(worker.id)
        self.run.emit(m.AbortGeneration(worker.id, self.number))

    def all_found(self) -> None:
        """There may be workers that this coordinator was not told of."""
        self.run.take(Transition.TAKEOVER_ENDED)
        self.formed = True
        self.fence.evicted("")

    # ------------------------------------------------------------------------- heartbeats

    def note_step(self, step: int, now: float) -> bool:
        """Whether it is a new one."""
        return self.steps.note(step, now, self.run.config.heartbeat_interval_s)

    def is_past(self, event: m.HeartbeatReceived) -> bool:
        """Whether this worker makes steps in an earlier generation: a lease would let it go on
        beside this one."""
        return 0 < event.generation < self.number and event.phase != "wait"

    def renewed(self, now: float) -> None:
        """A worker that may make its steps was answered."""
        self.fence.renew(now + self.run.config.lease_s)

    def heard(self, worker: WorkerState, event: m.HeartbeatReceived, now: float) -> None:
        inside = worker.id in self.inside
        if inside:  # a worker that has stopped makes no steps, whatever its lease
            self.renewed(now)
        in_flight = self.run.in_flight
        if event.generation == self.number and in_flight:
            self.not_entered.discard(worker.id)
            if event.phase not in BEFORE_TRAINING:
                self.not_formed.discard(worker.id)
                self._lineage.establish()
                if event.virtual_s:
                    worker.measured(event.virtual_s, self.number)
            elif event.phase in ("give", "receive", "restore"):
                self._form_by = max(self._form_by, now + self.run.config.forming_timeout_s)
            if inside and self.run.phase is not Phase.ENDING:
                self._note_lost_report(worker, event.phase)
        if inside and in_flight:
            self._remind(worker)

    def _note_lost_report(self, worker: WorkerState, phase: str) -> None:
        """The worker is out of the generation, and its report of that did not arrive."""
        if phase == "wait":
            self.abort(f"{worker.id} waits, its report was lost")
        elif phase == "done" and worker.looked_done(ODD_BEATS):
            self.abort(f"{worker.id} is done, its report was lost")

    def _remind(self, worker: WorkerState) -> None:
        """Of what it was told and has not acted on; less often each time, since it may be in a long
        loop body."""
        beats = worker.count_reminder()
        if beats & (beats - 1) and beats % REMIND_BEATS:  # 1, 2, 4, …, 32, 64, 96, …
            return
        if self.run.phase is Phase.ENDING:
            self._tell_end(worker)
        elif self.run.stop is not None:
            self._tell_stop(worker, self.run.stop)

    def tell_to_stop(self) -> None:
        """If the run is to end, the members agree on the step."""
        if self.run.stop is not None:
            for worker in self.members.values():
                worker.told()
                self._tell_stop(worker, self.run.stop)

    def _tell_stop(self, worker: WorkerState, stop: m.StopRequested) -> None:
        self.run.emit(m.StopTraining(worker.id, stop.reason))

    # ---------------------------------------------------------------------------- the end

    def plan_end(self, reason: str, at_once: bool = False) -> None:
        """`at_once`: time presses, so a step that some are in is given up."""
        ahead = 0 if at_once else self.run.config.steps_ahead
        self._after_step = self.steps.step + self.steps.pace + ahead
        self._end(reason)

    def abort(self, reason: str) -> None:
        self._after_step = None
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.run.take(Transition.END_REQUESTED)
        self.run.say(f"generation {self.number} ends: {reason}")
        for worker in self.members.values():
            if worker.id in self.inside:
                worker.progress.restart()  # what it was waiting for does not count
                worker.told()
                self._tell_end(worker)

    def _tell_end(self, worker: WorkerState) -> None:
        if self._after_step is None:
            self.run.emit(m.AbortGeneration(worker.id, self.number))
        else:
            self.run.emit(m.EndGeneration(worker.id, self.number, self._after_step))

    def stopped(self, worker: WorkerState | None, event: m.WorkerStopped, now: float) -> bool:
        """Whether it stopped on its own, and so ended the generation."""
        if worker is None or event.generation < self.number or worker.id not in self.inside:
            return False
        self.inside.discard(worker.id)
        worker.stopped(event)
        if event.has_state:
            self._lineage.shown(event.lineage_id)
        self.mismatch = self.mismatch or event.mismatch
        self.first_stop_at = min(self.first_stop_at, now)
        self.run.timers.wake(now + self.run.config.gather_timeout_s)
        if worker.entered == self.number:  # after a takeover, others cannot speak for it
            self.fence.confirm_exit()
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
        worker = self.members.get(event.worker)
        if worker is None or event.generation != self.number or not self.run.in_flight:
            return
        worker.finish(event)
        self.fence.confirm_exit()
        self._lineage.shown(event.lineage_id)  # after a takeover it may be the first to say so
        self.inside.discard(worker.id)
        self.not_formed.discard(worker.id)
        self.not_finished.discard(worker.id)

    def drain(self, worker: WorkerState) -> None:
        self.draining[worker.id] = worker

    def drop(self, worker: WorkerState, reason: str) -> None:
        """The worker is gone, or was told to go; what cannot go on without it ends."""
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
        """Leave it out of the next one, though nothing is wrong with it."""
        del self.members[worker.id]
        self.not_finished.discard(worker.id)
        self.draining.pop(worker.id, None)

    def take_back(self) -> None:
        """Every member is out."""
        self.run.take(Transition.ALL_OUT)

    def check_time(self, now: float) -> bool:
        """Its own deadlines; whether it failed to form."""
        phase = self.run.phase
        if phase is Phase.FORMING:
            return self._check_forming(now)
        waited = now >= self.first_stop_at + self.run.config.gather_timeout_s
        if phase is Phase.ENDING and waited:
            if self._after_step is not None:
                self.abort("the planned end takes too long")
            elif self.inside and not self._waiting_said:
                self._waiting_said = True
                self.run.say(f"waiting for {_some(sorted(self.inside))} to stop")
        return False

    def _check_forming(self, now: float) -> bool:
        if now < self._form_by:
            self.run.timers.wake(self._form_by)
            return False
        never = self.not_entered & self.inside
        if never != self.inside:
            self.unreachable_pairs.update((worker, worker) for worker in never)
        self.abort(f"{counted(len(self.not_formed), 'member')} did not form in time")
        return True


def _some(workers: Iterable[WorkerId], shown: int = 5) -> str:
    first = list(workers)
    return f"{', '.join(first[:shown])}{' …' if first[shown:] else ''}"
