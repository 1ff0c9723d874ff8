"""The controller's loop around the coordinator."""

import dataclasses
import gc
import threading
import time
import types

import pytest

import elastic_dp as edp
from elastic_dp.cluster import outage_notice
from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.runs.controller_state import ControllerStateStore
from elastic_dp.config import JobSpec
from elastic_dp.coordinator import messages as m
from elastic_dp.distributed.rendezvous import GroupName, GroupRecords, MemberRecord
from elastic_dp.report.run_status import Health, health_of
from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.cluster.controllers import NotedWorkers
from tests.coordinator.scenarios import Scenario
from tests.patience import PATIENCE_S, eventually
from tests.runs import spec_of
from tests.train.jobs import clipped_average_norm


@pytest.fixture
def controller():
    spec = JobSpec(name="job", data=edp.DataConfig("nowhere", micro_batch_size=1), max_steps=1)
    made = Controller(spec, Journal(None), host="127.0.0.1", secret=b"secret")
    yield made
    made.heartbeats.close()


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_waits_while_an_event_is_handled(controller, fails, monkeypatch):
    collecting = []

    def handle(event, now):
        collecting.append(gc.isenabled())
        assert not fails
        return []

    monkeypatch.setattr(controller.coordinator, "handle", handle)
    if fails:
        with pytest.raises(AssertionError):
            controller._decide(m.DeadlineReached())
    else:
        assert controller._decide(m.DeadlineReached()) == []
    assert collecting == [False] and gc.isenabled()


def test_controller_does_not_wait_for_a_released_worker_without_a_node(controller):
    """Otherwise its demand for a node would live on until it is evicted."""
    controller._worker_group = workers = NotedWorkers()
    for worker in ("w1", "w2"):
        controller._execute(m.StartWorker(worker))
    controller._execute(m.BeginTraining("w2", is_source=True))
    for worker in ("w1", "w2"):
        controller._execute(m.ReleaseWorker(worker, "the size is 0 now"))
    assert workers.told == [
        *("start w1", "start w2", "BeginTraining"),
        *("ReleaseWorker", "kill w1"),  # it is told, so that its end is no failure of its node
        "ReleaseWorker",
    ]


def test_status_of_a_run_across_kinds_of_machine_says_inexact_and_why(controller):
    controller.spec = dataclasses.replace(controller.spec, exact=False)
    scenario = Scenario(exact=False)
    controller.coordinator = scenario.coordinator
    assert (controller.status()["exact"], controller.status()["inexact_because"]) == (False, ())
    scenario.ready("w1")
    scenario.ready("w2", kind="an abacus")
    scenario.wait(0.1)
    because = "steps were made on several kinds of machine: an abacus | kind"
    assert controller.status()["inexact_because"] == (because,)


def test_status_counts_no_member_that_is_lost(controller):
    """A run that has lost all its workers and waits for nodes has none, as its report says."""
    scenario = Scenario()
    scenario.committed = 0
    controller.coordinator = scenario.coordinator
    assert controller.status()["world_size"] == 0
    scenario.running("w1", "w2")
    assert controller.status()["world_size"] == 2
    for left, worker in ((1, "w2"), (0, "w1")):
        scenario.lost(worker)
        assert controller.status()["world_size"] == left
    status = controller.status()
    assert (health_of(status)[0], status["world_size"]) == (Health.CONCERN, 0)


def test_status_has_the_newest_decision_and_the_newest_checkpoint(controller, monkeypatch):
    """Also where the clock stands still."""
    monkeypatch.setattr("elastic_dp.telemetry.journal.time.time", lambda: 1e9)

    def newest(key):
        value = controller.status()[f"newest_{key}"]
        return value and {k: v for k, v in value.items() if k != "age_s" or v is None}

    journal, unknown = controller.journal, {"age_s": None, "duration_s": None}
    assert (newest("event"), newest("checkpoint")) == (None, None)
    journal.event(m.CheckpointFound(7))
    journal.command(m.Explain("starting"))
    assert (newest("event"), newest("checkpoint")) == ({"text": "starting"}, {"step": 7, **unknown})
    journal.event(m.CheckpointCommitted(9, 3.0))
    assert newest("checkpoint") == {"step": 9, "duration_s": 3.0}
    for step, expected in ((9, {"step": 9, "duration_s": 3.0}), (8, {"step": 8, **unknown})):
        journal.event(m.CheckpointFound(step))
        assert newest("checkpoint") == expected
    journal.event(m.CheckpointFound(None))
    assert newest("checkpoint") is None


def test_the_second_word_of_a_death_is_recorded_where_it_says_why(controller):
    controller.state_store.record(m.StartWorker("w1"))
    short = m.WorkerLost("w1", "Ray killed it", m.Cause.OUT_OF_MEMORY)
    for event in (m.WorkerLost("w1", "its sidecar says so"), short, short, m.WorkerLost("w1", "?")):
        controller._note(event)
    _, lines = controller.journal.since(None, 0.0)
    said = [line["reason"] for line in lines if line["event"] == "WorkerLost"]
    assert said == ["its sidecar says so", "Ray killed it"]
    assert controller.state_store.state.lost == 1


