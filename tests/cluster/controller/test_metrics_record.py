"""What is logged is written once, in order, as plain numbers."""

import json
import threading
import time
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from elastic_dp.telemetry.journal import Journal
from elastic_dp.train.log_sender import LoggedCall
from tests.cluster.controllers import controller_of
from tests.patience import PATIENCE_S
from tests.runs import local, spec_of
from tests.train.jobs import classify


class Slow(Journal):
    """While it writes the first record, another worker sends that and the next one."""

    def __init__(self) -> None:
        super().__init__(None)
        self.writes, self.sent, self.steps = threading.Event(), threading.Event(), []

    def metrics(self, step, metrics, at):
        if step == 1:
            self.writes.set()
            self.sent.wait(0.3)  # cannot come where one waits for the other
        self.steps.append(step)


def test_records_of_two_workers_keep_their_order():
    journal = Slow()
    controller = controller_of(spec_of(), journal)
    calls = [LoggedCall((1, 1), None, {}, 0.0), LoggedCall((2, 1), (1, 1), {}, 0.0)]
    first = threading.Thread(target=controller.log_all, args=(calls[:1], 0.0))
    first.start()
    assert journal.writes.wait(PATIENCE_S)
    controller.log_all(calls, 0.0)
    journal.sent.set()
    first.join()
    assert journal.steps == [1, 2]


def test_a_record_has_the_time_of_its_call_and_not_of_its_arrival():
    journal = Journal(None)
    controller = controller_of(spec_of(), journal)
    before = time.time()
    calls = [LoggedCall((1, 1), None, {}, 500.0), LoggedCall((2, 1), (1, 1), {}, 570.0)]
    assert controller.log_all(calls, sent_at=600.0)
    assert not controller.log_all([LoggedCall((4, 1), (3, 1), {}, 600.0)], sent_at=600.0)
    first, second = (line["time"] for line in journal.recorded())
    assert before - 100.001 <= first <= time.time() - 99.999
    assert second - first == pytest.approx(70.0)


def test_metrics_of_a_step_that_is_made_once_more_reach_its_new_checkpoint():
    """A run that went on from an older checkpoint records no line twice; but what it commits then
    is ranked, too."""
    journal = MagicMock(recorded=lambda: [{"step": 3, "loss": 0.5}, {"step": 9, "loss": 0.25}])
    controller = controller_of(spec_of(), journal)
    controller.committer = MagicMock()
    controller.log_all([LoggedCall((5, 1), None, {"loss": 0.4}, 0.0)], 0.0)
    journal.metrics.assert_not_called()
    controller.committer.log.assert_called_once_with(5, {"loss": 0.4})


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.ones(1), 1.0),
        (np.arange(2), [0, 1]),
        (torch.tensor(0.5), 0.5),
        (torch.ones(2), [1.0, 1.0]),
    ],
)
def test_numbers_are_written_as_such(value, plain):
    def train(ctx):
        classify(ctx, body=lambda step: ctx.log({"value": value}))

    record = local(spec_of(steps=1), train).logged[0]
    assert json.loads(json.dumps(record)) == {"step": 1, "value": plain}
