"""No event grows without bound: what concerns thousands is spread over several, and a change of
members costs so many messages for each of them, however many there are."""

from collections import deque

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.workers.worker_registry import MAX_RELEASED_PER_STEP
from tests.coordinator.scenarios import Scenario

SIGNATURE = m.Signature("layout", "data", "kind")
# as shares of the size: members of generations that end, of those that are formed, and who comes or
# goes
CHANGES = {
    "start": (0, 1, 1),
    "kill and join": (
        1.5,
        2,
        0,
    ),  # two generations; the one with the killed worker need not be told when to end
    "drain": (1, 1, 0),
    "scale down": (1, 0.5, 0.5),
    "scale up": (0.5, 1, 0.5),
}


class Life:
    """Obedient workers: whatever the coordinator asks is done at once and reported."""

    def __init__(self, workers):
        self.coordinator = Coordinator(
            CoordinatorConfig(min_workers=1, size=workers, virtual_workers=2 * workers, standby=0)
        )
        self.now, self.step = 0.0, 0
        self.sent = 0
        self.changes = {}  # messages
        self.inbox = deque()

    def tell(self, event):
        self.obey(self.coordinator.handle(event, self.now))

    def obey(self, commands):
        for command in commands:
            if isinstance(command, m.RenewLease | m.Explain):
                continue
            self.sent += 1
            match command:
                case m.StartWorker(worker=worker):
                    self.inbox.append(m.WorkerStarted(worker))
                case m.BeginTraining(worker=worker, is_source=is_source):
                    self.inbox.append(m.WorkerReady(worker, SIGNATURE, is_source))
                case m.ClaimGeneration(generation=generation):
                    self.inbox.append(m.GenerationClaimed(generation))
                case m.FindCheckpoint():
                    self.inbox.append(m.CheckpointFound(None))
                case m.FormGeneration(membership=membership):
                    self.sent += len(membership.members) - 1  # one for each member
                    generation = membership.generation
                    for member in membership.members:
                        heard = m.HeartbeatReceived(member.worker, generation, self.step, "compute")
                        self.inbox.append(heard)
                case m.AbortGeneration(worker=worker, generation=generation):
                    self.stop(worker, generation)
                case m.EndGeneration(worker=worker, generation=generation):
                    self.stop(worker, generation)
                case m.ReleaseWorker(worker=worker):
                    self.inbox.append(m.WorkerLost(worker, "left"))

    def stop(self, worker, generation):
        stopped = m.WorkerStopped(worker, generation, m.TrainingPosition(self.step), True, "asked")
        self.inbox.append(stopped)

    def settle(self):
        while self.inbox:
            self.tell(self.inbox.popleft())

    def members(self):
        membership = self.coordinator.membership
        assert membership is not None
        return [member.worker for member in membership.members]

    def beat(self):
        """One interval: everybody is heard once, and made a step."""
        self.now += 1.0
        self.step += 1
        for worker in self.members():
            self.tell(
                m.HeartbeatReceived(worker, self.coordinator.generation, self.step, "compute")
            )
        self.settle()

    def run(self):
        def change(name, event):
            self.sent = 0
            if event is None:
                self.obey(self.coordinator.start(self.now))
            else:
                self.tell(event)
            self.settle()
            for _ in range(3):  # joins and releases follow with the next heartbeats
                self.beat()
            self.changes[name] = self.sent

        size = self.coordinator.size
        change("start", None)
        change("kill and join", m.WorkerLost(self.members()[size // 2], "killed"))
        change("drain", m.DrainNoticed(self.members()[-1], None))
        change("scale down", m.SizeRequested(size // 2))
        change("scale up", m.SizeRequested(size))
        assert len(self.members()) == size, (len(self.members()), size, self.coordinator.reason)


class Counting(Life):
    """Sees that a heartbeat renews one lease at most, and nothing else renews any."""

    heard = renewed = 0

    def tell(self, event):
        self.heard += isinstance(event, m.HeartbeatReceived)
        super().tell(event)

    def obey(self, commands):
        self.renewed += sum(isinstance(command, m.RenewLease) for command in commands)
        assert self.renewed <= self.heard
        super().obey(commands)


@pytest.mark.parametrize("size", [200, 800])
def test_a_change_costs_each_member_so_many_messages_however_many_there_are(size):
    """Two for each whose generation ends (stop after this step; stop now), one for each member, two
    for each that comes or goes."""
    life = Counting(size)
    life.run()
    for name, messages in life.changes.items():
        ended, formed, changed = (share * size for share in CHANGES[name])
        assert messages <= 2 * ended + formed + 2 * changed + 4, (name, messages)
    assert set(life.changes) == set(CHANGES)
    assert life.renewed > 10 * size


def test_thousands_that_are_not_needed_any_more_leave_over_several_steps():
    workers = [f"w{n}" for n in range(1, MAX_RELEASED_PER_STEP + 3)]
    scenario = Scenario.training(*workers, virtual_workers=len(workers))
    scenario.tell(m.SizeRequested(1))
    scenario.stopped(*workers, step=3)
    assert scenario.members == ["w1"]
    for step, expected in (4, MAX_RELEASED_PER_STEP), (5, 1), (6, 0):
        scenario.hear("w1", step=step)
        assert len(scenario.of(m.ReleaseWorker)) == expected
