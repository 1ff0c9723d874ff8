"""A snapshot that refers to what nobody changes has the bytes of one that copies everything."""

import threading

import pytest
import torch

from elastic_dp.checkpoint.borrowing_snapshot import BorrowingSnapshot
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.checkpoint.uploader import Uploader
from elastic_dp.errors import StateError
from tests.checkpoint.states import big_tree, memory_store, train_state
from tests.checkpoint.test_uploader import held


def contents(snapshot):
    manifest = snapshot.manifest()
    return manifest.digest, [bytes(snapshot.part(part)) for part in manifest.layout.parts]


@pytest.mark.parametrize("lent", [set(), {"double"}, {"whole", "double", "last"}], ids=len)
@pytest.mark.parametrize("nbytes", [0, 1000, (3 << 20) + 48])
def test_parts_and_digests_are_those_of_a_copy(nbytes, lent):
    tree = big_tree(nbytes)
    addresses = {tree[name].data_ptr() for name in lent}
    copy, borrowing = Snapshot(), BorrowingSnapshot(lambda t: t.data_ptr() in addresses)
    for step in (1, 2):
        copy.take(step, tree)
        borrowing.take(step, tree)
        before = contents(copy)
        assert contents(borrowing) == before
        for name in {"whole", "double", "last"} - lent:  # what is not lent may change
            tree[name].zero_()
        assert contents(borrowing) == before
        assert set(borrowing._copied).isdisjoint(lent) or not nbytes  # all empty ones begin at 0


def test_state_of_a_training_is_that_of_a_copy():
    tree = train_state().tree([], None)
    copy, borrowing = Snapshot(), BorrowingSnapshot(lambda tensor: False)
    copy.take(3, tree)
    borrowing.take(3, tree)
    assert contents(borrowing) == contents(copy)


def test_state_that_cannot_be_stored_leaves_the_snapshot_before_it():
    snapshot = BorrowingSnapshot(lambda tensor: True)
    snapshot.take(1, {"x": torch.ones(3)})
    before = contents(snapshot)
    with pytest.raises(StateError):
        snapshot.take(2, {"x": threading.Lock()})
    assert snapshot.step == 1 and contents(snapshot) == before


def test_snapshot_is_let_go_only_when_nothing_is_written_from_it(monkeypatch):
    written = []
    uploader = Uploader(Catalog(memory_store()), lambda *told: written.append(told))
    uploader.snapshot = BorrowingSnapshot(lambda tensor: True)
    go = held(uploader._catalog, monkeypatch)
    uploader.take(1, {"x": torch.ones(3)}, 0, 1)
    uploader.forget()
    assert uploader.snapshot.step == 1
    go.set()
    uploader.wait()
    uploader.forget()
    assert uploader.snapshot.step == -1 and not uploader.snapshot._tensors
    uploader.write(1, [0])  # of a step that is gone
    uploader._last.result()
    uploader.close()
    assert len(written) == 1
