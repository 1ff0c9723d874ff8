"""What must hold, seen from outside: the checkers know every worker's true state, and trust nobody's word.

`Checkers` watches the workers (what they commit, receive, run) and the commands; `Watched` wraps one coordinator
and checks what it does with each event.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.messages import Command, Event, Membership
from tests.protocol.scenes import facts

if TYPE_CHECKING:
    from tests.simulation.workers import Group, SimWorker
    from tests.simulation.world import SimController, World


class Violation(AssertionError):
    """The protocol broke a promise."""


def must(condition: object, text: str) -> None:
    if not condition:
        raise Violation(text)


class Checkers:
    def __init__(self, world: World) -> None:
        self.world = world
        self.beginnings: dict[int, dict[int, str]] = {}  # founded in -> step -> the state after it
        self.beginning = 0  # the one that counts
        self.memberships: dict[int, Membership] = {}
        self.first_commit: dict[int, float] = {}  # generation -> when
        self.newest_committing = 0
        self.claims: dict[int, Any] = {}
        self.started: set[str] = set()
        self.finish: m.FinishRun | None = None
        self.finished_by: SimController | None = None
        self.failure: m.FailRun | None = None
        self.newest_told: dict[str, int] = {}
        self.last_steps: dict[tuple[str, int], tuple[int, float]] = {}
        self.first_told: dict[tuple[str, int, int], float] = {}
        self.marks: Counter[str] = Counter()

    @property
    def dismissed(self) -> set[str]:
        """Evicted or released by whoever leads now."""
        return self.world.controllers[-1].dismissed

    @property
    def states(self) -> dict[int, str]:
        return self.beginnings.setdefault(self.beginning, {})

    # ------------------------------------------------------------------- the workers

    def entered(self, worker: SimWorker, membership: Membership) -> None:
        known = self.memberships.get(membership.generation)
        must(
            known == membership, f"{worker.id} knows another membership of {membership.generation}"
        )
        newest = self.newest_told[worker.id]
        must(newest == membership.generation, f"{worker.id} was told of {newest}, not of this one")
        told = worker.said_out
        must(membership.generation > told, f"{worker.id} said that it is out of {told}")
        seat = next(s for s in membership.seats if s.worker == worker.id)
        if seat.whole or worker.whole:
            must(seat.whole == worker.whole, f"{seat} but {worker.id} is whole: {worker.whole}")
            must(seat.place == worker.place, f"{seat} but {worker.id} is at {worker.place}")

    def intact(self, worker: SimWorker) -> None:
        """Whoever is whole holds a whole state, also when a hand-over to it failed."""
        if worker.whole:
            truth = self.beginnings.get(worker.founded, {}).get(worker.step, worker.state)
            must(worker.state == truth, f"{worker.id} holds {worker.state}, not {truth}")

    def given_up(self, worker: SimWorker) -> set[str]:
        """Whom the controller that announced `worker`'s generation, or a later one, had given up."""
        assert worker.group is not None
        announcer = self.claims[worker.group.membership.generation]
        return self.dismissed | announcer.dismissed

    def told_to_form(self, worker: SimWorker, membership: Membership) -> None:
        self.newest_told[worker.id] = max(membership.generation, self.newest_told.get(worker.id, 0))

    def told_to_end(self, worker: SimWorker, generation: int, after_step: int) -> None:
        """From now on it may finish the step it is in, and none beyond `after_step`."""
        if worker.inside and generation == worker.generation:
            last = max(after_step, worker.step, worker.attempting)
            known, _ = self.last_steps.get((worker.id, generation), (last, 0.0))
            self.last_steps[worker.id, generation] = (min(last, known), self.world.now)
            self.first_told.setdefault((worker.id, generation, after_step), self.world.now)

    def left(self, worker: SimWorker) -> None:
        for (name, generation, after), at in self.first_told.items():
            if (
                name == worker.id
                and generation == worker.generation
                and worker.phase == "collective"
            ):
                late = worker.attempting > after and self.world.now - at > 1.5
                thawed = self.world.now - worker.thawed_at < 1.5
                must(not late or thawed, f"{name} waits in a step that the others did not enter")

    def founded(self, worker: SimWorker) -> str:
        """The founder formed its first generation: its initial weights are the state from now on."""
        must(
            worker.can_source, f"{worker.id} was told its weights do not count, and founds the run"
        )
        holders = [
            other.id
            for other in self.world.workers.values()
            if other.alive and other.whole and other.id not in self.given_up(worker)
        ]
        must(
            not holders or worker.id in self.dismissed,
            f"{worker.id} founds the run anew while {holders} hold its state",
        )
        if worker.id in self.dismissed:
            return f"init {worker.id}"  # given up; its lease keeps it from any step
        if self.beginning:
            self.marks["founded anew"] += 1
        assert worker.group is not None
        self.beginning = worker.group.membership.founded
        self.beginnings[self.beginning] = {0: f"init {worker.id}"}
        return f"init {worker.id}"

    def committed(self, worker: SimWorker, group: Group) -> None:
        generation = group.membership.generation
        self.holds(worker)
        self.marks["commit"] += 1
        last, _ = self.last_steps.get((worker.id, generation), (worker.step, 0.0))
        must(
            worker.step <= last,
            f"{worker.id} makes step {worker.step} of {generation} after {last}",
        )
        for controller in self.world.controllers:
            controller.failed_sets.clear()
        if generation < self.newest_committing:
            self.marks["late commit"] += 1
            last = max(
                key
                for key in group.completed_at
                if isinstance(key, tuple) and key[0] == worker.step
            )
            later = min(at for g, at in self.first_commit.items() if g > generation)
            must(
                group.completed_at[last] <= later,
                f"generation {generation} makes step {worker.step} beside a later generation",
            )
        if generation not in self.first_commit:
            self.first_commit[generation] = self.world.now
        self.newest_committing = max(self.newest_committing, generation)

    def holds(self, worker: SimWorker) -> None:
        if (
            worker.founded != self.beginning
        ):  # all who held the later one are gone: an older one counts
            holders = [
                w.id
                for w in self.world.workers.values()
                if w.alive
                and w.whole
                and w.founded == self.beginning
                and w.id not in self.given_up(worker)
            ]
            must(not holders, f"{worker.id} goes on from an older beginning than {holders}")
            self.beginning = worker.founded
        truth = self.states.setdefault(worker.step, worker.state)
        must(
            worker.state == truth,
            f"{worker.id} holds {worker.state} after step {worker.step}, not {truth}",
        )

    def body_runs(self, worker: SimWorker) -> None:
        must(
            worker.step == worker.body_begun + 1,
            f"{worker.id} runs the body of {worker.step} after that of {worker.body_begun}",
        )

    def handed_over(self, worker: SimWorker, source: SimWorker) -> None:
        self.marks["hand-over"] += 1
        must(source.whole, f"void {source.id} is the source of {worker.id}")
        must(source.place >= worker.place or not worker.whole, f"{worker.id} would go back")
        if worker.whole:
            must(
                source.step - worker.step <= 1,
                f"{worker.id} at {worker.step} is too far behind {source.step}",
            )
        else:
            must(
                source.at_head, f"{source.id} is inside a body and gives void {worker.id} its state"
            )

    # ------------------------------------------------------------------ the commands

    def command(self, command: Command, by: SimController) -> None:
        match command:
            case m.StartWorker(worker=worker):
                must(worker not in self.started, f"identity {worker} is used again")
                self.started.add(worker)
            case m.ClaimGeneration(generation=generation):
                must(self.claims.get(generation) is not by, f"{generation} claimed twice by one")
            case m.FormGeneration(worker=worker, membership=membership):
                self.formation(worker, membership, by)
            case m.EvictWorker(worker=worker, reason=reason):
                self.eviction(worker, reason, by)
            case m.ReleaseWorker(worker=worker):
                by.dismissed.add(worker)
            case m.FinishRun():
                self.finished(command, by)
            case m.FailRun():
                self.run_failed(command, by)

    def formation(self, worker: str, membership: Membership, by: SimController) -> None:
        generation = membership.generation
        must(self.claims.get(generation) is by, f"{generation} announced without its claim")
        must(
            worker not in by.buried,
            f"{worker} is known to be lost, and gets a seat in {generation}",
        )
        must(worker not in by.dismissed, f"{worker} was dismissed, and gets a seat in {generation}")
        if generation in self.memberships:
            must(self.memberships[generation] == membership, f"two memberships of {generation}")
            return
        self.memberships[generation] = membership
        seats = membership.seats
        dealt = [v for seat in seats for v in range(seat.first, seat.last)]
        must(dealt == list(range(self.world.rules.virtual_workers)), f"dealt {dealt}")
        sizes = {seat.last - seat.first for seat in seats}
        must(max(sizes) - min(sizes) <= 1, f"unbalanced: {sizes}")
        whole = [seat for seat in seats if seat.whole]
        if whole:
            top = max(seat.place for seat in whole)
            source = seats[membership.rank(membership.source)]
            must(source.whole and source.place == top, f"{source} is the source, {top} exists")
            must(self.world.workers[source.worker].whole, f"{source} holds no state")
            must(top.step - min(s.place.step for s in whole) <= 1, f"places too far apart: {whole}")
            known = (
                {seat.worker for seat in self.seats(by.generations[-1])}
                if by.generations
                else set()
            )
            ahead = [
                w.id
                for w in self.world.workers.values()
                if w.id in known
                and w.alive
                and w.whole
                and w.place > top
                and w.phase == "wait"
                and w.id in by.spoken
                and w.id not in by.dismissed
            ]
            must(not ahead, f"{ahead} are ahead of {top} and have no seat")
        at_head = self.world.workers[membership.source].at_head
        if not by.stopping and at_head:
            least = min(by.coordinator.rules.min_workers, by.size)
            must(len(seats) >= least, f"{len(seats)} members, at least {least} wanted")
        must(len(seats) <= max(by.size + 1, 1), f"{len(seats)} members, size {by.size}")
        ranks = [seat.worker for seat in seats]
        if by.generations:
            old = [
                s.worker for s in self.seats(by.generations[-1]) if s.worker in ranks and s.whole
            ]
            must([w for w in ranks if w in old] == old, f"ranks changed order: {old} -> {ranks}")
        by.generations.append(generation)
        members = frozenset(ranks)
        if by.failed_sets[-2:] == [members, members] and len(members) > 1:
            must(False, f"{sorted(members)} failed to form twice and is tried again")

    def eviction(self, worker: str, reason: str, by: SimController) -> None:
        by.dismissed.add(worker)
        if not reason.startswith("silent"):
            return
        now, timeout = self.world.now, self.world.rules.heartbeat_timeout_s
        must(
            now - by.heard.get(worker, by.born) >= timeout - 1e-6,
            f"{worker} was heard, and evicted",
        )
        waiting = [e for e in by.inbox if isinstance(e, m.WorkerHeard) and e.worker == worker]
        must(not waiting, f"{worker} evicted while its heartbeats wait to be read")
        generation = by.coordinator.generation
        if worker in {s.worker for s in self.seats(generation)}:
            spoken = (
                worker in by.spoken
            )  # it is out already, and who makes steps does so without it
            stepped = spoken or now - by.stepped_at.get(generation, -1e9) >= timeout - 1e-6
            must(stepped, f"{worker} evicted though its generation makes steps")

    def seats(self, generation: int) -> tuple[m.Seat, ...]:
        membership = self.memberships.get(generation)
        return membership.seats if membership else ()

    def finished(self, command: m.FinishRun, by: SimController) -> None:
        if self.finish is not None:  # the record is create-only, the first counts
            must(by is not self.finished_by, "finished twice")
            return
        self.finish, self.finished_by = command, by
        if command.place.step == 0 and command.digest == "":
            holders = [w.id for w in self.world.workers.values() if w.alive and w.whole]
            holders = [w for w in holders if w not in self.dismissed]
            must(not holders, f"finished at step 0, but {holders} hold a state")
            return
        must(command.place.ended == 1, f"finished at {command.place}")
        must(command.digest == self.states.get(command.place.step), "finished with other weights")
        must(not command.digests_differ, "weights differ")
        last = max(self.states)
        must(command.place.step == last, f"finished at {command.place}, but step {last} was made")

    def run_failed(self, command: m.FailRun, by: SimController) -> None:
        if self.failure is not None or self.finish is not None:  # the first record counts
            return
        self.failure = command
        if "is lost" in command.error:
            holders = [
                w.id
                for w in self.world.workers.values()
                if w.alive
                and w.whole
                and w.id not in by.dismissed
                and w.id not in by.buried
                and w.id not in by.drained
            ]
            must(not holders, f"given up, but {holders} hold the state")

    def end(self) -> None:
        """The run is over: nobody who finished ended elsewhere."""
        if self.finish is not None:
            for worker in self.world.workers.values():
                if worker.alive and worker.finished and worker.id not in self.dismissed:
                    must(worker.place == self.finish.place, f"{worker.id} ended at {worker.place}")


