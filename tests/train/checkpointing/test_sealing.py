"""Who owes which part of a checkpoint, and who may seal it."""

import json
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog, Keep
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.checkpoint.writing import write_parts
from elastic_dp.config import CheckpointConfig
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing import sealing
from elastic_dp.train.checkpointing.sealing import Sealer, SealerActions
from elastic_dp.train.controller_link import WrittenParts
from tests.patience import PATIENCE_S, eventually

TREE = {"weights": torch.arange(1_500_000, dtype=torch.float32)}  # six parts


class Stage:
    """A sealer, and what it asks and tells."""

    def __init__(self, url, lease_s=60.0, config=None, token=None):
        self.catalog = Catalog(Store(url))
        self.asked, self.told, self.sealed = queue.Queue(), [], queue.Queue()
        self.wanted = queue.Queue()
        self.stood_down = threading.Event()
        self.failures = []
        self.snapshot = Snapshot()
        self.sealer = Sealer(
            self.catalog,
            config or CheckpointConfig(),
            SealerActions(
                request_parts=lambda *request: self.asked.put(request),
                request_checkpoint=lambda: self.wanted.put(time.monotonic()),
                tell=self.told.append,
                sealed=self.sealed.put,
                stand_down=lambda reason: self.stood_down.set(),
                fail=self.failures.append,
            ),
            lease_s=lease_s,
            token=token,
        )

    def goes_on_from(self):
        found = queue.Queue()
        self.sealer.find(found.put)
        return found.get(timeout=PATIENCE_S)

    def comes_to_rest(self):
        rests = threading.Event()
        self.sealer._tasks.put(rests.set)
        assert rests.wait(timeout=PATIENCE_S)

    def write(self, worker, members, parts, step=5, founded=0):
        if self.snapshot.step != step:
            self.snapshot.take(step, TREE)
        with ThreadPoolExecutor(1) as executor:
            share = write_parts(self.catalog, self.snapshot, parts, executor, writer=worker)
        written = WrittenParts(share, members, self.snapshot.manifest(), {}, {}, 0.0, founded)
        self.sealer.wrote(worker, written)


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch):
    """Where a test is slow to tell what was written, nobody asks for it."""
    monkeypatch.setattr(sealing, "_PATIENCE_S", 1e6)


@pytest.fixture
def stage(tmp_path):
    stage = Stage(str(tmp_path))
    assert stage.goes_on_from() is None
    yield stage
    stage.sealer.close()


def test_sealed_when_all_have_written(stage):
    members = ("w1", "w2", "w3")
    stage.write("w2", members, [2, 3])
    stage.write("w1", members, [0, 1])
    assert stage.catalog.names() == []
    stage.write("w3", members, [4, 5])
    assert stage.sealed.get(timeout=PATIENCE_S) == 5
    assert stage.goes_on_from() == 5
    assert stage.asked.empty()


def test_nothing_wakes_it_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sealing, "_PATIENCE_S", 5.0)
    stage = Stage(str(tmp_path), lease_s=1e6)
    assert stage.goes_on_from() is None
    stage.write("w1", ("w1",), range(6))
    assert stage.sealed.get(timeout=PATIENCE_S) == 5
    stage.comes_to_rest()
    assert stage.sealer._idle_s() > 1e4
    stage.sealer.close()


def test_what_was_made_of_wrong_weights_is_no_part_of_history_and_never_sealed(stage):
    everything = [0, 1, 2, 3, 4, 5]
    for step in (5, 10):
        stage.write("w1", ("w1",), everything, step, founded=1)
        assert stage.sealed.get(timeout=PATIENCE_S) == step
    stage.write("w1", ("w1", "w2"), everything[:3], 12, founded=1)
    stage.sealer.reject(7, 3)
    assert stage.goes_on_from() == 5
    stage.write("w2", ("w1", "w2"), everything[3:], 12, founded=1)  # late
    stage.write("w3", ("w3",), everything, 10, founded=4)  # made again
    assert stage.sealed.get(timeout=PATIENCE_S) == 10
    assert [name.step for name in stage.catalog.names()] == [5, 10]
    assert stage.goes_on_from() == 10


