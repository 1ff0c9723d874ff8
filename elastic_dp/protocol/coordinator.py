"""The coordinator: who trains together, since when, until when, and why.

It is a state machine without clock, I/O, threads or chance. Facts and the time go in, requests come out; a
journal of the facts replays a run. Whoever drives it calls `start`, then `handle` for every fact, and again with
`DeadlineReached` when its `deadline` comes.

What it moves through:

    gathering   nobody trains; waits until enough workers are at hand, and until it is safe to go on
    claiming    the number of the next generation is being claimed, so that no other controller has it
    forming     a membership was announced; its members connect, and those void or behind receive state
    running     all members are past forming
    ending      the generation was told to end, at a step (planned) or now (abort); waits for every member
    surveying   a coordinator that took over asks everybody where they stand
    over        finished, failed, or another controller leads

    gathering -> claiming -> gathering -> forming -> running -> ending -> gathering -> ...

Three things always hold:

* A generation is announced only after it was claimed, and after the one before it can make no further step: one
  of its members said that it is out (no step completes without every member), or all the others are confirmed
  dead, or the lease of its members ran out. A worker that was evicted but not confirmed dead may be alive.
* The source of state is a most advanced worker among those that hold all of it. One that does not is void: it is
  given everything, and never counts as a survivor. If nobody is whole, the run is lost (here the newest sealed
  checkpoint will come in: `_lost_everyone`). Before anybody was past forming, the truth is the initial weights of
  one worker, the founder; another may take its place if it dies.
* A message about an older generation changes nothing, and an identity is used once.

A coordinator that slept, or heard nobody for a while, confirms by a claim that it still leads before it acts.
Nobody who is heard is evicted for being slow, and nobody at all for silence while the group makes steps. Members
of one generation differ by at most a step; one that is found further behind cannot be brought up and is replaced.
While the run is being stopped, `min_workers` does not hold it up: one worker is enough to end it.
"""

import heapq
import math
from collections.abc import Iterable
from enum import StrEnum

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.budget import Budget
from elastic_dp.protocol.liveness import Liveness
from elastic_dp.protocol.messages import START, Command, Event, Membership, Signature, WorkerId
from elastic_dp.protocol.roster import USEFUL, Identities, Stage, Worker
from elastic_dp.protocol.rules import Rules as Rules
from elastic_dp.protocol.seating import Seating, choose, membership, to_drop


class Phase(StrEnum):
    GATHERING = "gathering"
    CLAIMING = "claiming"
    FORMING = "forming"
    RUNNING = "running"
    ENDING = "ending"
    SURVEYING = "surveying"
    OVER = "over"


IN_FLIGHT = frozenset({Phase.FORMING, Phase.RUNNING, Phase.ENDING})
BEFORE_TRAINING = frozenset({"start", "wait", "form", "receive"})
FROM_WORKERS = (
    m.WorkerHeard,
    m.WorkerStarted,
    m.WorkerReady,
    m.WorkerStopped,
    m.WorkerFinished,
    m.WorkerReported,
)
UNTIMED = frozenset({Stage.STARTING, Stage.LEAVING, Stage.EVICTED})  # not judged by heartbeats
QUIET_BEATS = 2  # no heartbeat of anybody for so many intervals is odd
REMIND_BEATS = 32  # whoever does not answer is told again after at most so many heartbeats
ODD_BEATS = 3  # "done" heard so often without WorkerFinished: the report was lost


