"""A cluster in a box: workers, network, claims, controllers and time, all drawn from one seed.

Two phases. In the first anything may happen: kills, silent deaths, freezes and thaws, one-way cuts,
late, doubled and reordered messages, drains, scaling, controllers that crash or freeze and thaw
beside their successor. Then faults stop and cuts heal, and the run must end within a bounded time.
What cannot be shown here: that a death is really reported, that an abort really frees a
communicator, that a claim is really create-only.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import FROM_WORKERS, Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Membership, Signature
from tests.simulation.checkers import Checkers, Violation, Watched
from tests.simulation.workers import Group, SimWorker


@dataclass(frozen=True)
class Weather:
    """What goes wrong in this run, and how often (weights; 0: never)."""

    steps: int
    slots: int  # workers the cluster has room for
    chaos_s: float  # how long anything may happen
    pause_s: float  # mean time between two faults
    slow_messages: float  # fraction that is late by seconds
    doubled: float
    compute_s: float
    body_s: float
    torn: float  # fraction of hand-overs that fail half-way
    commit_steps: int  # a checkpoint after every so many steps; 0: none
    kill: float
    silent_kill: float
    kill_source: float
    kill_joiner: float
    kill_all: float
    freeze: float
    cut: float
    cut_founder: float
    kill_ahead: float
    false_failure: float
    drain: float
    scale: float
    stop: float
    misfit: float
    user_error: float
    bad_pair: float
    crash_controller: float
    freeze_controller: float
    hang: float = 0.0
    flip: float = 0.0
    uneven: float = 0.0  # not 0: workers differ in speed, and it changes
    drain_all: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Weather:
        faults = {
            field.name: rng.choice((0.0, 0.0, 1.0, 3.0))
            for field in fields(cls)
            if field.name in FAULTS and field.default is MISSING
        }
        faults["kill_all"] *= rng.choice((0.02, 0.2))
        faults["stop"] *= 0.05
        faults["misfit"] = rng.choice((0.0, 0.0, 0.0, 0.3))
        return cls(
            steps=rng.randint(2, 24),
            slots=rng.randint(1, 7),
            chaos_s=rng.choice((5.0, 30.0, 60.0)),
            pause_s=rng.choice((0.3, 1.5, 5.0, 15.0)),
            slow_messages=rng.choice((0.0, 0.0, 0.05, 0.3)),
            doubled=rng.choice((0.0, 0.05, 0.3)),
            compute_s=rng.choice((0.1, 0.5, 2.0)),
            body_s=rng.choice((0.0, 0.0, 0.3, 8.0)),
            torn=rng.choice((0.0, 0.0, 0.2)),
            commit_steps=rng.choice((0, 0, 1, 5)),
            **{k: v for k, v in faults.items() if k != "misfit"},
            misfit=faults["misfit"],
        )

    def with_more(self, seed: int) -> Weather:
        """Faults of later days, from a generator of their own: most seeds' weather is as it was."""
        rng = random.Random(~seed)
        hang, flip = (rng.choice((0.0, 0.0, 0.0, 1.0)) for _ in range(2))
        uneven = rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
        drain_all = rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.3))
        return replace(self, hang=hang, flip=flip, uneven=uneven, drain_all=drain_all)


FAULTS = (
    "kill",
    "silent_kill",
    "kill_source",
    "kill_joiner",
    "kill_all",
    "freeze",
    "cut",
    "cut_founder",
    "kill_ahead",
    "false_failure",
    "drain",
    "scale",
    "stop",
    "user_error",
    "bad_pair",
    "crash_controller",
    "freeze_controller",
    "hang",
    "flip",
    "drain_all",
)
HANDING_OVER = ("give", "restore", "receive")
ENDLESS = (
    "give",
    "receive",
    "compute",
    "collective",
    "apply",
)  # phases in which a hang has to be found
LIVENESS_S = 900.0
SPEEDS_S = 40.0  # for so long a worker is as fast


