"""Training goes on while the copy is written; one upload at a time; what goes wrong is raised."""

import copy
import threading

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load_newest
from elastic_dp.checkpoint.checkpoint_writer import write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.uploader import Uploader
from elastic_dp.errors import StateError, StorageError
from tests.checkpoint.sharded_states import held_by, pieces_of, whole_state, without_pieces
from tests.checkpoint.states import big_tree, memory_store, same
from tests.patience import PATIENCE_S, eventually


@pytest.fixture
def uploader():
    shares = []
    made = Uploader(Catalog(memory_store()), shares.append)
    made.shares = shares
    yield made
    made.close()


ALONE = {"writer": "a", "members": ["a"]}


def held(catalog, monkeypatch):
    """Writes wait for the event that is returned."""
    go, write = threading.Event(), catalog.store.write

    def waiting(*args, **kwargs):
        assert go.wait(PATIENCE_S)
        write(*args, **kwargs)

    monkeypatch.setattr(catalog.store, "write", waiting)
    return go


def test_the_state_may_change_during_the_upload(uploader, monkeypatch):
    catalog = uploader._catalog
    go = held(catalog, monkeypatch)
    tree = big_tree(3 << 20)
    before = big_tree(3 << 20)
    uploader.take(1, tree, writer="w0", members=["w0"])
    assert uploader.busy
    tree["whole"].zero_()
    tree["double"].zero_()
    go.set()
    share = uploader.wait()
    assert uploader.shares == [share] and share.writer == "w0" and not uploader.busy
    write_commit(catalog, [share], 1, CommitMetadata())
    assert same(load_newest(catalog, on_damage=pytest.fail)[1], before)


def test_the_next_one_waits_for_the_last(uploader, monkeypatch):
    go = held(uploader._catalog, monkeypatch)
    uploader.take(1, {"x": torch.ones(3)}, **ALONE)
    done = []
    thread = threading.Thread(
        target=lambda: done.append(uploader.take(2, {"x": torch.zeros(3)}, **ALONE))
    )
    thread.start()
    assert not done and uploader.snapshot.step == 1
    go.set()
    thread.join()
    uploader.wait()
    assert [share.step for share in uploader.shares] == [1, 2]
    assert done == [True]


def test_late_upload_is_waited_for_once(uploader, monkeypatch):
    """Parts that were asked for later count, too: they are read from the same snapshot."""
    monkeypatch.setattr("elastic_dp.checkpoint.uploader.PATIENCE_S", 0.05)
    go = held(uploader._catalog, monkeypatch)
    assert uploader.ready()
    uploader.take(1, {"x": torch.ones(3)}, writer="a", members="ab")  # the part is the other one's
    uploader.wait()
    uploader.write(1, [*uploader.snapshot.manifest().headers])
    assert not uploader.late and not uploader.ready() and uploader.late
    with monkeypatch.context() as patched:
        patched.setattr("elastic_dp.checkpoint.uploader.wait_for", pytest.fail)
        assert not uploader.ready()
    go.set()
    eventually(lambda: not uploader.late)
    assert uploader.ready()
    uploader.take(2, {"x": torch.ones(3)}, **ALONE)
    assert uploader.wait().step == 2 and not uploader.late


def test_checkpoint_that_waits_for_its_turn_is_written_before_the_uploader_closes(
    uploader, monkeypatch
):
    memory, ended = uploader.snapshot.memory, threading.Event()
    monkeypatch.setattr(memory, "make_ready", lambda: ended.wait(PATIENCE_S))
    monkeypatch.setattr(memory, "close", ended.set)
    uploader.take(1, {"x": torch.ones(3)}, **ALONE)
    uploader.take(2, {"x": torch.zeros(3)}, **ALONE)
    uploader.close()
    assert [share.step for share in uploader.shares] == [1, 2]


def test_upload_error_is_raised_once_and_the_next_upload_works(uploader, monkeypatch):
    def refuse(*args, **kwargs):
        raise StorageError("403 AccessDenied")

    with monkeypatch.context() as patched:
        patched.setattr(uploader._catalog.store, "write", refuse)
        uploader.take(1, {"x": torch.ones(3)}, **ALONE)
        with pytest.raises(StorageError, match="403"):
            uploader.take(2, {}, **ALONE)
    assert uploader.wait() is None
    uploader.take(3, {"x": torch.ones(3)}, **ALONE)
    assert uploader.wait().step == 3


def test_a_state_that_cannot_be_stored_starts_nothing(uploader):
    with pytest.raises(StateError, match=r"body\.f"):
        uploader.take(1, {"body": {"f": print}}, **ALONE)
    assert uploader.wait() is None and uploader.shares == []


def test_pieces_are_copied_with_the_state_and_written_by_who_is_to_write_them(uploader):
    tree, catalog = whole_state(), uploader._catalog
    holders = [(n % 2, 1 - n % 2) for n in range(len(pieces_of(tree)))]
    held = held_by(0, tree, holders)
    uploader.take(1, without_pieces(tree), writer="0", members="01", held=held)
    before = copy.deepcopy(tree)
    tree["step"]["optimizer"][0]["exp_avg"].zero_()
    uploader.wait()
    [told] = uploader.shares
    mine = [name for name, writer in told.planned.items() if writer == "0"]
    assert sorted(told.written) == sorted(mine) and len(mine) < len(told.planned)
    uploader.write(1, told.planned.keys() - told.written)
    eventually(lambda: len(uploader.shares) == 2)
    write_commit(catalog, uploader.shares, 1, CommitMetadata())
    assert same(load_newest(catalog, on_damage=pytest.fail)[1], before)
