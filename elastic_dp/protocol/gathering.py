"""Who trains next: when the present generation should end for a better one, and who sits in the one that follows.

Always: nobody is seated before the generation before can make no further step, nor before the next one's number was
claimed; fewer than the least number never train, except that void workers wait outside where nobody could give them
the state. A membership that fails to form twice in a row is not tried again. Whoever loses its seat and holds state
is kept until the others have made a step.
"""

import math
from itertools import chain

from elastic_dp.protocol import closing
from elastic_dp.protocol import messages as m
from elastic_dp.protocol.admission import Admission
from elastic_dp.protocol.balance import Balance
from elastic_dp.protocol.beginning import Beginning
from elastic_dp.protocol.disagreement import reject
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.keeping import Keeping, names
from elastic_dp.protocol.leadership import Leadership
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.resizing import Experience, Outlook, join_at
from elastic_dp.protocol.roster import Stage, Worker
from elastic_dp.protocol.run import Phase, Run
from elastic_dp.protocol.seating import Seating, choose, membership, to_drop
from elastic_dp.protocol.staff import Staff
from elastic_dp.wording import counted


class Gathering:
    def __init__(
        self,
        run: Run,
        leadership: Leadership,
        staff: Staff,
        generation: Generation,
        beginning: Beginning,
        admission: Admission,
        keeping: Keeping,
    ) -> None:
        self.run, self._leadership, self._staff = run, leadership, staff
        self._generation, self._beginning, self._admission = generation, beginning, admission
        self._balance = Balance(generation, run.rules.slow_s)
        self._keeping = keeping
        self._failed: frozenset[WorkerId] = frozenset()  # the membership that failed to form last
        self._joined_at = -math.inf  # when a generation was last formed for joiners, too
        self._experience = Experience()
        self._told_until = -math.inf  # that joiners wait

    # ------------------------------------------------------------- while a generation runs

    def all_formed(self) -> None:
        self._generation.all_formed()
        self._failed = frozenset()

    def consider_change(self, now: float) -> None:
        """Whether a running generation should end as planned."""
        run, generation = self.run, self._generation
        if run.stop is not None or len(generation.unfinished) < len(generation.members):
            return
        present, waiting = len(generation.members), len(self._staff.ready)
        self._experience.steps(generation.step, generation.progress_at)
        joins_at = self._join_at(run.size - present, now)
        if now < joins_at:
            run.alarms.wake(joins_at)
        if present > run.size:
            generation.plan_end(f"the size is {run.size} now")
        elif now >= joins_at:
            joiners = min(waiting, run.size - present)
            generation.plan_end(counted(joiners, "worker joins", "workers join"))
        elif generation.draining:
            self._part(present, waiting, now)
        elif joins_at == math.inf:
            self._balance_speeds(present, waiting, now)

    def _balance_speeds(self, present: int, waiting: int, now: float) -> None:
        """A better split, or, where none helps, a standby for the slowest."""
        reason = self._balance.why_change(now)
        if reason is not None:
            self._generation.plan_end(reason)
        elif waiting and (slow := self._balance.too_slow(now)) is not None:
            why = "the others wait for it, though it runs the least"
            self.run.explain(f"a standby replaces {slow}: {why}")
            self._staff.drain(self._staff.workers[slow], None, now, why)
            self._part(present, waiting, now)

    def _part(self, present: int, waiting: int, now: float) -> None:
        """Some members' nodes will go: when they are replaced, or their time has come."""
        run, keeping, draining = self.run, self._keeping, self._generation.draining
        due, who = keeping.due(now), names(draining.values())
        if present - len(draining) + waiting < run.least and run.rules.keeps:
            keeping.foresee(now)
        if not (due or waiting or present - len(draining) >= run.size):
            return
        if present - len(due or draining) + waiting >= run.least:
            self._generation.plan_end(f"{who} drained")
        elif due and run.rules.keeps and self._generation.step and keeping.in_time(due, now):
            self._generation.plan_end(f"{who} must leave, and too few are left", at_once=True)
        else:
            needed = counted(run.least, "worker is needed", "workers are needed")
            run.say(f"{who} should leave, but {needed}")

    def _join_at(self, free: int, now: float) -> float:
        """From when on those who are ready may join, for `free` seats."""
        staff, generation = self._staff, self._generation
        if free <= 0 or not staff.ready:
            return math.inf
        outlook = Outlook(
            present=len(generation.members),
            free=free,
            ready=len(staff.ready),
            ready_since=staff.ready_since,
            building=bool(staff.building),
            joined_at=self._joined_at,
            pause_s=self._experience.pause_s,
            between_s=self._experience.between_s(now),
        )
        at, why = join_at(outlook, self.run.rules)
        if at > max(now, self._told_until) + self.run.rules.heartbeat_interval_s:
            self._told_until = at
            who = counted(len(staff.ready), "worker waits", "workers wait")
            self.run.explain(f"{who} for up to {at - now:.2g} s: {why}")
        return at

    def take_back(self, now: float) -> None:
        """Every member has stopped, finished, or is gone."""
        finished = self._generation.finished
        if finished and not self._generation.unfinished:
            closing.finish(self._staff, finished, now)
            return
        if not self._generation.formed:
            self._judge_forming(now)
        self.run.phase = Phase.GATHERING
        if self._generation.disagreement is not None:
            reject(self._staff, self._generation, self._beginning, now)
        else:
            self._replace_stragglers(now)

    def _judge_forming(self, now: float) -> None:
        """Nobody died, and yet it did not form: leave out who could not be reached.

        Void workers at once (they come back later), whole ones only when the same membership failed before.
        """
        generation, needed = self._generation, self._beginning.needed
        if generation.lost_while_forming:
            return
        members = [*generation.members.values()]
        ids = frozenset(generation.members)
        again = ids == self._failed
        self._failed = ids
        dropped = to_drop(generation.pairs, members, needed)
        if again and not dropped and len(members) > 1:
            keep = max((w.place for w in members if w.whole), default=None)
            spare = [w for w in members if w.id != needed]
            spare = [w for w in spare if not w.whole or w.place != keep] or spare[1:]
            dropped = spare[-1:]
        for worker in dropped:
            if worker.whole and again:
                self._staff.release(worker, "out of reach of other members", now)
            elif not worker.whole:
                self._put_back(worker, again, now)

    def _put_back(self, worker: Worker, again: bool, now: float) -> None:
        """A void member that could not be reached; back off, or replace it."""
        worker.failed_joins += 1
        if again or worker.failed_joins > self.run.rules.max_failed_joins:
            self._staff.evict(worker, "could not join the others", now)
            return
        self._generation.unseat(worker)
        self._staff.move(worker, Stage.READY, now)
        pause_s = self.run.rules.heartbeat_timeout_s * 2.0 ** (worker.failed_joins - 1)
        self.run.alarms.wake(now + pause_s, "rejoin", worker.id)

    def _replace_stragglers(self, now: float) -> None:
        """Steps are handed on one at a time, since each process runs the body of each; more is a bug of ours."""
        staff, founded_in = self._staff, self._beginning.founded_in
        at_hand = (*self._generation.members.values(), *staff.leavers.values())
        whole = [worker for worker in at_hand if worker.whole]
        ours = [worker.place.step for worker in whole if worker.founded in (0, founded_in)]
        top = max(ours, default=0)
        for worker in whole:
            if 0 < worker.founded < founded_in:  # given up once, and the run begun anew
                staff.evict(worker, "its state is that of an earlier beginning", now)
            elif worker.place.step < top - 1 and worker.stage is Stage.LEAVER:
                staff.release(worker, worker.leave_reason, now)
            elif worker.place.step < top - 1:
                staff.evict(worker, f"at step {worker.place.step}, too far behind {top}", now)

    # ------------------------------------------------------------------------ the next one

    def seat(self, now: float) -> None:
        run, staff, generation, beginning = self.run, self._staff, self._generation, self._beginning
        holders = chain(generation.members.values(), staff.leavers.values())
        if not any(worker.whole for worker in holders):  # looks at the first, as a rule
            if not beginning.searched:
                self._search()
                return
            if beginning.founded and beginning.sealed is None:
                closing.lost_everyone(staff, beginning.at_most, now)
                return
            if beginning.founded:
                run.explain(f"all who held the state are lost; back to step {beginning.sealed}")
                self._admission.begin_again()
        founder = None if beginning.founded else self._admission.find_founder(now)
        if run.stop is not None and not beginning.founded:
            closing.stop_before_first_step(staff, beginning.sealed, run.stop.reason, now)
            return
        if generation.members and not generation.unfinished:
            closing.finish(staff, [*generation.members.values()], now)
            return
        going = self._keeping.due(now) if run.rules.keeps else []
        at_hand = len(generation.members) + len(staff.ready) + len(staff.leavers)
        if going and at_hand - len(going) < run.least:
            if self._keeping.hold(going, now):
                return
            if going[0].stage is Stage.LEAVING:
                self.seat(now)
                return
        if at_hand < run.least:
            needed = counted(run.least, "worker is ready", "workers are ready")
            run.say(f"{at_hand} of at least {needed}")
            return
        if not beginning.founded and founder is None:
            run.say("waiting for the worker that gives the state")
            return
        if now < self._earliest_seating():
            run.alarms.wake(self._earliest_seating())
            return
        if not generation.may_be_followed(now):
            run.say(
                f"a member of generation {generation.number} may be alive; "
                "waiting for its lease to end"
            )
            run.alarms.wake(generation.lease_until)
            return
        if self._leadership.claimed <= generation.number:
            run.phase = Phase.CLAIMING
            self._leadership.claim(generation.number, now)
        else:
            self._form(self._choose(founder, now), now)

    def _search(self) -> None:
        if not self._beginning.searching:
            self._beginning.searching = True
            self.run.emit(m.FindCheckpoint(self._beginning.at_most))
        self.run.say("looking for a checkpoint")

    def _earliest_seating(self) -> float:
        """A burst of first workers makes one generation; survivors wait for nobody."""
        staff = self._staff
        survivors = self._generation.members or staff.leavers
        waiting = not survivors and len(staff.ready) < self.run.size
        window = staff.ready_since + self.run.rules.join_window_s if waiting else -math.inf
        return max(staff.retry_at, window)

    def _choose(self, founder: Worker | None, now: float) -> Seating:
        staff, size = self._staff, self.run.size
        stopped = [*self._generation.members.values()]
        short = len(stopped) + len(staff.ready) < size
        recalled = [*staff.leavers.values()]
        if recalled and not short:  # only who is ahead of all the others
            top = max((w.place for w in stopped if w.whole), default=None)
            recalled = [w for w in recalled if top is None or w.place > top]
        return choose(
            stopped + recalled,
            staff.ready.values(),
            size=size,
            least=self.run.least,
            virtual_workers=self.run.rules.virtual_workers,
            now=now,
            founder=founder,
            floor=self.run.rules.min_on_demand,
        )

    def _form(self, seating: Seating, now: float) -> None:
        rules, staff, beginning = self.run.rules, self._staff, self._beginning
        number = self._leadership.claimed
        if not beginning.founded:
            beginning.founded_in = number
        seats = membership(
            number,
            seating,
            rules.virtual_workers,
            rules.forming_timeout_s,
            beginning.founded_in,
            restore=beginning.sealed is not None,
        )
        joins = {worker.whole for worker in seating.seated} == {True, False}
        if joins:
            self._joined_at = now
        step, stopped_at = seating.source.place.step, self._generation.first_stop_at
        self._experience.changes(now, stopped_at, step, joins)
        self._generation.seat(seats, seating.seated, now)
        beginning.forms()
        for worker in seating.left:
            self._unseat(worker, now)
        staff.seat(now)
        for worker_id in beginning.able.keys() & self._generation.members.keys():
            if worker_id != beginning.founder:
                beginning.able.pop(worker_id)  # may be half written from now on
        self._generation.announce(seating.reason)
        self._keeping.announced(seats.restore)

    def _unseat(self, worker: Worker, now: float) -> None:
        """It has no seat now: kept until the others have made a step, if it holds state."""
        staff = self._staff
        reason = worker.leave_reason if worker.draining else "its seat is gone"
        if not worker.whole:
            if worker.draining or len(staff.useful) > staff.wanted:
                staff.release(worker, reason, now)
            else:  # nobody at the head of the loop could give it the state
                staff.move(worker, Stage.READY, now)
                staff.queue(worker, now)
            return
        worker.leave_reason = reason
        staff.leavers[worker.id] = worker
        staff.move(worker, Stage.LEAVER, now)
        self.run.alarms.wake(worker.leave_at, "leave", worker.id)
