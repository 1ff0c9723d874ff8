"""A checkpoint of a sharded optimizer: each member copies and reads what it holds, and no more."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load, read_states
from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.snapshot import Snapshot, UnitSnapshot
from elastic_dp.train.sharding.checkpoint_units import CheckpointUnits
from tests.checkpoint.states import memory_store
from tests.train.sharding.test_sharded_state import (
    ADAM,
    Member,
    _dropped_here,  # noqa: F401
    _small_units,  # noqa: F401
    check_equal,
    enter,
    four,
    new_member,
    of_kind,
    plain_after,
    same_bits,
)

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")


def units_of(member):
    return CheckpointUnits(member.sharding, member.optimizer, member.parameters)


def snapshots_of(members, writers=None):
    """What each member copies for a checkpoint."""
    names, made = NAMES[: len(members)], {}
    for name, member in zip(names, members, strict=True):
        units = units_of(member)
        made[name] = UnitSnapshot()
        made[name].take(units.total, units.groups(name, names, writers or names))
    return made


def data_bytes(snapshot):
    return sum(file.nbytes - len(file.header) for _, file in snapshot.files())


@pytest.mark.parametrize("make", [ADAM, of_kind(torch.optim.Adafactor)], ids=["pieces", "whole"])
def test_member_copies_what_it_holds_and_no_more(make):
    members = [Member(make, [(70, 33), (64, 65)] * 2, torch.float32) for _ in range(4)]
    for member in members[1:]:
        member.take_over(members[0], joins=True)
    enter(members, Member.attempt)
    total = 0
    for member, snapshot in zip(members, snapshots_of(members).values(), strict=True):
        assert data_bytes(snapshot) == member.sharding.held_bytes
        total += data_bytes(snapshot)
    largest = max(member.sharding.held_bytes for member in members)
    assert largest < 0.8 * total / 2, "one has nearly all"


def test_each_unit_is_on_two_members_who_have_the_same_file_of_it():
    members = four()
    enter(members, Member.attempt)
    by_name, planned = {}, {}
    for name, snapshot in snapshots_of(members).items():
        for writer, file in snapshot.files():
            by_name.setdefault(file.name, {})[name] = bytes(snapshot.content(file))
            planned.setdefault(file.name, set()).add(writer)
    assert all(len(copies) == 2 for copies in by_name.values())
    assert all(len(set(copies.values())) == 1 for copies in by_name.values())
    assert all(len(writers) == 1 and writers < set(by_name[n]) for n, writers in planned.items())
    assert len({next(iter(writers)) for writers in planned.values()}) == 4, "they share the writing"


def test_backup_is_to_write_units_whose_primary_writes_nothing():
    members = four()
    enter(members, Member.attempt)
    for snapshot in snapshots_of(members, writers=("b", "c", "d")).values():
        assert all(writer != "a" for writer, _ in snapshot.files())


def written_by(members, url):
    """The catalog and the commit record of a checkpoint of what the members hold."""
    catalog, rest = Catalog(url), Snapshot()
    optimized = [{} for _ in members[0].parameters]
    rest.take(1, {"step": {"optimizer": optimized}})
    held = snapshots_of(members)
    with ThreadPoolExecutor(2) as executor:
        told = [
            write_blobs(catalog, rest, executor, writer=name, members=list(held), units=snapshot)
            for name, snapshot in held.items()
        ]
    return catalog, write_commit(catalog, rest.manifest(), told, 1, CommitMetadata())


@pytest.mark.parametrize(("writing", "reading"), [(1, 4), (2, 3), (4, 1), (4, 4), (5, 2), (4, 8)])
def test_restored_member_reads_what_it_is_to_hold_and_receives_nothing(writing, reading):
    members = [new_member() for _ in range(writing)]
    for member in members[1:]:
        member.take_over(members[0], joins=True)
    enter(members, Member.attempt)
    catalog, commit = written_by(members, memory_store())
    restored = [new_member() for _ in range(reading)]
    for rank, member in enumerate(restored):
        for mine, given in zip(
            member.parameters.values(), members[0].parameters.values(), strict=True
        ):
            mine.data.copy_(given.data)
        units = units_of(member)
        wanted = units.to_hold(commit.manifest.units, rank, reading, ())
        units.hold(read_states(catalog, commit, wanted), {})
        nbytes = sum(one.unit.kind.nbytes for one in wanted)
        assert nbytes == member.sharding.held_bytes
        member.step = 1
    assert enter(restored, Member.attempt) == [0] * reading
    check_equal(restored, plain_after(2))


def test_units_of_any_members_are_the_state_of_an_optimizer_that_is_not_sharded():
    members = four()
    enter(members, Member.attempt)
    catalog, commit = written_by(members, memory_store())
    plain = plain_after(1)
    states = load(catalog, commit)["step"]["optimizer"]
    for given, p in zip(states, plain.parameters.values(), strict=True):
        expected = plain.optimizer.state[p]
        assert list(given) == list(expected)
        assert all(same_bits(given[key], expected[key]) for key in expected)


def test_state_that_was_divided_in_another_way_is_read_as_a_whole():
    members = [new_member()]
    enter(members, Member.attempt)
    _, commit = written_by(members, memory_store())
    other = Member(
        of_kind(torch.optim.Adafactor), [(70, 33), (129,), (64, 2), (1,), ()], torch.float32
    )
    table = commit.manifest.units
    assert units_of(other).to_hold(table, 0, 1, ()) is None
    assert units_of(new_member()).to_hold(table, 0, 1, ()) is not None
