"""What a controller that takes over knows of the run, without Ray."""

import dataclasses
import itertools
import json
import types
from types import SimpleNamespace

import cloudpickle
import pytest

from elastic_dp.cluster.controller.controller import coordinator_config_of
from elastic_dp.cluster.heartbeat.shared_memory_page import ControllerAddress, SharedMemoryPage
from elastic_dp.cluster.runs import controller_state
from elastic_dp.cluster.runs.controller_state import (
    ControllerStateStore,
    pending_requests,
    time_left_s,
)
from elastic_dp.cluster.worker import Worker, WorkerJob
from elastic_dp.config import FailureConfig
from elastic_dp.coordinator import messages as m
from elastic_dp.telemetry.journal import Journal
from elastic_dp.train.controller_link import ControllerLink
from elastic_dp.train.log_sender import LoggedCall
from tests.cluster.controllers import controller_of
from tests.coordinator.scenarios import Scenario
from tests.runs import spec_of


class Stored(ControllerStateStore):
    """The stored state of a run that one controller led before."""

    def __init__(self, earlier: ControllerStateStore) -> None:
        super().__init__()
        self.state = earlier.state
        self.state.term += 1
        self.claims = []

    def claim(self, generation):
        self.claims.append(generation)
        return True

    def highest_claimed(self):
        return 7


def earlier(now=0.0):
    state_store = ControllerStateStore()
    for message in (
        *(m.StartWorker(worker) for worker in ("w1", "w2", "w3", "w4")),
        m.ReleaseWorker("w4", "the size is 3 now"),
        m.SizeRequested(2, 2),
        m.SizeRequested(3),
        m.HeartbeatReceived("w1", 1, 5, "compute"),
        *(m.WorkerStarted(worker) for worker in ("w1", "w2", "w3")),
        m.StartWorker("w5"),  # the controller died before there was an actor
        m.DrainNoticed("w2", now + 30.0),
        m.StopRequested("enough"),
        m.StopRequested("too late"),
    ):
        state_store.record(message)
    return state_store


def controller(state_store, journal=None):
    return controller_of(spec_of(workers=2), journal, state_store=state_store)


def test_takeover_asks_the_workers_there_are():
    made = controller(Stored(earlier()))
    commands = made._take_over(["w1", "w2", "w4"])
    asked = [c.worker for c in commands if isinstance(c, m.ReportState)]
    assert asked == ["w1", "w2"]
    for task in itertools.chain(*made._tasks.get_nowait()):
        task()
    assert made._worker_group.told == ["ReleaseWorker", "kill w4"], "it takes no part any more"
    assert [c.generation for c in commands if isinstance(c, m.ClaimGeneration)] == [8]
    assert (made.coordinator.size, made.coordinator._run.min_members) == (3, 2)
    assert made.coordinator._lineage.established


class Heard(ControllerLink):
    def __init__(self):
        self.said = []

    def post(self, event):
        self.said.append(event)


def job_of(spec):
    address = ControllerAddress("127.0.0.1", 9, b"n")
    return WorkerJob(cloudpickle.dumps((spec, None)), None, "run", None, address, b"secret")


def test_heartbeat_interval_of_the_job_is_that_of_controller_and_sidecar(monkeypatch):
    """The controller expects heartbeats as often as they come."""
    given = []

    def start(page, worker, secret, interval_s, others):
        given.append(interval_s)

    monkeypatch.setattr(SharedMemoryPage, "start_sidecar", start)
    failure = FailureConfig(heartbeat_timeout_s=1.0)
    spec = dataclasses.replace(spec_of(), failure=failure)
    Worker("w1", job_of(spec), Heard())
    assert given == [0.125] == [coordinator_config_of(spec).heartbeat_interval_s]


@pytest.mark.parametrize("was_begun", [False, True])
def test_worker_that_came_up_without_a_controller_begins_training_at_takeover(
    monkeypatch, was_begun
):
    monkeypatch.setattr(SharedMemoryPage, "start_sidecar", lambda *_: None)
    link = Heard()
    worker = Worker("w1", job_of(spec_of()), link)
    if was_begun:
        worker.deliver(m.BeginTraining("w1", True))
    scenario = Scenario.recovered(["w1"], 0, size=1)
    for command in scenario.ever(m.ReportState):
        worker.deliver(command)
    for event in link.said:
        scenario.tell(event)
    scenario.hear("w1", phase="start")
    assert scenario.ever(m.BeginTraining)


