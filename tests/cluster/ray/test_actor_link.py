"""Each call of ctx.log is recorded once and in order, whatever is lost while a controller takes
over."""

from types import SimpleNamespace

import pytest

from elastic_dp.cluster.controller.metric_log import MetricLog
from elastic_dp.cluster.ray.actor_link import ActorLink
from elastic_dp.train import log_sender
from elastic_dp.train.generations.worker_progress import WorkerProgress
from tests.patience import PATIENCE_S


class JournalInMemory:
    def __init__(self, lines):
        self.lines = list(lines)

    def recorded(self):
        return iter(self.lines)

    def metrics(self, step, metrics, at):
        self.lines.append({"step": step, **metrics})


class FakeController:
    """What a worker's calls reach: a controller, or nobody."""

    def __init__(self):
        self.term, self.now, self.reachable, self.links = 0, 0.0, True, {}
        self.asks = False
        self.messages = 0
        self.log_all = SimpleNamespace(remote=self._log_all)
        self.starts([])

    def starts(self, lines):
        self.term += 1
        self.journal = JournalInMemory(lines)
        self.record = MetricLog(self.journal, lambda: self.now)
        self.asks = True
        self.answers_come()

    def answers_come(self):
        if self.asks:
            self.asks = False
            for link in self.links.values():
                link.serve(self.term, self.record.logged_to)

    def steps(self):
        return [line["step"] for line in self.journal.lines]

    def _log_all(self, term, calls, sent_at):
        self.messages += 1
        if self.reachable and term == self.term:
            recorded = [self.record.log(*call, sent_at - at) for *call, at in calls]
            self.asks |= not all(recorded)


class LoggingWorker:
    """A worker whose body logs `calls` times in each step."""

    def __init__(self, name, controller, progress=None):
        self.progress = progress or WorkerProgress()
        self.link = ActorLink(controller, controller.term)
        controller.links[name] = self.link

    def trains_to(self, step, calls=1):
        for number in range(self.progress.position.step + 1, step + 1):
            self.progress.step_committed(number, is_last=False)
            for _ in range(calls):
                self.link.log(*self.progress.logs(), {"loss": 0.5})
            self.link.flush()


@pytest.fixture
def controller():
    return FakeController()


def joined(name, controller, source):
    """A worker that received its state from `source`."""
    progress = WorkerProgress()
    progress.joined(*source.progress.of_finished_bodies())
    progress.took_over(source.progress.position, [], None, 1)
    return LoggingWorker(name, controller, progress)


@pytest.mark.parametrize("calls", [1, 2])
def test_metrics_that_a_new_controller_did_not_get_are_asked_for_again(controller, calls):
    worker = LoggingWorker("w1", controller)
    worker.trains_to(30, calls)
    controller.reachable = False  # the worker does not know the new address yet
    controller.starts(controller.journal.lines[: 23 * calls])
    worker.trains_to(38, calls)
    controller.reachable = True
    worker.trains_to(39, calls)
    assert controller.steps()[-1] == 23  # not 39, with a gap before it
    controller.answers_come()
    assert controller.steps() == [step for step in range(1, 40) for _ in range(calls)]


def test_a_joiner_is_not_recorded_before_what_others_have_logged(controller):
    first = LoggingWorker("w1", controller)
    first.trains_to(30)
    joiner = joined("w0", controller, first)
    joiner.trains_to(34)
    first.trains_to(34)
    controller.links = {"w0": joiner.link, "w1": first.link}  # the joiner is asked first
    controller.starts(controller.journal.lines[:23])
    assert controller.steps() == list(range(1, 35))


def test_calls_after_the_loop_are_recorded_once_where_a_joiner_is_first(controller):
    """The joiner comes between two of them. It has not run the last body, and it makes both."""
    first = LoggingWorker("w1", controller)
    first.trains_to(30)
    first.progress.loop_left()
    first.link.log(*first.progress.logs(), {"accuracy": 0.25})
    joiner = joined("w2", controller, first)
    joiner.progress.loop_left()
    joiner.link.log(*joiner.progress.logs(), {"accuracy": 0.25})
    for worker in (joiner, first):
        worker.link.log(*worker.progress.logs(), {"perplexity": 4.0})
        worker.link.flush()
    after_the_loop = [line for line in controller.journal.lines if "loss" not in line]
    assert [line.get("accuracy") for line in after_the_loop] == [0.25, None]
    assert [line.get("perplexity") for line in after_the_loop] == [None, 4.0]


