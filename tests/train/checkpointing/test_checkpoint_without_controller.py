"""The last checkpoint of a worker whose controller is gone: only after its own one, and by the
rules for all commit records."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load_newest
from elastic_dp.checkpoint.checkpoint_writer import write_blobs
from elastic_dp.checkpoint.lease import Lease
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing.checkpoint_without_controller import commit_without_controller
from tests.checkpoint.sharded_states import held_by, pieces_of, whole_state, without_pieces
from tests.checkpoint.states import same
from tests.patience import PATIENCE_S
from tests.train.checkpointing.test_checkpoint_committer import TREE, Stage

LEASE_S = 0.6  # where nobody else wants it meanwhile
TOKEN = "of-the-controller"


def orphan(tmp_path, step, worker="w1", lease_s=LEASE_S):
    catalog, snapshot = Catalog(Store(str(tmp_path))), Snapshot()
    snapshot.take(step, {"weights": TREE["weights"] + step})
    return commit(catalog, snapshot, worker, lease_s)


def commit(catalog, snapshot, worker="w1", lease_s=LEASE_S):
    def write():
        with ThreadPoolExecutor(1) as executor:
            return write_blobs(catalog, snapshot, executor, writer=worker, members=[worker])

    how = {"worker": worker, "token": TOKEN, "lease_s": lease_s}
    return commit_without_controller(catalog, snapshot.step, write, **how)


def test_orphan_that_holds_all_units_of_a_sharded_optimizer_writes_them_too(tmp_path, long_gone):
    tree, catalog, snapshot = whole_state(), Catalog(Store(str(tmp_path))), Snapshot()
    # Another member was to write some of them.
    holders = [(n % 2, 1 - n % 2) for n in range(len(pieces_of(tree)))]
    snapshot.take(9, without_pieces(tree), held_by(0, tree, holders))
    said = commit(catalog, snapshot, "0")
    assert said == "checkpoint of step 9 is committed, without a controller"
    newest, found = load_newest(catalog, on_damage=pytest.fail)
    assert newest.step == 9 and same(found, tree)


def steps_of(tmp_path):
    return [name.step for name in Catalog(Store(str(tmp_path))).names()]


@pytest.fixture
def gone(tmp_path):
    """A controller that has committed step 5 and is no more; what it held it never gave up."""
    stage = Stage(str(tmp_path), lease_s=1e6, token=TOKEN)
    assert stage.goes_on_from() is None
    stage.commit_all("w1")
    return stage  # its thread waits, and renews nothing for a long time


@pytest.fixture
def long_gone(tmp_path, gone):
    """Let a lease end early: whoever takes it need not wait, and can keep it for long."""
    newest = sorted(tmp_path.glob("lease/*"))[-1]
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"at": 0.0}))


def test_orphan_commits_its_state_and_the_next_start_continues_from_it(tmp_path, gone):
    assert orphan(tmp_path, 9) == "checkpoint of step 9 is committed, without a controller"
    assert steps_of(tmp_path) == [5, 9]
    later = Stage(str(tmp_path))
    assert later.goes_on_from() == 9, "and waits for no lease"
    _, tree = load_newest(later.catalog, on_damage=pytest.fail)
    assert torch.equal(tree["weights"], TREE["weights"] + 9)
    later.commit_all("w2", 12)
    assert steps_of(tmp_path) == [5, 9, 12]
    later.committer.close()


def test_a_controller_that_comes_back_after_it_commits_nothing_beside_it(tmp_path, gone):
    assert "is committed" in orphan(tmp_path, 9)
    gone.write("w1", ("w1",), range(6), step=10)
    gone.committer.find(lambda step: None)
    assert gone.stood_down.wait(PATIENCE_S)
    assert steps_of(tmp_path) == [5, 9], "what it committed is not in the history"


def test_orphan_writes_nothing_where_a_controller_leads(tmp_path):
    stage = Stage(str(tmp_path), token=TOKEN)
    assert stage.goes_on_from() is None
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(orphan, tmp_path, 9, lease_s=60.0)
        while not waits.done():  # it looks once a second
            stage.committer._tasks.put(stage.committer._lease.renew)
            time.sleep(0.1)
    assert waits.result() == "no last checkpoint: a controller leads the run"
    stage.committer.close()
    ended = "no last checkpoint: the run has ended or continues elsewhere"
    assert orphan(tmp_path, 9) == ended
    other = Stage(str(tmp_path))
    assert other.goes_on_from() is None
    assert orphan(tmp_path, 9) == ended
    other.committer.close()
    assert steps_of(tmp_path) == []


def test_orphans_at_one_step_commit_once(tmp_path, long_gone):
    three = (("w1", 9), ("w2", 9), ("w3", 10))
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda one: orphan(tmp_path, one[1], one[0], lease_s=60.0), three))
    assert steps_of(tmp_path)[-1] == 10, said
    assert sum("without a controller" in text for text in said) <= 2, said


def test_orphan_that_commits_while_another_looks_does_not_stop_it(tmp_path, long_gone, monkeypatch):
    looked, newest = [], Lease.newest

    def and_then_the_other(lease):
        found = newest(lease)
        if not looked:
            looked.append(found)
            assert "is committed" in orphan(tmp_path, 9, "w2")
        return found

    monkeypatch.setattr(Lease, "newest", and_then_the_other)
    assert "is committed" in orphan(tmp_path, 10, "w1")
    assert steps_of(tmp_path) == [5, 9, 10]


def test_an_orphan_that_slept_while_others_went_on_changes_nothing(tmp_path, gone):
    """The orphan's lease ran out before it committed."""
    store = Store(str(tmp_path))
    sleeper = Lease(store, "orphan", f"{TOKEN}.w1", LEASE_S)
    while not hasattr(sleeper.acquire(), "state"):
        time.sleep(0.1)
    fence = sleeper.fence
    assert "is committed" in orphan(tmp_path, 9, "w2")
    catalog = Catalog(store)
    with pytest.raises(Exception, match="was made meanwhile"):
        catalog.claim(fence, catalog.names()[0])
    assert steps_of(tmp_path) == [5, 9]