class SimController:
    """One process that runs a coordinator; may be frozen, and then reads its inbox late."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.alive, self.frozen = True, False
        self.inbox: list[m.Event] = []
        self.born = world.now
        self.heard: dict[str, float] = {}
        self.stepped_at: dict[int, float] = {}
        self.steps: dict[int, int] = {}
        self.last_step: dict[str, int] = {}
        self.buried: set[str] = set()
        self.dismissed: set[str] = set()
        self.drained: set[str] = set()
        self.failed_sets: list[frozenset[str]] = []  # since the last step of anybody
        self.at_most: int | None = None  # it was told that nothing after this step counts
        self.spoken: set[str] = set()  # said that they stopped, in the newest generation
        self.generations: list[int] = []
        self.restorable: int | None = None  # what it was told last
        self.stopping = False
        self.dealt_at = -1e9  # when it last ended a generation for a better split
        self.replaced_at = -1e9  # when it last asked one to leave that was too slow
        self.measured_at: dict[str, float] = {}  # worker -> when it first told how fast it is
        self.size, self.least = world.size, min(world.least, world.size)
        self.alarm = 0
        self.coordinator: Any = None
        self.watched: Any = None

    def begin(self, recovering: bool) -> None:
        world, now = self.world, self.world.now
        if recovering:
            known = [w.id for w in world.workers.values() if w.alive]
            rules = world.rules_of(size=world.size, min_workers=world.least)
            highest = max(world.check.claims, default=0)
            self.coordinator, commands = world.make.recover(rules, known, highest, now)
        else:
            self.coordinator = world.make(world.rules_of(size=world.size, min_workers=world.least))
            commands = self.coordinator.start(now)
        if world.seed % 3 == 0:
            self.coordinator._leadership.at_once = 3  # a process has thousands, and we have few
        self.watched = Watched(self.coordinator, world.rng)
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
        if self.world.talk is not None:  # the longest_s part of many an event
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
            self.spoken.clear()
        self.execute(commands)

    def note(self, event: m.Event) -> None:
        match event:
            case m.HeartbeatReceived(worker=worker, generation=generation, step=step):
                self.heard[worker] = self.world.now
                if event.virtual_s:
                    self.measured_at.setdefault(worker, self.world.now)
                members = self.world.check.members(generation)
                begun = max((member.position.step for member in members), default=0)
                if self.world.check.goes_back(generation):
                    begun = max(self.world.commits)
                if generation not in self.steps:
                    ours = generation in self.generations
                    self.steps[generation] = begun if ours else max(begun, step)
                gone = self.dismissed | self.buried
                if step > self.steps[generation] and worker not in gone:
                    if (
                        self.last_step.get(worker, step) < step
                    ):  # it made one, and is not just ahead
                        self.stepped_at[generation] = self.world.now
                    self.steps[generation] = step
                self.last_step[worker] = step
            case m.WorkerLost(worker=worker):
                self.buried.add(worker)
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
                    self.spoken.add(worker)
                    known = worker in self.coordinator._generation.inside
                    if said is not None and known and self.at_most is None:
                        self.at_most = said.agreed
        if isinstance(event, FROM_WORKERS):
            self.heard[event.worker] = self.world.now

    def execute(self, commands: list[m.Command]) -> None:
        for command in commands:
            if self.world.talk is not None:
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


class World:
    def __init__(
        self,
        seed: int,
        make: type[Coordinator] = Coordinator,
        worker_class: type[SimWorker] = SimWorker,
        talk: Callable[[str], None] | None = None,
        climate: dict[str, float] | None = None,
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        # Where workers run, and whether joiners wait for others: in every second world.
        self.land = random.Random(f"land of {seed}") if seed % 2 else None
        self.make, self.worker_class, self.talk = make, worker_class, talk
        self.weather = replace(Weather.drawn(self.rng).with_more(seed), **(climate or {}))
        virtual = self.rng.choice((1, 2, 4, 5, 8))
        size = self.rng.randint(1, min(virtual, 5))
        self.rules = CoordinatorConfig(
            min_workers=1
            if self.weather.misfit  # who does not fit may leave too few
            else self.rng.randint(1, min(size, self.weather.slots)),
            size=size,
            standby=self.rng.choice((0, 0, 1)),
            virtual_workers=virtual,
            heartbeat_timeout_s=self.rng.choice((3.0, 5.0)),
            lease_s=self.rng.choice((2.5, 6.0, 12.0)),
            forming_timeout_s=4.0,
            gather_timeout_s=4.0,
            release_timeout_s=5.0,
            drain_margin_s=3.0,
            source_timeout_s=10.0,
            steps_ahead=self.rng.choice((0, 1, 2)),
            hang_timeout_s=30.0,
            slow_s=8.0,
            max_losses_without_progress=1000,
            max_losses_of_micro_batch=1000,
            max_out_of_memory=1000,
            max_user_errors=1000,
            stabilization_s=self.land.choice((0.0, 2.0, 5.0)) if self.land else 0.0,
            min_on_demand=self.land.choice((0, 0, 1, 2)) if self.land else 0,
            checkpointing=self.weather.commit_steps > 0,
        )
        self.size, self.least, self.steps = size, self.rules.min_workers, self.weather.steps
        self.now, self.counter = 0.0, 0
        self.queue: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.workers: dict[str, SimWorker] = {}
        self.pending: list[str] = []
        self.cancelled: set[str] = set()
        self.groups: dict[int, Group] = {}
        self.commits: dict[int, str] = {}  # step -> the state after it
        self.rejected = -1  # what those made who began in this generation or before is wrong
        self.bad_pairs: set[frozenset[str]] = set()
        self.calm = False
        self.stop_asked = False
        self.check = Checkers(self)
        self.controllers: list[SimController] = []

    # ---------------------------------------------------------------------- driving

    def run(self) -> Checkers:
        self.new_controller(recovering=False)
        self.at(self.rng.uniform(0, 2 * self.weather.pause_s), self.fault)
        self.run_until(self.weather.chaos_s)
        self.calm_down()
        self.run_until(self.now + LIVENESS_S)
        if not self.over:
            raise Violation(
                f"no end within {LIVENESS_S:g} s after the faults stopped\n{self.picture()}"
            )
        self.run_until(self.now + 3.0, even_if_over=True)
        self.check.end()
        return self.check

    @property
    def over(self) -> bool:
        return self.check.finish is not None or self.check.failure is not None

    def run_until(self, end: float, even_if_over: bool = False) -> None:
        while self.queue and self.queue[0][0] <= end and (even_if_over or not self.over):
            self.now, _, function, args = heapq.heappop(self.queue)
            function(*args)

    def at(self, delay: float, function: Any, *args: Any) -> None:
        self.counter += 1
        heapq.heappush(self.queue, (self.now + delay, self.counter, function, args))

    def position(self) -> m.WorkerLocation:
        """Of a new worker: nodes have room for several, and some are of the spot market."""
        if self.land is None:
            return m.UNKNOWN_LOCATION
        number = self.land.randrange(4)
        return m.WorkerLocation(f"n{number}", spot=number % 2 == 1)

    def trace(self, line: str) -> None:
        if self.talk is not None:
            self.talk(f"{self.now:9.3f} {line}")

    def picture(self) -> str:
        lines = []
        for c in self.controllers:
            if c.alive:
                k = c.coordinator
                lines.append(
                    f"  c{c.number} frozen={c.frozen} {k.phase} generation={k.generation} "
                    f"size={k.size} deadline={k.deadline} {k.workers}\n     {k.reason}"
                )
        lines += [
            f"  {w.id} {w.phase} generation={w.generation} inside={w.inside} "
            f"place={tuple(w.position)} "
            f"whole={w.has_state} ended={w.ended}"
            for w in self.workers.values()
            if w.alive
        ]
        return "\n".join(lines)

    # ------------------------------------------------------------------ the network

    def delay(self) -> float:
        if self.rng.random() < self.weather.slow_messages and not self.calm:
            return self.rng.uniform(0.0, self.rng.choice((4.0, 4.0, 15.0)))
        return self.rng.uniform(0.0, 0.02)

    def copies(self) -> int:
        return 2 if self.rng.random() < self.weather.doubled else 1

    def to_controller(self, worker: SimWorker, event: m.Event) -> None:
        if not worker.up_cut:
            for _ in range(self.copies()):
                self.at(self.delay(), self.post, event)

    def post(self, event: m.Event) -> None:
        """To whoever has the controller's name now."""
        self.controllers[-1].deliver(event)

    def to_worker(self, worker_id: str, command: m.Command) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and not worker.down_cut:
            for _ in range(self.copies()):
                self.at(self.delay(), worker.run_unless_gone, worker.receive, (command,))

    def execute(self, command: m.Command, by: SimController) -> None:
        match command:
            case m.StartWorker(worker=worker):
                self.pending.append(worker)
                self.at(self.rng.choice((0.1, 0.5, 3.0)), self.place_pending)
            case m.EvictWorker(worker=worker):
                self.evict(worker)
            case m.ReleaseWorker(worker=worker) if worker in self.pending:
                self.pending.remove(worker)
                self.at(0.01, self.post, m.WorkerLost(worker, "was never placed"))
            case m.ClaimGeneration(generation=generation):
                self.at(self.rng.choice((0.01, 0.01, 2.0)), self.claim, generation, by)
            case m.FindCheckpoint(at_most=at_most):
                delay = self.rng.choice((0.01, 0.01, 2.0))
                self.at(delay, self.find_checkpoint, by, at_most)
            case m.StandDown():
                by.alive = False
                if self.controllers[-1] is by:  # somebody has to lead
                    self.at(self.rng.uniform(1.0, 5.0), self.replace_controller, by)
            case m.FinishRun() | m.FailRun() | m.Explain():
                pass
            case m.FormGeneration(membership=membership):
                for member in membership.members:
                    self.to_worker(member.worker, command)
            case _:
                self.to_worker(command.worker, command)

    def claim(self, generation: int, by: SimController) -> None:
        owner = self.check.claims.setdefault(generation, by)
        mine = owner is by
        answer = m.GenerationClaimed(generation) if mine else m.GenerationClaimLost(generation)
        self.at(self.rng.choice((0.01, 0.5)), by.deliver, answer)

    def find_checkpoint(self, by: SimController, at_most: int | None) -> None:
        newest = max(self.check.claims, default=0)
        if at_most is not None and self.check.claims[newest] is by:  # else only for itself
            self.commits = {step: state for step, state in self.commits.items() if step <= at_most}
            self.rejected = by.coordinator.generation
        found = m.CheckpointFound(max(self.commits, default=None))
        self.at(self.rng.choice((0.0, 0.5)), by.deliver, found)

    # ------------------------------------------------------------------ the cluster

    def place_pending(self) -> None:
        running = sum(worker.alive for worker in self.workers.values())
        while self.pending and running < self.weather.slots:
            worker = self.worker_class(self, self.pending.pop(0))
            self.workers[worker.id] = worker
            running += 1
            worker.later(self.rng.choice((0.0, 1.0)), worker.start)

    def kill(self, worker: SimWorker, reason: str, notice_s: float | None = None) -> None:
        if not worker.alive:
            return
        self.trace(f"== {worker.id} dies: {reason}")
        worker.alive = worker.inside = False
        if worker.group is not None:
            worker.group.reset_by(worker)
        if notice_s is None:
            notice_s = self.rng.choice((0.01, 0.01, 0.5))
        at = (worker.step + 1, 0) if worker.phase == "compute" else None
        causes = m.Cause.UNKNOWN, m.Cause.PREEMPTED, m.Cause.OUT_OF_MEMORY
        cause = self.rng.choice(causes)
        if self.rng.random() < 0.3:  # the connection tells it first, and why comes later
            self.at(notice_s, self.post, m.WorkerLost(worker.id, reason, micro_batch=at))
            notice_s += self.rng.choice((0.01, 1.0, 5.0))
        self.at(notice_s, self.post, m.WorkerLost(worker.id, reason, cause, at))
        self.at(notice_s + 0.1, self.place_pending)

    def evict(self, worker_id: str) -> None:
        if worker_id in self.pending:
            self.pending.remove(worker_id)
            self.at(0.01, self.post, m.WorkerLost(worker_id, "was never placed"))
        worker = self.workers.get(worker_id)
        if worker is None or not worker.alive:
            return
        unreachable = worker.down_cut or (worker.frozen and self.rng.random() < 0.7)
        if not unreachable:
            self.at(self.rng.uniform(0.0, 0.3), self.kill, worker, "evicted")

    def snapshot(self, worker: SimWorker) -> bool:
        """At the head of the loop, if one is due. Committed while training goes on, if this worker
        lives so long."""
        every = self.weather.commit_steps
        due = bool(every and worker.step and (worker.keep_wanted or worker.step % every == 0))
        if due:
            worker.keep_wanted = False
            delay = self.rng.choice((0.1, 2.0, 10.0))
            worker.later(delay, self.commit, worker.step, worker.state, worker.lineage_id)
        return due

    def commit(self, step: int, state: str, lineage_id: int) -> None:
        """Create-only, by whoever has the controller's name."""
        if self.controllers[-1].alive and lineage_id > self.rejected:
            if step not in self.commits:
                self.trace(f"== committed {step}")
                self.commits[step] = state
            self.at(0.01, self.post, m.CheckpointCommitted(step))

    def group_of(self, membership: Membership) -> Group:
        group = self.groups.get(membership.generation)
        if group is None:
            group = self.groups[membership.generation] = Group(self, membership)
        return group

    def any_bad_pair(self, members: Iterable[str]) -> bool:
        members = set(members)
        return any(pair <= members for pair in self.bad_pairs)

    def rules_of(self, **changes: Any) -> CoordinatorConfig:
        values = {
            field.name: getattr(self.rules, field.name) for field in fields(CoordinatorConfig)
        } | changes
        values["min_workers"] = min(values["min_workers"], values["size"])
        return CoordinatorConfig(**values)

    def signature(self, worker: str) -> Signature:
        number = sum(worker.encode())
        misfit = (
            number % 3 == 0 and random.Random(self.seed + number).random() < self.weather.misfit
        )
        return Signature("layout", "data", "other kind" if misfit else "kind")

    def build_time(self) -> float:
        return self.rng.choice((0.1, 1.0, 4.0))

    def transfer_time(self) -> float:
        return self.rng.choice((0.05, 0.5, 2.5))

    def compute_time(self) -> float:
        return self.rng.uniform(0.5, 1.5) * self.weather.compute_s

    def virtual_time(self, worker: str) -> float:
        """Relative: of one virtual worker on this one, now."""
        rng = random.Random(f"speed of {worker} in {self.seed} at {self.now // SPEEDS_S}")
        return rng.choice((1.0, 1.0, 1.5, 2.0, 4.0)) / self.rules.virtual_workers

    def body_time(self) -> float:
        return self.rng.uniform(0.0, 1.0) * self.weather.body_s

    # ------------------------------------------------------------------ controllers

    def new_controller(self, recovering: bool) -> None:
        controller = SimController(self, len(self.controllers) + 1)
        self.controllers.append(controller)
        controller.begin(recovering)
        if recovering:
            for worker in self.workers.values():
                if worker.alive and worker.node_deadline < float("inf"):
                    self.post(m.DrainNoticed(worker.id, worker.node_deadline))
            if self.stop_asked:
                self.post(m.StopRequested("asked"))

    def replace_controller(self, old: SimController) -> None:
        if self.controllers[-1] is old and not self.over:
            self.new_controller(recovering=True)

    # ----------------------------------------------------------------------- faults

    def fault(self) -> None:
        if self.calm:
            return
        weights = [getattr(self.weather, name) for name in FAULTS]
        if sum(weights):
            name = self.rng.choices(FAULTS, weights)[0]
            alive = [worker for worker in self.workers.values() if worker.alive]
            self.trace(f"== fault {name}")
            if self.counter % 4 == 0:
                self.post(m.CheckpointRequested())
            getattr(self, f"fault_{name}")(alive)
            self.at(self.rng.expovariate(1 / self.weather.pause_s), self.fault)

    def one(self, workers: list[SimWorker]) -> list[SimWorker]:
        return [self.rng.choice(workers)] if workers else []

    def fault_kill(self, alive: list[SimWorker]) -> None:
        for worker in self.one(alive):
            self.kill(worker, "killed")

    def fault_silent_kill(self, alive: list[SimWorker]) -> None:
        for worker in self.one(alive):
            self.kill(worker, "node gone", notice_s=self.rng.uniform(5.0, 40.0))

    def fault_kill_source(self, alive: list[SimWorker]) -> None:
        """In the middle of a hand-over."""
        for worker in self.one([w for w in alive if w.phase in HANDING_OVER]):
            assert worker.group is not None
            self.kill(self.workers[worker.group.membership.source], "killed as the source")

    def fault_kill_joiner(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if not w.has_state]):
            self.kill(worker, "killed before it was whole")

    def fault_kill_all(self, alive: list[SimWorker]) -> None:
        for worker in alive:
            self.kill(worker, "all killed")

    def fault_freeze(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if not w.frozen]):
            worker.frozen = True
            self.at(self.rng.choice((1.0, 4.0, 12.0, 40.0)), self.thaw, worker)

    def fault_hang(self, alive: list[SimWorker]) -> None:
        """Its heartbeats go on. For ever, where it can be told from what users may take as long as
        they like for."""
        for worker in self.one([w for w in alive if not w.frozen and not w.hung]):
            worker.hung = True
            endless = worker.phase in ENDLESS and self.rng.random() < 0.7
            self.trace(f"== {worker.id} hangs in {worker.phase}")
            if not endless:
                self.at(self.rng.choice((1.0, 10.0, 40.0)), self.thaw, worker)

    def fault_flip(self, alive: list[SimWorker]) -> None:
        """Before the next header, in which it shows, unless the group ends before."""
        able = [w for w in alive if w.phase == "compute" and w.has_state and w.group is not None]
        for worker in self.one([w for w in able if w.group and len(w.group.ids) > 1]):
            self.trace(f"== a bit of {worker.id} flips")
            worker.state, worker.flipped = f"flipped {worker.state}", True

    def thaw(self, worker: SimWorker) -> None:
        if worker.frozen or worker.hung:
            self.trace(f"== {worker.id} thaws")
            worker.thaw()

    def fault_cut(self, alive: list[SimWorker]) -> None:
        for worker in self.one(alive):
            up, down = self.rng.choice(((True, False), (False, True), (True, True)))
            worker.up_cut, worker.down_cut, worker.was_cut = up, down, True
            self.trace(f"== {worker.id} cut up={up} down={down}")
            self.at(self.rng.choice((1.0, 5.0, 20.0)), self.heal, worker)

    def fault_cut_founder(self, alive: list[SimWorker]) -> None:
        """Out of sight just as it forms: it may train, and nobody knows."""
        forming = [w for w in alive if w.phase == "form" and not w.has_state]
        for worker in self.one(forming):
            worker.up_cut = worker.down_cut = worker.was_cut = True
            self.trace(f"== {worker.id} cut as it forms")
            self.at(self.rng.choice((20.0, 40.0)), self.heal, worker)

    def fault_kill_ahead(self, alive: list[SimWorker]) -> None:
        """One that is a step behind others loses a mate, and needs the step handed over."""
        steps = [worker.step for worker in alive if worker.has_state]
        behind = [w for w in alive if w.phase == "collective" and steps and w.step < max(steps)]
        for worker in self.one([w for w in alive if behind and w not in behind and w.has_state]):
            self.kill(worker, "killed while ahead")

    def heal(self, worker: SimWorker) -> None:
        worker.up_cut = worker.down_cut = False

    def fault_false_failure(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if w.phase in ("collective", "evaluate")]):
            if not worker.frozen and not worker.hung:
                worker.failed("a collective failed for no reason")

    def fault_drain(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if w.node_deadline == float("inf")]):
            notice_s = self.rng.choice((2.0, 10.0, 30.0))
            worker.node_deadline = self.now + notice_s
            told = None if self.rng.random() < 0.1 else worker.node_deadline
            self.at(0.1, self.post, m.DrainNoticed(worker.id, told))
            self.at(notice_s, self.kill, worker, "its node went away")

    def fault_drain_all(self, alive: list[SimWorker]) -> None:
        for worker in alive:
            self.fault_drain([worker])

    def fault_scale(self, alive: list[SimWorker]) -> None:
        size = self.rng.randint(1, self.rules.virtual_workers)
        if size < self.rules.min_workers or self.rng.random() < 0.05:
            size = self.rng.choice((self.rules.virtual_workers + 1, size))
        least = None
        if self.land and not self.weather.misfit:
            least = self.land.choice((None, self.land.randint(0, self.weather.slots)))
        if self.may_be_scaled(size, least):
            self.size, self.least = size, self.least if least is None else least
        controller = self.controllers[-1]
        if controller.alive and not controller.frozen:
            controller.deliver(m.SizeRequested(size, least))

    def may_be_scaled(self, size: int, least: int | None) -> bool:
        return 1 <= size <= self.rules.virtual_workers and (least is None or 1 <= least <= size)

    def fault_stop(self, alive: list[SimWorker]) -> None:
        self.stop_asked = True
        self.post(m.StopRequested("asked"))

    def fault_user_error(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if w.runs_user_code and not w.frozen]):
            worker.raises()

    def fault_bad_pair(self, alive: list[SimWorker]) -> None:
        if len(alive) >= 2:
            pair = frozenset(worker.id for worker in self.rng.sample(alive, 2))
            self.bad_pairs.add(pair)
            self.at(self.rng.choice((3.0, 20.0)), self.bad_pairs.discard, pair)

    def fault_crash_controller(self, alive: list[SimWorker]) -> None:
        controller = self.controllers[-1]
        controller.alive = False
        self.at(self.rng.choice((0.1, 2.0, 15.0)), self.replace_controller, controller)

    def fault_freeze_controller(self, alive: list[SimWorker]) -> None:
        controller = self.controllers[-1]
        if not controller.alive or controller.frozen:
            return
        controller.frozen = True
        if self.rng.random() < 0.5:  # taken for dead: a second one leads, and the first comes back
            self.at(self.rng.uniform(0.5, 6.0), self.replace_controller, controller)
        self.at(self.rng.uniform(0.5, 20.0), controller.thaw)

    def calm_down(self) -> None:
        self.trace("== the faults stop")
        self.calm = True
        self.bad_pairs.clear()
        for worker in self.workers.values():
            self.heal(worker)
            if worker.alive and not (worker.hung and worker.phase in ENDLESS):
                self.thaw(worker)
        for controller in self.controllers:
            if controller.frozen:
                controller.thaw()
        if not self.controllers[-1].alive:
            self.replace_controller(self.controllers[-1])
        self.at(1.0, self.place_pending)
