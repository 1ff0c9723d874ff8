"""Times of workers, from their heartbeats to the journal and the goodput of a run."""

import time

import pytest
import torch

from elastic_dp.cluster.controller.run_times import RunTimes
from elastic_dp.coordinator.messages import (
    CheckpointFound,
    FormGeneration,
    HeartbeatReceived,
    Member,
    Membership,
    StopRequested,
    TrainingPosition,
    WorkerLost,
)
from elastic_dp.telemetry.goodput import goodput_of
from elastic_dp.telemetry.journal import Journal
from tests.patience import eventually
from tests.runs import ENDLESS, goes_on, group, lines_of, spec_of
from tests.telemetry.test_goodput import counted


def train(ctx):
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy
    for _ in ctx.steps(model, optimizer, lambda model, batch: loss(model(batch["x"]), batch["y"])):
        time.sleep(0.02)  # a body that takes time, and waits for nobody


def kill_one(run):
    """When two train: either may have begun alone, and has the only state until the other one has
    received it. The group trains again when this returns."""
    status = run.controller.status
    eventually(lambda: (status()["world_size"], status()["phase"]) == (2, "running"), status)
    worker = sorted(run.worker_group.processes)[-1]
    run.worker_group.processes[worker].kill()
    eventually(lambda: worker not in status()["workers"] and status()["phase"] == "running", status)
    goes_on(run)


def test_goodput_of_a_run_with_a_kill_adds_up_to_the_wall_time_of_its_workers():
    script = [(10, kill_one), (10, StopRequested("enough"))]
    outcome, run = group(spec_of(steps=ENDLESS, workers=2), train, script=script)
    assert (outcome.reason, outcome.error) == ("enough", None)
    lines = [line for line in lines_of(run) if "event" in line or "command" in line]
    goodput, (total, missing) = goodput_of(lines), counted(lines)
    assert goodput.total == pytest.approx(total, rel=0.01)
    assert goodput.waiting_for_workers == pytest.approx(missing, rel=0.01)
    # The bodies alone, of both workers or of the one that was left.
    assert goodput.useful > outcome.step * 0.02
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


def test_step_in_the_journal_goes_back_with_the_run():
    journal = Journal(None)
    times = RunTimes(journal)
    times.heard(beat("w1", 30, 1.0))
    times.flush()
    journal.event(CheckpointFound(10))
    times.heard(beat("w2", 12, 1.0))
    times.flush()
    lines = [line["step"] for line in journal.since(None, 0)[1]]
    assert lines == [30, 10, 12]


def test_controller_that_takes_over_continues_the_goodput_of_the_one_before(tmp_path):
    journal = Journal(str(tmp_path))
    first = RunTimes(journal)
    began = time.time()
    first.begin(1, takes_over=False, rows_by_step={0: 8})
    members = (Member("w1", ((0, 1),), TrainingPosition(0), False),)
    journal.command(FormGeneration(Membership(1, members, "w1", 1.0)))
    first.heard(beat("w1", 3, 0.0, 1e-3))
    first.flush()
    before = first.goodput()
    journal.close()
    again = RunTimes(Journal(str(tmp_path), since=began - 1))
    again.begin(1, takes_over=True, rows_by_step={0: 8})
    assert again.goodput().useful >= before.useful > 0
    assert again.times().compute == 1e-3


def test_retries_of_stores_are_the_newest_count_of_each_worker_also_of_one_that_is_gone():
    times = RunTimes(Journal(None))
    for worker, retries in (("w1", 3), ("w2", 1), ("w1", 5), ("w1", 4), ("w3", 0)):
        times.heard(HeartbeatReceived(worker, 1, 1, "data", store_retries=retries))
    assert times.store_retries == 6