@pytest.mark.parametrize("lost_first", [True, False])
def test_what_a_lost_one_owes_is_asked_of_another(stage, lost_first):
    members = ("w1", "w2", "w3")
    if lost_first:
        stage.sealer.lost("w3")
    stage.write("w2", members, [2, 3])
    if not lost_first:
        stage.sealer.lost("w3")
    assert stage.asked.get(timeout=PATIENCE_S) == ("w2", 5, [4, 5])
    stage.write("w1", members, [0, 1])
    stage.write("w2", members, [4, 5])
    assert stage.sealed.get(timeout=PATIENCE_S) == 5
    stage.write("w1", ("w1", "w2"), [0, 1, 2], step=10)  # that loss is over
    stage.write("w2", ("w1", "w2"), [3, 4, 5], step=10)
    assert stage.sealed.get(timeout=PATIENCE_S) == 10
    assert stage.asked.empty()


def test_what_nobody_owes_is_asked_for_in_the_end(stage, monkeypatch):
    """One that is a step behind shares the writing with the members of the next generation."""
    stage.write("w1", ("w1", "w2"), [0, 1, 2])
    stage.write("w2", ("w1", "w2", "w3"), [2, 3])
    stage.comes_to_rest()
    monkeypatch.setattr(sealing, "_PATIENCE_S", 0.0)
    stage.sealer.lost("w9")  # wakes it
    worker, step, parts = stage.asked.get(timeout=PATIENCE_S)
    assert (step, parts) == (5, [4, 5])
    stage.write(worker, ("w1", "w2"), parts)
    assert stage.sealed.get(timeout=PATIENCE_S) == 5


def test_what_is_told_late_of_an_older_step_is_not_sealed_any_more(stage):
    everything = [0, 1, 2, 3, 4, 5]
    stage.write("w1", ("w1", "w2"), [0, 1, 2], step=5)
    stage.write("w1", ("w1",), everything, step=7)
    assert stage.sealed.get(timeout=PATIENCE_S) == 7
    stage.comes_to_rest()  # what lay there of step 5 is collected
    stage.write("w2", ("w2",), everything, step=5)
    assert stage.sealed.get(timeout=PATIENCE_S) == 7, "a step before it is covered by it"
    assert [name.step for name in stage.catalog.names()] == [7]


def test_what_is_whole_at_last_is_sealed_in_the_order_of_steps(stage):
    """One that is lost was the last that the newer one waited for, and the older one, told later, as well."""
    everything = [0, 1, 2, 3, 4, 5]
    stage.write("w1", ("w1", "w2"), everything, step=7)
    stage.write("w3", ("w3", "w2"), everything, step=5)
    stage.sealer.lost("w2")
    assert stage.sealed.get(timeout=PATIENCE_S) == 7
    assert stage.goes_on_from() == 7
    assert [name.step for name in stage.catalog.names()] == [7]


def test_what_was_asked_of_one_that_is_lost_then_is_asked_of_another(stage):
    members = ("w1", "w2", "w3")
    stage.sealer.lost("w3")
    stage.write("w2", members, [2, 3])
    assert stage.asked.get(timeout=PATIENCE_S) == ("w2", 5, [4, 5])
    stage.write("w1", members, [0, 1])
    stage.sealer.lost("w2")
    assert stage.asked.get(timeout=PATIENCE_S) == ("w1", 5, [4, 5])
    stage.write("w1", members, [4, 5])
    assert stage.sealed.get(timeout=PATIENCE_S) == 5


