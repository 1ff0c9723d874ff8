"""Who trains next: when the present generation should end for a better one, and who sits in the one that follows.

Always: nobody is seated before the generation before can make no further step, nor before the next one's number was
claimed; fewer than the least number never train, except that void workers wait outside where nobody could give them
the state. A membership that fails to form twice is not tried a third time. Whoever loses its seat and holds state
is kept until the others have made a step.
"""

import math

from elastic_dp.protocol import closing
from elastic_dp.protocol.admission import Admission
from elastic_dp.protocol.beginning import Beginning
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.leadership import Leadership
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.roster import Stage, Worker
from elastic_dp.protocol.run import Phase, Run
from elastic_dp.protocol.seating import Seating, choose, membership, to_drop
from elastic_dp.protocol.staff import Staff


class Gathering:
    def __init__(
        self,
        run: Run,
        leadership: Leadership,
        staff: Staff,
        generation: Generation,
        beginning: Beginning,
        admission: Admission,
    ) -> None:
        self.run, self._leadership, self._staff = run, leadership, staff
        self._generation, self._beginning, self._admission = generation, beginning, admission
        self._failed: frozenset[WorkerId] = frozenset()  # the membership that failed to form last

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
        if present > run.size:
            generation.plan_end(f"the size is {run.size} now")
        elif waiting and present < run.size:
            joinable_at = self._staff.ready_since + run.rules.join_window_s
            if waiting >= run.size - present or now >= joinable_at:
                generation.plan_end(f"{min(waiting, run.size - present)} workers join")
            else:
                run.alarms.wake(joinable_at)
        elif generation.draining:
            staying = present - len(generation.draining)
            due = any(now >= worker.leave_at for worker in generation.draining.values())
            if not (due or waiting or staying >= run.size):
                return
            names = ", ".join(generation.draining)
            if staying + waiting >= run.least:
                generation.plan_end(f"{names} drained")
            else:
                run.say(f"{names} should leave, but {run.least} workers are needed")

    def take_back(self, now: float) -> None:
        """Every member has stopped, finished, or is gone."""
        finished = self._generation.finished
        if finished and not self._generation.unfinished:
            closing.finish(self._staff, finished, now)
            return
        if not self._generation.formed:
            self._judge_forming(now)
        self.run.phase = Phase.GATHERING

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

    # ------------------------------------------------------------------------ the next one

    def seat(self, now: float) -> None:
        run, staff, generation, beginning = self.run, self._staff, self._generation, self._beginning
        founder = None if beginning.founded else self._admission.find_founder(now)
        if run.stop is not None and not beginning.founded:
            closing.stop_before_first_step(staff, run.stop, now)
            return
        holders = (*generation.members.values(), *staff.leavers.values())
        if beginning.founded and not any(worker.whole for worker in holders):
            closing.lost_everyone(staff, now)
            return
        if generation.members and not generation.unfinished:
            closing.finish(staff, [*generation.members.values()], now)
            return
        at_hand = len(generation.members) + len(staff.ready) + len(staff.leavers)
        if at_hand < run.least:
            run.say(f"{at_hand} of at least {run.least} workers are ready")
            return
        if not beginning.founded and founder is None:
            run.say("waiting for the worker whose initial weights count")
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
        if self._replace_stragglers(now):
            self.seat(now)  # with those who are left
            return
        seating = self._choose(founder, now)
        if self._leadership.claimed <= generation.number:
            run.phase = Phase.CLAIMING
            self._leadership.claim(generation.number, now)
        else:
            self._form(seating, now)

    def _earliest_seating(self) -> float:
        """A burst of first workers makes one generation; survivors wait for nobody."""
        staff = self._staff
        waiting = not self._generation.members and len(staff.ready) < self.run.size
        window = staff.ready_since + self.run.rules.join_window_s if waiting else -math.inf
        return max(staff.retry_at, window)

    def _replace_stragglers(self, now: float) -> bool:
        """Steps are handed on one at a time, since each process runs the body of each; more is a bug of ours."""
        staff, founded_in = self._staff, self._beginning.founded_in
        at_hand = (*self._generation.members.values(), *staff.leavers.values())
        whole = [worker for worker in at_hand if worker.whole]
        ours = [worker.place.step for worker in whole if worker.founded in (0, founded_in)]
        top, found = max(ours, default=0), False
        for worker in whole:
            if 0 < worker.founded < founded_in:  # given up once, and the run begun anew
                staff.evict(worker, "its state is that of an earlier beginning", now)
            elif worker.place.step < top - 1 and worker.stage is Stage.LEAVER:
                staff.release(worker, worker.leave_reason, now)
            elif worker.place.step < top - 1:
                staff.evict(worker, f"at step {worker.place.step}, too far behind {top}", now)
            else:
                continue
            found = True
        return found

    def _choose(self, founder: Worker | None, now: float) -> Seating:
        staff, size = self._staff, self.run.size
        stopped = [*self._generation.members.values()]
        top = max((w.place for w in stopped if w.whole), default=None)
        short = len(stopped) + len(staff.ready) < size
        recalled = [w for w in staff.leavers.values() if short or top is None or w.place > top]
        return choose(
            stopped + recalled,
            staff.ready.values(),
            size=size,
            least=self.run.least,
            virtual_workers=self.run.rules.virtual_workers,
            now=now,
            founder=founder,
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
        )
        self._generation.seat(seats, seating.seated, now)
        for worker in seating.left:
            self._unseat(worker, now)
        for worker in seating.seated:
            staff.ready.pop(worker.id, None)
            staff.leavers.pop(worker.id, None)
            staff.move(worker, Stage.MEMBER, now)
            if worker.id != beginning.founder:
                beginning.able.pop(worker.id, None)  # may be half written from now on
        staff.ready_since = now if staff.ready else math.inf
        self._generation.announce(seating.reason)

    def _unseat(self, worker: Worker, now: float) -> None:
        """It has no seat now: kept until the others have made a step, if it holds state."""
        staff = self._staff
        reason = "its node goes away" if worker.draining else "its seat is gone"
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
