"""A coordinator without a cluster: events are told by name, and its commands are recorded."""

import dataclasses
import math
from typing import TypeVar

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Signature, TrainingPosition

SIGNATURE = Signature("layout", "data", "kind")
C = TypeVar("C")
SIGNS_OF_LIFE = ("failure_detector", "heard_at")


def facts(coordinator):
    """The state of all parts, except for when each worker was heard: any message updates that."""
    parts = {name: part for name, part in vars(coordinator).items() if name != "config"}
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in vars(part).items()
        if key not in SIGNS_OF_LIFE and f"_{key.lstrip('_')}" not in parts
    }


class Scenario:
    """`now` is moved by `wait`; claims are granted at once unless `claims` is False."""

    def __init__(self, claims=True, begin=True, **config):
        config = {"size": 2, "virtual_workers": 8} | config
        self.config = CoordinatorConfig(**config)
        self.now, self.claims = 0.0, claims
        self.said = []
        self.all = []
        self.beats = 0
        self.committed = None  # the newest checkpoint
        self.older = None  # the one that is found where that is too new
        self.coordinator = Coordinator(self.config)
        if begin:
            self.note(self.coordinator.start(0.0))

    @classmethod
    def training(cls, *workers, size=0, step=0, **config):
        """These run the first generation. `size`: their number, unless it is given."""
        scenario = cls(size=size or len(workers), **config)
        scenario.running(*workers, step=step)
        return scenario

    @classmethod
    def recovered(cls, workers, highest, **config):
        scenario = cls(begin=False, **config)
        scenario.coordinator, commands = Coordinator.recover(scenario.config, workers, highest, 0.0)
        scenario.note(commands)
        return scenario

    def answer(self, event):
        """A report, unless it says otherwise, answers the newest question."""
        if isinstance(event, m.WorkerReported) and event.asked == 0:
            asked = [c.asked for c in self.all if isinstance(c, m.ReportState)]
            return dataclasses.replace(event, asked=asked[-1] if asked else 0)
        return event

    def note(self, commands):
        self.said = commands
        self.all += commands
        for command in commands:
            if isinstance(command, m.ClaimGeneration) and self.claims:
                self.tell(m.GenerationClaimed(command.generation), keep=True)
            if isinstance(command, m.FindCheckpoint):
                late = command.at_most is not None and (self.committed or 0) > command.at_most
                self.tell(m.CheckpointFound(self.older if late else self.committed), keep=True)

    def tell(self, event, keep=False):
        before = self.said if keep else []
        self.note(self.coordinator.handle(self.answer(event), self.now))
        self.said = before + self.said
        return self.said

    def wait(self, seconds, *alive, phase="compute", step=0):
        """Let time pass; `alive` are heard every second; deadlines are kept."""
        said = []
        end = self.now + seconds
        next_beat, idle = self.now + 1.0, 0
        while True:
            deadline = self.coordinator.deadline
            due = min(next_beat, math.inf if deadline is None else deadline)
            if due > end:
                break
            idle = idle + 1 if due <= self.now else 0
            assert idle < 100, "a deadline that does not move on"
            self.now = max(self.now, due)
            if due == next_beat:
                next_beat += 1.0
                for worker in alive:
                    said += self.hear(worker, phase=phase, step=step)
            else:
                said += self.tell(m.DeadlineReached())
        self.now = end
        self.said = said

    def hear(self, *workers, phase="compute", step=0, generation=-1, virtual_s=0.0):
        said = []
        for worker in workers:
            self.beats += 1
            at = self.coordinator.generation if generation < 0 else generation
            heard = m.HeartbeatReceived(worker, at, step, phase, self.beats, virtual_s=virtual_s)
            said += self.tell(heard)
        self.said = said
        return said

    def ready(self, *workers, can_source=None, **differing):
        for worker in workers:
            self.tell(m.WorkerStarted(worker))
            source = m.BeginTraining(worker, True) in self.said
            can = source if can_source is None else can_source
            self.tell(m.WorkerReady(worker, SIGNATURE._replace(**differing), can))

    def running(self, *workers, step=0, **differing):
        """Bring these to the running first generation."""
        self.ready(*workers, **differing)
        self.wait(0.1)
        self.hear(*workers, step=step)
        assert self.coordinator.phase == "running", (
            self.coordinator.phase,
            self.coordinator.reason,
        )

    def stopped(self, *workers, step=0, has_state=True, generation=-1, position=None, **more):
        at = TrainingPosition(step) if position is None else position
        for worker in workers:
            left = self.coordinator.generation if generation < 0 else generation
            self.tell(m.WorkerStopped(worker, left, at, has_state, "asked", **more))

    def change(self, step=1):
        """The members stop as asked, and those who join make the next generation run."""
        self.stopped(*self.members, step=step)
        self.hear(*self.members, step=step)
        assert self.coordinator.phase == "running", self.coordinator.reason

    def lost(self, *workers):
        for worker in workers:
            self.tell(m.WorkerLost(worker, "killed"))

    def of(self, kind):
        """The commands of this kind in the last answer."""
        return [command for command in self.said if isinstance(command, kind)]

    def ever(self, kind):
        return [command for command in self.all if isinstance(command, kind)]

    @property
    def members(self):
        membership = self.coordinator.membership
        return [member.worker for member in membership.members] if membership else []


def trio(**config):
    """Three members that train."""
    return Scenario.training("w1", "w2", "w3", **config)
