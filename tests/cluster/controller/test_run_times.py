"""Times of workers, from their heartbeats to the journal and the goodput of a run."""

import time

import pytest
import torch

from elastic_dp.cluster.controller.run_times import RunTimes
from elastic_dp.coordinator.messages import HeartbeatReceived, WorkerLost
from elastic_dp.telemetry.goodput import goodput_of
from elastic_dp.telemetry.journal import Journal
from tests.patience import eventually
from tests.runs import goes_on, group, lines_of, spec_of
from tests.telemetry.test_goodput import counted


def train(ctx):
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy
    for _ in ctx.steps(model, optimizer, lambda model, batch: loss(model(batch["x"]), batch["y"])):
        time.sleep(0.02)  # a body that takes time, and waits for nobody


def kill_one(run):
    status = run.controller.status
    eventually(lambda: status()["world_size"] == 2, status)  # it may have begun with one
    worker = sorted(run.worker_group.processes)[-1]
    run.worker_group.processes[worker].kill()
    goes_on(run)


def test_goodput_of_a_run_with_a_kill_adds_up_to_the_wall_time_of_its_workers():
    outcome, run = group(spec_of(steps=40, workers=2), train, script=[(10, kill_one)])
    assert outcome.reason and outcome.error is None
    lines = [line for line in lines_of(run) if "event" in line or "command" in line]
    goodput, (total, missing) = goodput_of(lines), counted(lines)
    assert goodput.total == pytest.approx(total, rel=0.01)
    assert goodput.waiting_for_workers == pytest.approx(missing, rel=0.01)
    # The bodies alone, of both workers or of the one that was left.
    assert goodput.useful > 40 * 0.02
    assert goodput.pause > 0
    # What the controller knows as the run goes on is no other number.
    assert run.controller.times.goodput() == goodput


def beat(worker, step, *times):
    return HeartbeatReceived(worker, 1, step, "body", times=times)


def test_times_of_a_worker_are_in_the_journal_before_its_end():
    journal = Journal(None)
    times = RunTimes(journal)
    times.heard(beat("w1", 3, 1.0, 2.0))
    times.heard(beat("w2", 4, 1.0, 3.0))
    times.lost("w1")
    journal.event(WorkerLost("w1", "gone"))
    kinds = [(line["event"], line.get("times")) for line in journal.since(None, 0)[1]]
    assert kinds == [("TimesReported", {"w1": (1.0, 2.0)}), ("WorkerLost", None)]


def test_many_heartbeats_make_one_line():
    journal = Journal(None)
    times = RunTimes(journal)
    for step in range(1000):
        times.heard(beat(f"w{step % 7}", step, float(step)))
    assert journal.since(None, 0)[1] == []
    times.flush()
    [line] = journal.since(None, 0)[1]
    assert line["step"] == 999 and len(line["times"]) == 7


def test_controller_that_takes_over_continues_the_goodput_of_the_one_before(tmp_path):
    journal = Journal(str(tmp_path))
    first = RunTimes(journal)
    began = time.time()
    first.begin(1, takes_over=False)
    journal._line("events", "command", "FormGeneration", {"members": ["w1"]})
    first.heard(beat("w1", 3, 0.0, 1e-3))
    first.flush()
    before = first.goodput()
    journal.close()
    again = RunTimes(Journal(str(tmp_path), since=began - 1))
    again.begin(1, takes_over=True)
    assert again.goodput().useful >= before.useful > 0
    assert again.times().compute == 1e-3
