"""Who owes which part of a checkpoint, and who may commit it."""

import queue
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from elastic_dp.checkpoint import lease
from elastic_dp.checkpoint.catalog import Catalog, Keep
from elastic_dp.checkpoint.checkpoint_reader import load, verify
from elastic_dp.checkpoint.checkpoint_writer import write_blobs
from elastic_dp.checkpoint.lease import Record
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.config import CheckpointConfig
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing import checkpoint_committer
from elastic_dp.train.checkpointing.checkpoint_committer import (
    CheckpointCommitter,
    CommitterActions,
)
from tests.patience import PATIENCE_S, eventually

TREE = {"weights": torch.arange(1_500_000, dtype=torch.float32)}  # six parts
EVERY_PART = range(6)


class Stage:
    """A committer, and what it asks and tells."""

    def __init__(self, url, lease_s=60.0, config=None, token=None):
        self.catalog = Catalog(Store(url))
        self.asked, self.told, self.committed = queue.Queue(), [], queue.Queue()
        self.wanted, self.durations_s = queue.Queue(), []
        self.stood_down = threading.Event()
        self.failures = []
        self.snapshot = Snapshot()
        self.committer = CheckpointCommitter(
            self.catalog,
            config or CheckpointConfig(),
            CommitterActions(
                request_blobs=lambda *asked: self.asked.put(asked),
                request_checkpoint=lambda: self.wanted.put(time.monotonic()),
                tell=self.told.append,
                committed=self.commit,
                stand_down=lambda reason: self.stood_down.set(),
                fail=self.failures.append,
            ),
            lease_s=lease_s,
            token=token,
        )
        self.committer.training_began()

    def commit(self, step, duration_s):
        self.durations_s.append(duration_s)
        self.committed.put(step)

    def goes_on_from(self):
        found = queue.Queue()
        self.committer.find(found.put)
        return found.get(timeout=PATIENCE_S)

    def comes_to_rest(self):
        rests = threading.Event()
        self.committer._tasks.put(rests.set)
        assert rests.wait(timeout=PATIENCE_S)

    def write(self, worker, members, parts, step=5, lineage_id=0, took_s=0.0):
        if self.snapshot.step != step:
            self.snapshot.take(step, TREE)
        blobs = blobs_of(self, worker, members, parts)
        written = replace(blobs, lineage_id=lineage_id, took_s=took_s)
        self.committer.wrote(worker, written)
        return written

    def commit_all(self, worker, step=5, **how):
        """One worker writes all parts, and they are committed."""
        self.write(worker, (worker,), EVERY_PART, step, **how)
        assert self.committed.get(timeout=PATIENCE_S) == step


def names_of(stage, parts):
    names = [*stage.snapshot.manifest().headers]
    return sorted(names[number] for number in parts)


def blobs_of(stage, worker, members, parts):
    """Writes these parts."""
    names = names_of(stage, parts)
    with ThreadPoolExecutor(1) as executor:
        return write_blobs(
            stage.catalog, stage.snapshot, executor, writer=worker, members=members, names=names
        )


@pytest.fixture(autouse=True)
def _nothing_is_requested(monkeypatch):
    """Where a test is slow to tell what was written, nobody asks for it."""
    monkeypatch.setattr(checkpoint_committer, "_PATIENCE_S", 1e6)


@pytest.fixture
def begun(tmp_path):
    """Makes committers that go on from nothing, and closes them in the end."""
    made = []

    def begin(folder=tmp_path, **options):
        made.append(Stage(str(folder), **options))
        assert made[-1].goes_on_from() is None
        return made[-1]

    yield begin
    for stage in made:
        stage.committer.close()


@pytest.fixture
def stage(begun):
    return begun()


def test_duration_of_a_checkpoint_begins_with_the_first_snapshot(stage):
    stage.write("w1", ("w1", "w2"), [0, 1, 2], took_s=200.0)
    told = stage.write("w2", ("w1", "w2"), [3, 4, 5], took_s=100.0)
    assert stage.committed.get(timeout=PATIENCE_S) == 5
    [duration_s] = stage.durations_s
    assert 200.0 <= duration_s < 200.0 + PATIENCE_S
    stage.committer.wrote("w2", told)  # once more
    assert stage.committed.get(timeout=PATIENCE_S) == 5
    assert stage.durations_s == [duration_s, 0.0]


def test_committer_without_work_sleeps(begun, monkeypatch):
    monkeypatch.setattr(checkpoint_committer, "_PATIENCE_S", 5.0)
    stage = begun(lease_s=1e6)
    stage.commit_all("w1")
    stage.comes_to_rest()
    assert stage.committer._idle_s() > 1e4


