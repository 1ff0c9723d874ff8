"""Invariants of one coordinator: what each single event may and may not make it do."""

from __future__ import annotations

import pickle
import re
from typing import Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Command, Event, Membership
from tests.coordinator.scenarios import facts
from tests.simulation.invariants import Violation, must


class CoordinatorInvariants:
    """Wraps a coordinator and checks its answer to each event."""

    def __init__(self, coordinator: Any, rng: Any) -> None:
        self.coordinator, self.rng = coordinator, rng
        self.joined_at = -1e9  # when it last formed a generation for joiners, too

    def handle(self, event: Event, now: float) -> list[Command]:
        coordinator = self.coordinator
        out: list[Command] = []
        if coordinator.phase == "over" and isinstance(
            event, m.DeadlineReached | m.HeartbeatReceived
        ):
            return coordinator.handle(event, now)  # type: ignore[no-any-return]
        waiting = coordinator._registry.failure_detector.watches_any
        doubt = coordinator._leadership
        sure = doubt.deferred is None and not doubt.fell_quiet(now, waiting)
        waits = coordinator.deadline is None or now < coordinator.deadline
        if sure and waits and self.stale(event) and self.rng.random() < 0.3:
            coordinator._fire_timers(now)  # whatever is due for any event
            coordinator._advance_phase(now)
            out += coordinator._run.flush()
            if self.stale(event) and coordinator.phase != "over":
                self.changes_nothing(event, now, "stale")
            return out
        deadline = coordinator.deadline
        if self.rng.random() < 0.005 and deadline is not None and now < deadline:
            self.changes_nothing(m.DeadlineReached(), now, "early")
        over = coordinator.phase == "over"
        bystander = sure and self.bystander(event)  # else what was held is taken with it
        size = len(coordinator._registry.workers)
        phase, members = (
            coordinator.phase,
            coordinator.membership and coordinator.membership.members,
        )
        answers: list[Command] = coordinator.handle(event, now)
        if phase == "running" and coordinator.phase == "ending" and sure:
            self.join_is_due(len(members), now)
        for command in answers:
            if isinstance(command, m.FormGeneration):
                self.note_join(command.membership, now)
        if coordinator.phase == "running" and sure:
            self.no_wait_is_endless(now)
        if bystander and not any(isinstance(c, m.EvictWorker) for c in answers):
            aborts = [c for c in answers if isinstance(c, m.AbortGeneration)]
            must(not aborts, f"the loss of bystander {event} broke {coordinator.generation}")
        if over:
            must(all(isinstance(c, m.EvictWorker) for c in answers), f"after the end: {answers}")
        told = [c for c in answers if not isinstance(c, m.Explain | m.StartWorker)]
        size = max(size, len(coordinator._registry.workers))
        if len(told) > 3 * size + 6 and sure:
            raise Violation(f"{len(told)} commands for {event}")
        return out + answers

    def note_join(self, membership: Membership, now: float) -> None:
        if {member.has_state for member in membership.members} == {True, False}:
            self.joined_at = now

    def join_is_due(self, present: int, now: float) -> None:
        """A burst makes one change, or two: who comes soon after a join waits for others, but not
        for long."""
        joining = re.search(r"(\d+) workers? joins?$", self.coordinator.reason)
        patience_s = self.coordinator.config.stabilization_s
        if joining is None or not patience_s or present + int(joining[1]) >= self.coordinator.size:
            return
        waited = now >= self.coordinator._registry.ready_since + patience_s - 1e-6
        must(waited or now >= self.joined_at + patience_s - 1e-6, "joins follow each other at once")
        building = "building" in self.coordinator.workers.values()
        must(waited or not building, "a worker joins while another is about to be ready")

    def no_wait_is_endless(self, now: float) -> None:
        """Who is ready joins, unless the run is about to end."""
        coordinator, config = self.coordinator, self.coordinator.config
        generation, registry = coordinator._generation, coordinator._registry
        ends = coordinator._run.stop is not None or len(generation.not_finished) < len(
            generation.members
        )
        if ends or not registry.ready or len(generation.members) >= coordinator.size:
            return
        until = registry.ready_since + config.join_window_s + config.stabilization_s
        must(
            now < until + 1e-6,
            f"{list(registry.ready)} wait since {registry.ready_since}, free places",
        )

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
        return event.worker not in {member.worker for member in membership.members}
