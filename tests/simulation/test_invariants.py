"""The invariants themselves: what an evicted worker may do, and what not."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_dp.coordinator.messages import Member, Membership, TrainingPosition
from tests.simulation.group import Group
from tests.simulation.invariants import Violation
from tests.simulation.workers import COLLECTIVES, SimWorker
from tests.simulation.world import World


class Beside:
    """w1 froze in generation 1, step 1; w2 and w3 left it, and have made that step in generation
    2."""

    def __init__(self, removed: str = "w1", left: str = "w2 w3") -> None:
        self.world = world = World(0)
        world.new_controller(recovering=False)
        self.workers = {name: SimWorker(world, name) for name in ("w1", "w2", "w3")}
        world.workers |= self.workers
        members = [
            Member(name, ((v, v + 1),), TrainingPosition(0), True)
            for v, name in enumerate(self.workers)
        ]
        one = Membership(1, tuple(members), "w2", 4.0)
        two = Membership(2, tuple(members[1:]), "w2", 4.0)
        world.check.memberships |= {1: one, 2: two}
        world.check.claims |= dict.fromkeys((1, 2), world.controllers[0])
        self.groups = {1: Group(world, one), 2: Group(world, two)}
        for worker in self.workers.values():
            worker.generation, worker.inside, worker.state = 1, True, "init"
            worker.group = self.groups[1]
        for name in ("w2", "w3"):
            self.enter(name, 1)
        world.now = 2.0
        for name in left.split():
            world.check.left(self.workers[name])
        world.controllers[0].removed.update(removed.split())
        world.now = 3.0
        self.commit("w2", 2)
        world.now = 4.0

    def enter(self, name: str, step: int) -> None:
        for index in range(COLLECTIVES):
            self.groups[1].enter(self.workers[name], (step, index))

    def commit(self, name: str, generation: int) -> None:
        worker = self.workers[name]
        worker.step, worker.generation = worker.step + 1, generation
        worker.state = f"after {worker.step}"
        self.world.check.committed(worker, self.groups[generation])


@contextmanager
def violates(words: str) -> Iterator[None]:
    with pytest.raises(Violation, match=words):
        yield


def test_late_commit_of_an_evicted_worker_is_allowed() -> None:
    beside = Beside()
    beside.enter("w1", 1)
    beside.commit("w1", 1)
    assert beside.world.check.marks["late commit"] == 1


def test_late_commit_a_second_time_violates() -> None:
    beside = Beside()
    for step in (1, 2):
        for name in beside.workers:
            beside.enter(name, step)
    beside.groups[1].entered_at[1, 0]["w2"] = 1.0
    beside.groups[1].entered_at[1, 1].update(w2=1.0, w3=1.0)
    beside.groups[1].entered_at[1, 0]["w3"] = 1.0
    beside.commit("w1", 1)
    with violates("did so before"):
        beside.commit("w1", 1)


def test_late_commit_with_other_weights_violates() -> None:
    beside = Beside()
    beside.enter("w1", 1)
    worker = beside.workers["w1"]
    worker.step, worker.state = 1, "another"
    with violates("holds another after step 1"):
        beside.world.check.committed(worker, beside.groups[1])


def test_late_commit_of_a_worker_that_was_not_evicted_violates() -> None:
    beside = Beside(removed="")
    beside.enter("w1", 1)
    with violates("was not evicted"):
        beside.commit("w1", 1)


def test_late_commit_before_any_member_left_violates() -> None:
    """Only its lease then stops such a worker."""
    beside = Beside(removed="w1 w2 w3", left="")
    beside.enter("w1", 1)
    with violates("nobody had left it"):
        beside.commit("w1", 1)


def test_late_commit_together_with_a_member_that_had_left_violates() -> None:
    beside = Beside()
    beside.enter("w1", 1)
    beside.enter("w3", 1)
    with violates("with w3, which had left"):
        beside.commit("w1", 1)


def test_late_commit_together_with_a_member_that_was_not_evicted_violates() -> None:
    beside = Beside(left="w2")
    beside.enter("w1", 1)
    beside.enter("w3", 1)
    with violates("with w3, not evicted"):
        beside.commit("w1", 1)


def test_late_commit_beyond_the_step_in_flight_violates() -> None:
    beside = Beside()
    beside.enter("w1", 1)
    beside.workers["w1"].step = 1
    beside.world.check.states[2] = "after 2"
    with violates("which goes on from 0"):
        beside.commit("w1", 1)


def test_hand_over_of_a_late_commit_violates() -> None:
    beside = Beside()
    beside.enter("w1", 1)
    beside.commit("w1", 1)
    beside.workers["w1"].has_state = True
    with violates("takes what w1 made alone"):
        beside.world.check.handed_over(beside.workers["w3"], beside.workers["w1"])


def test_membership_without_a_stopped_worker_that_is_ahead_violates() -> None:
    """Whether it said so in the newest generation, or in the one before."""
    beside = Beside()
    controller, ahead = beside.world.controllers[0], beside.workers["w3"]
    controller.generations.append(2)
    ahead.phase, ahead.step = "wait", 1
    every = (0, beside.world.config.virtual_workers)
    behind = Membership(3, (Member("w2", (every,), TrainingPosition(0), True),), "w2", 4.0)
    beside.world.check.claims[3] = controller
    beside.workers["w2"].has_state = ahead.has_state = True
    for said in (controller.reported_stopped, controller.left_previous):
        said.add("w3")
        with violates("ahead of .* and have no place"):
            beside.world.check.formation(behind, controller)
        said.clear()
        beside.world.check.memberships.pop(3)