def test_last_words_are_kept_of_who_died_before_it_was_told_to_go(controller):
    """Last words are a message of their own, and come when the death may be waiting in the
    inbox."""
    controller._worker_group = NotedWorkers()
    kept = []
    controller._crash_logs = types.SimpleNamespace(keep=lambda *of: kept.append(of))
    dies, leaves = (m.WorkerLost(worker, "its process exits") for worker in ("w1", "w2"))
    controller.heartbeats._heard(dies)
    for worker in ("w1", "w2"):
        controller._execute(m.ReleaseWorker(worker, "the size is 0 now"))
    controller.heartbeats._heard(leaves)
    for worker in ("w1", "w2", "w3"):
        controller._write_crash_log(worker, "words")
    assert kept == [("w1", "words"), ("w3", "words")]


def test_controller_sends_what_all_members_get_in_one_call(controller):
    sent = []
    workers = types.SimpleNamespace(send=lambda workers, *_: sent.append(workers))
    controller._worker_group = workers
    position = m.TrainingPosition(1)
    members = tuple(m.Member(f"w{i}", ((i, i + 1),), position, True) for i in range(3))
    controller._execute(m.FormGeneration(m.Membership(2, members, "w0", 5.0)))
    controller._execute(m.PrepareGroup(3, 1, ("w0", "w2"), 5.0))
    assert [list(workers) for workers in sent] == [["w0", "w1", "w2"], ["w0", "w2"]]


def test_controller_sends_the_records_of_all_members_and_names_those_that_are_missing(controller):
    sent = []
    workers = types.SimpleNamespace(send=lambda workers, command: sent.append((workers, command)))
    controller._worker_group = workers
    members = tuple(m.Member(f"w{i}", ((i, i + 1),), m.START, True) for i in range(3))
    membership = m.Membership(2, members, "w0", 5.0, prepared=1)
    controller.coordinator = types.SimpleNamespace(membership=membership)
    controller._execute(m.FormGeneration(membership))
    stopped = m.WorkerStopped("w0", 2, m.START, True, "late", members_missing=True)
    aborted = dataclasses.replace(stopped, members_missing=False)
    for rank, absent in ((0, ("w1", "w2")), (2, ("w1",)), (1, ())):
        group = GroupName(2, "main-1")
        controller.register(MemberRecord(f"w{rank}", group, 0, rank, 3, ((f"{rank}", b""),)))
        told = controller._with_absent(stopped)
        assert isinstance(told, m.WorkerStopped) and told.unreachable == absent
        assert controller._with_absent(aborted) is aborted
    names, records = sent[-1]
    assert list(names) == ["w0", "w1", "w2"] and isinstance(records, GroupRecords)
    assert [key for key, _ in records.values] == ["0", "1", "2"]


def test_superseded_controller_touches_no_worker_and_writes_nothing(controller, monkeypatch):
    """Errors of Ray before it learns of its successor end nothing."""
    monkeypatch.setattr(outage_notice, "_RETRY_S", 0.0)
    errors = [AttributeError("another Ray"), ConnectionError("the GCS is away")] * 2

    def save():
        if len(errors) > 2:
            raise errors.pop()

    def claim(generation):
        if errors:
            raise errors.pop()
        return False

    controller.state_store.claim = claim
    monkeypatch.setattr(controller.state_store, "save", save)
    controller._worker_group = workers = NotedWorkers()
    controller.lead()
    assert controller.superseded and not controller.ended.is_set()
    assert not [told for told in workers.told if not told.startswith("start")]


class StalledStore(ControllerStateStore):
    """What the GCS stores. From `goes_away` on it raises twice, and then does not answer."""

    def __init__(self):
        super().__init__()
        self.goes_away, self.stalls = threading.Event(), threading.Event()
        self.answers = threading.Event()
        self.errors = [RuntimeError("the GCS is away"), TypeError("another Ray")]

    def claim(self, generation):
        if self.goes_away.is_set() and not self.answers.is_set():
            self.stalls.set()
            if self.errors:
                raise self.errors.pop()
            self.answers.wait()
        return True


def test_gcs_that_stalls_for_longer_than_a_lease_when_a_worker_is_lost_costs_nothing_else(tmp_path):
    """Leases are renewed, and an error is no bug."""
    spec = spec_of(virtual=2, workers=2, steps=200, min_workers=1, config={"body_s": 0.05})
    spec = dataclasses.replace(
        spec, failure=dataclasses.replace(spec.failure, heartbeat_timeout_s=2.0)
    )
    stored = StalledStore()
    with ProcessRun(spec, clipped_average_norm, url=str(tmp_path), state_store=stored) as run:
        eventually(lambda: run.controller.status()["step"] >= 5, run.controller.status)
        status = run.controller.status
        eventually(lambda: status()["world_size"] == 2 and status()["phase"] == "running", status)
        stored.goes_away.set()
        next(iter(run.worker_group.processes.values())).kill()
        assert stored.stalls.wait(PATIENCE_S)
        renewed = []
        renew = run.controller.heartbeats.renew
        run.controller.heartbeats.renew = lambda worker, beat: (
            renewed.append(worker),
            renew(worker, beat),
        )
        time.sleep(2 * spec.failure.lease)
        eventually(lambda: len(renewed) >= 3, lambda: f"of the survivor: {renewed}")
        stored.answers.set()
        outcome = run.wait()
    assert (outcome.step, outcome.error, outcome.workers_lost) == (200, None, 1)
