"""Decides which workers make up the next generation, and when it is safe to form it.

Four things always hold. No generation is formed before the previous one can make no further step,
nor before its number was claimed; the claim is sent, and the likely members are told to connect,
while the previous one ends. A generation never has fewer than the minimum number of members, except
that workers without state wait outside while no member can serve them. A membership that fails to
form twice in a row is not tried again. A worker with state that is no longer a member is retained
until the others have made a step.
"""

import math
from itertools import chain

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator import run_termination
from elastic_dp.coordinator.drain_checkpointer import DrainCheckpointer
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.leadership import Leadership
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.planning.member_selection import (
    MemberSelection,
    likely_members,
    members_to_exclude,
    membership_of,
    select_members,
)
from elastic_dp.coordinator.planning.worker_eligibility import WorkerEligibility
from elastic_dp.coordinator.run_state import Phase, RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import Stage, WorkerState
from elastic_dp.wording import counted

MAX_IN_A_ROW = 3  # mismatches without a step in between after which all weights were equal


class MembershipPlanner:
    """Forms the next generation when it is safe, or ends the run."""

    def __init__(
        self,
        run: RunState,
        leadership: Leadership,
        registry: WorkerRegistry,
        generation: Generation,
        lineage: StateLineage,
        eligibility: WorkerEligibility,
        checkpointer: DrainCheckpointer,
    ) -> None:
        self.run, self._leadership, self._registry = run, leadership, registry
        self._generation, self._lineage, self._eligibility = generation, lineage, eligibility
        self._checkpointer = checkpointer
        self.failed: frozenset[WorkerId] = frozenset()  # the membership that failed to form last
        self._preparation: m.PrepareGroup | None = None  # the last one
        self._looked_at = (0, 0, 0)  # what it followed from

    # ------------------------------------------------------- as a generation forms and ends

    def generation_over(self, now: float) -> None:
        """Act on the end of a generation: every member has left, finished, or is gone."""
        if self._generation.has_finished:
            run_termination.finish(self._registry, self._generation, now)
            return
        if not self._generation.formed:
            self._exclude_unreachable(now)
        self.run.enter(Phase.GATHERING)
        if self._generation.mismatch is not None:
            replace_differing(self._registry, self._generation, self._lineage, now)
        elif self._generation.pieces_lost:
            self._give_up_state(now)
        else:
            self._replace_stragglers(now)

    def _give_up_state(self, now: float) -> None:
        """Replace every worker with state: a part of the sharded state was lost with workers, and
        a process never goes back.
        """
        self.run.explain(
            "both workers that held some part of the optimizer's state are lost; the others cannot "
            "continue without it"
        )
        for worker in [*self._generation.members.values(), *self._registry.retained.values()]:
            if worker.has_state:
                self._registry.release(worker, "a part of the optimizer's state is lost", now)

    def _exclude_unreachable(self, now: float) -> None:
        """Exclude members that could not be reached, if the generation failed to form though no
        member died.

        Workers without state are excluded at once and may join later; others only if the same
        membership has failed before.
        """
        generation, needed = self._generation, self._lineage.required_source
        if generation.lost_while_forming:
            return
        members = [*generation.members.values()]
        ids = frozenset(generation.members)
        again = ids == self.failed
        self.failed = ids
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
                self._retry_join(worker, again, now)

    def _retry_join(self, worker: WorkerState, again: bool, now: float) -> None:
        """Let a member without state that could not be reached join later, or replace it."""
        worker.failed_joins += 1
        if again or worker.failed_joins > self.run.config.max_failed_joins:
            self._registry.evict(worker, "could not join the others", now)
            return
        self._generation.exclude(worker)
        self._registry.move(worker, Stage.READY, now)
        pause_s = self.run.config.heartbeat_timeout_s * 2.0 ** (worker.failed_joins - 1)
        self.run.timers.wake(now + pause_s, "rejoin", worker.id)

    def _replace_stragglers(self, now: float) -> None:
        """Replace workers that are more than one step behind.

        A receiver gets at most one step, because each process must run the loop body of every step.
        A larger distance is a bug of this package.
        """
        registry, lineage_id = self._registry, self._lineage.lineage_id
        at_hand = (*self._generation.members.values(), *registry.retained.values())
        holders = [worker for worker in at_hand if worker.has_state]
        ours = [worker.position.step for worker in holders if worker.lineage_id in (0, lineage_id)]
        top = max(ours, default=0)
        for worker in holders:
            # evicted before the run started again from other weights
            if 0 < worker.lineage_id < lineage_id:
                registry.evict(worker, "its state is of an earlier start of the run", now)
            elif worker.position.step < top - 1 and worker.stage is Stage.RETAINED:
                registry.release(worker, worker.leave_reason, now)
            elif worker.position.step < top - 1:
                registry.evict(worker, f"at step {worker.position.step}, too far behind {top}", now)

    # ------------------------------------------------------------------------ the next one

    def claim_ahead(self, now: float) -> None:
        """Claim the next generation while the members of the present one still leave it, so that
        nobody waits for the claim. A number that is not used costs nothing.
        """
        if not self._has_number and not self._leadership.claiming:
            self._leadership.claim(self._generation.number, now)

    def prepare_ahead(self) -> None:
        """Let those who will most likely be the next members connect while they still leave the
        present generation. They connect under the number that is being claimed: whether it is
        granted matters only to what is announced.
        """
        run, registry, generation = self.run, self._registry, self._generation
        claimed = self._leadership.claimed
        following = max(self._leadership.claiming, claimed)
        seen = following, len(generation.members), len(registry.ready)
        if seen == self._looked_at or not generation.must_stop:
            return
        self._looked_at = seen
        certain = generation.formed and self._lineage.established and not registry.retained
        if not certain or generation.mismatch is not None:
            return
        likely = likely_members([*generation.members.values()], registry.ready.values(), run.size)
        workers = tuple(worker.id for worker in likely)
        if len(workers) < max(2, run.min_members):
            return
        # No other controller, which may claim the same number, has this one.
        before = 0 if self._preparation is None else self._preparation.number
        number = max(before, claimed << 20) + 1
        self._preparation = m.PrepareGroup(following, number, workers, run.config.forming_timeout_s)
        run.emit(self._preparation)

    def _prepared(self, selection: MemberSelection) -> int:
        """Return the number of the preparation of these members for the next generation, or 0."""
        made, members = self._preparation, selection.members
        if made is None or made.generation != self._leadership.claimed:
            return 0
        same = made.workers == tuple(worker.id for worker in members)
        return made.number if same else 0

    @property
    def _has_number(self) -> bool:
        return self._leadership.claimed > self._generation.number

    def plan_next_generation(self, now: float) -> None:
        """While no generation trains: claim the next generation, form it, or end the run."""
        lineage = self._lineage
        if not self._held_by_a_worker:
            if not lineage.searched:
                self._search_checkpoint()
                return
            if lineage.established:  # a step was made: only a checkpoint counts
                if lineage.checkpoint_step is None:
                    run_termination.fail_without_state(self._registry, lineage.at_most, now)
                    return
                self._go_back()
        source = None if lineage.established else self._eligibility.find_initial_source(now)
        stop, step = self.run.stop, lineage.checkpoint_step
        if stop is not None and not lineage.established:
            run_termination.stop_before_first_step(self._registry, step, stop.reason, now)
            return
        if self._generation.has_finished:
            run_termination.finish(self._registry, self._generation, now)
            return
        checkpointer = self._checkpointer
        if now < (until := checkpointer.suspended_until(now)):
            self._suspend(until, now)
            return
        due = checkpointer.due(now) if self.run.config.checkpointing else []
        registry = self._registry
        stay = self._available - len(due) - len(registry.ready) + registry.successors
        if due and stay < self.run.min_members:
            if checkpointer.awaits_commit(due, checkpointer.last_deadline(due), now):
                return
            if checkpointer.saved_step:
                checkpointer.release(due, now)
                self.plan_next_generation(now)
                return
        if self._must_wait(source, now):
            return
        if not self._has_number:
            self.run.enter(Phase.CLAIMING)
            if not self._leadership.claiming:
                self._leadership.claim(self._generation.number, now)
        else:
            self._form(self._select_members(source, now), now)

    def _suspend(self, until: float, now: float) -> None:
        """Commit the state and form no generation, because the head node goes away."""
        self.run.timers.wake(until)
        if not self._checkpointer.awaits_commit([], until, now):
            step = self._checkpointer.saved_step
            saved = f", and the state after step {step} is committed" if step else ""
            self.run.set_reason(f"suspended: the head node goes away{saved}")

    @property
    def _held_by_a_worker(self) -> bool:
        """Whether a worker has the training state; usually the first one has."""
        at_hand = chain(self._generation.members.values(), self._registry.retained.values())
        return any(worker.has_state for worker in at_hand)

    def _search_checkpoint(self) -> None:
        if not self._lineage.searching:
            self._lineage.searching = True
            self.run.emit(m.FindCheckpoint(self._lineage.at_most))
        self.run.set_reason("looking for a checkpoint")

    def _go_back(self) -> None:
        step = self._lineage.checkpoint_step
        self.run.explain(f"every worker with the training state is lost; going back to step {step}")
        self._eligibility.start_from_checkpoint()

    @property
    def _available(self) -> int:
        registry = self._registry
        return len(self._generation.members) + len(registry.ready) + len(registry.retained)

    def _must_wait(self, source: WorkerState | None, now: float) -> bool:
        """Return whether the next generation must wait, and say for what."""
        run, generation = self.run, self._generation
        if self._available < run.min_members:
            needed = counted(run.min_members, "worker is ready", "workers are ready")
            run.set_reason(f"{self._available} of at least {needed}")
        elif not self._lineage.established and source is None:
            run.set_reason("waiting for the worker that is the source of the state")
        elif now < (start_at := self._earliest_start()):
            run.timers.wake(start_at)
        elif not generation.fence.is_closed(now):
            run.set_reason(
                f"a member of generation {generation.number} may be alive; waiting for its lease "
                "to expire"
            )
            run.timers.wake(generation.fence.lease_until)
        else:
            return False
        return True

    def _earliest_start(self) -> float:
        """Return the earliest time to form a generation: a burst of first workers makes one
        generation.

        Survivors do not wait for other workers.
        """
        registry = self._registry
        survivors = self._generation.members or registry.retained
        waiting = not survivors and len(registry.ready) < self.run.size
        window = registry.ready_since + self.run.config.join_window_s if waiting else -math.inf
        return max(registry.failures.retry_at, window)

    def _select_members(self, source: WorkerState | None, now: float) -> MemberSelection:
        registry, size = self._registry, self.run.size
        stopped = [*self._generation.members.values()]
        short = len(stopped) + len(registry.ready) < size
        recalled = [*registry.retained.values()]
        if recalled and not short:  # recall only workers that are ahead of all members
            top = max((w.position for w in stopped if w.has_state), default=None)
            recalled = [w for w in recalled if top is None or w.position > top]
        return select_members(
            stopped + recalled,
            registry.ready.values(),
            size=size,
            least=self.run.min_members,
            virtual_workers=self.run.config.virtual_workers,
            now=now,
            initial_source=source,
            some_lost=self._generation.some_lost,
        )

    def _form(self, selection: MemberSelection, now: float) -> None:
        config, registry, lineage = self.run.config, self._registry, self._lineage
        number = self._leadership.claimed
        lineage.members_chosen(number)
        made = membership_of(
            number,
            selection,
            config.virtual_workers,
            config.forming_timeout_s,
            lineage.lineage_id,
            restore=lineage.checkpoint_step is not None,
            prepared=self._prepared(selection),
        )
        self._generation.assign(made, selection.members, now)
        lineage.forget_checkpoint()
        for worker in selection.left:
            self._leave_out(worker, now)
        registry.mark_members(now)
        lineage.drop_receiving_candidates(self._generation.members)
        self._generation.announce(selection.reason)
        self._checkpointer.announced(made.restore)

    def _leave_out(self, worker: WorkerState, now: float) -> None:
        """Retain a worker that is not a member now if it has state; otherwise release or queue
        it.
        """
        registry = self._registry
        reason = worker.leave_reason if worker.draining else "another worker takes its place"
        if worker.has_state:
            registry.retain(worker, reason, now)
        elif worker.draining or len(registry.provisioned) > registry.target_size:
            registry.release(worker, reason, now)
        else:  # no member could give it the state yet
            registry.move(worker, Stage.READY, now)
            registry.queue(worker, now)


def replace_differing(
    registry: WorkerRegistry, generation: Generation, lineage: StateLineage, now: float
) -> None:
    """Replace every worker with state, once every member has stopped with different weights.

    The gradients of the members that differ have moved the others since all weights were last
    equal, and a process never goes back. The run continues from the newest checkpoint of that time
    or earlier. Without one it fails, and it fails if the job seems to be the cause.
    """
    mismatch = generation.mismatch
    assert mismatch is not None
    times = lineage.reject(mismatch.agreed)
    names = ", ".join(mismatch.odd)
    what = f"the weights of {names} differ; all workers agreed after step {mismatch.agreed}"
    registry.run.explain(what)
    if times > MAX_IN_A_ROW:
        error = (
            f"{what}; this is time {times} in a row: does something in the job differ between "
            "workers?"
        )
        run_termination.fail(registry, error, "", now)
        return
    for worker in [*generation.members.values(), *registry.retained.values()]:
        if worker.has_state and worker.id in mismatch.odd:
            registry.evict(worker, "its weights differ from the others'", now)
        elif worker.has_state:
            registry.release(worker, f"trained with {names}, whose weights differed", now)
