"""A checkpoint of a sharded optimizer: each member copies and reads what it holds, and no more."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import device_types, load
from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.train.checkpointing.collective_read import read_collectively
from tests.checkpoint.states import memory_store
from tests.distributed.test_gradient_reducer import of_each
from tests.train.sharding.test_sharded_state import (
    ADAM,
    Member,
    _dropped_here,  # noqa: F401
    _small_units,  # noqa: F401
    check_equal,
    enter,
    four,
    joined,
    new_member,
    of_kind,
    plain_after,
    same_bits,
)

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")


def snapshots_of(members):
    """What each member copies for a checkpoint, besides an empty state."""
    names, made = NAMES[: len(members)], {}
    tree = {"step": {"optimizer": [{} for _ in members[0].parameters]}}
    for name, member in zip(names, members, strict=True):
        made[name] = Snapshot()
        made[name].take(1, tree, member.sharding.to_write(name, names))
    return made


def read_for(group, catalog, member, damaged=pytest.fail):
    """What a member reads of the checkpoint, and how many bytes."""
    read = read_collectively(
        catalog,
        group,
        enters=lambda phase: None,
        damaged=damaged,
        needs_of=lambda manifest: member.sharding.needs(manifest, group.world_size, ()),
    )
    member.step = read.commit.step
    return read, sum(len(memory) for some in read._memory.values() for _, _, memory in some)


def restore(group, catalog, member):
    """A member holds what it is to hold of the checkpoint. Returns the bytes that it has had."""
    read, nbytes = read_for(group, catalog, member)
    places = device_types(read.commit)
    member.sharding.restore(read, places, group.rank, group.world_size, ())
    return nbytes


@pytest.mark.parametrize("make", [ADAM, of_kind(torch.optim.Adafactor)], ids=["pieces", "whole"])
def test_member_copies_what_it_holds_and_no_more(make):
    members = joined(4, lambda: Member(make, [(70, 33), (64, 65)] * 2, torch.float32))
    enter(members, Member.attempt)
    total = 0
    for member, snapshot in zip(members, snapshots_of(members).values(), strict=True):
        units = snapshot.manifest().units.values()
        copied = sum(unit.nbytes for unit in units)
        assert member.held_bytes - 4 * len(member.sharding.held) <= copied
        assert copied <= member.held_bytes
        total += copied
    largest = max(member.held_bytes for member in members)
    assert largest < 0.8 * total / 2, "one has nearly all"


@pytest.mark.parametrize("writers", [NAMES[:4], NAMES[1:4]])
def test_each_blob_is_on_two_members_one_of_which_is_to_write_it(writers):
    members = four()
    enter(members, Member.attempt)
    by_name, planned = {}, {}
    for name, snapshot in snapshots_of(members).items():
        for blob in snapshot.manifest().headers:
            by_name.setdefault(blob, {})[name] = bytes(snapshot.content(blob))
        for blob, writer in snapshot.writers(writers).items():
            planned.setdefault(blob, set()).add(writer)
    assert all(len(copies) == 2 for copies in by_name.values())
    assert all(len(set(copies.values())) == 1 for copies in by_name.values())
    assert all(len(chosen) == 1 and chosen < set(by_name[n]) for n, chosen in planned.items())
    assert {next(iter(chosen)) for chosen in planned.values()} == set(writers)


def written_by(members, url):
    """The catalog and the commit record of a checkpoint of what the members hold."""
    catalog, held = Catalog(url), snapshots_of(members)
    with ThreadPoolExecutor(2) as executor:
        told = [
            write_blobs(catalog, snapshot, executor, writer=name, members=list(held))
            for name, snapshot in held.items()
        ]
    return catalog, write_commit(catalog, told, 1, CommitMetadata())


@pytest.mark.parametrize(("writing", "reading"), [(1, 4), (2, 3), (4, 1), (4, 4), (5, 2), (4, 8)])
def test_restored_member_has_what_it_is_to_hold_and_no_more(writing, reading):
    members = joined(writing)
    enter(members, Member.attempt)
    catalog, _ = written_by(members, memory_store())
    restored = [new_member() for _ in range(reading)]
    for member in restored:
        for mine, given in zip(
            member.parameters.values(), members[0].parameters.values(), strict=True
        ):
            mine.data.copy_(given.data)
    sizes = of_each(reading, lambda group: restore(group, catalog, restored[group.rank]))
    for nbytes, member in zip(sizes, restored, strict=True):
        assert nbytes <= member.held_bytes
    assert enter(restored, Member.attempt) == [0] * reading
    check_equal(restored, plain_after(2))


def test_pieces_of_any_members_are_the_state_of_an_optimizer_that_is_not_sharded():
    members = four()
    enter(members, Member.attempt)
    catalog, commit = written_by(members, memory_store())
    plain = plain_after(1)
    states = load(catalog, commit)["step"]["optimizer"]
    for given, p in zip(states, plain.parameters.values(), strict=True):
        expected = plain.optimizer.state[p]
        assert list(given) == list(expected)
        assert all(same_bits(given[key], expected[key]) for key in expected)
