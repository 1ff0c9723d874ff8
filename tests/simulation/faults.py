"""The faults of a simulated run: one method for each kind, which picks its victims at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_dp.coordinator import messages as m
from tests.simulation.fault_profile import FAULTS
from tests.simulation.workers import SimWorker

if TYPE_CHECKING:
    from tests.simulation.sim_controller import SimController
    from tests.simulation.world import World

HANDING_OVER = ("give", "restore", "receive")
# Phases in which a hang must be found.
ENDLESS = ("give", "receive", "compute", "collective", "apply")


class FaultInjector:
    """Injects faults into a world until it is calm."""

    def __init__(self, world: World) -> None:
        self.world = world

    def inject(self) -> None:
        if self.world.calm:
            return
        weights = [getattr(self.world.profile, name) for name in FAULTS]
        if sum(weights):
            name = self.world.rng.choices(FAULTS, weights)[0]
            alive = [worker for worker in self.world.workers.values() if worker.alive]
            self.world.trace(f"== fault {name}")
            if self.world.counter % 4 == 0:
                self.world.post(m.CheckpointRequested())
            getattr(self, f"fault_{name}")(alive)
            self.world.at(self.world.rng.expovariate(1 / self.world.profile.pause_s), self.inject)

    def one(self, workers: list[SimWorker]) -> list[SimWorker]:
        return [self.world.rng.choice(workers)] if workers else []

    def fault_kill(self, alive: list[SimWorker]) -> None:
        for worker in self.one(alive):
            self.world.kill(worker, "killed")

    def fault_silent_kill(self, alive: list[SimWorker]) -> None:
        for worker in self.one(alive):
            self.world.kill(worker, "node gone", notice_s=self.world.rng.uniform(5.0, 40.0))

    def fault_kill_source(self, alive: list[SimWorker]) -> None:
        """Kill a source in the middle of a hand-over."""
        to_joiners = [w for w in alive if w.group is not None and not w.all_joined]
        for worker in self.one([w for w in alive if w.phase in HANDING_OVER] + to_joiners):
            assert worker.group is not None
            self.world.kill(
                self.world.workers[worker.group.membership.source], "killed as the source"
            )

    def fault_kill_joiner(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if not w.has_state]):
            self.world.kill(worker, "killed before it had the state")

    def fault_kill_all(self, alive: list[SimWorker]) -> None:
        for worker in alive:
            self.world.kill(worker, "all killed")

    def fault_freeze(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if not w.frozen]):
            worker.frozen = True
            self.world.at(self.world.rng.choice((1.0, 4.0, 12.0, 40.0)), self.thaw, worker)

    def fault_hang(self, alive: list[SimWorker]) -> None:
        """Hang one worker, whose heartbeats go on. In phases with a time limit it hangs forever."""
        for worker in self.one([w for w in alive if not w.frozen and not w.hung]):
            worker.hung = True
            endless = worker.phase in ENDLESS and self.world.rng.random() < 0.7
            self.world.trace(f"== {worker.id} hangs in {worker.phase}")
            if not endless:
                self.world.at(self.world.rng.choice((1.0, 10.0, 40.0)), self.thaw, worker)

    def fault_flip(self, alive: list[SimWorker]) -> None:
        """Flip a bit before the next header, in which it shows, unless the group ends before."""
        able = [w for w in alive if w.phase == "compute" and w.has_state and w.group is not None]
        for worker in self.one([w for w in able if w.group and w.group.compared > 1]):
            self.world.trace(f"== a bit of {worker.id} flips")
            worker.state, worker.flipped = f"flipped {worker.state}", True

    def thaw(self, worker: SimWorker) -> None:
        if worker.frozen or worker.hung:
            self.world.trace(f"== {worker.id} thaws")
            worker.thaw()

    def fault_cut(self, alive: list[SimWorker]) -> None:
        for worker in self.one(alive):
            up, down = self.world.rng.choice(((True, False), (False, True), (True, True)))
            worker.up_cut, worker.down_cut, worker.was_cut = up, down, True
            self.world.trace(f"== {worker.id} cut up={up} down={down}")
            self.world.at(self.world.rng.choice((1.0, 5.0, 20.0)), self.heal, worker)

    def fault_cut_initial_source(self, alive: list[SimWorker]) -> None:
        """Cut off an initial source as it forms: it may train, and the controller does not know."""
        forming = [w for w in alive if w.phase == "form" and not w.has_state]
        for worker in self.one(forming):
            worker.up_cut = worker.down_cut = worker.was_cut = True
            self.world.trace(f"== {worker.id} cut as it forms")
            self.world.at(self.world.rng.choice((20.0, 40.0)), self.heal, worker)

    def fault_kill_ahead(self, alive: list[SimWorker]) -> None:
        """Kill a member that is ahead: one that is a step behind needs the step handed over."""
        steps = [worker.step for worker in alive if worker.has_state]
        behind = [w for w in alive if w.phase == "collective" and steps and w.step < max(steps)]
        for worker in self.one([w for w in alive if behind and w not in behind and w.has_state]):
            self.world.kill(worker, "killed while ahead")

    def heal(self, worker: SimWorker) -> None:
        worker.up_cut = worker.down_cut = False

    def fault_false_failure(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if w.phase in ("collective", "evaluate")]):
            if not worker.frozen and not worker.hung:
                worker.failed("a collective failed for no reason")

    def fault_drain(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if w.node_deadline == float("inf")]):
            notice_s = self.world.rng.choice((2.0, 10.0, 30.0))
            worker.node_deadline = self.world.now + notice_s
            told = None if self.world.rng.random() < 0.1 else worker.node_deadline
            self.world.at(0.1, self.world.post, m.DrainNoticed(worker.id, told))
            self.world.at(notice_s, self.world.kill, worker, "its node went away")

    def fault_drain_all(self, alive: list[SimWorker]) -> None:
        for worker in alive:
            self.fault_drain([worker])

    def fault_drain_head(self, alive: list[SimWorker]) -> None:
        """Drain the head node. Mostly it stays; the next one follows at the deadline."""
        within_s = self.world.rng.choice((2.0, 10.0, 20.0, 20.0))
        told = None if self.world.rng.random() < 0.1 else self.world.now + within_s
        self.world.post(m.HeadDrainNoticed(told))
        if self.world.rng.random() < 0.5:
            self.world.at(within_s, self.lose_head, self.world.controllers[-1])

    def lose_head(self, controller: SimController) -> None:
        if self.world.controllers[-1] is controller and not self.world.calm:
            self.fault_crash_controller([])

    def fault_scale(self, alive: list[SimWorker]) -> None:
        size = self.world.rng.randint(1, self.world.config.virtual_workers)
        if size < self.world.config.min_workers or self.world.rng.random() < 0.05:
            size = self.world.rng.choice((self.world.config.virtual_workers + 1, size))
        least = None
        if self.world.location_rng and not self.world.profile.misfit:
            least = self.world.location_rng.choice(
                (None, self.world.location_rng.randint(0, self.world.profile.slots))
            )
        if self.world.may_be_scaled(size, least):
            self.world.size, self.world.least = size, self.world.least if least is None else least
        controller = self.world.controllers[-1]
        if controller.alive and not controller.frozen:
            controller.deliver(m.SizeRequested(size, least))
            if alive and size % 3:
                controller.deliver(m.WorkerSlow(alive[0].id, "data takes long"))

    def fault_stop(self, alive: list[SimWorker]) -> None:
        self.world.stop_asked = True
        self.world.post(m.StopRequested("asked"))

    def fault_user_error(self, alive: list[SimWorker]) -> None:
        for worker in self.one([w for w in alive if w.runs_user_code and not w.frozen]):
            worker.raises()

    def fault_bad_pair(self, alive: list[SimWorker]) -> None:
        if len(alive) >= 2:
            pair = frozenset(worker.id for worker in self.world.rng.sample(alive, 2))
            self.world.bad_pairs.add(pair)
            self.world.at(self.world.rng.choice((3.0, 20.0)), self.world.bad_pairs.discard, pair)

    def fault_crash_controller(self, alive: list[SimWorker]) -> None:
        controller = self.world.controllers[-1]
        controller.alive = False
        self.world.at(
            self.world.rng.choice((0.1, 2.0, 15.0)), self.world.replace_controller, controller
        )

    def fault_freeze_controller(self, alive: list[SimWorker]) -> None:
        controller = self.world.controllers[-1]
        if not controller.alive or controller.frozen:
            return
        controller.frozen = True
        if (
            self.world.rng.random() < 0.5
        ):  # taken for dead: a second one leads, and the first comes back
            self.world.at(
                self.world.rng.uniform(0.5, 6.0), self.world.replace_controller, controller
            )
        self.world.at(self.world.rng.uniform(0.5, 20.0), controller.thaw)