def test_rejected_checkpoint_leaves_the_history_and_is_never_committed(stage):
    for step in (5, 10):
        stage.commit_all("w1", step, lineage_id=1)
    stage.write("w1", ("w1", "w2"), EVERY_PART[:3], 12, lineage_id=1)
    stage.committer.reject(7, 3)
    assert stage.goes_on_from() == 5
    stage.write("w2", ("w1", "w2"), EVERY_PART[3:], 12, lineage_id=1)  # late
    stage.write("w3", ("w3",), EVERY_PART, 10, lineage_id=4)  # made again
    assert stage.committed.get(timeout=PATIENCE_S) == 10
    assert [name.step for name in stage.catalog.names()] == [5, 10]
    assert stage.goes_on_from() == 10


@pytest.mark.parametrize("lost_first", [True, False])
def test_parts_of_a_lost_worker_are_requested_of_another(stage, lost_first):
    members = ("w1", "w2", "w3")
    if lost_first:
        stage.committer.lost("w3")
    stage.write("w2", members, [2, 3])
    if not lost_first:
        stage.committer.lost("w3")
    assert stage.asked.get(timeout=PATIENCE_S) == ("w2", 5, names_of(stage, [4, 5]))
    stage.write("w1", members, [0, 1])
    stage.write("w2", members, [4, 5])
    assert stage.committed.get(timeout=PATIENCE_S) == 5
    stage.write("w1", ("w1", "w2"), [0, 1, 2], step=10)  # that loss is over
    stage.write("w2", ("w1", "w2"), [3, 4, 5], step=10)
    assert stage.committed.get(timeout=PATIENCE_S) == 10
    assert stage.asked.empty()


def test_parts_without_a_writer_are_requested_in_the_end(stage, monkeypatch):
    """A worker a step behind shares the writing with the members of the next generation."""
    stage.write("w1", ("w1", "w2"), [0, 1, 2])
    stage.write("w2", ("w1", "w2", "w3"), [2, 3])
    stage.comes_to_rest()
    monkeypatch.setattr(checkpoint_committer, "_PATIENCE_S", 0.0)
    stage.committer.lost("w9")  # wakes it
    worker, step, names = stage.asked.get(timeout=PATIENCE_S)
    assert (step, names) == (5, names_of(stage, [4, 5]))
    stage.write(worker, ("w1", "w2"), [4, 5])
    assert stage.committed.get(timeout=PATIENCE_S) == 5


def test_late_parts_of_an_older_step_are_not_committed(stage):
    stage.write("w1", ("w1", "w2"), [0, 1, 2], step=5)
    stage.commit_all("w1", 7)
    stage.comes_to_rest()  # what lay there of step 5 is collected
    stage.write("w2", ("w2",), EVERY_PART, step=5)
    assert stage.committed.get(timeout=PATIENCE_S) == 7, "a step before it is covered by it"
    assert [name.step for name in stage.catalog.names()] == [7]


def test_completed_checkpoints_are_committed_in_the_order_of_steps(stage):
    """The lost worker was the last that the newer checkpoint waited for, and the older one,
    reported later, as well."""
    stage.write("w1", ("w1", "w2"), EVERY_PART, step=7)
    stage.write("w3", ("w3", "w2"), EVERY_PART, step=5)
    stage.committer.lost("w2")
    assert stage.committed.get(timeout=PATIENCE_S) == 7
    assert stage.goes_on_from() == 7
    assert [name.step for name in stage.catalog.names()] == [7]


def test_parts_requested_of_a_worker_that_is_lost_are_requested_of_another(stage):
    members = ("w1", "w2", "w3")
    stage.committer.lost("w3")
    stage.write("w2", members, [2, 3])
    assert stage.asked.get(timeout=PATIENCE_S) == ("w2", 5, names_of(stage, [4, 5]))
    stage.write("w1", members, [0, 1])
    stage.committer.lost("w2")
    assert stage.asked.get(timeout=PATIENCE_S) == ("w1", 5, names_of(stage, [4, 5]))
    stage.write("w1", members, [4, 5])
    assert stage.committed.get(timeout=PATIENCE_S) == 5


