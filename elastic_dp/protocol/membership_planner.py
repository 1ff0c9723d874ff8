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
from elastic_dp.protocol.assignment import (
    Assignment,
    assign_members,
    members_to_exclude,
    membership,
)
from elastic_dp.protocol.balance import Balance
from elastic_dp.protocol.drain_checkpointer import DrainCheckpointer, names
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.leadership import Leadership
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.replica_mismatch import reject
from elastic_dp.protocol.resizing import ResizeHistory, ResizeOutlook, join_at
from elastic_dp.protocol.run_state import Phase, RunState
from elastic_dp.protocol.state_lineage import StateLineage
from elastic_dp.protocol.worker_registry import WorkerRegistry
from elastic_dp.protocol.worker_state import Stage, WorkerState
from elastic_dp.wording import counted


class MembershipPlanner:
    def __init__(
        self,
        run: RunState,
        leadership: Leadership,
        registry: WorkerRegistry,
        generation: Generation,
        lineage: StateLineage,
        admission: Admission,
        checkpointer: DrainCheckpointer,
    ) -> None:
        self.run, self._leadership, self._registry = run, leadership, registry
        self._generation, self._lineage, self._admission = generation, lineage, admission
        self._balance = Balance(generation, run.config.slow_s)
        self._checkpointer = checkpointer
        self._failed: frozenset[WorkerId] = frozenset()  # the membership that failed to form last
        self._joined_at = -math.inf  # when a generation was last formed for joiners, too
        self._history = ResizeHistory()
        self._told_until = -math.inf  # that joiners wait

    # ------------------------------------------------------------- while a generation runs

    def all_formed(self) -> None:
        self._generation.all_formed()
        self._failed = frozenset()

    def consider_change(self, now: float) -> None:
        """Whether a running generation should end as planned."""
        run, generation = self.run, self._generation
        if run.stop is not None or len(generation.not_finished) < len(generation.members):
            return
        present, waiting = len(generation.members), len(self._registry.ready)
        self._history.steps(generation.step, generation.progress_at)
        joins_at = self._join_at(run.size - present, now)
        if now < joins_at:
            run.timers.wake(joins_at)
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
            self._registry.drain(self._registry.workers[slow], None, now, why)
            self._part(present, waiting, now)

    def _part(self, present: int, waiting: int, now: float) -> None:
        """Some members' nodes will go: when they are replaced, or their time has come."""
        run, checkpointer, draining = self.run, self._checkpointer, self._generation.draining
        due, who = checkpointer.due(now), names(draining.values())
        if present - len(draining) + waiting < run.least and run.config.keeps:
            checkpointer.foresee(now)
        if not (due or waiting or present - len(draining) >= run.size):
            return
        if present - len(due or draining) + waiting >= run.least:
            self._generation.plan_end(f"{who} drained")
        elif due and run.config.keeps and self._generation.step and checkpointer.in_time(due, now):
            self._generation.plan_end(f"{who} must leave, and too few are left", at_once=True)
        else:
            needed = counted(run.least, "worker is needed", "workers are needed")
            run.say(f"{who} should leave, but {needed}")

    def _join_at(self, free: int, now: float) -> float:
        """From when on those who are ready may join, for `free` seats."""
        registry, generation = self._registry, self._generation
        if free <= 0 or not registry.ready:
            return math.inf
        outlook = ResizeOutlook(
            present=len(generation.members),
            free=free,
            ready=len(registry.ready),
            ready_since=registry.ready_since,
            building=bool(registry.building),
            joined_at=self._joined_at,
            pause_s=self._history.pause_s,
            between_s=self._history.between_s(now),
        )
        at, why = join_at(outlook, self.run.config)
        if at > max(now, self._told_until) + self.run.config.heartbeat_interval_s:
            self._told_until = at
            who = counted(len(registry.ready), "worker waits", "workers wait")
            self.run.explain(f"{who} for up to {at - now:.2g} s: {why}")
        return at

    def take_back(self, now: float) -> None:
        """Every member has stopped, finished, or is gone."""
        finished = self._generation.finished
        if finished and not self._generation.not_finished:
            closing.finish(self._registry, finished, now)
            return
        if not self._generation.formed:
            self._judge_forming(now)
        self.run.phase = Phase.GATHERING
        if self._generation.mismatch is not None:
            reject(self._registry, self._generation, self._lineage, now)
        else:
            self._replace_stragglers(now)

    def _judge_forming(self, now: float) -> None:
        """Nobody died, and yet it did not form: leave out who could not be reached.

        Void workers at once (they come back later), whole ones only when the same membership failed before.
        """
        generation, needed = self._generation, self._lineage.needed
        if generation.lost_while_forming:
            return
        members = [*generation.members.values()]
        ids = frozenset(generation.members)
        again = ids == self._failed
        self._failed = ids
        dropped = members_to_exclude(generation.unreachable_pairs, members, needed)
        if again and not dropped and len(members) > 1:
            keep = max((w.position for w in members if w.has_state), default=None)
            spare = [w for w in members if w.id != needed]
            spare = [w for w in spare if not w.has_state or w.position != keep] or spare[1:]
            dropped = spare[-1:]
        for worker in dropped:
            if worker.has_state and again:
                self._registry.release(worker, "out of reach of other members", now)
            elif not worker.has_state:
                self._put_back(worker, again, now)

    def _put_back(self, worker: WorkerState, again: bool, now: float) -> None:
        """A void member that could not be reached; back off, or replace it."""
        worker.failed_joins += 1
        if again or worker.failed_joins > self.run.config.max_failed_joins:
            self._registry.evict(worker, "could not join the others", now)
            return
        self._generation.unseat(worker)
        self._registry.move(worker, Stage.READY, now)
        pause_s = self.run.config.heartbeat_timeout_s * 2.0 ** (worker.failed_joins - 1)
        self.run.timers.wake(now + pause_s, "rejoin", worker.id)

    def _replace_stragglers(self, now: float) -> None:
        """Steps are handed on one at a time, since each process runs the body of each; more is a bug of ours."""
        registry, lineage_id = self._registry, self._lineage.lineage_id
        at_hand = (*self._generation.members.values(), *registry.retained.values())
        whole = [worker for worker in at_hand if worker.has_state]
        ours = [worker.position.step for worker in whole if worker.lineage_id in (0, lineage_id)]
        top = max(ours, default=0)
        for worker in whole:
            if 0 < worker.lineage_id < lineage_id:  # given up once, and the run begun anew
                registry.evict(worker, "its state is that of an earlier lineage", now)
            elif worker.position.step < top - 1 and worker.stage is Stage.RETAINED:
                registry.release(worker, worker.leave_reason, now)
            elif worker.position.step < top - 1:
                registry.evict(worker, f"at step {worker.position.step}, too far behind {top}", now)

    # ------------------------------------------------------------------------ the next one

    def seat(self, now: float) -> None:
        run, registry, generation, lineage = (
            self.run,
            self._registry,
            self._generation,
            self._lineage,
        )
        holders = chain(generation.members.values(), registry.retained.values())
        if not any(worker.has_state for worker in holders):  # looks at the first, as a rule
            if not lineage.searched:
                self._search()
                return
            if lineage.established and lineage.checkpoint_step is None:
                closing.lost_everyone(registry, lineage.at_most, now)
                return
            if lineage.established:
                run.explain(
                    f"all who held the state are lost; back to step {lineage.checkpoint_step}"
                )
                self._admission.start_from_checkpoint()
        initial_source = None if lineage.established else self._admission.find_initial_source(now)
        if run.stop is not None and not lineage.established:
            closing.stop_before_first_step(registry, lineage.checkpoint_step, run.stop.reason, now)
            return
        if generation.members and not generation.not_finished:
            closing.finish(registry, [*generation.members.values()], now)
            return
        going = self._checkpointer.due(now) if run.config.keeps else []
        at_hand = len(generation.members) + len(registry.ready) + len(registry.retained)
        if going and at_hand - len(going) < run.least:
            if self._checkpointer.hold(going, now):
                return
            if going[0].stage is Stage.LEAVING:
                self.seat(now)
                return
        if at_hand < run.least:
            needed = counted(run.least, "worker is ready", "workers are ready")
            run.say(f"{at_hand} of at least {needed}")
            return
        if not lineage.established and initial_source is None:
            run.say("waiting for the worker that gives the state")
            return
        if now < self._earliest_seating():
            run.timers.wake(self._earliest_seating())
            return
        if not generation.may_be_followed(now):
            run.say(
                f"a member of generation {generation.number} may be alive; "
                "waiting for its lease to end"
            )
            run.timers.wake(generation.lease_until)
            return
        if self._leadership.claimed <= generation.number:
            run.phase = Phase.CLAIMING
            self._leadership.claim(generation.number, now)
        else:
            self._form(self._choose(initial_source, now), now)

    def _search(self) -> None:
        if not self._lineage.searching:
            self._lineage.searching = True
            self.run.emit(m.FindCheckpoint(self._lineage.at_most))
        self.run.say("looking for a checkpoint")

    def _earliest_seating(self) -> float:
        """A burst of first workers makes one generation; survivors wait for nobody."""
        registry = self._registry
        survivors = self._generation.members or registry.retained
        waiting = not survivors and len(registry.ready) < self.run.size
        window = registry.ready_since + self.run.config.join_window_s if waiting else -math.inf
        return max(registry.retry_at, window)

    def _choose(self, initial_source: WorkerState | None, now: float) -> Assignment:
        registry, size = self._registry, self.run.size
        stopped = [*self._generation.members.values()]
        short = len(stopped) + len(registry.ready) < size
        recalled = [*registry.retained.values()]
        if recalled and not short:  # only who is ahead of all the others
            top = max((w.position for w in stopped if w.has_state), default=None)
            recalled = [w for w in recalled if top is None or w.position > top]
        return assign_members(
            stopped + recalled,
            registry.ready.values(),
            size=size,
            least=self.run.least,
            virtual_workers=self.run.config.virtual_workers,
            now=now,
            initial_source=initial_source,
            floor=self.run.config.min_on_demand,
        )

    def _form(self, seating: Assignment, now: float) -> None:
        config, registry, lineage = self.run.config, self._registry, self._lineage
        number = self._leadership.claimed
        if not lineage.established:
            lineage.lineage_id = number
        seats = membership(
            number,
            seating,
            config.virtual_workers,
            config.forming_timeout_s,
            lineage.lineage_id,
            restore=lineage.checkpoint_step is not None,
        )
        joins = {worker.has_state for worker in seating.seated} == {True, False}
        if joins:
            self._joined_at = now
        step, stopped_at = seating.source.position.step, self._generation.first_stop_at
        self._history.changes(now, stopped_at, step, joins)
        self._generation.seat(seats, seating.seated, now)
        lineage.forms()
        for worker in seating.left:
            self._unseat(worker, now)
        registry.seat(now)
        for worker_id in lineage.source_candidates.keys() & self._generation.members.keys():
            if worker_id != lineage.initial_source:
                lineage.source_candidates.pop(worker_id)  # may be half written from now on
        self._generation.announce(seating.reason)
        self._checkpointer.announced(seats.restore)

    def _unseat(self, worker: WorkerState, now: float) -> None:
        """It has no seat now: kept until the others have made a step, if it holds state."""
        registry = self._registry
        reason = worker.leave_reason if worker.draining else "its seat is gone"
        if not worker.has_state:
            if worker.draining or len(registry.provisioned) > registry.wanted:
                registry.release(worker, reason, now)
            else:  # nobody at the head of the loop could give it the state
                registry.move(worker, Stage.READY, now)
                registry.queue(worker, now)
            return
        worker.leave_reason = reason
        registry.retained[worker.id] = worker
        registry.move(worker, Stage.RETAINED, now)
        self.run.timers.wake(worker.leave_at, "leave", worker.id)
