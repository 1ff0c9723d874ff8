"""The process group of one simulated generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_dp.coordinator.messages import Membership

if TYPE_CHECKING:
    from tests.simulation.workers import SimWorker
    from tests.simulation.world import World


class Group:
    """Which members have entered which collective of a generation."""

    def __init__(self, world: World, membership: Membership) -> None:
        self.world, self.membership = world, membership
        self.ids = [member.worker for member in membership.members]
        self.members = {member.worker: member for member in membership.members}
        self.entered: dict[Any, dict[SimWorker, int]] = {}  # with the token it had then
        self.entered_at: dict[Any, dict[str, float]] = {}
        self.stop: dict[int, bool] = {}
        self.weights: dict[Any, dict[str, str]] = {}  # as each entered
        self.formed: set[str] = set()
        self.joining = world.worker_class.joining(world, membership)
        self.parts_left = 0  # steps in which they take the state over
        self.committed = 0  # the checkpoint that all of them read, once one has begun

    @property
    def compared(self) -> int:
        """How many members compare their weights."""
        return len(self.ids) - len(self.joining)

    def enter(self, worker: SimWorker, key: Any) -> None:
        inside = self.entered.setdefault(key, {})
        inside[worker] = worker.token
        self.entered_at.setdefault(key, {})[worker.id] = self.world.now
        weights = self.weights.setdefault(key, {})
        if not worker.joins_gradually:
            weights[worker.id] = worker.state
        apart = 0 if worker.all_joined or key[0] != "evaluate" else len(self.joining)
        if len(inside) == len(self.ids) - apart:
            for member, token in inside.items():
                if key == "form":
                    member.later(0.0, member.all_entered, token)
                elif key == "share":
                    member.later(self.world.transfer_time(), member.restored, token)
                else:
                    delay = self.world.rng.choice((0.01, 0.05, 0.4))
                    member.later(delay, member.collective_done, token, key)

    def alive(self) -> list[SimWorker]:
        workers = (self.world.workers[member] for member in self.ids)
        here = self.membership.generation
        return [w for w in workers if w.alive and w.inside and w.generation == here]

    def reset_by(self, gone: SimWorker) -> None:
        """A member left or died: those blocked with it may see their connection reset, or stay
        blocked."""
        for member in self.alive():
            if member is not gone and self.world.rng.random() < 0.8:
                delay = self.world.rng.uniform(0.0, 0.3)
                member.later(delay, member.connection_reset, member.token)
