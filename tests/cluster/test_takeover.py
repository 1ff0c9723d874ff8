"""What a controller that takes over knows of the run, without Ray."""

from types import SimpleNamespace

import cloudpickle
import pytest

from elastic_dp.cluster import ledger
from elastic_dp.cluster.controller import Controller
from elastic_dp.cluster.heartbeats import Address, Page
from elastic_dp.cluster.ledger import Ledger, requests, time_left_s
from elastic_dp.cluster.worker import Job, Worker
from elastic_dp.coordinator import messages as m
from elastic_dp.telemetry.journal import Journal
from elastic_dp.train.controller_link import ControllerLink
from tests.coordinator.scenes import Scene
from tests.runs import spec_of


class Stored(Ledger):
    """Of a run that one controller led before."""

    def __init__(self, earlier: Ledger) -> None:
        super().__init__()
        self.facts = earlier.facts
        self.facts.term += 1
        self.claims = []

    def claim(self, generation):
        self.claims.append(generation)
        return True

    def highest_claimed(self):
        return 7


class Fleet:
    def __init__(self):
        self.sent, self.started, self.killed = [], [], []

    def start(self, worker):
        self.started.append(worker)

    def send(self, worker, command, rendezvous):
        self.sent.append(command)

    def kill(self, worker):
        self.killed.append(worker)

    def close(self):
        pass


def earlier(now=0.0):
    ledger = Ledger()
    for message in (
        *(m.StartWorker(worker) for worker in ("w1", "w2", "w3", "w4")),
        m.ReleaseWorker("w4", "the size is 3 now"),
        m.SizeRequested(2, 2),
        m.SizeRequested(3),
        m.WorkerHeard("w1", 1, 5, "compute"),
        *(m.WorkerStarted(worker) for worker in ("w1", "w2", "w3")),
        m.StartWorker("w5"),  # the controller died before there was an actor
        m.DrainNoticed("w2", now + 30.0),
        m.StopRequested("enough"),
        m.StopRequested("too late"),
    ):
        ledger.note(message)
    return ledger


def controller(ledger, journal=None):
    made = Controller(
        spec_of(workers=2), "run", "127.0.0.1", b"secret", journal or Journal(None), ledger
    )
    made._fleet = Fleet()
    made.heartbeats.close()
    return made


def test_it_asks_the_workers_there_are():
    made = controller(Stored(earlier()))
    commands = made._take_over(["w1", "w2", "w4"])
    asked = [c.worker for c in commands if isinstance(c, m.ReportYourself)]
    assert asked == ["w1", "w2"]
    assert made._fleet.killed == ["w4"], "it was told to leave, and takes no part any more"
    assert [c.generation for c in commands if isinstance(c, m.ClaimGeneration)] == [8]
    assert (made.coordinator.size, made.coordinator._run.least) == (3, 2)
    assert made.coordinator._lineage.established


class Heard(ControllerLink):
    def __init__(self):
        self.said = []

    def post(self, event):
        self.said.append(event)


@pytest.mark.parametrize("was_begun", [False, True])
def test_who_came_up_while_no_controller_led_is_begun(monkeypatch, was_begun):
    monkeypatch.setattr(Page, "start_pulse", lambda *_: None)
    job = Job(
        cloudpickle.dumps((spec_of(), None)),
        None,
        "run",
        None,
        Address("127.0.0.1", 9, b"n"),
        b"secret",
    )
    link = Heard()
    worker = Worker("w1", job, link)
    if was_begun:
        worker.deliver(m.BeginTraining("w1", True), None)
    scene = Scene.recovered(["w1"], 0, size=1)
    for command in scene.ever(m.ReportYourself):
        worker.deliver(command, None)
    for event in link.said:
        scene.tell(event)
    scene.hear("w1", phase="start")
    assert scene.ever(m.BeginTraining)


def test_who_died_meanwhile_is_counted_and_who_was_let_go_is_not():
    made = controller(Stored(earlier()))
    made._take_over(["w1", "w2", "w4"])
    while not made.inbox.empty():
        made._note(made.inbox.get())
    assert made.ledger.facts.lost == 1  # w3
    for worker in ("w4", "w1"):
        made._note(m.WorkerLost(worker, "left"))
    assert made.ledger.facts.lost == 2
    assert list(made.ledger.facts.here) == ["w2"]


def test_what_an_operator_asked_for_is_asked_again(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0)
    monkeypatch.setattr(ledger, "time", clock)
    facts = earlier(now=100.0).facts
    drain, stop = requests(facts, now=1000.0)
    assert drain == m.DrainNoticed("w2", 1030.0)
    assert stop == m.StopRequested("enough")
    facts.started_at = 4990.0
    assert time_left_s(facts, 60.0) == 50.0


@pytest.mark.parametrize(("set_by_s", "left_s"), [(0.0, 30.0), (-3600.0, 30.0), (3600.0, -3570.0)])
def test_a_drain_is_never_put_off_by_a_clock_that_was_set(monkeypatch, set_by_s, left_s):
    earlier, clock = Ledger(), SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0)
    monkeypatch.setattr(ledger, "time", clock)
    earlier.note(m.DrainNoticed("w1", 130.0))
    clock.time = lambda: 5000.0 + set_by_s
    assert requests(earlier.facts, now=7.0) == [m.DrainNoticed("w1", 7.0 + left_s)]


def test_the_first_stop_counts_for_who_takes_over():
    ledger = Ledger()
    for reason in ("enough", "interrupted"):
        ledger.note(m.StopRequested(reason))
    assert requests(ledger.facts, 0.0) == [m.StopRequested("enough")]


def test_a_checkpoint_that_was_asked_for_is_asked_for_again_until_one_is_sealed():
    ledger = Ledger()
    ledger.note(m.CheckpointRequested())
    assert requests(ledger.facts, 0.0) == [m.CheckpointRequested()]
    ledger.note(m.CheckpointSealed(3))
    assert requests(ledger.facts, 0.0) == []


def test_what_was_made_by_workers_that_went_wrong_stays_rejected():
    ledger = Ledger()
    ledger.note(m.FindCheckpoint(at_most=20))
    assert ledger.facts.at_most == 20
    ledger.note(m.FormGeneration(m.Membership(8, (), "w1", 1.0)))
    assert ledger.facts.at_most is None


def test_a_run_that_has_ended_is_not_led_again():
    first = controller(Ledger())
    first.coordinator._generation.number = 4
    first._execute(m.FinishRun(m.TrainingPosition(12, 1), "digest", "the last step"))
    second = controller(Stored(first.ledger))
    outcome = second.lead()
    assert (outcome.step, outcome.digest, outcome.generations) == (12, "digest", 4)
    assert outcome.result is not None and second.ended.is_set()
    status = second.status()
    assert (status["phase"], status["reason"], status["step"]) == ("over", "the last step", 12)


def test_metrics_are_recorded_once_over_two_controllers(tmp_path):
    ledger = Ledger()
    journal = Journal(str(tmp_path))
    first = controller(ledger, journal)
    for step, call in ((1, 1), (1, 2), (2, 1)):
        first.log(step, call, {"loss": step + call / 10})
    journal.close()
    second = controller(Stored(ledger), Journal(str(tmp_path), since=ledger.facts.started_at))
    assert second.logged_to == (2, 1)
    assert second.logged == {"loss": 2.1}
    for step, call in ((1, 2), (2, 1), (2, 2)):
        second.log(step, call, {"loss": step + call / 10})
    assert [line["loss"] for line in second.journal.recorded()] == [1.1, 1.2, 2.1, 2.2]
    second.journal.close()