def test_takeover_counts_workers_that_died_meanwhile_but_not_released_ones():
    made = controller(Stored(earlier()))
    made._take_over(["w1", "w2", "w4"])
    while not made.inbox.empty():
        made._note(made.inbox.get())
    assert made.state_store.state.lost == 1  # w3
    for worker in ("w4", "w1"):
        made._note(m.WorkerLost(worker, "left"))
    assert made.state_store.state.lost == 2
    assert list(made.state_store.state.here) == ["w2"]


def test_takeover_repeats_the_requests_of_an_operator(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0)
    monkeypatch.setattr(controller_state, "time", clock)
    state = earlier(now=100.0).state
    drain, stop = pending_requests(state, now=1000.0)
    assert drain == m.DrainNoticed("w2", 1030.0)
    assert stop == m.StopRequested("enough")
    state.started_at = 4990.0
    assert time_left_s(state, 60.0) == 50.0


@pytest.mark.parametrize(("set_by_s", "left_s"), [(0.0, 30.0), (-3600.0, 30.0), (3600.0, -3570.0)])
def test_a_drain_is_never_put_off_by_a_clock_that_was_set(monkeypatch, set_by_s, left_s):
    earlier, clock = (
        ControllerStateStore(),
        SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0),
    )
    monkeypatch.setattr(controller_state, "time", clock)
    earlier.record(m.DrainNoticed("w1", 130.0))
    clock.time = lambda: 5000.0 + set_by_s
    assert pending_requests(earlier.state, now=7.0) == [m.DrainNoticed("w1", 7.0 + left_s)]


def test_a_checkpoint_that_was_asked_for_is_asked_for_again_until_one_is_committed():
    state_store = ControllerStateStore()
    state_store.record(m.CheckpointRequested())
    assert pending_requests(state_store.state, 0.0) == [m.CheckpointRequested()]
    state_store.record(m.CheckpointCommitted(3))
    assert pending_requests(state_store.state, 0.0) == []


def test_takeover_still_rejects_checkpoints_of_mismatched_replicas():
    state_store = ControllerStateStore()
    state_store.record(m.FindCheckpoint(at_most=20))
    assert state_store.state.at_most == 20
    state_store.record(m.FormGeneration(m.Membership(8, (), "w1", 1.0)))
    assert state_store.state.at_most is None


def test_a_run_that_has_ended_is_not_led_again():
    first = controller(ControllerStateStore())
    first.coordinator._generation.number = 4
    first._execute(m.FinishRun(m.TrainingPosition(12, 1), "digest", "the last step"))
    second = controller(Stored(first.state_store))
    outcome = second.lead()
    assert (outcome.step, outcome.digest, outcome.generations) == (12, "digest", 4)
    assert outcome.result is not None and second.ended.is_set()
    status = second.status()
    assert (status["phase"], status["reason"], status["step"]) == ("over", "the last step", 12)


def logged(step, call):
    return LoggedCall((step, call), None, {"loss": step + call / 10}, 0.0)


def test_metrics_are_recorded_once_over_two_controllers(tmp_path):
    state_store = ControllerStateStore()
    journal = Journal(str(tmp_path))
    first = controller(state_store, journal)
    for step, call in ((1, 1), (1, 2), (2, 1)):
        first.log_all([logged(step, call)], 0.0)
    journal.close()
    second = controller(
        Stored(state_store), Journal(str(tmp_path), since=state_store.state.started_at)
    )
    assert second.metrics.logged_to == (2, 1)
    assert second.metrics.newest == {"loss": 2.1}
    for step, call in ((1, 2), (2, 1), (2, 2)):
        second.log_all([logged(step, call)], 0.0)
    assert [line["loss"] for line in second.journal.recorded()] == [1.1, 1.2, 2.1, 2.2]
    second.journal.close()


def test_checkpoint_committed_after_the_last_worker_left_is_in_the_journal(tmp_path):
    journal = Journal(str(tmp_path))
    made = controller(ControllerStateStore(), journal)
    commit = m.CheckpointCommitted(10, 0.5)
    made.committer = types.SimpleNamespace(close=lambda: made.post(commit))
    made.post(m.DeadlineReached())  # in front of it, and of no interest any more
    made._close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    committed = [line for line in lines if line.get("event") == "CheckpointCommitted"]
    assert [line["step"] for line in committed] == [10]