def test_what_lies_unsealed_is_given_up_with_those_who_wrote_it(stage):
    """The next ones may hold another state of the same step, where rounding depends on the fleet."""
    members = ("w1", "w2")
    stage.write("w1", members, [0, 1, 2])
    stage.sealer.lost("w1")
    stage.sealer.lost("w2")
    assert stage.goes_on_from() is None
    stage.write("w2", members, [3, 4, 5])  # its word was under way
    stage.snapshot = Snapshot()
    stage.snapshot.take(5, {"weights": TREE["weights"] + 1})
    stage.write("w3", ("w3",), range(6))
    assert stage.sealed.get(timeout=PATIENCE_S) == 5
    assert not any("not the same" in text for text in stage.told)


def test_losses_of_everyone_are_known_to_later_starts(tmp_path):
    def sealed(stage, step):
        stage.write("w1", ("w1",), range(6), step)
        assert stage.sealed.get(timeout=PATIENCE_S) == step
        return next(stage.catalog.seals()).about

    first = Stage(str(tmp_path))
    assert first.goes_on_from() is None
    assert sealed(first, 5).losses == 0
    assert first.goes_on_from() == 5
    about = sealed(first, 10)
    assert about.losses == 1 and about.observed_s > 0
    first.sealer.close()  # an end that was wished for
    second = Stage(str(tmp_path))
    assert second.goes_on_from() == 10
    later = sealed(second, 15)
    assert later.losses == 1 and later.observed_s > about.observed_s
    second.sealer.close()
    newest = sorted(tmp_path.glob("lease/*"))[-1]
    newest.unlink()  # as if its controller had died: the lease is held, and was not given up
    newest = sorted(tmp_path.glob("lease/*"))[-1]
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"at": 0.0}))
    third = Stage(str(tmp_path))
    assert third.goes_on_from() == 15
    assert sealed(third, 20).losses == 2
    third.sealer.close()


def test_one_is_asked_for_in_time_and_knows_the_metrics_of_its_step(tmp_path):
    stage = Stage(str(tmp_path), config=CheckpointConfig(every_s=2.0))
    assert stage.goes_on_from() is None
    for step in (4, 5, 6):
        stage.sealer.log(step, {"loss": step / 2, "name": "mine"})
    asked_at = stage.wanted.get(timeout=PATIENCE_S)
    stage.write("w1", ("w1",), range(6))
    assert stage.sealed.get(timeout=PATIENCE_S) == 5
    assert next(stage.catalog.seals()).about.metrics == {"loss": 2.5}
    # It says so a moment after it has looked at the clock, and on a busy machine a long one.
    assert stage.wanted.get(timeout=PATIENCE_S) - asked_at > 0.1
    stage.sealer.close()


def test_best_checkpoint_is_kept_when_the_run_is_stopped_at_a_step_without_a_value(tmp_path):
    """The last step took the value of the evaluation before it, tied with the best, and the best was deleted."""
    config = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="accuracy", checkpoint_score_order="max"
    )
    stage = Stage(str(tmp_path), config=config)
    assert stage.goes_on_from() is None
    for step, logged in ((5, {"accuracy": 0.9}), (6, {}), (7, {"accuracy": 0.4}), (9, {})):
        stage.sealer.log(step, {"loss": 1.0} | logged)
        stage.snapshot.take(step, {"weights": TREE["weights"] + step})
        stage.write("w1", ("w1",), range(6), step)
        assert stage.sealed.get(timeout=PATIENCE_S) == step
    stage.comes_to_rest()
    assert [seal.step for seal in stage.catalog.seals()] == [9, 5]
    assert [seal.about.metrics for seal in stage.catalog.seals()] == [
        {"loss": 1.0},
        {"loss": 1.0, "accuracy": 0.9},
    ]
    assert stage.catalog.best(Keep(score_attribute="accuracy")).step == 5
    assert sum("is not ranked" in text for text in stage.told) == 1
    stage.sealer.close()


