"""Which workers make up the next generation, and when it is safe to form it.

Three things always hold. No generation is formed before the one before can make no further step,
nor before its number was claimed. Fewer than the least number never train, except that workers
without state wait outside where no member could give them any. A membership that fails to form
twice in a row is not tried again. A worker with state that is no member any more is retained until
the others have made a step.
"""

import math
from dataclasses import dataclass
from itertools import chain

from elastic_dp.coordinator import closing
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.admission import Admission
from elastic_dp.coordinator.assignment import (
    Assignment,
    assign_members,
    members_to_exclude,
    membership,
)
from elastic_dp.coordinator.change_policy import ChangePolicy
from elastic_dp.coordinator.drain_checkpointer import DrainCheckpointer
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.leadership import Leadership
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.phases import Phase, Transition
from elastic_dp.coordinator.replica_mismatch import reject
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.worker_registry import WorkerRegistry
from elastic_dp.coordinator.worker_state import Stage, WorkerState
from elastic_dp.wording import counted


@dataclass(frozen=True, slots=True)
class Blocked:
    """No generation can be formed yet. `reason` is said, if there is one; `until` is when to look
    again."""

    reason: str = ""
    until: float = math.inf


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
        changes: ChangePolicy,
    ) -> None:
        self.run, self._leadership, self._registry = run, leadership, registry
        self._generation, self._lineage, self._admission = generation, lineage, admission
        self._checkpointer, self._changes = checkpointer, changes
        self._failed: frozenset[WorkerId] = frozenset()  # the membership that failed to form last

    # ------------------------------------------------------- as a generation forms and ends

    def all_formed(self) -> None:
        self._generation.all_formed()
        self._failed = frozenset()

    def take_back(self, now: float) -> None:
        """Every member has stopped, finished, or is gone."""
        finished = self._generation.finished
        if finished and not self._generation.not_finished:
            closing.finish(self._registry, finished, now)
            return
        if not self._generation.formed:
            self._judge_forming(now)
        self._generation.take_back()
        if self._generation.mismatch is not None:
            reject(self._registry, self._generation, self._lineage, now)
        else:
            self._replace_stragglers(now)

    def _judge_forming(self, now: float) -> None:
        """No member died, and yet it did not form: leave out those that could not be reached.

        Workers without state at once (they come back later), others only when the same membership
        failed before.
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
            others = [w for w in members if w.id != needed]
            others = [w for w in others if not w.has_state or w.position != keep] or others[1:]
            dropped = others[-1:]
        for worker in dropped:
            if worker.has_state and again:
                self._registry.release(worker, "out of reach of other members", now)
            elif not worker.has_state:
                self._put_back(worker, again, now)

    def _put_back(self, worker: WorkerState, again: bool, now: float) -> None:
        """A member without state that could not be reached: back off, or replace it."""
        worker.could_not_join()
        if again or worker.failed_joins > self.run.config.max_failed_joins:
            self._registry.evict(worker, "could not join the others", now)
            return
        self._generation.exclude(worker)
        self._registry.move(worker, Stage.READY, now)
        pause_s = self.run.config.heartbeat_timeout_s * 2.0 ** (worker.failed_joins - 1)
        self.run.timers.wake(now + pause_s, "rejoin", worker.id)

    def _replace_stragglers(self, now: float) -> None:
        """Steps are handed on one at a time, since each process runs the body of each; more is a
        bug of ours."""
        registry, lineage_id = self._registry, self._lineage.lineage_id
        at_hand = (*self._generation.members.values(), *registry.retained.values())
        holders = [worker for worker in at_hand if worker.has_state]
        ours = [worker.position.step for worker in holders if worker.lineage_id in (0, lineage_id)]
        top = max(ours, default=0)
        for worker in holders:
            if 0 < worker.lineage_id < lineage_id:  # evicted once, and the run begun anew
                registry.evict(worker, "its state is that of an earlier beginning", now)
            elif worker.position.step < top - 1 and worker.stage is Stage.RETAINED:
                registry.release(worker, worker.leave_reason, now)
            elif worker.position.step < top - 1:
                registry.evict(worker, f"at step {worker.position.step}, too far behind {top}", now)

    # ------------------------------------------------------------------------ the next one

    def advance(self, now: float) -> None:
        """Nobody trains: claim the next generation, form it, or end the run."""
        if not self._has_or_finds_state(now):
            return
        established = self._lineage.established
        source = None if established else self._admission.find_initial_source(now)
        if self._ends_instead(now):
            return
        due = self._checkpointer.due(now) if self.run.config.keeps else []
        if due and self._at_hand - len(due) < self.run.least:
            if self._checkpointer.blocks(due, now):
                return
            if due[0].stage is Stage.LEAVING:
                self.advance(now)
                return
        blocked = self._blocked(source, now)
        if blocked is not None:
            if blocked.reason:
                self.run.say(blocked.reason)
            self.run.timers.wake(blocked.until)
        elif self._leadership.claimed <= self._generation.number:
            self.run.take(Transition.CLAIM_SENT)
            self._leadership.claim(self._generation.number, now)
        else:
            self._form(self._assign(source, now), now)

    def claimed(self) -> None:
        """The number of the next generation is ours."""
        if self.run.phase is Phase.CLAIMING:
            self.run.take(Transition.CLAIM_GRANTED)

    def _has_or_finds_state(self, now: float) -> bool:
        """Some worker has state, or a checkpoint was looked for. False: wait for the answer, or the
        run has ended."""
        lineage = self._lineage
        holders = chain(self._generation.members.values(), self._registry.retained.values())
        if any(worker.has_state for worker in holders):  # looks at the first, as a rule
            return True
        if not lineage.searched:
            if lineage.search():
                self.run.emit(m.FindCheckpoint(lineage.at_most))
            self.run.say("looking for a checkpoint")
            return False
        if lineage.established and lineage.checkpoint_step is None:
            closing.lost_everyone(self._registry, lineage.at_most, now)
            return False
        if lineage.established:
            step = lineage.checkpoint_step
            self.run.explain(f"all who held the state are lost; back to step {step}")
            self._admission.start_from_checkpoint()
        return True

    def _ends_instead(self, now: float) -> bool:
        """The run ends here: it was stopped before the first step, or all members have finished."""
        lineage, generation = self._lineage, self._generation
        if self.run.stop is not None and not lineage.established:
            step, reason = lineage.checkpoint_step, self.run.stop.reason
            closing.stop_before_first_step(self._registry, step, reason, now)
            return True
        if generation.members and not generation.not_finished:
            closing.finish(self._registry, [*generation.members.values()], now)
            return True
        return False

    @property
    def _at_hand(self) -> int:
        registry = self._registry
        return len(self._generation.members) + len(registry.ready) + len(registry.retained)

    def _blocked(self, source: WorkerState | None, now: float) -> Blocked | None:
        """What the next generation has to wait for. Changes nothing."""
        run, generation = self.run, self._generation
        if self._at_hand < run.least:
            needed = counted(run.least, "worker is ready", "workers are ready")
            return Blocked(f"{self._at_hand} of at least {needed}")
        if not self._lineage.established and source is None:
            return Blocked("waiting for the worker that gives the state")
        if now < self._earliest():
            return Blocked(until=self._earliest())
        if not generation.fence.is_closed(now):
            return Blocked(
                f"a member of generation {generation.number} may be alive; "
                "waiting for its lease to end",
                until=generation.fence.lease_until,
            )
        return None

    def _earliest(self) -> float:
        """A burst of first workers makes one generation; survivors wait for nobody."""
        registry = self._registry
        survivors = self._generation.members or registry.retained
        waiting = not survivors and len(registry.ready) < self.run.size
        window = registry.ready_since + self.run.config.join_window_s if waiting else -math.inf
        return max(registry.failures.retry_at, window)

    def _assign(self, source: WorkerState | None, now: float) -> Assignment:
        registry, size = self._registry, self.run.size
        stopped = [*self._generation.members.values()]
        short = len(stopped) + len(registry.ready) < size
        recalled = [*registry.retained.values()]
        if recalled and not short:  # only those that are ahead of all the others
            top = max((w.position for w in stopped if w.has_state), default=None)
            recalled = [w for w in recalled if top is None or w.position > top]
        return assign_members(
            stopped + recalled,
            registry.ready.values(),
            size=size,
            least=self.run.least,
            virtual_workers=self.run.config.virtual_workers,
            now=now,
            initial_source=source,
            floor=self.run.config.min_on_demand,
        )

    def _form(self, assignment: Assignment, now: float) -> None:
        config, registry, lineage = self.run.config, self._registry, self._lineage
        number = self._leadership.claimed
        lineage.forms(number)
        made = membership(
            number,
            assignment,
            config.virtual_workers,
            config.forming_timeout_s,
            lineage.lineage_id,
            restore=lineage.checkpoint_step is not None,
        )
        joins = {worker.has_state for worker in assignment.members} == {True, False}
        if joins:
            self._changes.joined(now)
        self._generation.assign(made, assignment.members, now)
        lineage.formed()
        for worker in assignment.left:
            self._leave_out(worker, now)
        registry.assign_members(now)
        lineage.may_be_half_written(self._generation.members)
        self._generation.announce(assignment.reason)
        self._checkpointer.announced(made.restore)

    def _leave_out(self, worker: WorkerState, now: float) -> None:
        """It is no member now: retained until the others have made a step, if it has state."""
        registry = self._registry
        reason = worker.leave_reason if worker.draining else "another worker takes its place"
        if worker.has_state:
            registry.retain(worker, reason, now)
        elif worker.draining or len(registry.provisioned) > registry.wanted:
            registry.release(worker, reason, now)
        else:  # no member could give it the state yet
            registry.move(worker, Stage.READY, now)
            registry.queue(worker, now)
