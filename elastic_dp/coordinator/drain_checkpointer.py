"""Checkpoints that are asked for, and the last one of a run whose workers must all go: none takes
the state along.

Where the workers whose nodes go away would leave fewer than the least number behind, the run cannot
go on without them:

    at the notice          a checkpoint of one of the next steps is asked for, so there is one if
                           the rest is too late
    when their time comes  the generation ends, and those that stopped furthest write a checkpoint
                           of that state
    when it is committed   they are released; those that stay wait for others, or take the
                           checkpoint if nobody stays

Two things always hold. The run goes back only to what is committed, so a worker that alone has a
later state is not released before that; and nobody waits for the commit beyond the time of the
notice. Those that share the writing are told again when one of them is lost, and after a while: a
message or a write may be lost.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import START, WorkerId
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.worker_registry import WorkerRegistry
from elastic_dp.coordinator.worker_state import WorkerState

NOTICES_S = 1.0  # those of one second are answered by one checkpoint
ASKED = 2  # members; one would do, and may be about to go
NAMED = 5


def names(workers: Iterable[WorkerState]) -> str:
    """Of the first, since there may be thousands."""
    first = [worker.id for worker in islice(workers, NAMED + 1)]
    return ", ".join(first[:NAMED]) + (" …" if first[NAMED:] else "")


@dataclass(frozen=True, slots=True)
class Unneeded:
    """There is no state yet, or none that can be written in time."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The state of this step is safe: those that must go may."""

    step: int


@dataclass(frozen=True, slots=True)
class Write:
    """These have the newest state, and must write it before anybody leaves."""

    step: int
    writers: tuple[WorkerId, ...]


CheckpointDecision = Unneeded | Committed | Write


class DrainCheckpointer:
    def __init__(self, run: RunState, registry: WorkerRegistry, generation: Generation) -> None:
        self.run, self._registry, self._generation = run, registry, generation
        self.committed_step = 0  # the newest, of those that the present members made
        self._wanted = False  # as soon as somebody trains
        self._foreseen: set[WorkerId] = set()
        self._foresee_at = -math.inf
        self._due: list[WorkerState] = []  # of this situation, and until then
        self._due_of: tuple[object, ...] = ()
        self._due_until = -math.inf
        self._held_of: tuple[object, ...] = ()  # likewise those that wait for the commit
        self._held_until = -math.inf
        self._asked = Write(0, ())
        self._again_at = math.inf

    def ask(self) -> None:
        """For a checkpoint of one of the next steps. One member would do; any may be about to
        go."""
        self._wanted = not self.run.in_flight
        if self.run.in_flight:
            for worker_id in self._generation.members:
                self.run.emit(m.TakeCheckpoint(worker_id))

    def committed(self, step: int) -> None:
        self.committed_step = step

    def announced(self, restores: bool) -> None:
        """A generation is; `restores`: from the newest checkpoint that is complete, whichever that
        is."""
        if restores:
            self.committed_step = 0
        if self._wanted:
            self.ask()

    def foresee(self, now: float) -> None:
        """Draining members are needed, and will be missed; once for each notice, or for all of one
        second."""
        if now < self._foresee_at:
            return
        self._foresee_at = now + NOTICES_S
        if not self._foreseen.issuperset(self._generation.draining):
            self._foreseen.update(self._generation.draining)
            members = self._generation.members.values()
            for worker in sorted(members, key=lambda worker: worker.draining)[:ASKED]:
                self.run.emit(m.TakeCheckpoint(worker.id))

    def due(self, now: float) -> list[WorkerState]:
        """Whose time to leave has come: members, and while nobody trains retained workers, which
        alone may have the state."""
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
        """Equal as long as nobody came, went, or had another notice, which is cheaper to see than
        to look at all."""
        generation, registry = self._generation, self._registry
        counts = len(generation.members), len(generation.draining), len(registry.retained)
        return generation.number, self.run.in_flight, registry.notices, counts

    def in_time(self, due: list[WorkerState], now: float) -> bool:
        """Whether one of them has time for a last checkpoint; if it is still there later, it was
        not taken away."""
        return now < self._gone_at(due)

    def _gone_at(self, due: list[WorkerState]) -> float:
        return max([worker.leave_at for worker in due]) + self.run.config.drain_margin_s

    def blocks(self, due: list[WorkerState], now: float) -> bool:
        """All have stopped, and too few will be left. Whether the next generation has to wait for a
        commit."""
        situation = (*self._situation(), self.committed_step, len(due))
        if situation == self._held_of and now < self._held_until:
            return True
        match self._decide(due, now):
            case Unneeded():
                return False
            case Committed(step):
                for worker in due:
                    reason = f"its node goes away, and step {step} is committed"
                    self._registry.release(worker, reason, now)
                return False
            case Write() as write:
                self._request(write, now)
        self._held_of, self._held_until = situation, min(self._again_at, self._gone_at(due))
        self.run.timers.wake(self._held_until)
        self.run.say(
            f"{names(due)} must leave; the state after step {write.step} is committed before"
        )
        return True

    def _decide(self, due: list[WorkerState], now: float) -> CheckpointDecision:
        holders = (*self._generation.members.values(), *self._registry.retained.values())
        top = max([worker.position for worker in holders if worker.has_state], default=START)
        writers = tuple([w.id for w in holders if w.has_state and w.position == top and w.at_head])
        if top.ended or not top.step or not writers or not self.in_time(due, now):
            return Unneeded()
        if self.committed_step >= top.step:
            return Committed(self.committed_step)
        return Write(top.step, writers)

    def _request(self, write: Write, now: float) -> None:
        if write != self._asked or now >= self._again_at:
            self._asked = write
            self._again_at = now + self.run.config.drain_margin_s / 3
            for worker_id in write.writers:
                self.run.emit(
                    m.WriteDrainCheckpoint(worker_id, self._generation.number, write.writers)
                )
