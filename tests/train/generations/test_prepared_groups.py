"""A group that forms before its generation is announced: taken if the members are those that were
likely, else thrown away."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.coordinator.messages import START, Member, Membership, PrepareGroup
from elastic_dp.distributed import abandoned_groups
from elastic_dp.train.generations.generation_groups import GenerationGroups
from elastic_dp.train.generations.worker_control import WorkerControl
from tests.distributed.meeting import InMemory
from tests.patience import PATIENCE_S, eventually

LIKELY = ("w1", "w2")


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """The groups that are closed. They go with their test."""
    left = []
    monkeypatch.setattr(abandoned_groups, "abandon", left.append)
    yield left
    left.clear()


def groups_of(*workers):
    meet, cpu = InMemory(), torch.device("cpu")
    return [GenerationGroups(w, cpu, WorkerControl(), meet, connects=False) for w in workers]


def preparation(workers, number=1):
    return PrepareGroup(2, number, tuple(workers), PATIENCE_S)


def forms(groups, workers, prepared, generation=2):
    members = tuple(Member(w, ((i, i + 1),), START, True) for i, w in enumerate(workers))
    membership = Membership(generation, members, workers[0], PATIENCE_S, prepared=prepared)

    def form(one):
        one._control.form(membership)
        told = one._control.wait()
        assert isinstance(told, Membership)
        one.enter(told)
        one.start()
        one.formed()
        assert one.main is not None
        one.main.gather_bytes(b"connected")
        return one.main

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(form, groups))


def test_prepared_group_of_the_members_is_taken():
    groups = groups_of(*LIKELY)
    for one in groups:
        one.prepare(preparation(LIKELY))
    formations = [one._prepared.formation for one in groups if one._prepared is not None]
    eventually(lambda: all(formation._ended.is_set() for formation in formations))
    assert forms(groups, LIKELY, prepared=1) == [formation.wait() for formation in formations]


def test_member_that_was_not_told_meets_those_who_were():
    groups = groups_of(*LIKELY)
    groups[0].prepare(preparation(LIKELY))
    assert [one.rank for one in forms(groups, LIKELY, prepared=1)] == [0, 1]


def test_prepared_group_of_others_is_closed(closed):
    names = ("w1", "w2", "w3")
    groups = dict(zip(names, groups_of(*names), strict=True))
    for worker in LIKELY:
        groups[worker].prepare(preparation(LIKELY))
    prepared = groups["w1"]._prepared
    assert prepared is not None
    eventually(prepared.formation._ended.is_set)
    members = ("w1", "w3")
    made = forms([groups[worker] for worker in members], members, prepared=0)
    assert [one.world_size for one in made] == [2, 2] and len(closed) == 1
    assert prepared.formation._group is not None and prepared.formation._group.aborted


def test_newer_preparation_takes_the_place_of_the_older_one():
    groups = groups_of(*LIKELY)
    groups[0].prepare(preparation(("w1", "w3")))
    for one in groups:
        one.prepare(preparation(LIKELY, number=2))
    groups[0].prepare(preparation(("w1", "w3")))  # the same again
    assert [one.rank for one in forms(groups, LIKELY, prepared=2)] == [0, 1]


def test_preparation_of_a_generation_that_was_entered_comes_too_late():
    groups = groups_of(*LIKELY)
    forms(groups, LIKELY, prepared=1)
    groups[0].prepare(preparation(LIKELY))
    assert groups[0]._prepared is None


def test_groups_are_closed_when_the_next_one_has_formed(closed):
    """Until then, other members may receive what was sent for the last step."""
    groups = groups_of(*LIKELY)
    forms(groups, LIKELY, prepared=0)
    for one in groups:
        one.leave()
        one._control.leave()
    assert not closed
    forms(groups, LIKELY, prepared=0, generation=3)
    assert len(closed) == 2