def test_uncommitted_parts_are_discarded_when_their_writers_are_lost(stage):
    """The next ones may hold another state of the same step, where rounding depends on the
    number of workers."""
    members = ("w1", "w2")
    stage.write("w1", members, [0, 1, 2])
    stage.committer.lost("w1")
    stage.committer.lost("w2")
    assert stage.goes_on_from() is None
    stage.write("w2", members, [3, 4, 5])  # its word was under way
    stage.snapshot = Snapshot()
    stage.snapshot.take(5, {"weights": TREE["weights"] + 1})
    stage.commit_all("w3")
    assert not any("not the same" in text for text in stage.told)


def test_checkpoint_by_time_is_requested_and_has_the_metrics_of_its_step(begun):
    stage = begun(config=CheckpointConfig(every_s=2.0))
    for step in (4, 5, 6):
        stage.committer.log(step, {"loss": step / 2, "name": "mine"})
    asked_at = stage.wanted.get(timeout=PATIENCE_S)
    stage.commit_all("w1")
    assert next(stage.catalog.commits()).metadata.metrics == {"loss": 2.5}
    # It says so a moment after it has looked at the clock, and on a busy machine a long one.
    assert stage.wanted.get(timeout=PATIENCE_S) - asked_at > 0.1


def test_best_checkpoint_is_kept_when_the_run_is_stopped_at_a_step_without_a_value(begun):
    """The last step took the value of the evaluation before it, tied with the best, and the best
    was deleted."""
    config = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="accuracy", checkpoint_score_order="max"
    )
    stage = begun(config=config)
    for step, logged in ((5, {"accuracy": 0.9}), (6, {}), (7, {"accuracy": 0.4}), (9, {})):
        stage.committer.log(step, {"loss": 1.0} | logged)
        stage.snapshot.take(step, {"weights": TREE["weights"] + step})
        stage.commit_all("w1", step)
    stage.comes_to_rest()
    assert [commit.step for commit in stage.catalog.commits()] == [9, 5]
    assert [commit.metadata.metrics for commit in stage.catalog.commits()] == [
        {"loss": 1.0},
        {"loss": 1.0, "accuracy": 0.9},
    ]
    assert stage.catalog.best(Keep(score_attribute="accuracy")).step == 5
    assert sum("is not ranked" in text for text in stage.told) == 1


def of_user(value, weights=0.0):
    """A state whose weights and whose state= have these values, in six parts."""
    user = {"ema": {"shadow": torch.full((9,), value), "n": int(value), "same": 1}}
    weights = torch.arange(1_500_000, dtype=torch.float32) + weights
    return {"step": {"parameters": [weights]}, "body": {"user": user}}


def report(stage, worker, tree, parts):
    stage.snapshot = Snapshot()
    stage.snapshot.take(5, tree)
    members = ("w1", "w2", "w3")
    blobs = blobs_of(stage, worker, members, parts)
    stage.committer.wrote(worker, blobs)


def report_shares(stage, trees):
    for rank, (worker, tree) in enumerate(trees.items()):
        report(stage, worker, tree, range(2 * rank, 2 * rank + 2))


def test_state_that_differs_is_an_error_by_key_and_the_majority_has_a_checkpoint(stage):
    trees = {"w1": of_user(2.0), "w2": of_user(1.0), "w3": of_user(1.0)}
    report_shares(stage, trees)
    worker, _, names = stage.asked.get(timeout=PATIENCE_S)
    report(stage, worker, trees[worker], [0, 1])
    assert worker in ("w2", "w3") and names == names_of(stage, [0, 1])
    assert stage.committed.get(timeout=PATIENCE_S) == 5
    stage.comes_to_rest()
    [error] = stage.failures
    assert str(error).startswith(
        "the state differs between members after step 5: state['ema'].state_dict().n (2 and 1), "
        "state['ema'].state_dict().shadow (on w1)."
    )
    [commit] = stage.catalog.commits()
    assert load(stage.catalog, commit)["body"]["user"]["ema"]["n"] == 1


def test_weights_that_differ_are_committed_only_if_no_step_follows(begun, tmp_path):
    for follows in (True, False):
        stage = begun(tmp_path / str(follows))
        trees = {"w1": of_user(1.0), "w2": of_user(1.0), "w3": of_user(2.0, weights=1.0)}
        report_shares(stage, trees)
        worker, _, names = stage.asked.get(timeout=PATIENCE_S)
        report(stage, worker, trees[worker], [4, 5])
        assert names == names_of(stage, [4, 5])
        stage.comes_to_rest()
        assert stage.catalog.names() == [] and "step.parameters.0" in stage.told[-1], stage.told
        if follows:
            stage.committer.reject(4, 0)
        stage.committer.close()
        assert [name.step for name in stage.catalog.names()] == ([] if follows else [5])
        assert len(stage.failures) == (0 if follows else 1)


