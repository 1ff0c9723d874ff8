"""Every short history of three workers: all sequences of facts to a depth, over the coordinator
alone.

Where the simulator draws, this enumerates, on a small world without a network: a worker does what
it was told at once or not at all, may die, fall silent, or fail at any point, and time may pass. In
some worlds it is also drained, its last word comes twice, the run is resized, or another controller
takes the claim. Histories that leave the coordinator and the workers in the same state are followed
once.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Signature, TrainingPosition

SIGNATURE = Signature("layout", "data", "kind")
CONFIG = CoordinatorConfig(
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
ALL_TRAIN = replace(CONFIG, size=3, standby=0, virtual_workers=3)
UNDISTURBED = ("ready", "claimed", "enter", "stop", "step", "time")


@dataclass
class Puppet:
    """One worker: what it was told last, and how far it is."""

    stage: str = "asked"
    told: object = None
    generation: int = 0
    step: int = 0
    has_state: bool = False
    word: m.Event | None = None  # its last


@dataclass
class Scenario:
    coordinator: Coordinator
    now: float = 0.0
    puppets: dict[str, Puppet] = field(default_factory=dict)
    claims: list[int] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    announced: int = 0
    over: bool = False
    checkpoints: bool = False  # after every step
    committed: int | None = None  # the newest
    disturbances: int = 0  # that may still come

    def handle(self, event: m.Event) -> None:
        self.obey_all(self.coordinator.handle(event, self.now))

    def obey_all(self, commands: list[m.Command]) -> None:
        for command in commands:
            self.obey(command)
        if any(isinstance(command, m.FindCheckpoint) for command in commands):
            self.handle(m.CheckpointFound(self.committed))

    def obey(self, command: m.Command) -> None:
        assert not self.over or isinstance(command, m.EvictWorker | m.ReleaseWorker | m.Explain)
        match command:
            case m.StartWorker(worker=worker):
                assert worker not in self.puppets and worker not in self.lost
                self.puppets[worker] = Puppet()
            case m.ClaimGeneration(generation=generation):
                assert generation not in self.claims and generation not in self.granted
                self.claims.append(generation)
            case m.FormGeneration(membership=membership):
                for member in membership.members:
                    self.judge(member.worker, membership)
                    self.puppets[member.worker].told = command
            case (
                m.BeginTraining(worker=worker)
                | m.AbortGeneration(worker=worker)
                | m.EndGeneration(worker=worker)
            ):
                if worker in self.puppets:  # else it died meanwhile
                    self.puppets[worker].told = command
            case m.ReleaseWorker(worker=worker) | m.EvictWorker(worker=worker):
                self.removed.add(worker)
                if isinstance(command, m.ReleaseWorker) and not self.over:
                    self.let_go(worker)
            case m.FailRun(error=error):
                assert "is lost" not in error or self.committed is None
                self.over = True
            case m.FinishRun() | m.StandDown():
                self.over = True

    def let_go(self, worker: str) -> None:
        """What it holds is not lost with it."""
        puppet = self.puppets.get(worker)
        if puppet is not None and puppet.has_state:
            others = [p for w, p in self.puppets.items() if w not in self.removed]
            kept = [p.step for p in others if p.has_state]
            assert max([*kept, self.committed or 0]) >= puppet.step, f"{worker} takes it along"

    def judge(self, worker: str, membership: m.Membership) -> None:
        assert membership.generation in self.granted
        assert membership.generation >= self.announced
        self.announced = membership.generation
        assert worker not in self.lost and worker not in self.removed
        members = membership.members
        every = range(self.coordinator.config.virtual_workers)
        assert sorted(v for member in members for v in member.virtual_workers) == [*every]
        has_state = [member for member in members if member.has_state]
        for member in members:
            assert member.has_state == self.puppets[member.worker].has_state, member
            puppet = self.puppets[member.worker]
            assert puppet.stage != "inside" or puppet.generation < membership.generation - 1, member
        if has_state:
            source = members[membership.rank(membership.source)]
            assert source.has_state and source.position == max(
                member.position for member in has_state
            )
        else:
            assert not any(p.has_state for w, p in self.puppets.items() if w not in self.removed)
            assert membership.restore is (self.committed is not None)

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
            if self.disturbances and puppet.stage != "asked":
                moves += [("drain", name), ("again", name)]
        if self.disturbances:
            moves += [("resize", str(size)) for size in (1, 2, 3) if size != self.coordinator.size]
            moves += [("claim lost", "")] * bool(self.claims)
        return moves

    def play(self, move: str, name: str) -> None:
        puppet = self.puppets.get(name, Puppet())
        self.now += 0.01
        match move:
            case "claimed":
                generation = self.claims.pop(0)
                self.granted.add(generation)
                self.handle(m.GenerationClaimed(generation))
            case "claim lost":
                self.handle(m.GenerationClaimLost(self.claims.pop(0)))
                assert self.over
            case "drain":
                self.disturbances -= 1
                self.handle(m.DrainNoticed(name, None))
            case "again":
                self.disturbances -= 1
                assert puppet.word is not None
                self.handle(puppet.word)
            case "resize":
                self.disturbances -= 1
                self.handle(m.SizeRequested(int(name)))
            case "time":
                assert self.coordinator.deadline is not None
                self.now = max(self.now, self.coordinator.deadline)
                self.handle(m.DeadlineReached())
            case "start":
                puppet.stage = "begun"
                self.hear(puppet, m.WorkerStarted(name))
            case "ready":
                told = puppet.told
                assert isinstance(told, m.BeginTraining)
                puppet.stage, puppet.told = "waits", None
                self.hear(puppet, m.WorkerReady(name, SIGNATURE, told.is_source))
            case "enter":
                told = puppet.told
                assert isinstance(told, m.FormGeneration)
                puppet.stage, puppet.told = "inside", None
                puppet.generation, puppet.has_state = told.membership.generation, True
                places = [
                    member.position.step for member in told.membership.members if member.has_state
                ]
                puppet.step = max(places, default=self.committed or 0)
                self.hear(
                    puppet, m.HeartbeatReceived(name, puppet.generation, puppet.step, "compute")
                )
            case "step":
                mates = [p.step for p in self.puppets.values() if p.generation == puppet.generation]
                puppet.step = min(puppet.step, min(mates)) + 1
                if self.checkpoints:
                    self.committed = max(self.committed or 0, puppet.step)
                self.hear(
                    puppet, m.HeartbeatReceived(name, puppet.generation, puppet.step, "compute")
                )
            case "fail" | "stop":
                generation = puppet.generation
                if isinstance(puppet.told, m.AbortGeneration | m.EndGeneration):
                    generation = max(generation, puppet.told.generation)
                puppet.stage, puppet.told = "waits", None
                position = TrainingPosition(puppet.step)
                self.hear(
                    puppet, m.WorkerStopped(name, generation, position, puppet.has_state, move)
                )
            case "die":
                del self.puppets[name]
                self.lost.add(name)
                self.handle(m.WorkerLost(name, "died"))

    def hear(self, puppet: Puppet, word: m.Event) -> None:
        puppet.word = word
        self.handle(word)

    def key(self) -> bytes:
        """Everything but the absolute time."""
        registry, generation = self.coordinator._registry, self.coordinator._generation
        told = {
            n: (p.stage, p.told, p.generation, p.step, p.has_state) for n, p in self.puppets.items()
        }
        workers = [(w.id, w.stage, w.position, w.has_state) for w in registry.workers.values()]
        facts = (
            str(self.coordinator.phase),
            generation.number,
            sorted(generation.inside),
            sorted(generation.not_formed),
            sorted(registry.ready),
            sorted(generation.fence.unconfirmed_dead),
            generation.fence.exit_confirmed,
            self.coordinator._lineage.initial_source,
        )
        facts += (
            self.coordinator.size,
            sorted(w.id for w in registry.workers.values() if w.draining),
        )
        facts += self.disturbances, [p.word for p in self.puppets.values() if self.disturbances]
        return pickle.dumps((told, workers, facts, self.claims, sorted(self.removed)))


def begun(scenario: Scenario, trains: bool) -> Scenario:
    """All workers have started. `trains`: and each member has made a step, while the others wait
    for a place."""
    scenario.obey_all(scenario.coordinator.start(0.0))
    for name in list(scenario.puppets):
        scenario.play("start", name)
    while (
        trains and len([p for p in scenario.puppets.values() if p.step]) < scenario.coordinator.size
    ):
        moves = [move for move in scenario.moves() if move[0] in UNDISTURBED]
        steps = {name: puppet.step for name, puppet in scenario.puppets.items()}
        scenario.play(*min(moves, key=lambda m: (UNDISTURBED.index(m[0]), steps.get(m[1], 0))))
    return scenario


def explore(
    depth: int,
    *,
    config: CoordinatorConfig = CONFIG,
    trains: bool = False,
    checkpoints: bool = False,
    disturbances: int = 0,
) -> tuple[int, int]:
    """(states, transitions) to `depth` facts after the beginning."""
    scenario = Scenario(Coordinator(config), checkpoints=checkpoints, disturbances=disturbances)
    first = begun(scenario, trains)
    seen, transitions, frontier = {first.key()}, 0, [first]
    for _ in range(depth):
        following = []
        for scenario in frontier:
            kept = pickle.dumps(scenario, pickle.HIGHEST_PROTOCOL)  # copied ten times as fast
            for move in scenario.moves():
                if move[0] == "die" and len(scenario.lost) >= 2:
                    continue
                child: Scenario = pickle.loads(kept)
                child.play(*move)
                transitions += 1
                key = child.key()
                if key not in seen:
                    seen.add(key)
                    following.append(child)
        frontier = following
    return len(seen), transitions


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "depth", "floor"),
    [
        ({}, 7, 3_000),
        ({"trains": True, "disturbances": 1}, 4, 1_500),
        ({"trains": True, "disturbances": 2, "config": ALL_TRAIN, "checkpoints": True}, 3, 1_200),
        pytest.param({"checkpoints": True}, 7, 3_000, marks=SLOW),
        pytest.param({"trains": True, "config": ALL_TRAIN}, 6, 1_500, marks=SLOW),
        pytest.param(
            {"trains": True, "disturbances": 2, "config": ALL_TRAIN, "checkpoints": True},
            *(4, 4_000),
            marks=SLOW,
        ),
        pytest.param({}, 9, 12_000, marks=SLOW),
        pytest.param({"checkpoints": True}, 8, 7_000, marks=SLOW),
        pytest.param({"trains": True, "disturbances": 1}, 7, 25_000, marks=SLOW),
        pytest.param(
            {"trains": True, "disturbances": 2, "config": ALL_TRAIN}, 6, 60_000, marks=SLOW
        ),
    ],
)
def test_every_short_history_violates_no_invariant(
    world: dict[str, Any], depth: int, floor: int
) -> None:
    states, transitions = explore(depth, **world)
    assert states > floor, (states, transitions)