def test_joiner_that_is_alone_is_recorded_from_where_it_joined(controller):
    first = LoggingWorker("w1", controller)
    first.trains_to(30)
    joiner = joined("w2", controller, first)
    joiner.trains_to(34)
    assert controller.steps() == list(range(1, 35))


def test_run_that_logs_rarely_has_no_gaps(controller):
    worker = LoggingWorker("w1", controller)
    for step in range(1, 200):
        worker.progress.step_committed(step, is_last=False)
        if step % 50 == 0:
            worker.link.log(*worker.progress.logs(), {})
    worker.link.flush()
    assert controller.steps() == [50, 100, 150]


def test_steps_that_are_recorded_are_not_recorded_again_after_a_restore(controller):
    worker = LoggingWorker("w1", controller)
    worker.trains_to(30)
    worker.progress.restored(20, [], 1, is_last=False)
    worker.trains_to(33)
    assert controller.steps() == list(range(1, 34))


def test_calls_after_the_loop_are_recorded_after_a_restore_of_the_last_step(controller):
    worker = LoggingWorker("w1", controller)
    worker.trains_to(30, calls=2)
    calls = worker.progress.log_calls_of_body()
    worker.progress.restored(30, [], calls, is_last=True)
    worker.link.log(*worker.progress.logs(), {"accuracy": 0.25})
    worker.link.flush()
    assert controller.journal.lines[-2:] == [
        {"step": 30, "loss": 0.5},
        {"step": 30, "accuracy": 0.25},
    ]


def test_last_metrics_are_sent_again_when_the_state_is_asked_for(controller):
    worker = LoggingWorker("w1", controller)
    worker.trains_to(30)
    controller.reachable = False
    controller.starts(controller.journal.lines[:23])
    controller.reachable = True
    worker.link.resend()
    assert controller.steps() == list(range(1, 31))


def test_metrics_whose_workers_are_lost_are_waited_for_some_seconds(controller):
    first = LoggingWorker("w1", controller)
    first.trains_to(30)
    joiner = joined("w2", controller, first)
    joiner.trains_to(34)
    del controller.links["w1"]
    controller.starts(controller.journal.lines[:23])
    controller.now += 4.0
    joiner.trains_to(35)
    assert controller.steps() == list(range(1, 24))
    controller.now += 2.0
    joiner.trains_to(36)
    assert controller.steps() == [*range(1, 24), *range(31, 37)]


def test_metrics_that_wait_are_recorded_when_the_run_ends(controller):
    first = LoggingWorker("w1", controller)
    first.trains_to(30)
    joiner = joined("w2", controller, first)
    joiner.trains_to(34)
    del controller.links["w1"]
    controller.starts(controller.journal.lines[:23])
    controller.record.close()
    assert controller.steps() == [*range(1, 24), *range(31, 35)]


def test_each_later_message_comes_behind_what_was_logged_before(controller, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", PATIENCE_S)
    came = []
    controller.log_all.remote = lambda term, calls, at: came.append([each.call for each in calls])
    controller.tell = SimpleNamespace(remote=lambda method, *_: came.append(method))
    link = ActorLink(controller, controller.term)
    later = [lambda: link.post(None), lambda: link.say("text"), lambda: link.skipped(["a"])]
    later += [lambda: link.wrote("w1", None)]
    for step, send in enumerate(later, start=1):
        link.log((step, 1), None, {})
        link.log((step, 2), (step, 1), {})
        send()
    assert came == [
        each
        for step, method in enumerate(("post", "say", "skipped", "wrote"), start=1)
        for each in ([(step, 1), (step, 2)], method)
    ]
