"""A simulated cluster: workers, network, claims, controllers and time, all drawn from one seed.

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
from dataclasses import fields, replace
from typing import Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Membership, Signature
from tests.simulation.fault_profile import FaultProfile
from tests.simulation.faults import ENDLESS, FaultInjector
from tests.simulation.group import Group
from tests.simulation.invariants import Invariants, Violation
from tests.simulation.sim_controller import SimController
from tests.simulation.workers import SimWorker

LIVENESS_S = 900.0
SPEEDS_S = 40.0  # for so long a worker is as fast


class World:
    def __init__(
        self,
        seed: int,
        make: type[Coordinator] = Coordinator,
        worker_class: type[SimWorker] = SimWorker,
        trace_to: Callable[[str], None] | None = None,
        faults: dict[str, float] | None = None,
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        # Draws where workers run, and whether joiners wait for others, in every second world.
        self.location_rng = random.Random(f"land of {seed}") if seed % 2 else None
        self.make, self.worker_class, self.trace_to = make, worker_class, trace_to
        self.profile = replace(FaultProfile.drawn(self.rng).with_more(seed), **(faults or {}))
        virtual = self.rng.choice((1, 2, 4, 5, 8))
        size = self.rng.randint(1, min(virtual, 5))
        self.config = CoordinatorConfig(
            min_workers=1
            if self.profile.misfit  # who does not fit may leave too few
            else self.rng.randint(1, min(size, self.profile.slots)),
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
            max_losses_without_progress=1000,
            max_losses_of_micro_batch=1000,
            max_out_of_memory=1000,
            max_user_errors=1000,
            stabilization_s=self.location_rng.choice((0.0, 2.0, 5.0)) if self.location_rng else 0.0,
            checkpointing=self.profile.commit_steps > 0,
        )
        self.size, self.least, self.steps = size, self.config.min_workers, self.profile.steps
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
        self.check = Invariants(self)
        self.injector = FaultInjector(self)
        self.controllers: list[SimController] = []

    # ---------------------------------------------------------------------- driving

    def run(self) -> Invariants:
        self.new_controller(recovering=False)
        self.at(self.rng.uniform(0, 2 * self.profile.pause_s), self.injector.inject)
        self.run_until(self.profile.chaos_s)
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

    def new_location(self) -> m.WorkerLocation:
        """The location of a new worker. Nodes have room for several, and some are spot nodes."""
        if self.location_rng is None:
            return m.UNKNOWN_LOCATION
        number = self.location_rng.randrange(4)
        return m.WorkerLocation(f"n{number}", spot=number % 2 == 1)

    def trace(self, line: str) -> None:
        if self.trace_to is not None:
            self.trace_to(f"{self.now:9.3f} {line}")

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
            f"has_state={w.has_state} ended={w.ended}"
            for w in self.workers.values()
            if w.alive
        ]
        return "\n".join(lines)

    # ------------------------------------------------------------------ the network

    def delay(self) -> float:
        if self.rng.random() < self.profile.slow_messages and not self.calm:
            return self.rng.uniform(0.0, self.rng.choice((4.0, 4.0, 15.0)))
        return self.rng.uniform(0.0, 0.02)

    def copies(self) -> int:
        return 2 if self.rng.random() < self.profile.doubled else 1

    def to_controller(self, worker: SimWorker, event: m.Event) -> None:
        if not worker.up_cut:
            for _ in range(self.copies()):
                self.at(self.delay(), self.post, event)

    def post(self, event: m.Event) -> None:
        """Send `event` to the controller that leads now."""
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
            case m.AvoidNode(worker=worker):
                by.drained.add(worker)  # only who is about to leave
            case m.FinishRun() | m.FailRun() | m.Explain() | m.PrepareGroup():
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
        while self.pending and running < self.profile.slots:
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
        every = self.profile.commit_steps
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

    def config_of(self, **changes: Any) -> CoordinatorConfig:
        values = {
            field.name: getattr(self.config, field.name) for field in fields(CoordinatorConfig)
        } | changes
        values["min_workers"] = min(values["min_workers"], values["size"])
        return CoordinatorConfig(**values)

    def signature(self, worker: str) -> Signature:
        number = sum(worker.encode())
        misfit = (
            number % 3 == 0 and random.Random(self.seed + number).random() < self.profile.misfit
        )
        return Signature("layout", "data", "other kind" if misfit else "kind")

    def build_time(self) -> float:
        return self.rng.choice((0.1, 1.0, 4.0))

    def transfer_time(self) -> float:
        return self.rng.choice((0.05, 0.5, 2.5))

    def compute_time(self) -> float:
        return self.rng.uniform(0.5, 1.5) * self.profile.compute_s

    def virtual_time(self, worker: str) -> float:
        """Relative: of one virtual worker on this one, now."""
        rng = random.Random(f"speed of {worker} in {self.seed} at {self.now // SPEEDS_S}")
        return rng.choice((1.0, 1.0, 1.5, 2.0, 4.0)) / self.config.virtual_workers

    def body_time(self) -> float:
        return self.rng.uniform(0.0, 1.0) * self.profile.body_s

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

    def may_be_scaled(self, size: int, least: int | None) -> bool:
        return 1 <= size <= self.config.virtual_workers and (least is None or 1 <= least <= size)

    def calm_down(self) -> None:
        self.trace("== the faults stop")
        self.calm = True
        self.bad_pairs.clear()
        for worker in self.workers.values():
            self.injector.heal(worker)
            if worker.alive and not (worker.hung and worker.phase in ENDLESS):
                self.injector.thaw(worker)
        for controller in self.controllers:
            if controller.frozen:
                controller.thaw()
        if not self.controllers[-1].alive:
            self.replace_controller(self.controllers[-1])
        self.at(1.0, self.place_pending)