def test_commit_waits_for_the_digest_of_members_without_parts(stage):
    """A small state is one part: who writes it may be the one that is wrong."""
    report(stage, "w3", of_user(1.0), range(6))
    stage.committer.lost("w2")
    stage.comes_to_rest()
    assert stage.catalog.names() == []
    report(stage, "w1", of_user(1.0), [])
    assert stage.committed.get(timeout=PATIENCE_S) == 5


def test_a_silent_one_is_not_waited_for_without_end(stage, monkeypatch):
    """The silent member joined at this step, or the run ends."""
    stage.write("w1", ("w1", "w2"), range(6))
    monkeypatch.setattr(checkpoint_committer, "_PATIENCE_S", 0.2)
    stage.committer.lost("w9")  # wakes it
    assert stage.committed.get(timeout=PATIENCE_S) == 5
    monkeypatch.setattr(checkpoint_committer, "_PATIENCE_S", 1e6)
    stage.write("w1", ("w1", "w2"), range(6), step=10)
    stage.committer.close()
    assert stage.committed.get(timeout=PATIENCE_S) == 10


def test_a_second_one_waits_and_goes_on_from_what_was_committed(begun, tmp_path):
    first = begun()
    second = Stage(str(tmp_path))
    found = queue.Queue()
    second.committer.find(found.put)
    eventually(lambda: second.told)
    first.commit_all("w1")
    assert found.empty()
    first.committer.close()
    assert found.get(timeout=PATIENCE_S) == 5
    assert "the run is held by" in second.told[0]
    second.committer.close()


def test_committer_with_the_token_continues_the_lease_of_one_that_is_gone(begun, tmp_path):
    """On another machine nobody can see that the holder is gone; a minute would be lost."""
    first = begun(lease_s=60.0, token="of the run")
    first.commit_all("w1")
    second = Stage(str(tmp_path), lease_s=60.0, token="of the run")
    second.committer.take_over()
    for step in (5, 10):  # a member tells of the newest once more
        second.write("w1", ("w1",), range(6), step=step)
    assert [second.committed.get(timeout=PATIENCE_S) for _ in range(2)] == [5, 10]
    assert [step for step, _ in second.catalog.names()] == [5, 10]
    second.committer.close()


def test_committer_that_slept_over_its_lease_stands_down(begun, tmp_path):
    first = begun(lease_s=0.6)
    asleep = threading.Event()
    first.committer.find(lambda step: asleep.wait(PATIENCE_S))  # its thread does nothing meanwhile
    second = Stage(str(tmp_path), lease_s=0.6)
    assert second.goes_on_from() is None
    first.write("w1", ("w1",), range(6))
    asleep.set()
    assert first.stood_down.wait(PATIENCE_S)
    second.commit_all("w1")
    assert [name.fence for name in second.catalog.names()] == [
        max(f for _, f in second.catalog.names())
    ]
    second.committer.close()


def test_last_checkpoint_of_members_that_differ_and_are_gone_has_the_weights(begun):
    stage = begun()
    for rank, worker in enumerate(("w1", "w2", "w3")):
        report(stage, worker, of_user(float(rank)), range(2 * rank, 2 * rank + 2))
    stage.committer.close()
    [commit] = stage.catalog.commits()
    assert verify(stage.catalog, stage.catalog.names()[0]) == []
    weights = of_user(0.0)["step"]["parameters"][0]
    assert torch.equal(load(stage.catalog, commit)["step"]["parameters"][0], weights)
    [error] = stage.failures
    assert "shadow" in str(error)


def test_only_a_process_of_this_machine_that_has_ended_counts_as_gone(monkeypatch):
    """Pods in the network of their host share its name, and neither process ids nor a namespace."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host, machine = socket.gethostname(), lease._machine()
    pid, began = child.pid, lease._started_at(child.pid)

    def is_gone(holder):
        return lease._is_gone(Record(1, holder, "token", "held", 60.0))

    holders = [f"{host}/{machine}/{pid}/{began}", f"{host}/{machine}/{pid}/{int(began) - 1}"]
    assert [is_gone(holder) for holder in holders] == [False, True], "its id is used again"
    child.communicate(b"\n")
    others = [f"{host}/{pid}", f"{host}/another/{pid}/{began}", f"{host}//{pid}/{began}", "", "/"]
    assert is_gone(holders[0]) and not any(map(is_gone, others))
    assert not is_gone(lease._this_process())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lease.os, "stat", lambda path: types.SimpleNamespace(st_ino=1))
        assert lease._machine() != machine, "of another pod"