class Coordinator:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.size = rules.size
        self.phase = Phase.GATHERING
        self.reason = ""
        self.generation = 0
        self.membership: Membership | None = None
        self._workers: dict[WorkerId, Worker] = {}
        self._identities = Identities()
        self._liveness = Liveness(rules.heartbeat_timeout_s)
        self._budget = Budget(rules.max_losses_without_progress)
        self._alarms: list[tuple[float, str, WorkerId]] = []  # a heap
        self._set: set[tuple[float, str, WorkerId]] = set()  # the same, to set none twice
        self._out: list[Command] = []

        self._heard_at = -math.inf  # anybody
        self._excused: dict[WorkerId, float] = {}  # silent, but not judged before this
        self._held: list[Event] | None = None  # not acted on until leadership is confirmed
        self._slept, self._asked_at = False, -math.inf

        self._useful: set[WorkerId] = set()  # count towards size + standby
        self._ready: dict[WorkerId, Worker] = {}  # void, may be seated now
        self._leavers: dict[WorkerId, Worker] = {}
        self._draining: dict[WorkerId, Worker] = {}  # members only
        self._unreported: set[WorkerId] = set()

        # The present generation: members by rank, without the lost and the evicted.
        self._members: dict[WorkerId, Worker] = {}
        self._open: set[WorkerId] = set()  # not known to be out of it
        self._unentered: set[WorkerId] = set()  # not known to have entered it
        self._unformed: set[WorkerId] = set()  # not known to be past forming
        self._unfinished: set[WorkerId] = set()
        self._ghosts: set[WorkerId] = set()  # evicted, not confirmed dead
        self._acknowledged = False
        self._lease_until = -math.inf
        self._formed = True
        self._lost_while_forming = False
        self._waiting_said = False
        self._after_step: int | None = None  # planned end; None while ending: abort
        self._first_stop_at = math.inf
        self._form_by = math.inf
        self._start_step = 0
        self._step = 0
        self._progress_at = -math.inf
        self._paced_at, self._paced_step, self._pace = -math.inf, 0, 0

        self._claiming = 0
        self._claimed = 0
        self._pairs: set[tuple[WorkerId, WorkerId]] = set()
        self._failed: frozenset[WorkerId] = frozenset()  # the membership that failed to form last
        self._retry_at = -math.inf
        self._start_at = -math.inf
        self._ready_since = math.inf

        self._founded = False  # somebody holds the run's state
        self._founded_in = 0  # the generation that its initial weights come from
        self._founder: WorkerId | None = None
        self._able: dict[WorkerId, Worker] = {}  # void, and its initial weights may count
        self._sourceless_since = math.inf
        self._signature: Signature | None = None
        self._rejections = 0
        self._unfilled = 0
        self._stop: str | None = None

    # -------------------------------------------------------------------------------- status

    @property
    def workers(self) -> dict[WorkerId, str]:
        return {worker.id: worker.stage.value for worker in self._workers.values()}

    @property
    def deadline(self) -> float | None:
        """When to come back with DeadlineReached; None: not before the next fact."""
        if self._held is not None:
            return None
        due = self._alarms[0][0] if self._alarms else math.inf
        if self.phase is not Phase.OVER:
            due = min(due, self._liveness.due)
        return due if due < math.inf else None

    # ----------------------------------------------------------------------------- beginning

    def start(self, now: float) -> list[Command]:
        """The first requests of a run that nobody has begun."""
        self._say(f"starting {self.size + self.rules.standby} workers")
        self._proceed(now)
        return self._flush()

    @classmethod
    def recover(
        cls,
        rules: Rules,
        workers: Iterable[WorkerId],
        highest_claimed: int,
        now: float,
        founded: bool = False,
    ) -> tuple["Coordinator", list[Command]]:
        """Take over a run whose controller is gone: claim the next generation, ask all where they stand.

        Every generation up to `highest_claimed` is treated as one that may still run: each worker is told to
        leave it, and the next is formed when all have said so or fallen silent. `founded`: a step is known to
        have been made; then a run of which nobody holds the state is lost, and does not begin anew.
        """
        self = cls(rules)
        self.generation = highest_claimed
        self._founded = founded
        self.phase = Phase.SURVEYING
        self._lease_until = now + rules.lease_s  # whoever led before may have renewed until now
        for worker_id in workers:
            number = self._identities.next()[1]
            self._workers[worker_id] = Worker(worker_id, number, Stage.SURVEYED, now)
            self._useful.add(worker_id)
            self._unreported.add(worker_id)
            self._liveness.heard(worker_id, now)
            self._heard_at = now
            self._emit(m.ReportYourself(worker_id))
        self._claim(now)
        self._say(
            f"took over after generation {highest_claimed}, asking {len(self._workers)} workers"
        )
        return self, self._flush()

    # -------------------------------------------------------------------------------- driving

    def handle(self, event: Event, now: float) -> list[Command]:
        deadline = self.deadline
        if isinstance(event, m.DeadlineReached) and (deadline is None or now < deadline):
            return []
        if self.phase is Phase.OVER:
            self._handle_over(event, now)
        elif self._held is not None:
            self._hold(event, now)
        elif self._fell_quiet(now) or self._answered_late(event, now):
            self._confirm(event, now, deadline)
        else:
            self._take(event, now)
            self._ring(now)
            self._judge_silence(event, now)
            self._proceed(now)
        return self._flush()

    # A coordinator that heard nobody for a while, because it slept or because the workers follow another one by
    # now, acts on nothing before it has claimed one more generation: that shows whether it still leads.

    def _fell_quiet(self, now: float) -> bool:
        quiet_s = QUIET_BEATS * self.rules.heartbeat_interval_s
        return self._liveness.waiting and now > self._heard_at + quiet_s

    def _answered_late(self, event: Event, now: float) -> bool:
        """The answer to a claim lay there: it proves who led then, not who leads now."""
        ours = event == m.GenerationClaimed(self._claiming)
        return ours and now > self._asked_at + self.rules.heartbeat_timeout_s

    def _confirm(self, event: Event, now: float, deadline: float | None) -> None:
        on_time = deadline is None or now <= deadline + self.rules.heartbeat_interval_s
        self._slept = not (isinstance(event, m.DeadlineReached) and on_time)
        self._held = []
        if self._claiming:  # one after the other: who skips a number may skip one that another owns
            self._asked_at = -math.inf
        else:
            self._claim(now)
        self._hold(event, now)

    def _claim(self, now: float) -> None:
        self._asked_at = now
        self._claiming = max(self.generation, self._claimed) + 1
        self._emit(m.ClaimGeneration(self._claiming))

    def _hold(self, event: Event, now: float) -> None:
        assert self._held is not None
        if isinstance(event, m.GenerationClaimLost):
            self._held = None
            self._stand_down(event)
        elif event != m.GenerationClaimed(self._claiming):
            self._held.append(event)
        elif self._answered_late(event, now):
            self._claimed = self._claiming
            self._claim(now)
        else:
            if self._slept or now > self._asked_at + self.rules.heartbeat_interval_s:
                self._liveness.was_away(now)
            self._heard_at = now
            held, self._held = self._held, None
            for each in (event, *held):
                self._take(each, now)
            self._ring(now)
            self._judge_silence(event, now)
            self._proceed(now)

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, FROM_WORKERS):
            self._heard_at = now
            worker = self._workers.get(event.worker)
            if worker is not None and worker.stage not in UNTIMED:
                self._liveness.heard(worker.id, now)
        match event:
            case m.WorkerHeard():
                self._heard(event, now)
            case m.WorkerStarted():
                self._started(event, now)
            case m.WorkerReady():
                self._became_ready(event.worker, event.signature, event.can_source, now)
            case m.WorkerStopped():
                self._stopped(event, now)
            case m.WorkerFinished():
                self._finished(event)
            case m.WorkerFailed():
                self._failed_in_user_code(event, now)
            case m.WorkerLost():
                self._lost(event, now)
            case m.WorkerReported():
                self._reported(event, now)
            case m.DrainNoticed():
                self._drained(event, now)
            case m.SizeRequested():
                self._resized(event, now)
            case m.StopRequested():
                self._asked_to_stop(event)
            case m.GenerationClaimed():
                self._was_claimed(event)
            case m.GenerationClaimLost():
                self._stand_down(event)
            case m.DeadlineReached():
                pass

    def _proceed(self, now: float) -> None:
        """Whatever the facts now allow. O(1) unless it ends or forms a generation."""
        if self.phase is Phase.OVER:
            return
        if self._budget.exhausted:
            self._fail(
                f"{self._budget.incidents} losses without a step in between; last: {self.reason}",
                "",
                now,
            )
            return
        if self.phase is Phase.SURVEYING:
            self._end_survey(now)
        if self.phase is Phase.FORMING and not self._unformed:
            self._all_formed(now)
        if self.phase in IN_FLIGHT and not (self._open and self._unfinished):
            self._generation_over(now)
        if self.phase is Phase.RUNNING:
            self._consider_change(now)
        if self.phase is Phase.GATHERING:
            self._seat(now)
        self._replenish(now)

    # ------------------------------------------------------------------ before the first seat

    def _replenish(self, now: float) -> None:
        wanted = self.size + self.rules.standby - self._unfilled
        if len(self._useful) >= wanted or self._stop is not None or self.phase is Phase.OVER:
            return
        if self.phase is Phase.SURVEYING and self._claimed <= self.generation:
            return  # identities are counted under the claim
        if now < self._start_at:
            self._wake(self._start_at)
            return
        while len(self._useful) < wanted:
            worker_id, number = self._identities.next()
            self._workers[worker_id] = Worker(worker_id, number, Stage.STARTING, now)
            self._useful.add(worker_id)
            self._emit(m.StartWorker(worker_id))

    def _started(self, event: m.WorkerStarted, now: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or worker.stage is not Stage.STARTING:
            return
        self._begin(worker, now)

    def _begin(self, worker: Worker, now: float) -> None:
        self._move(worker, Stage.BUILDING, now)
        worker.renewed_at = now  # its first lease runs from its start
        self._liveness.heard(worker.id, now)
        if not self._founded and self._founder is None and not self._able:
            self._founder = worker.id
        self._emit(m.BeginTraining(worker.id, worker.id == self._founder))

    def _became_ready(
        self, worker_id: WorkerId, signature: Signature, can_source: bool, now: float
    ) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.stage not in (Stage.STARTING, Stage.BUILDING):
            return
        worker.signature, worker.can_source = signature, can_source
        self._move(worker, Stage.READY, now)
        if can_source and not self._founded:
            self._able[worker_id] = worker
        if self._founder == worker_id and not self._founded:
            self._set_signature(worker, now)
        elif self._fits(worker, now):
            self._queue(worker, now)

    def _queue(self, worker: Worker, now: float) -> None:
        self._ready[worker.id] = worker
        if self._ready_since == math.inf:
            self._ready_since = now

    def _set_signature(self, founder: Worker, now: float) -> None:
        """The founder decides what fits; those already waiting are measured against it."""
        self._signature = founder.signature
        if founder.stage is Stage.READY:
            self._queue(founder, now)
        for worker in [*self._ready.values()]:
            if worker is not founder and not self._fits(worker, now):
                self._ready.pop(worker.id, None)

    def _fits(self, worker: Worker, now: float) -> bool:
        ours, theirs = self._signature, worker.signature
        if ours is None or theirs is None:
            return True
        if ours.layout != theirs.layout:  # all run the same pickled function, so this is its doing
            self._fail(
                f"ModelError: parameter names, shapes or dtypes of {worker.id}'s model differ from the others'; "
                "the train function must build the same model in every worker",
                "",
                now,
            )
            return False
        differing = [
            name
            for name in ("data", "kind")
            if getattr(ours, name) != getattr(theirs, name) and (name != "kind" or self.rules.exact)
        ]
        if not differing:
            return True
        what = ", ".join(f"{n} {getattr(theirs, n)!r}, not {getattr(ours, n)!r}" for n in differing)
        self._rejections += 1
        if self._rejections > self.rules.max_rejections:
            self._unfilled += 1
        self._explain(f"{worker.id} does not fit this run: {what}")
        self._release(worker, f"does not fit this run: {what}", now)
        return False

    def _find_founder(self, now: float) -> Worker | None:
        """The worker whose initial weights count, if it is at hand."""
        founder = self._workers.get(self._founder) if self._founder else None
        if founder is not None and founder.stage in (Stage.READY, Stage.MEMBER):
            return founder
        if founder is not None and founder.stage is Stage.BUILDING:
            return None
        self._founder, self._signature = None, None
        founder = next(iter(self._able.values()), None)
        if founder is not None:
            self._founder = founder.id
            self._explain(f"{founder.id} gives the initial weights")
            self._set_signature(founder, now)
            self._sourceless_since = math.inf
            return founder
        self._sourceless_since = min(self._sourceless_since, now)
        if now >= self._sourceless_since + self.rules.source_timeout_s:
            self._make_room_for_founder(now)
        self._wake(self._sourceless_since + self.rules.source_timeout_s)
        return None

    def _make_room_for_founder(self, now: float) -> None:
        """All at hand were told that their weights do not count; a fresh one may need the place of one."""
        self._sourceless_since = now
        void = [*self._members.values(), *self._ready.values()]
        youngest = max(void, key=lambda worker: worker.number, default=None)
        if youngest is not None:
            self._release(youngest, "a fresh worker must give the initial weights", now)

    # ------------------------------------------------------------------------ heartbeats

    def _heard(self, event: m.WorkerHeard, now: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or worker.stage is Stage.EVICTED:
            self._emit(m.EvictWorker(event.worker, "not a worker of this run any more"))
            return
        if worker.stage is Stage.STARTING:
            self._begin(worker, now)
        worker.renewed_at = now
        self._emit(m.RenewLease(worker.id, event.beat))
        if worker.stage is Stage.MEMBER:
            self._member_heard(worker, event, now)
        elif worker.stage is Stage.SURVEYED or (
            worker.stage is Stage.BUILDING and event.phase == "wait"
        ):
            self._note_step(event.step, now)
            self._emit(m.ReportYourself(worker.id))  # its word was lost
        elif (
            worker.stage is Stage.BUILDING
            and event.phase == "start"
            and now > worker.since + self.rules.heartbeat_timeout_s
        ):
            worker.since = now
            self._emit(m.BeginTraining(worker.id, worker.id == self._founder))  # ours was, perhaps

    def _member_heard(self, worker: Worker, event: m.WorkerHeard, now: float) -> None:
        inside = worker.id in self._open
        if inside:  # who has stopped makes no steps, whatever its lease
            self._lease_until = max(self._lease_until, now + self.rules.lease_s)
        if event.generation == self.generation:
            self._note_step(event.step, now)
        if event.generation == self.generation and self.phase in IN_FLIGHT:
            self._unentered.discard(worker.id)
            if event.phase not in BEFORE_TRAINING:
                self._unformed.discard(worker.id)
                self._founded = True
            elif event.phase == "receive":
                self._form_by = max(self._form_by, now + self.rules.forming_timeout_s)
            if inside and self.phase is not Phase.ENDING:
                self._note_lost_report(worker, event.phase, now)
        if inside and self.phase in IN_FLIGHT:
            self._remind(worker)

    def _remind(self, worker: Worker) -> None:
        """Of what it was told and did not act on yet; seldomer each time, since a long body is no deafness."""
        worker.reminded_beats += 1
        beats = worker.reminded_beats
        if beats & (beats - 1) and beats % REMIND_BEATS:  # 1, 2, 4, …, 32, 64, 96, …
            return
        if self.phase is Phase.ENDING:
            self._tell_end(worker)
        elif self._stop is not None:
            self._emit(m.StopTraining(worker.id, self._stop))

    def _note_step(self, step: int, now: float) -> None:
        if step > self._step:
            self._step, self._progress_at = step, now
            self._budget.progressed()
            for leaver in (
                [*self._leavers.values()] if self.phase in IN_FLIGHT else ()
            ):  # its state is covered
                self._release(leaver, leaver.leave_reason, now)
        if now >= self._paced_at + self.rules.heartbeat_interval_s:
            self._pace = self._step - self._paced_step
            self._paced_at, self._paced_step = now, self._step

    def _note_lost_report(self, worker: Worker, phase: str, now: float) -> None:
        """It is out of the generation, and its own word of that did not arrive."""
        if phase == "wait":
            self._abort(f"{worker.id} waits, its report was lost", now)
        elif phase == "done":
            worker.odd_beats += 1
            if worker.odd_beats >= ODD_BEATS:
                worker.odd_beats = 0
                self._abort(f"{worker.id} is done, its report was lost", now)

    # --------------------------------------------------------------- the end of a generation

    def _stopped(self, event: m.WorkerStopped, now: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or event.generation < self.generation or worker.id not in self._open:
            return
        self._open.discard(worker.id)
        worker.place, worker.whole, worker.at_head = event.place, event.whole, event.at_head
        if event.whole:
            self._founded = True
            worker.founded = event.founded
            self._founded_in = max(self._founded_in, event.founded)
        self._first_stop_at = min(self._first_stop_at, now)
        self._wake(now + self.rules.gather_timeout_s)
        # After a take-over only those who entered the newest generation can speak for it.
        self._acknowledged = self._acknowledged or worker.entered == self.generation
        self._pairs.update((worker.id, other) for other in event.unreachable)
        if self.phase in (Phase.FORMING, Phase.RUNNING):
            self._abort(f"{worker.id} stopped: {event.reason}", now)
            self._count(worker, now)
        elif self._after_step is not None and (
            event.place < (self._after_step,) or not event.at_head
        ):
            self._abort(f"{worker.id} stopped before the planned end: {event.reason}", now)

    def _finished(self, event: m.WorkerFinished) -> None:
        worker = self._members.get(event.worker)
        if worker is None or event.generation != self.generation or self.phase not in IN_FLIGHT:
            return
        worker.finished, worker.place, worker.whole = event.digest, event.place, True
        worker.at_head = True
        self._founded = self._acknowledged = True
        self._open.discard(worker.id)
        self._unformed.discard(worker.id)
        self._unfinished.discard(worker.id)

    def _plan_end(self, reason: str, now: float) -> None:
        self._after_step = self._step + self._pace + self.rules.steps_ahead
        self._end(reason)

    def _abort(self, reason: str, now: float) -> None:
        self._after_step = None
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.phase = Phase.ENDING
        self._say(f"generation {self.generation} ends: {reason}")
        for worker_id in self._members:
            if worker_id in self._open:
                self._members[worker_id].reminded_beats = 0
                self._tell_end(self._members[worker_id])

    def _tell_end(self, worker: Worker) -> None:
        if self._after_step is None:
            self._emit(m.AbortGeneration(worker.id, self.generation))
        else:
            self._emit(m.EndGeneration(worker.id, self.generation, self._after_step))

    def _generation_over(self, now: float) -> None:
        """Every member has stopped, finished, or is gone."""
        finished = [w for w in self._members.values() if w.finished is not None]
        if finished and not self._unfinished:
            self._finish(finished, now)
            return
        if not self._formed:
            self._judge_forming(now)
        self.phase = Phase.GATHERING

    def _judge_forming(self, now: float) -> None:
        """Nobody died, and yet it did not form: leave out who could not be reached.

        Void workers at once (they come back later), whole ones only when the same membership failed before.
        """
        if self._lost_while_forming:
            return
        members = [*self._members.values()]
        ids = frozenset(self._members)
        again = ids == self._failed
        self._failed = ids
        dropped = to_drop(self._pairs, members, self._founder if not self._founded else None)
        if again and not dropped and len(members) > 1:
            keep = max((w.place for w in members if w.whole), default=None)
            spare = [w for w in members if w.id != self._founder or self._founded]
            spare = [w for w in spare if not w.whole or w.place != keep] or spare[1:]
            dropped = spare[-1:]
        for worker in dropped:
            if worker.whole and again:
                self._release(worker, "out of reach of other members", now)
            elif not worker.whole:
                self._put_back(worker, again, now)

    def _put_back(self, worker: Worker, again: bool, now: float) -> None:
        """A void member that could not be reached; back off, or replace it."""
        worker.failed_joins += 1
        if again or worker.failed_joins > self.rules.max_failed_joins:
            self._evict(worker, "could not join the others", now)
            return
        del self._members[worker.id]
        self._unfinished.discard(worker.id)
        self._draining.pop(worker.id, None)
        self._move(worker, Stage.READY, now)
        pause_s = self.rules.heartbeat_timeout_s * 2.0 ** (worker.failed_joins - 1)
        self._wake(now + pause_s, "rejoin", worker.id)

    # ----------------------------------------------------------------- the next generation

    def _seat(self, now: float) -> None:
        founder = None if self._founded else self._find_founder(now)
        if self._stop is not None and not self._founded:
            self._emit(m.FinishRun(START, "", self._stop))
            self._close(f"stopped before the first step: {self._stop}", now)
            return
        holders = (*self._members.values(), *self._leavers.values())
        if self._founded and not any(worker.whole for worker in holders):
            self._lost_everyone(now)
            return
        if self._members and not self._unfinished:
            self._finish([*self._members.values()], now)
            return
        least = self._least
        at_hand = len(self._members) + len(self._ready) + len(self._leavers)
        if at_hand < least:
            self._say(f"{at_hand} of at least {least} workers are ready")
            return
        if not self._founded and founder is None:
            self._say("waiting for the worker whose initial weights count")
            return
        if now < self._earliest_seating():
            self._wake(self._earliest_seating())
            return
        if not self._may_announce(now):
            self._say(
                f"a member of generation {self.generation} may be alive; waiting for its lease to end"
            )
            self._wake(self._lease_until)
            return
        if self._replace_stragglers(now):
            self._seat(now)  # with those who are left
            return
        seating = self._choose(founder, now)
        if self._claimed <= self.generation:
            self.phase = Phase.CLAIMING
            self._claim(now)
        else:
            self._form(seating, now)

    @property
    def _least(self) -> int:
        return 1 if self._stop is not None else min(self.rules.min_workers, self.size)

    def _earliest_seating(self) -> float:
        """A burst of first workers makes one generation; survivors wait for nobody."""
        waiting = not self._members and len(self._ready) < self.size
        window = self._ready_since + self.rules.join_window_s if waiting else -math.inf
        return max(self._retry_at, window)

    def _may_announce(self, now: float) -> bool:
        """The generation before can make no further step."""
        return self._acknowledged or not self._ghosts or now >= self._lease_until

    def _replace_stragglers(self, now: float) -> bool:
        """Steps are handed on one at a time, since each process runs the body of each; more is a bug of ours."""
        whole = [w for w in (*self._members.values(), *self._leavers.values()) if w.whole]
        ours = [w.place.step for w in whole if w.founded in (0, self._founded_in)]
        top, found = max(ours, default=0), False
        for worker in whole:
            if 0 < worker.founded < self._founded_in:  # given up once, and the run begun anew
                self._evict(worker, "its state is that of an earlier beginning", now)
            elif worker.place.step < top - 1 and worker.stage is Stage.LEAVER:
                self._release(worker, worker.leave_reason, now)
            elif worker.place.step < top - 1:
                self._evict(worker, f"at step {worker.place.step}, too far behind {top}", now)
            else:
                continue
            found = True
        return found

    def _choose(self, founder: Worker | None, now: float) -> Seating:
        stopped = [*self._members.values()]
        top = max((w.place for w in stopped if w.whole), default=None)
        short = len(stopped) + len(self._ready) < self.size
        recalled = [w for w in self._leavers.values() if short or top is None or w.place > top]
        return choose(
            stopped + recalled,
            self._ready.values(),
            size=self.size,
            least=self._least,
            virtual_workers=self.rules.virtual_workers,
            now=now,
            founder=founder,
        )

    def _was_claimed(self, event: m.GenerationClaimed) -> None:
        if event.generation != self._claiming:
            return
        self._claiming, self._claimed = 0, event.generation
        if self.phase is Phase.CLAIMING:
            self.phase = Phase.GATHERING
        elif self.phase is Phase.SURVEYING:
            self._identities.adopt(event.generation)

    def _form(self, seating: Seating, now: float) -> None:
        rules = self.rules
        self.generation = self._claimed
        if not self._founded:
            self._founded_in = self.generation
        self.membership = membership(
            self.generation,
            seating,
            rules.virtual_workers,
            rules.forming_timeout_s,
            self._founded_in,
        )
        self._members = {worker.id: worker for worker in seating.seated}
        for worker in seating.left:
            self._unseat(worker, now)
        renewed_at = -math.inf
        self._draining.clear()
        for worker in seating.seated:
            self._ready.pop(worker.id, None)
            self._leavers.pop(worker.id, None)
            self._move(worker, Stage.MEMBER, now)
            worker.entered, worker.odd_beats, worker.reminded_beats = self.generation, 0, 0
            renewed_at = max(renewed_at, worker.renewed_at)
            if worker.draining:
                self._draining[worker.id] = worker
            if worker.id != self._founder:
                self._able.pop(worker.id, None)  # may be half written from now on
            self._emit(m.FormGeneration(worker.id, self.membership))
            if self._stop is not None:
                self._emit(m.StopTraining(worker.id, self._stop))
        self._open, self._unformed = set(self._members), set(self._members)
        self._unentered = set(self._members)
        self._unfinished = {w.id for w in seating.seated if w.finished is None}
        self._ghosts = set()
        self._pairs = set()
        self._acknowledged = self._formed = self._lost_while_forming = False
        self._waiting_said = False
        self._after_step, self._first_stop_at = None, math.inf
        self._lease_until = renewed_at + rules.lease_s
        self._ready_since = now if self._ready else math.inf
        self._start_step = max(w.place.step for w in seating.seated) if self._founded else 0
        self._step = self._start_step
        self._progress_at = now
        self._paced_at, self._paced_step, self._pace = now, self._step, 0
        self._form_by = now + rules.forming_timeout_s + rules.gather_timeout_s
        self._wake(self._form_by)
        self.phase = Phase.FORMING
        self._say(f"generation {self.generation}: {seating.reason}")

    def _unseat(self, worker: Worker, now: float) -> None:
        """It has no seat now: kept until the others have made a step, if it holds state."""
        reason = "its node goes away" if worker.draining else "its seat is gone"
        if not worker.whole:
            if worker.draining or len(self._useful) > self.size + self.rules.standby:
                self._release(worker, reason, now)
            else:  # nobody at the head of the loop could give it the state
                self._move(worker, Stage.READY, now)
                self._queue(worker, now)
            return
        worker.leave_reason = reason
        self._leavers[worker.id] = worker
        self._move(worker, Stage.LEAVER, now)
        self._wake(worker.leave_at, "leave", worker.id)

    def _all_formed(self, now: float) -> None:
        self.phase = Phase.RUNNING
        self._formed = True
        self._failed = frozenset()
        for worker in self._members.values():
            worker.failed_joins = 0

    def _consider_change(self, now: float) -> None:
        """Whether a running generation should end as planned."""
        if self._stop is not None or len(self._unfinished) < len(self._members):
            return
        present, waiting = len(self._members), len(self._ready)
        if present > self.size:
            self._plan_end(f"the size is {self.size} now", now)
        elif waiting and present < self.size:
            joinable_at = self._ready_since + self.rules.join_window_s
            if waiting >= self.size - present or now >= joinable_at:
                self._plan_end(f"{min(waiting, self.size - present)} workers join", now)
            else:
                self._wake(joinable_at)
        elif self._draining:
            staying = present - len(self._draining)
            due = any(now >= worker.leave_at for worker in self._draining.values())
            if not (due or waiting or staying >= self.size):
                return
            names = ", ".join(self._draining)
            if staying + waiting >= self._least:
                self._plan_end(f"{names} drained", now)
            else:
                self._say(f"{names} should leave, but {self._least} workers are needed")

    # ---------------------------------------------------------------------------- leaving

    def _lost(self, event: m.WorkerLost, now: float) -> None:
        worker = self._workers.pop(event.worker, None)
        if worker is None:
            return
        self._ghosts.discard(worker.id)
        if worker.stage is Stage.EVICTED:
            return
        expected = worker.draining or worker.stage in (Stage.LEAVING, Stage.LEAVER)
        self._remove(worker, f"{worker.id} is lost: {event.reason}", now)
        if not expected:
            self._count(worker, now)

    def _evict(self, worker: Worker, reason: str, now: float) -> None:
        member = worker.stage in (Stage.MEMBER, Stage.SURVEYED)
        unexpected = worker.id in self._useful
        self._emit(m.EvictWorker(worker.id, reason))
        self._explain(f"{worker.id} evicted: {reason}")
        self._remove(worker, f"{worker.id} evicted: {reason}", now)
        if member:
            self._ghosts.add(worker.id)
        self._move(worker, Stage.EVICTED, now)
        if unexpected:
            self._count(worker, now)

    def _release(self, worker: Worker, reason: str, now: float) -> None:
        self._emit(m.ReleaseWorker(worker.id, reason))
        self._remove(worker, f"{worker.id} released: {reason}", now)
        self._move(worker, Stage.LEAVING, now)
        self._wake(now + self.rules.release_timeout_s, "leave", worker.id)

    def _remove(self, worker: Worker, reason: str, now: float) -> None:
        """It plays no part any more."""
        worker_id, finished = worker.id, worker.finished is not None
        self._liveness.forget(worker_id)
        self._excused.pop(worker_id, None)
        for pool in (self._ready, self._leavers, self._draining, self._able):
            pool.pop(worker_id, None)
        for group in (self._useful, self._unreported, self._open, self._unformed, self._unfinished):
            group.discard(worker_id)
        if self._founder == worker_id:
            self._founder = None
        if self._members.pop(worker_id, None) is None:
            return
        if self.phase is Phase.FORMING or (self.phase is Phase.RUNNING and not finished):
            self._lost_while_forming = self.phase is Phase.FORMING
            self._abort(reason, now)
        elif self.phase is Phase.ENDING:
            self._lost_while_forming = True
            if self._after_step is not None:
                self._abort(reason, now)

    def _count(self, worker: Worker, now: float) -> None:
        if self._budget.counts(self.generation, worker.number, self._identities.given):
            self._start_at = self._retry_at = now + self._budget.pause_s

    def _drained(self, event: m.DrainNoticed, now: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or worker.stage in (Stage.LEAVING, Stage.EVICTED):
            return
        worker.draining = True
        if event.deadline is not None:
            worker.leave_at = event.deadline - self.rules.drain_margin_s
        if worker.stage in (Stage.STARTING, Stage.BUILDING, Stage.READY):
            self._release(worker, "its node goes away", now)
            return
        self._useful.discard(worker.id)  # so a replacement is asked for at once
        if worker.stage is Stage.MEMBER:
            self._draining[worker.id] = worker
        self._wake(worker.leave_at, "leave", worker.id)

    def _resized(self, event: m.SizeRequested, now: float) -> None:
        if not 1 <= event.size <= self.rules.virtual_workers:
            self._explain(f"size {event.size} refused: not within 1..{self.rules.virtual_workers}")
            return
        self.size, self._unfilled, self._rejections = event.size, 0, 0
        surplus = len(self._useful) - self.size - self.rules.standby
        for worker in (
            sorted(self._workers.values(), key=lambda w: -w.number) if surplus > 0 else ()
        ):
            if surplus <= 0:
                break
            loose = worker.stage in (Stage.STARTING, Stage.BUILDING, Stage.READY)
            if loose and worker.id in self._useful and worker.id != self._founder:
                self._release(worker, f"the size is {self.size} now", now)
                surplus -= 1

    # -------------------------------------------------------------------------- the end

    def _asked_to_stop(self, event: m.StopRequested) -> None:
        if self._stop is not None:
            return
        self._stop = event.reason
        self._explain(f"stopping: {event.reason}")
        if self.phase in IN_FLIGHT:
            for worker in self._members.values():
                worker.reminded_beats = 0
                self._emit(m.StopTraining(worker.id, event.reason))

    def _finish(self, finished: list[Worker], now: float) -> None:
        digests = {worker.finished for worker in finished}
        place = max(worker.place for worker in finished)
        if len(digests) > 1:
            self._explain(f"THE RESULT IS NOT EXACT: {len(digests)} different final weights")
        reason = self._stop or "all members finished"
        self._emit(m.FinishRun(place, finished[0].finished or "", reason, len(digests) > 1))
        self._close(f"finished after step {place.step}: {reason}", now)

    def _failed_in_user_code(self, event: m.WorkerFailed, now: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None and worker.stage not in (Stage.LEAVING, Stage.EVICTED):
            self._fail(event.error, event.traceback, now)

    def _lost_everyone(self, now: float) -> None:
        """Nobody holds the state any more. With checkpoints, a new generation starts from the newest seal
        here, under the same rule about the lease of the one before."""
        self._fail("every worker that held the state is lost, and there is no checkpoint", "", now)

    def _fail(self, error: str, traceback: str, now: float) -> None:
        if self.phase is not Phase.OVER:
            self._emit(m.FailRun(error, traceback))
            self._close(f"failed: {error}", now)

    def _close(self, reason: str, now: float) -> None:
        """The run is decided; everybody goes."""
        self.phase = Phase.OVER
        self._say(reason)
        for worker in self._workers.values():
            if worker.stage not in (Stage.LEAVING, Stage.EVICTED):
                self._emit(m.ReleaseWorker(worker.id, reason))
                self._move(worker, Stage.LEAVING, now)
        self._alarms = [(now + self.rules.release_timeout_s, "close", "")]

    def _handle_over(self, event: Event, now: float) -> None:
        """Only who does not go is still of interest."""
        if isinstance(event, m.WorkerLost):
            self._workers.pop(event.worker, None)
        if self._alarms and now >= self._alarms[0][0]:
            self._alarms.clear()
            for worker in self._workers.values():
                if worker.stage is Stage.LEAVING:
                    self._emit(m.EvictWorker(worker.id, "did not leave"))
                    self._move(worker, Stage.EVICTED, now)

    def _stand_down(self, event: m.GenerationClaimLost) -> None:
        self._emit(m.StandDown(f"generation {event.generation} belongs to another controller"))
        self.phase = Phase.OVER
        self.reason = "another controller leads"
        self._workers.clear()
        self._alarms.clear()

    # ----------------------------------------------------------------------- taking over

    def _reported(self, event: m.WorkerReported, now: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        if worker.stage is Stage.BUILDING and event.signature is not None and event.generation == 0:
            self._became_ready(worker.id, event.signature, event.can_source, now)
        if worker.stage is not Stage.SURVEYED:
            return
        self._unreported.discard(worker.id)
        worker.signature, worker.can_source = event.signature, event.can_source
        worker.entered, worker.founded = event.generation, event.founded
        worker.place, worker.whole = event.place, event.whole
        if event.signature is None:
            self._move(worker, Stage.BUILDING, -math.inf)
        elif self.generation == 0:  # none was ever announced
            self._move(worker, Stage.BUILDING, now)
            self._became_ready(worker.id, event.signature, event.can_source, now)
        else:  # it may hold, or be about to enter, any generation up to the newest
            self._move(worker, Stage.MEMBER, now)
            self._members[worker.id] = worker
            self._open.add(worker.id)
            self._unfinished.add(worker.id)
            self._emit(m.AbortGeneration(worker.id, self.generation))
        if worker.draining:
            self._drained(m.DrainNoticed(worker.id, None), now)

    def _end_survey(self, now: float) -> None:
        if self._unreported or self._claimed <= self.generation:
            return
        self.phase = Phase.ENDING
        self._formed = True
        # There may be workers of the newest generation that we were not told of.
        self._ghosts.add("")
        whole = [worker for worker in self._members.values() if worker.whole]
        if whole:
            self._founded = True
            self._founded_in = max(self._founded_in, *(worker.founded for worker in whole))
            self._signature = max(whole, key=lambda w: (w.founded, w.place)).signature
        else:
            able = [w for w in self._members.values() if w.can_source and w.entered == 0]
            self._able = {worker.id: worker for worker in able}
        for worker in [*self._members.values()]:
            if not worker.whole:
                self._fits(worker, now)
        self._say(f"generation {self.generation} ends: its controller is gone")

    # ------------------------------------------------------------------------------- time

    def _ring(self, now: float) -> None:
        """Act on what is due, each alarm only if it still means something."""
        while self._alarms and now >= self._alarms[0][0] and self.phase is not Phase.OVER:
            alarm = heapq.heappop(self._alarms)
            self._set.discard(alarm)
            worker = self._workers.get(alarm[2])
            if worker is not None:
                self._worker_alarm(alarm[1], worker, now)
        if self.phase is Phase.FORMING and now >= self._form_by:
            never = self._unentered & self._open
            if never != self._open:
                self._pairs.update((worker, worker) for worker in never)
            self._abort(f"{len(self._unformed)} members did not form in time", now)
            self._count(next(iter(self._members.values())), now)
        elif self.phase is Phase.FORMING:
            self._wake(self._form_by)
        elif (
            self.phase is Phase.ENDING and now >= self._first_stop_at + self.rules.gather_timeout_s
        ):
            if self._after_step is not None:
                self._abort("the planned end takes too long", now)
            elif self._open and not self._waiting_said:
                self._waiting_said = True
                waiting = sorted(self._open)
                self._say(
                    f"waiting for {', '.join(waiting[:5])}{' …' if waiting[5:] else ''} to stop"
                )

    def _judge_silence(self, event: Event, now: float) -> None:
        """Once nothing more waits to be read, as DeadlineReached says; or some time after, if it never comes."""
        patience_s = (
            0.0
            if isinstance(event, m.DeadlineReached)
            else QUIET_BEATS * self.rules.heartbeat_interval_s
        )
        if now >= self._liveness.due + patience_s:
            for worker_id in self._liveness.overdue(now):
                self._judge_silent(self._workers[worker_id], now)
        for worker_id, until in [*self._excused.items()]:
            if worker_id not in self._workers or self._liveness.knows(worker_id):
                del self._excused[worker_id]
            elif now >= until + patience_s:
                del self._excused[worker_id]
                self._judge_silent(self._workers[worker_id], now)
            else:
                self._wake(max(now, until))

    def _judge_silent(self, worker: Worker, now: float) -> None:
        excused_until = self.rules.heartbeat_timeout_s + max(
            self._progress_at, self._liveness.awake_since
        )
        if worker.stage in (Stage.MEMBER, Stage.SURVEYED) and now < excused_until:
            self._excused[worker.id] = excused_until  # the group makes steps, so it lives
            self._wake(excused_until)
        else:
            self._evict(worker, f"silent for {self.rules.heartbeat_timeout_s:g} s", now)

    def _worker_alarm(self, kind: str, worker: Worker, now: float) -> None:
        match kind, worker.stage:
            case "leave", Stage.LEAVING:
                if now >= worker.since + self.rules.release_timeout_s:
                    self._evict(worker, "did not leave", now)
            case "leave", Stage.LEAVER:
                self._release(worker, worker.leave_reason, now)
            case "rejoin", Stage.READY if worker.id not in self._ready:
                self._queue(worker, now)

    def _wake(self, at: float, kind: str = "", worker: WorkerId = "") -> None:
        alarm = (at, kind, worker)
        if at < math.inf and alarm not in self._set:
            self._set.add(alarm)
            heapq.heappush(self._alarms, alarm)

    # ------------------------------------------------------------------------------ words

    def _move(self, worker: Worker, stage: Stage, now: float) -> None:
        worker.stage, worker.since = stage, now
        if stage in USEFUL and not worker.draining:
            self._useful.add(worker.id)
        else:
            self._useful.discard(worker.id)

    def _emit(self, command: Command) -> None:
        self._out.append(command)

    def _explain(self, text: str) -> None:
        self._out.append(m.Explain(text))

    def _say(self, reason: str) -> None:
        """Why things are as they are; said once, when it changes."""
        if reason != self.reason:
            self.reason = reason
            self._explain(reason)

    def _flush(self) -> list[Command]:
        out, self._out = self._out, []
        return out
