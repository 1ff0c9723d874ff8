"""Every short history of three workers: all sequences of facts to a depth, over the coordinator alone.

Where the simulator draws, this enumerates, on a small world without a network: a worker does what it was told at
once or not at all, may die, fall silent, or fail at any point, and time may pass. Histories that leave the
coordinator and the workers in the same state are followed once.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.coordinator import Coordinator
from elastic_dp.protocol.messages import Place, Signature
from elastic_dp.protocol.rules import Rules

SIGNATURE = Signature("layout", "data", "kind")
RULES = Rules(
    min_workers=1,
    size=2,
    standby=1,
    virtual_workers=2,
    heartbeat_interval_s=1.0,
    heartbeat_timeout_s=5.0,
    lease_s=7.0,
    forming_timeout_s=3.0,
    gather_timeout_s=3.0,
    join_window_s=0.0,
)


@dataclass
class Puppet:
    """One worker: what it was told last, and how far it is."""

    stage: str = "asked"
    told: object = None
    generation: int = 0
    step: int = 0
    whole: bool = False


@dataclass
class Scene:
    coordinator: Coordinator
    now: float = 0.0
    puppets: dict[str, Puppet] = field(default_factory=dict)
    claims: list[int] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)
    buried: set[str] = field(default_factory=set)
    dismissed: set[str] = field(default_factory=set)
    announced: int = 0
    over: bool = False
    checkpoints: bool = False  # after every step
    sealed: int | None = None  # the newest

    def handle(self, event: m.Event) -> None:
        self.obey_all(self.coordinator.handle(event, self.now))

    def obey_all(self, commands: list[m.Command]) -> None:
        for command in commands:
            self.obey(command)
        if any(isinstance(command, m.FindCheckpoint) for command in commands):
            self.handle(m.CheckpointFound(self.sealed))

    def obey(self, command: m.Command) -> None:
        assert not self.over or isinstance(command, m.EvictWorker | m.ReleaseWorker | m.Explain)
        match command:
            case m.StartWorker(worker=worker):
                assert worker not in self.puppets and worker not in self.buried
                self.puppets[worker] = Puppet()
            case m.ClaimGeneration(generation=generation):
                assert generation not in self.claims and generation not in self.granted
                self.claims.append(generation)
            case m.FormGeneration(membership=membership):
                for seat in membership.seats:
                    self.judge(seat.worker, membership)
                    self.puppets[seat.worker].told = command
            case (
                m.BeginTraining(worker=worker)
                | m.AbortGeneration(worker=worker)
                | m.EndGeneration(worker=worker)
            ):
                if worker in self.puppets:  # else it died meanwhile
                    self.puppets[worker].told = command
            case m.ReleaseWorker(worker=worker) | m.EvictWorker(worker=worker):
                self.dismissed.add(worker)
            case m.FailRun(error=error):
                assert "is lost" not in error or self.sealed is None
                self.over = True
            case m.FinishRun() | m.StandDown():
                self.over = True

    def judge(self, worker: str, membership: m.Membership) -> None:
        assert membership.generation in self.granted
        assert membership.generation >= self.announced
        self.announced = membership.generation
        assert worker not in self.buried and worker not in self.dismissed
        seats = membership.seats
        assert [v for s in seats for v in range(s.first, s.last)] == [0, 1]
        whole = [seat for seat in seats if seat.whole]
        for seat in seats:
            assert seat.whole == self.puppets[seat.worker].whole, seat
            puppet = self.puppets[seat.worker]
            assert puppet.stage != "inside" or puppet.generation < membership.generation - 1, seat
        if whole:
            source = seats[membership.rank(membership.source)]
            assert source.whole and source.place == max(seat.place for seat in whole)
        else:
            assert not any(p.whole for w, p in self.puppets.items() if w not in self.dismissed)
            assert membership.restore is (self.sealed is not None)

    def moves(self) -> list[tuple[str, str]]:
        """What can happen next."""
        if self.over:
            return []
        moves = [("claimed", "")] if self.claims else []
        if self.coordinator.deadline is not None:
            moves.append(("time", ""))
        for name, puppet in self.puppets.items():
            if puppet.stage == "asked":
                moves.append(("start", name))
            elif puppet.stage == "begun" and isinstance(puppet.told, m.BeginTraining):
                moves.append(("ready", name))
            elif puppet.stage == "waits" and isinstance(puppet.told, m.FormGeneration):
                moves.append(("enter", name))
            elif puppet.stage == "inside":
                moves += [("step", name), ("fail", name)]
            if isinstance(puppet.told, m.AbortGeneration | m.EndGeneration):
                moves.append(("stop", name))
            if puppet.stage != "asked":
                moves.append(("die", name))
        return moves

    def play(self, move: str, name: str) -> None:
        puppet = self.puppets.get(name, Puppet())
        self.now += 0.01
        match move:
            case "claimed":
                generation = self.claims.pop(0)
                self.granted.add(generation)
                self.handle(m.GenerationClaimed(generation))
            case "time":
                assert self.coordinator.deadline is not None
                self.now = max(self.now, self.coordinator.deadline)
                self.handle(m.DeadlineReached())
            case "start":
                puppet.stage = "begun"
                self.handle(m.WorkerStarted(name))
            case "ready":
                told = puppet.told
                assert isinstance(told, m.BeginTraining)
                puppet.stage, puppet.told = "waits", None
                self.handle(m.WorkerReady(name, SIGNATURE, told.is_source))
            case "enter":
                told = puppet.told
                assert isinstance(told, m.FormGeneration)
                puppet.stage, puppet.told = "inside", None
                puppet.generation, puppet.whole = told.membership.generation, True
                places = [seat.place.step for seat in told.membership.seats if seat.whole]
                puppet.step = max(places, default=self.sealed or 0)
                self.handle(m.WorkerHeard(name, puppet.generation, puppet.step, "compute"))
            case "step":
                mates = [p.step for p in self.puppets.values() if p.generation == puppet.generation]
                puppet.step = min(puppet.step, min(mates)) + 1
                if self.checkpoints:
                    self.sealed = max(self.sealed or 0, puppet.step)
                self.handle(m.WorkerHeard(name, puppet.generation, puppet.step, "compute"))
            case "fail" | "stop":
                generation = puppet.generation
                if isinstance(puppet.told, m.AbortGeneration | m.EndGeneration):
                    generation = max(generation, puppet.told.generation)
                puppet.stage, puppet.told = "waits", None
                place = Place(puppet.step)
                self.handle(m.WorkerStopped(name, generation, place, puppet.whole, move))
            case "die":
                del self.puppets[name]
                self.buried.add(name)
                self.handle(m.WorkerLost(name, "died"))

    def key(self) -> bytes:
        """Everything but the absolute time."""
        staff, generation = self.coordinator._staff, self.coordinator._generation
        told = {
            n: (p.stage, p.told, p.generation, p.step, p.whole) for n, p in self.puppets.items()
        }
        workers = [(w.id, w.stage, w.place, w.whole) for w in staff.workers.values()]
        facts = (
            str(self.coordinator.phase),
            generation.number,
            sorted(generation.open),
            sorted(generation.unformed),
            sorted(staff.ready),
            sorted(generation.ghosts),
            generation.acknowledged,
            self.coordinator._beginning.founder,
        )
        return pickle.dumps((told, workers, facts, self.claims, sorted(self.dismissed)))


def explore(depth: int, checkpoints: bool) -> tuple[int, int]:
    """(states, transitions) to `depth` facts after all three workers have started."""
    first = Scene(Coordinator(RULES), checkpoints=checkpoints)
    first.obey_all(first.coordinator.start(0.0))
    for name in list(first.puppets):
        first.play("start", name)
    seen, transitions, frontier = {first.key()}, 0, [first]
    for _ in range(depth):
        following = []
        for scene in frontier:
            kept = pickle.dumps(scene, pickle.HIGHEST_PROTOCOL)  # copied ten times as fast
            for move in scene.moves():
                if move[0] == "die" and len(scene.buried) >= 2:
                    continue
                child: Scene = pickle.loads(kept)
                child.play(*move)
                transitions += 1
                key = child.key()
                if key not in seen:
                    seen.add(key)
                    following.append(child)
        frontier = following
    return len(seen), transitions


@pytest.mark.parametrize(
    ("checkpoints", "depth", "floor"),
    [
        (False, 8, 5_000),
        (True, 7, 3_000),
        pytest.param(False, 9, 12_000, marks=pytest.mark.slow),
        pytest.param(True, 8, 7_000, marks=pytest.mark.slow),
    ],
)
def test_every_short_history_keeps_the_promises(checkpoints: bool, depth: int, floor: int) -> None:
    states, transitions = explore(depth, checkpoints)
    assert states > floor, (states, transitions)