class Watched:
    """One coordinator, with what may be said about its single answers."""

    def __init__(self, coordinator: Any, rng: Any) -> None:
        self.coordinator, self.rng = coordinator, rng

    def handle(self, event: Event, now: float) -> list[Command]:
        coordinator = self.coordinator
        out: list[Command] = []
        if coordinator.phase == "over" and isinstance(event, m.DeadlineReached | m.WorkerHeard):
            return coordinator.handle(event, now)  # type: ignore[no-any-return]
        waiting = coordinator._staff.liveness.waiting
        doubt = coordinator._leadership
        sure = doubt.held is None and not doubt.fell_quiet(now, waiting)
        waits = coordinator.deadline is None or now < coordinator.deadline
        if sure and waits and self.stale(event) and self.rng.random() < 0.3:
            coordinator._ring(now)  # whatever is due for any event
            coordinator._proceed(now)
            out += coordinator._run.flush()
            if self.stale(event) and coordinator.phase != "over":
                self.changes_nothing(event, now, "stale")
            return out
        deadline = coordinator.deadline
        if self.rng.random() < 0.005 and deadline is not None and now < deadline:
            self.changes_nothing(m.DeadlineReached(), now, "early")
        over = coordinator.phase == "over"
        bystander = self.bystander(event)
        size = len(coordinator.workers)
        answers: list[Command] = coordinator.handle(event, now)
        if bystander and not any(isinstance(c, m.EvictWorker) for c in answers):
            aborts = [c for c in answers if isinstance(c, m.AbortGeneration)]
            must(not aborts, f"the loss of bystander {event} broke {coordinator.generation}")
        if over:
            must(all(isinstance(c, m.EvictWorker) for c in answers), f"after the end: {answers}")
        told = [c for c in answers if not isinstance(c, m.Explain | m.StartWorker)]
        size = max(size, len(coordinator.workers))
        must(len(told) <= 3 * size + 6 or not sure, f"{len(told)} commands for {event}")
        return out + answers

    def stale(self, event: Event) -> bool:
        match event:
            case m.WorkerStopped(generation=g) | m.WorkerFinished(generation=g):
                return g < self.coordinator.generation
            case m.GenerationClaimed(generation=g):
                return g <= self.coordinator.generation
        return False

    def changes_nothing(self, event: Event, now: float, what: str) -> None:
        before = self.snapshot()
        answers = self.coordinator.handle(event, now)
        must(not answers, f"{what} {event} was answered: {answers}")
        must(self.snapshot() == before, f"{what} {event} changed something")

    def snapshot(self) -> bytes:
        return pickle.dumps(facts(self.coordinator))

    def bystander(self, event: Event) -> bool:
        if not isinstance(event, m.WorkerLost) or self.coordinator.phase != "running":
            return False
        membership = self.coordinator.membership
        return event.worker not in {seat.worker for seat in membership.seats}
