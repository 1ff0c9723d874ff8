"""Checkpoints on request, and the last checkpoint of a run whose workers or head must leave.

If the workers whose nodes go away would leave fewer than the minimum, the run cannot continue
without them:

    at the notice            a checkpoint of one of the next steps is requested, in case the last
                             one comes too late
    when they must leave     the generation ends, and its most advanced workers write a checkpoint
                             of their state
    when it is committed     they are released; the others wait for new workers, or the run
                             continues from the checkpoint if no worker stays

If the cluster's head node goes away, the controller, the driver and usually the whole cluster go
with it, and the run continues from its newest checkpoint. So a checkpoint is requested at the
notice. Shortly before the deadline, the generation ends, the state is committed, and training is
suspended: a later step would be lost. It resumes if the head is still there `HEAD_GRACE_S` after
the deadline.

Two things always hold. The run goes back only to what is committed, so a worker that alone has a
later state is not released before that state is committed. No worker waits for the commit longer
than its notice allows. The request is repeated when one of the writers is lost, and after a while,
because a message or a write may be lost.
"""

import math

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import START, WorkerId
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import WorkerState
from elastic_dp.wording import first_few

NOTICE_WINDOW_S = 1.0  # notices within one second cause one checkpoint
HEAD_GRACE_S = 30.0  # a head that is there so long after its deadline was not taken away


class DrainCheckpointer:
    """Requests checkpoints, and decides whether draining workers must write one first."""

    def __init__(self, run: RunState, registry: WorkerRegistry, generation: Generation) -> None:
        self.run, self._registry, self._generation = run, registry, generation
        self.committed_step = 0  # newest committed step of the present members
        self._commit_s = 0.0  # the longest time from a snapshot to its commit
        self._head_leaves_at = math.inf
        self._wanted = False  # requested while no generation trained
        self._requested_for: set[WorkerId] = set()
        self._request_ahead_at = -math.inf
        # cached result of `due`, with the situation and time it is valid for
        self._due: list[WorkerState] = []
        self._due_of: tuple[object, ...] = ()
        self._due_until = -math.inf
        self.saved_step = 0  # see `awaits_commit`
        self._awaits_in: tuple[object, ...] = ()  # likewise for `awaits_commit`
        self._awaits_until = -math.inf
        self._last_write: tuple[int, tuple[WorkerId, ...]] = 0, ()  # step and writers
        self._repeat_at = math.inf

    def request(self) -> None:
        """Request a checkpoint of one of the next steps, now or when a generation trains.

        Every member is told: one would do, but any may be about to leave.
        """
        self._wanted = not self.run.in_flight
        if self.run.in_flight:
            for worker_id in self._generation.members:
                self.run.emit(m.TakeCheckpoint(worker_id))

    def committed(self, step: int, duration_s: float = 0.0) -> None:
        self.committed_step = step
        self._commit_s = max(self._commit_s, duration_s)
        self.run.timers.wake(self._suspend_at)

    def head_drains(self, deadline: float | None, now: float) -> None:
        """Prepare for the end of the head node."""
        if not self.run.config.checkpointing:
            return
        when = "" if deadline is None else f" in {max(0.0, deadline - now):.0f} s"
        self.run.explain(f"the head node goes away{when}: a checkpoint is made first")
        self._head_leaves_at = math.inf if deadline is None else deadline
        if now < self._suspend_at:
            self.request()
        self.run.timers.wake(self._suspend_at)

    @property
    def _suspend_at(self) -> float:
        """When training must stop for the state to be committed before the head node is gone."""
        return self._head_leaves_at - self.run.config.drain_margin_s - 2 * self._commit_s

    def suspended_until(self, now: float) -> float:
        """Return until when no generation trains because the head node goes away; -inf: none is
        kept from it.
        """
        until = self._head_leaves_at + HEAD_GRACE_S
        return until if self._suspend_at <= now < until and self.run.stop is None else -math.inf

    def announced(self, restores: bool) -> None:
        """Note that a generation was announced. `restores`: it starts from a checkpoint."""
        if restores:
            self.committed_step = 0
        if self._wanted:
            self.request()

    def request_ahead(self, now: float) -> None:
        """Request a checkpoint, at most once a second: draining members cannot be replaced."""
        if now < self._request_ahead_at:
            return
        self._request_ahead_at = now + NOTICE_WINDOW_S
        if not self._requested_for.issuperset(self._generation.draining):
            self._requested_for.update(self._generation.draining)
            self.request()

    def due(self, now: float) -> list[WorkerState]:
        """Return the draining workers whose time to leave has come.

        These are members and, while no generation trains, retained workers, which may be the only
        ones with the state.
        """
        situation = self._situation()
        if situation != self._due_of or now >= self._due_until:
            draining = [*self._generation.draining.values()]
            if not self.run.in_flight:
                draining += self._registry.retained.values()
            self._due = [worker for worker in draining if now >= worker.leave_at]
            self._due_until = min(
                [w.leave_at for w in draining if now < w.leave_at], default=math.inf
            )
            self._due_of = situation
        return self._due

    def _situation(self) -> tuple[object, ...]:
        """Return a key that changes whenever a worker comes, leaves or gets another notice.

        Comparing it is cheaper than looking at all workers.
        """
        generation, registry = self._generation, self._registry
        counts = len(generation.members), len(generation.draining), len(registry.retained)
        return generation.number, self.run.in_flight, registry.notices, counts

    def last_deadline(self, due: list[WorkerState]) -> float:
        """Return until when one of the workers has time for a last checkpoint. One that is still
        there after its deadline was not taken away.
        """
        return max([worker.leave_at for worker in due]) + self.run.config.drain_margin_s

    def awaits_commit(self, due: list[WorkerState], until: float, now: float) -> bool:
        """Have the newest state written before the workers in `due` leave. Return whether its
        commit, which is possible `until` then, must be waited for. If not, `saved_step` is the step
        that is committed, or 0 if there is no state, or none that can be written in time.

        All members have stopped. Those that write are told again when something changes, and after
        a while.
        """
        situation = (*self._situation(), self.committed_step, len(due))
        if situation == self._awaits_in and now < self._awaits_until:
            return True
        holders = (*self._generation.members.values(), *self._registry.retained.values())
        top = max([worker.position for worker in holders if worker.has_state], default=START)
        writers = tuple([w.id for w in holders if w.has_state and w.position == top and w.at_head])
        self.saved_step = 0
        if top.ended or not top.step or not writers or now >= until:
            return False
        if self.committed_step >= top.step:
            self.saved_step = self.committed_step
            return False
        if (top.step, writers) != self._last_write or now >= self._repeat_at:
            self._last_write = top.step, writers
            self._repeat_at = now + self.run.config.drain_margin_s / 3
            for worker_id in writers:
                self.run.emit(m.WriteDrainCheckpoint(worker_id, self._generation.number, writers))
        self._awaits_in, self._awaits_until = situation, min(self._repeat_at, until)
        self.run.timers.wake(self._awaits_until)
        who = first_few(worker.id for worker in due) or "the head node"
        self.run.set_reason(
            f"{who} must leave; waiting for the commit of the state after step {top.step}"
        )
        return True

    def release(self, due: list[WorkerState], now: float) -> None:
        """Release the workers that had to leave: the state after `saved_step` is committed."""
        for worker in due:
            reason = f"its node goes away, and the state after step {self.saved_step} is committed"
            self._registry.release(worker, reason, now)
