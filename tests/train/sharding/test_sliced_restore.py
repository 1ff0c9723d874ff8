"""A sharded run goes on from a checkpoint of a run that is not sharded: each member keeps what it
is to hold, and each byte is read once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.checkpoint import layout as layouts
from elastic_dp.checkpoint.catalog import Catalog, blob_path
from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.extensions.sharding.sharded_optimizer import without_optimizer
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing import collective_read
from elastic_dp.train.state import state_moves
from tests.checkpoint.states import memory_store
from tests.distributed.test_gradient_reducer import of_each
from tests.train.sharding import test_sharded_state as of_members
from tests.train.sharding.test_checkpoint_units import read_for
from tests.train.sharding.test_sharded_state import (
    ADAM,
    Member,
    _dropped_here,  # noqa: F401
    _small_units,  # noqa: F401
    check_equal,
    enter,
    of_kind,
)

KINDS = [(70, 33), (129,), (64, 65), (1,), ()]
PART_BYTES = 2048
ROUND_BYTES = 1500


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(layouts, "_MIN_BLOB_BYTES", PART_BYTES)
    monkeypatch.setattr(layouts, "_BLOBS", 1 << 20)
    monkeypatch.setattr(collective_read, "READ_REQUESTS", 2)
    monkeypatch.setattr(state_moves, "ROUND_BYTES", ROUND_BYTES)
    monkeypatch.setattr(state_moves, "UNIT_BYTES", ROUND_BYTES)


def turned(parameters):
    """An optimizer whose first parameter has other strides than is usual."""
    optimizer = ADAM(parameters)
    parameters[0].data = parameters[0].data.t().contiguous().t()
    return optimizer


def member_of(make, *, shard):
    kinds = [*KINDS, (0, 3)] if make in (ADAM, turned) else KINDS  # Adafactor divides by the size
    return Member(make, kinds, torch.float32, shard=shard)


def plain_after(make, steps):
    return of_members.plain_after(steps, member_of(make, shard=False))


def write(url, step, make, also=None):
    """Commits what a run that is not sharded has after so many steps."""
    catalog, snapshot, plain = Catalog(url), Snapshot(), plain_after(make, step)
    parameters = list(plain.parameters.values())
    states = [dict(plain.optimizer.state[p]) for p in parameters]
    tree = {"step": {"parameters": parameters, "optimizer": states}}
    snapshot.take(step, tree | ({} if also is None else {"also": also(states)}))
    with ThreadPoolExecutor(2) as executor:
        blobs = write_blobs(catalog, snapshot, executor, writer="a", members=["a"])
    return catalog, write_commit(catalog, [blobs], 1, CommitMetadata())


def restore(group, catalog, make, said=lambda error: None):
    """Returns a member that has restored, and the bytes that it has had of the checkpoint."""
    member = member_of(make, shard=True)
    read, nbytes = read_for(group, catalog, member, said)
    step = read.tree(without_optimizer(read.commit.manifest))["step"]
    for mine, given in zip(member.parameters.values(), step["parameters"], strict=True):
        mine.data.copy_(given)
    member.sharding.restore(read, {}, group.rank, group.world_size, ())
    return member, nbytes


WHOLE, WITHOUT_STATE = of_kind(torch.optim.Adafactor), of_kind(torch.optim.SGD)


@pytest.mark.parametrize(
    ("make", "workers"), [(ADAM, 2), (ADAM, 3), (ADAM, 5), (WHOLE, 3), (WITHOUT_STATE, 3)]
)
def test_member_holds_its_part_of_a_state_that_was_not_sharded(make, workers):
    catalog, _ = write(memory_store(), 2, make)
    members = [one for one, _ in of_each(workers, lambda group: restore(group, catalog, make))]
    assert enter(members, Member.attempt) == [0] * workers, "pieces were sent again"
    check_equal(members, plain_after(make, 3))


@pytest.mark.parametrize("written", [ADAM, turned])
def test_parameter_may_lie_in_memory_in_another_order(written):
    catalog, _ = write(memory_store(), 2, written)
    members = [one for one, _ in of_each(3, lambda group: restore(group, catalog, turned))]
    enter(members)
    check_equal(members, plain_after(turned, 2))


def test_each_byte_is_read_once_and_a_member_has_only_what_it_needs(monkeypatch):
    catalog, commit = write(memory_store(), 1, ADAM)
    read, lock, inner = [], threading.Lock(), Store.read

    def counted(store, path, first, last):
        if "/step-" in path:
            with lock:
                read.append((path, first, last))
        return inner(store, path, first, last)

    monkeypatch.setattr(Store, "read", counted)
    received = []

    def act(group):
        all_to_all = group.all_to_all

        def watched(output, given, *sizes):
            received.append(output.nbytes)
            return all_to_all(output, given, *sizes)

        group.all_to_all = watched
        return restore(group, catalog, ADAM)

    restored = of_each(3, act)
    assert sum(last - first for _, first, last in read) == commit.nbytes
    assert len(set(read)) == len(read)
    specs = commit.manifest.specs.values()
    for_all = sum(s.nbytes for s in specs if "parameters" in s.name)
    counts = sum(s.nbytes for s in specs if not s.shape)
    for member, nbytes in restored:
        states = [value for state in member.sharding.held.values() for value in state.values()]
        divided = sum(value.nbytes for value in states if value.dim())
        assert 0 <= nbytes - for_all - divided <= counts
    assert max(nbytes for _, nbytes in restored) < 0.9 * commit.nbytes
    record = 8 + len(commit.to_bytes())
    assert max(n for n in received if n != record) <= 3 * ROUND_BYTES, "it came at once"


def test_damage_found_by_one_sends_all_to_the_checkpoint_before():
    url = memory_store()
    write(url, 1, ADAM)
    catalog, commit = write(url, 2, ADAM)
    path = blob_path(catalog.folder, commit.step, commit.manifest.blobs[-1].name)
    content = bytearray(url.read_all(path))
    content[-1] ^= 1
    url.write(path, bytes(content))
    said = []
    members = [m for m, _ in of_each(3, lambda g: restore(g, catalog, ADAM, said.append))]
    assert [member.step for member in members] == [1, 1, 1]
    assert len(said) == 1 and f"step {commit.step}" in str(said[0])
    assert enter(members, Member.attempt) == [0] * 3
    check_equal(members, plain_after(ADAM, 2))


def test_tensor_that_is_also_elsewhere_in_the_tree_is_read_as_a_whole():
    catalog, commit = write(memory_store(), 1, ADAM, also=lambda states: states[0]["exp_avg"])
    member = member_of(ADAM, shard=True)
    pieces = member.sharding
    name = "step.optimizer.0.exp_avg"
    for needs in pieces.needs(commit.manifest, 3, ()):
        assert needs[name] == [(0, commit.manifest.specs[name].nbytes)]
    members = [one for one, _ in of_each(3, lambda group: restore(group, catalog, ADAM))]
    enter(members, Member.attempt)
    check_equal(members, plain_after(ADAM, 2))
