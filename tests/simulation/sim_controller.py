"""A simulated controller: a process that runs a coordinator, and may freeze or crash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import FROM_WORKERS
from tests.simulation.coordinator_invariants import CoordinatorInvariants
from tests.simulation.invariants import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimController:
    """One process that runs a coordinator. While it is frozen, its inbox fills."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.alive, self.frozen = True, False
        self.inbox: list[m.Event] = []
        self.born = world.now
        self.heard: dict[str, float] = {}
        self.stepped_at: dict[int, float] = {}
        self.steps: dict[int, int] = {}
        self.last_step: dict[str, int] = {}
        self.lost: set[str] = set()
        self.removed: set[str] = set()
        self.drained: set[str] = set()
        self.failed_sets: list[frozenset[str]] = []  # since the last step of anybody
        self.at_most: int | None = None  # it was told that nothing after this step counts
        self.reported_stopped: set[str] = set()  # said that they stopped, in the newest generation
        self.left_previous: set[str] = set()  # said so in the generation before
        self.generations: list[int] = []
        self.restorable: int | None = None  # what it was told last
        self.stopping = False
        self.reassigned_at = -1e9  # when it last ended a generation for a better split
        self.size, self.least = world.size, min(world.least, world.size)
        self.alarm = 0
        self.coordinator: Any = None
        self.watched: Any = None

    def begin(self, recovering: bool) -> None:
        world, now = self.world, self.world.now
        if recovering:
            known = [w.id for w in world.workers.values() if w.alive]
            config = world.config_of(size=world.size, min_workers=world.least)
            highest = max(world.check.claims, default=0)
            self.coordinator, commands = world.make.recover(config, known, highest, now)
        else:
            self.coordinator = world.make(world.config_of(size=world.size, min_workers=world.least))
            commands = self.coordinator.start(now)
        if world.seed % 3 == 0:
            self.coordinator._leadership.at_once = 3  # a process has thousands, and we have few
        self.watched = CoordinatorInvariants(self.coordinator, world.rng)
        self.execute(commands)

    def deliver(self, event: m.Event) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.inbox.append(event)
        else:
            self.process(event)

    def process(self, event: m.Event) -> None:
        self.note(event)
        if self.world.trace_to is not None:  # the longest_s part of many an event
            self.world.trace(f"c{self.number} <- {event}")
        before, phase = self.coordinator.generation, self.coordinator.phase
        commands = self.watched.handle(event, self.world.now)
        followed = before != self.coordinator.generation  # within one event, if facts were held
        if phase == "forming" and (
            followed or self.coordinator.phase not in ("forming", "running", "over")
        ):
            self.failed_sets.append(frozenset(s.worker for s in self.world.check.members(before)))
        if self.coordinator._generation.formed and phase == "forming":
            self.failed_sets.clear()
        if followed:
            self.left_previous = set(self.reported_stopped)
            self.reported_stopped.clear()
        self.execute(commands)

    def note(self, event: m.Event) -> None:
        match event:
            case m.HeartbeatReceived(worker=worker, generation=generation, step=step):
                self.heard[worker] = self.world.now
                members = self.world.check.members(generation)
                begun = max((member.position.step for member in members), default=0)
                if self.world.check.goes_back(generation):
                    begun = max(self.world.commits)
                if generation not in self.steps:
                    ours = generation in self.generations
                    self.steps[generation] = begun if ours else max(begun, step)
                gone = self.removed | self.lost
                if step > self.steps[generation] and worker not in gone:
                    if (
                        self.last_step.get(worker, step) < step
                    ):  # it made one, and is not just ahead
                        self.stepped_at[generation] = self.world.now
                    self.steps[generation] = step
                self.last_step[worker] = step
            case m.WorkerLost(worker=worker):
                self.lost.add(worker)
            case m.DrainNoticed(worker=worker):
                self.drained.add(worker)
            case m.StopRequested():
                self.stopping = True
            case m.CheckpointFound(step=step):
                self.restorable = step
            case m.SizeRequested(size=size, min_workers=least):
                if self.world.may_be_scaled(size, least):
                    self.size, self.least = size, self.least if least is None else least
            case m.WorkerStopped(worker=worker, generation=generation, mismatch=said):
                if generation >= self.coordinator.generation:
                    self.reported_stopped.add(worker)
                    known = worker in self.coordinator._generation.inside
                    if said is not None and known and self.at_most is None:
                        self.at_most = said.agreed
        if isinstance(event, FROM_WORKERS):
            self.heard[event.worker] = self.world.now

    def execute(self, commands: list[m.Command]) -> None:
        for command in commands:
            if self.world.trace_to is not None:
                self.world.trace(f"c{self.number} -> {command}")
            if not self.alive:
                raise Violation(f"a controller that stood down says {command}")
            self.world.check.command(command, self)
            self.world.execute(command, self)
        deadline = self.coordinator.deadline
        self.alarm += 1
        if deadline is not None:
            late = self.world.rng.choice((0.0, 0.0, 0.05))
            self.world.at(max(0.0, deadline - self.world.now) + late, self.ring, self.alarm)

    def ring(self, alarm: int) -> None:
        if alarm == self.alarm and self.alive and not self.frozen:
            self.process(m.DeadlineReached())

    def thaw(self) -> None:
        """What waited is read at once, in order; the clock went on meanwhile."""
        self.frozen = False
        while self.inbox and self.alive and not self.frozen:
            self.process(self.inbox.pop(0))
        if self.alive and self.coordinator is not None:
            self.execute([])
