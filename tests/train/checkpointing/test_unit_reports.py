"""Who owes which units of a sharded optimizer's state, and when all of them are written."""

import dataclasses

import pytest

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load, verify
from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs
from tests.checkpoint.sharded_states import held_by_two, pieces_of, whole_state, write_sharded
from tests.checkpoint.states import same
from tests.patience import PATIENCE_S, eventually
from tests.train.checkpointing.test_checkpoint_committer import (
    _nothing_is_requested,  # noqa: F401
    stage,  # noqa: F401
)

TREE, STEP, MEMBERS = whole_state(), 5, ("0", "1", "2")


class Reports:
    """What each member says that it has written; all blobs are written already."""

    def __init__(self, stage, tree=TREE):  # noqa: F811
        self._stage = stage
        self.blobs = write_sharded(Catalog(stage.catalog.store), STEP, tree)

    def of(self, worker, *, writes):
        """Reports that a worker wrote the blobs with these names."""
        blobs = dataclasses.replace(self.blobs[worker], written=frozenset(writes))
        written = WrittenBlobs(blobs, MEMBERS)
        self._stage.committer.wrote(worker, written)

    def planned(self, worker, by):
        """The blobs that a worker holds and another one is to write."""
        return [name for name, writer in self.blobs[worker].planned.items() if writer == by]

    def own(self, worker):
        return self.planned(worker, worker)


def committed(stage):  # noqa: F811
    assert stage.committed.get(timeout=PATIENCE_S) == STEP
    (name,) = stage.catalog.names()
    assert verify(stage.catalog, name) == []
    assert same(load(stage.catalog, stage.catalog.read(name)), TREE)


@pytest.mark.parametrize("first", [True, False])
def test_units_of_a_lost_writer_are_requested_of_their_other_holder(stage, first):  # noqa: F811
    reports = Reports(stage)
    if first:
        stage.committer.lost("0")
    for worker in ("1", "2"):
        reports.of(worker, writes=reports.own(worker))
    if not first:
        stage.committer.lost("0")
    wanted = {worker: set(reports.planned(worker, "0")) for worker in ("1", "2")}
    assert all(wanted.values())
    left = set.union(*wanted.values())
    while left:
        asked = stage.asked.get(timeout=PATIENCE_S)
        assert asked.step == STEP and set(asked.names) <= wanted[asked.worker] & left
        left -= set(asked.names)
        assert stage.catalog.names() == []
        reports.of(asked.worker, writes=asked.names)
    committed(stage)


def test_units_are_requested_of_nobody_when_both_their_holders_are_lost(stage):  # noqa: F811
    reports = Reports(stage)
    stage.committer.lost("0")
    stage.committer.lost("1")
    reports.of("2", writes=reports.own("2"))
    stage.comes_to_rest()
    asked = []
    while not stage.asked.empty():
        asked += stage.asked.get().names
    assert set(asked) == {*reports.planned("2", "0"), *reports.planned("2", "1")}
    reports.of("2", writes=asked)
    stage.comes_to_rest()
    pairs = held_by_two(len(pieces_of(TREE)), 3)
    assert any("2" not in map(str, pair) for pair in pairs)
    assert stage.catalog.names() == []


def test_units_that_differ_on_their_holders_are_told_and_nothing_is_committed(stage):  # noqa: F811
    reports = Reports(stage)
    other = whole_state()
    other["step"]["optimizer"][0]["exp_avg"] += 1.0
    others = Reports(stage, other)
    for worker in ("0", "1"):
        reports.of(worker, writes=reports.own(worker))
    others.of("2", writes=others.own("2"))
    words = "not the same on the two members that hold a part of it"
    eventually(lambda: any(words in text for text in stage.told))
    assert stage.catalog.names() == []