def test_members_that_differ_are_told_and_nothing_is_sealed(stage):
    members = ("w1", "w2")
    stage.write("w1", members, [0, 1, 2])
    stage.snapshot = Snapshot()
    stage.snapshot.take(5, {"weights": TREE["weights"] + 1})
    stage.write("w2", members, [3, 4, 5])
    eventually(lambda: any("not the same on all members" in text for text in stage.told))
    assert stage.catalog.names() == []


def test_who_has_nothing_to_write_is_heard_before_the_seal(stage):
    """A small state is one part: who writes it may be the one that is wrong."""
    members = ("w1", "w2", "w3")
    stage.write("w3", members, range(6))
    stage.sealer.lost("w2")
    stage.snapshot = Snapshot()
    stage.snapshot.take(5, {"weights": TREE["weights"] + 1})
    stage.write("w1", members, [])
    eventually(lambda: any("not the same on all members" in text for text in stage.told))
    assert stage.catalog.names() == []
    stage.write("w3", members, range(6), step=10)
    stage.sealer.lost("w1")
    assert stage.sealed.get(timeout=PATIENCE_S) == 10, "nobody is left who could differ"


def test_a_silent_one_is_not_waited_for_without_end(stage, monkeypatch):
    """It joined at this step; or the run ends."""
    stage.write("w1", ("w1", "w2"), range(6))
    monkeypatch.setattr(sealing, "_PATIENCE_S", 0.2)
    stage.sealer.lost("w9")  # wakes it
    assert stage.sealed.get(timeout=PATIENCE_S) == 5
    monkeypatch.setattr(sealing, "_PATIENCE_S", 1e6)
    stage.write("w1", ("w1", "w2"), range(6), step=10)
    stage.sealer.close()
    assert stage.sealed.get(timeout=PATIENCE_S) == 10


def test_a_second_one_waits_and_goes_on_from_what_was_sealed(tmp_path):
    first = Stage(str(tmp_path))
    assert first.goes_on_from() is None
    second = Stage(str(tmp_path))
    found = queue.Queue()
    second.sealer.find(found.put)
    eventually(lambda: second.told)
    first.write("w1", ("w1",), range(6))
    assert first.sealed.get(timeout=PATIENCE_S) == 5
    assert found.empty()
    first.sealer.close()
    assert found.get(timeout=PATIENCE_S) == 5
    assert "the run is held by" in second.told[0]
    second.sealer.close()


def test_who_knows_the_token_goes_on_with_the_lease_of_one_that_is_gone(tmp_path):
    """On another machine nobody can see that the holder is gone; a minute would be lost."""
    first = Stage(str(tmp_path), lease_s=60.0, token="of the run")
    assert first.goes_on_from() is None
    first.write("w1", ("w1",), range(6))
    assert first.sealed.get(timeout=PATIENCE_S) == 5
    second = Stage(str(tmp_path), lease_s=60.0, token="of the run")
    second.sealer.take_over()
    for step in (5, 10):  # a member tells of the newest once more
        second.write("w1", ("w1",), range(6), step=step)
    assert [second.sealed.get(timeout=PATIENCE_S) for _ in range(2)] == [5, 10]
    assert [step for step, _ in second.catalog.names()] == [5, 10]
    second.sealer.close()
    first.sealer.close()


def test_one_that_slept_over_its_lease_stands_down(tmp_path):
    first = Stage(str(tmp_path), lease_s=0.6)
    assert first.goes_on_from() is None
    asleep = threading.Event()
    first.sealer.find(lambda step: asleep.wait(PATIENCE_S))  # its thread does nothing meanwhile
    second = Stage(str(tmp_path), lease_s=0.6)
    assert second.goes_on_from() is None
    first.write("w1", ("w1",), range(6))
    asleep.set()
    assert first.stood_down.wait(PATIENCE_S)
    second.write("w1", ("w1",), range(6))
    assert second.sealed.get(timeout=PATIENCE_S) == 5
    assert [name.fence for name in second.catalog.names()] == [
        max(f for _, f in second.catalog.names())
    ]
    second.sealer.close()
