"""The present generation: who is in it, who is known to be out of it, how far it is, and its end.

Always: a member that said that it is out is never waited for again; the lease of those inside is renewed by their
heartbeats alone; and the next one may follow only if this one can make no further step (`may_be_followed`). An end
is told to every member that is not known to be out, and told again until it is, seldomer each time.
"""

import math

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.messages import Membership, WorkerId
from elastic_dp.protocol.run_state import Phase, RunState
from elastic_dp.protocol.state_lineage import StateLineage
from elastic_dp.protocol.worker_state import WorkerState
from elastic_dp.wording import counted

BEFORE_TRAINING = frozenset({"start", "wait", "form", "give", "receive", "restore"})
REMIND_BEATS = 32  # whoever does not answer is told again after at most so many heartbeats
ODD_BEATS = 3  # "done" heard so often without WorkerFinished: the report was lost


class Generation:
    def __init__(self, run: RunState, lineage: StateLineage) -> None:
        self.run, self._lineage = run, lineage
        self.number = 0
        self.membership: Membership | None = None
        self.members: dict[WorkerId, WorkerState] = {}  # by rank, without the lost and the evicted
        self.inside: set[WorkerId] = set()  # not known to be out of it
        self.not_entered: set[WorkerId] = set()  # not known to have entered it
        self.not_formed: set[WorkerId] = set()  # not known to be past forming
        self.not_finished: set[WorkerId] = set()
        self.unconfirmed_dead: set[WorkerId] = set()  # evicted, not confirmed dead
        self.draining: dict[WorkerId, WorkerState] = {}  # members whose node goes away
        self.unreachable_pairs: set[tuple[WorkerId, WorkerId]] = set()  # out of reach of each other
        self.mismatch: m.Disagreement | None = None  # of what its members hold

        self.exit_confirmed = False  # one of its members said that it is out
        self.lease_until = -math.inf
        self.formed = True
        self.lost_while_forming = False
        self._form_by = math.inf
        self._after_step: int | None = None  # planned end; None while ending: abort
        self.first_stop_at = math.inf
        self._waiting_said = False

        self.step = 0
        self.progress_at = -math.inf
        self._paced_at, self._paced_step, self._pace = -math.inf, 0, 0

    @property
    def is_over(self) -> bool:
        """Every member has stopped, finished, or is gone."""
        return self.run.in_flight and not (self.inside and self.not_finished)

    @property
    def must_stop(self) -> bool:
        """Every member was told to leave it now, or one has left it: nobody inside waits for a step of the others."""
        told = self.run.phase is Phase.ENDING
        return told and (self._after_step is None or self.first_stop_at < math.inf)

    @property
    def finished(self) -> list[WorkerState]:
        return [worker for worker in self.members.values() if worker.finished is not None]

    def may_be_followed(self, now: float) -> bool:
        """It can make no further step."""
        return self.exit_confirmed or not self.unconfirmed_dead or now >= self.lease_until

    # -------------------------------------------------------------------------- lineage

    def seat(self, membership: Membership, seated: list[WorkerState], now: float) -> None:
        """Take the place of the one before."""
        config = self.run.config
        self.number, self.membership = membership.generation, membership
        self.members = {worker.id: worker for worker in seated}
        self.inside, self.not_formed = set(self.members), set(self.members)
        self.not_entered = set(self.members)
        self.not_finished = {worker.id for worker in seated if worker.finished is None}
        self.draining = {worker.id: worker for worker in seated if worker.draining}
        self.unconfirmed_dead, self.unreachable_pairs, self.mismatch = set(), set(), None
        self.exit_confirmed = self.formed = self.lost_while_forming = False
        self._waiting_said = False
        self._after_step, self.first_stop_at = None, math.inf
        self.lease_until = max([worker.renewed_at for worker in seated]) + config.lease_s
        source = self.members[membership.source]
        self.step = (
            source.position.step
            if self._lineage.established
            else self._lineage.checkpoint_step or 0
        )
        for worker in seated:
            if not worker.has_state:
                worker.progress.first_step = self.step
        self.progress_at = now
        self._paced_at, self._paced_step, self._pace = now, self.step, 0
        self._form_by = now + config.forming_timeout_s + config.gather_timeout_s
        self.run.timers.wake(self._form_by)

    def announce(self, reason: str) -> None:
        assert self.membership is not None
        for worker in self.members.values():
            worker.entered, worker.odd_beats, worker.reminded_beats = self.number, 0, 0
        self.run.emit(m.FormGeneration(self.membership))
        self.tell_to_stop()
        self.run.phase = Phase.FORMING
        self.run.say(f"generation {self.number}: {reason}")

    def all_formed(self) -> None:
        self.run.phase = Phase.RUNNING
        self.formed = True
        for worker in self.members.values():
            worker.failed_joins = 0

    # ------------------------------------------------------------------------- heartbeats

    def note_step(self, step: int, now: float) -> bool:
        """Whether it is a new one."""
        progressed = step > self.step
        if progressed:
            self.step, self.progress_at = step, now
        if now >= self._paced_at + self.run.config.heartbeat_interval_s:
            self._pace = self.step - self._paced_step
            self._paced_at, self._paced_step = now, self.step
        return progressed

    def is_past(self, event: m.WorkerHeard) -> bool:
        """Whether this worker makes steps in an earlier one: a lease would let it go on beside this one."""
        return 0 < event.generation < self.number and event.phase != "wait"

    def renewed(self, now: float) -> None:
        """One that may make its steps was answered."""
        self.lease_until = max(self.lease_until, now + self.run.config.lease_s)

    def heard(self, worker: WorkerState, event: m.WorkerHeard, now: float) -> None:
        inside = worker.id in self.inside
        if inside:  # who has stopped makes no steps, whatever its lease
            self.renewed(now)
        in_flight = self.run.in_flight
        if event.generation == self.number and in_flight:
            self.not_entered.discard(worker.id)
            if event.phase not in BEFORE_TRAINING:
                self.not_formed.discard(worker.id)
                self._lineage.established = True
                if event.virtual_s:
                    worker.virtual_s, worker.measured_in = event.virtual_s, self.number
            elif event.phase in ("give", "receive", "restore"):
                self._form_by = max(self._form_by, now + self.run.config.forming_timeout_s)
            if inside and self.run.phase is not Phase.ENDING:
                self._note_lost_report(worker, event.phase)
        if inside and in_flight:
            self._remind(worker)

    def _note_lost_report(self, worker: WorkerState, phase: str) -> None:
        """It is out of the generation, and its own word of that did not arrive."""
        if phase == "wait":
            self.abort(f"{worker.id} waits, its report was lost")
        elif phase == "done":
            worker.odd_beats += 1
            if worker.odd_beats >= ODD_BEATS:
                worker.odd_beats = 0
                self.abort(f"{worker.id} is done, its report was lost")

    def _remind(self, worker: WorkerState) -> None:
        """Of what it was told and did not act on yet; seldomer each time, since a long body is no deafness."""
        worker.reminded_beats += 1
        beats = worker.reminded_beats
        if beats & (beats - 1) and beats % REMIND_BEATS:  # 1, 2, 4, …, 32, 64, 96, …
            return
        if self.run.phase is Phase.ENDING:
            self._tell_end(worker)
        elif self.run.stop is not None:
            self._tell_stop(worker, self.run.stop)

    def tell_to_stop(self) -> None:
        """If the run shall end, the members agree on the step."""
        if self.run.stop is not None:
            for worker in self.members.values():
                worker.reminded_beats = 0
                self._tell_stop(worker, self.run.stop)

    def _tell_stop(self, worker: WorkerState, stop: m.StopRequested) -> None:
        self.run.emit(m.StopTraining(worker.id, stop.reason))

    # ---------------------------------------------------------------------------- the end

    def plan_end(self, reason: str, at_once: bool = False) -> None:
        """`at_once`: time presses, so a step that some are in is given up."""
        ahead = 0 if at_once else self.run.config.steps_ahead
        self._after_step = self.step + self._pace + ahead
        self._end(reason)

    def abort(self, reason: str) -> None:
        self._after_step = None
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.run.phase = Phase.ENDING
        self.run.say(f"generation {self.number} ends: {reason}")
        for worker in self.members.values():
            if worker.id in self.inside:
                worker.progress.restart()  # what it was waiting for does not count
                worker.reminded_beats = 0
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
        worker.position, worker.has_state, worker.at_head = event.place, event.whole, event.at_head
        if event.whole:
            self._lineage.shown(event.founded)
            worker.lineage_id = event.founded
        self.mismatch = self.mismatch or event.disagreement
        self.first_stop_at = min(self.first_stop_at, now)
        self.run.timers.wake(now + self.run.config.gather_timeout_s)
        # After a take-over only those who entered the newest generation can speak for it.
        self.exit_confirmed = self.exit_confirmed or worker.entered == self.number
        self.unreachable_pairs.update((worker.id, other) for other in event.unreachable)
        if self.run.phase in (Phase.FORMING, Phase.RUNNING):
            self.abort(f"{worker.id} stopped: {event.reason}")
            return True
        if self._after_step is not None and (
            event.place < (self._after_step,) or not event.at_head
        ):
            self.abort(f"{worker.id} stopped before the planned end: {event.reason}")
        return False

    def worker_finished(self, event: m.WorkerFinished) -> None:
        worker = self.members.get(event.worker)
        if worker is None or event.generation != self.number or not self.run.in_flight:
            return
        worker.finished, worker.position, worker.has_state = event.digest, event.place, True
        worker.finished_because, worker.lineage_id = event.reason, event.founded
        worker.at_head = self.exit_confirmed = True
        self._lineage.shown(event.founded)  # after a take-over it may be the first word of it
        self.inside.discard(worker.id)
        self.not_formed.discard(worker.id)
        self.not_finished.discard(worker.id)

    def drop(self, worker: WorkerState, reason: str) -> None:
        """It is gone, or was told to go; what cannot go on without it ends."""
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

    def unseat(self, worker: WorkerState) -> None:
        """Leave it out of the next one, though it is well."""
        del self.members[worker.id]
        self.not_finished.discard(worker.id)
        self.draining.pop(worker.id, None)

    def check_time(self, now: float) -> bool:
        """Its own deadlines; whether it failed to form."""
        phase = self.run.phase
        if phase is Phase.RUNNING:
            return False
        if phase is Phase.FORMING:
            if now < self._form_by:
                self.run.timers.wake(self._form_by)
                return False
            never = self.not_entered & self.inside
            if never != self.inside:
                self.unreachable_pairs.update((worker, worker) for worker in never)
            self.abort(f"{counted(len(self.not_formed), 'member')} did not form in time")
            return True
        waited = now >= self.first_stop_at + self.run.config.gather_timeout_s
        if phase is Phase.ENDING and waited:
            if self._after_step is not None:
                self.abort("the planned end takes too long")
            elif self.inside and not self._waiting_said:
                self._waiting_said = True
                waiting = sorted(self.inside)
                names = f"{', '.join(waiting[:5])}{' …' if waiting[5:] else ''}"
                self.run.say(f"waiting for {names} to stop")
        return False
