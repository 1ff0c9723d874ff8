"""What a controller keeps of workers that are gone."""

import gc
import tracemalloc
import types

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.heartbeat.heartbeat_sidecar import Channel
from elastic_dp.coordinator import messages as m
from elastic_dp.telemetry.journal import Journal
from tests.cluster.controllers import NotedWorkers
from tests.coordinator.scenarios import SIGNATURE
from tests.runs import spec_of

MIB = 1 << 20


class Run:
    """A controller of two workers, one of which is lost again and again."""

    def __init__(self):
        self.controller = made = Controller(
            spec_of(workers=2, steps=100_000), Journal(None), host="127.0.0.1", secret=b"secret"
        )
        self.group, self.step, self.beat = NotedWorkers(), 0, 0
        self.channels = {}
        made._worker_group = self.group
        made._tasks = types.SimpleNamespace(
            put=lambda waiting: [task() for tasks in waiting for task in tasks]
        )
        made._execute_all(made.coordinator.start(0.0))
        self.settle()
        self.tell(m.CheckpointFound(None))
        for worker in self.group.started:
            self.joins(worker)

    def tell(self, event):
        made = self.controller
        event = made.exits.relabel(event)
        made._note(event)
        made._execute_all(made._decide(event))
        self.settle()

    def settle(self):
        made = self.controller
        while made.coordinator._leadership.claiming or not made.inbox.empty():
            self.tell(made.inbox.get(timeout=10))

    def hears(self, worker, phase="compute"):
        """A heartbeat, as a sidecar sends it."""
        made = self.controller
        self.beat += 1
        channel = self.channels.setdefault(
            worker, Channel(b"secret", made.heartbeats.address.nonce, "")
        )
        message = {
            "worker": worker,
            "generation": made.coordinator.generation,
            "step": self.step,
            "phase": phase,
            "at": float(self.beat),
            "cpu_s": 1.0,
            "virtual_s": 0.1,
            "times": [0.1] * 7,
            "store_retries": 1,
        }
        made.heartbeats.receive(channel.sign(self.beat, message), ("127.0.0.1", 9))
        self.settle()

    def joins(self, *workers):
        """Workers start, and become members beside those that there are."""
        for worker in workers:
            self.tell(m.WorkerStarted(worker))
            self.tell(m.WorkerPlaced(worker, m.WorkerLocation("node", False, "")))
            self.hears(worker, "start")
            self.tell(m.WorkerReady(worker, SIGNATURE, self.step == 0))

    def members(self):
        membership = self.controller.coordinator.membership
        return [member.worker for member in membership.members] if membership else []

    def trains(self):
        self.step += 1
        for worker in self.members():
            self.hears(worker)

    def loses_one(self):
        lost, left = self.members()
        self.tell(m.WorkerLost(lost, "killed"))
        generation = self.controller.coordinator.generation
        position = m.TrainingPosition(self.step)
        self.tell(m.WorkerStopped(left, generation, position, True, "a peer is gone"))
        self.trains()
        self.joins(self.group.started[-1])
        self.tell(m.DeadlineReached())
        generation = self.controller.coordinator.generation
        self.tell(m.WorkerStopped(left, generation, position, True, "planned end"))
        self.trains()


def test_controller_keeps_little_of_a_worker_that_is_lost():
    run = Run()
    run.trains()
    for _ in range(50):
        run.loses_one()
    gc.collect()
    tracemalloc.start(6)
    before = tracemalloc.take_snapshot()
    losses = 300
    for _ in range(losses):
        run.loses_one()
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = after.compare_to(before, "lineno")
    assert sum(each.size_diff for each in grown) / losses < 0.05 * MIB, grown[:9]
    run.controller.heartbeats.close()
