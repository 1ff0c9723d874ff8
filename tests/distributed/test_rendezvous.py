"""Members of a group meet over their links to the controller. A process without the run's secret is
no member of a group, and stops none."""

import contextlib
import gc
import os
import random
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from elastic_dp.distributed import process_group
from elastic_dp.distributed.process_group import GroupFormation
from elastic_dp.distributed.rendezvous import (
    GroupName,
    MemberRecord,
    RendezvousTables,
    packed,
    unpacked,
)
from elastic_dp.errors import FormingFailed, MembersMissing
from tests.distributed.meeting import CPU, InMemory
from tests.patience import PATIENCE_S, eventually

GROUP = GroupName(1, "main-0")
PATIENT = timedelta(seconds=PATIENCE_S)


def record(group, rank, world_size=2, number=0):
    return MemberRecord(f"w{rank}", group, number, rank, world_size, ((f"key/{rank}", b"value"),))


def record_of(rank, count):
    """Return a record as Gloo's of a rank: its address, and a number for each peer."""
    address = random.Random(rank).randbytes(24) + bytes(126)
    return address + b"".join((rank * count + r).to_bytes(8, "little") for r in range(count))


def test_group_of_1024_meets_in_memory_within_a_second():
    """Counts what the controller and one member do: members have machines of their own."""
    count, meet = 1024, InMemory()
    contents = [record_of(rank, count) for rank in range(count)]
    stores = [meet.store(GROUP, rank, count, PATIENT) for rank in range(count)]
    first, last = stores[0], stores[-1]
    meet._stores.clear()
    meet._stores.add(first)
    for store, content in zip(stores[:-1], contents, strict=False):
        store.set(f"main/{store._member.rank}", content)
    before = time.process_time()
    tables = RendezvousTables()
    for _, table in list(meet.tables._tables.items()):
        for one in table.values():
            assert tables.add(one) is None
    meet.tables = tables
    last.set(f"main/{count - 1}", contents[-1])
    found = [first.get(f"main/{rank}") for rank in range(count)]
    took = time.process_time() - before
    assert found == contents
    assert sum(len(value) for value in first._values.values()) < 1 << 18
    assert took < 1.0


def test_store_gives_what_others_have_set_in_several_rounds():
    """As NCCL's: only the first rank sets, and may set more than once."""
    meet = InMemory()
    one, other = (meet.store(GROUP, rank, 2, PATIENT) for rank in (0, 1))
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(other.get, "a")
        one.set("a", bytes(range(256)))
        one.set("b", "text")
        assert waits.result(PATIENCE_S) == bytes(range(256))
        assert other.get("b") == b"text"
        later = pool.submit(lambda: (other.wait(["c", "d"]), other.get("d"))[1])
        one.set("c", b"")
        one.set("d", b"d")
        assert later.result(PATIENCE_S) == b"d"
    assert one.check(["a", "b"]) and not one.check(["a", "e"])


def test_store_gives_up_in_time():
    alone = InMemory().store(GROUP, 0, 2, timedelta(milliseconds=20))
    with pytest.raises(dist.DistStoreError, match=r"not all members have registered in 0\.02 s"):
        alone.wait(["never"], PATIENT)


def test_tables_keep_nothing_of_a_group_that_is_complete_or_has_ended():
    tables = RendezvousTables()
    assert tables.add(record(GROUP, 0)) is None
    assert tables.registered(GROUP) == {"w0"}
    workers, records = tables.add(record(GROUP, 1))
    assert workers == ["w0", "w1"] and [key for key, _ in records.values] == ["key/0", "key/1"]
    assert tables.registered(GROUP) is None and not tables._tables
    prepared = [GroupName.main(2, 1), GroupName.main(2, 2), GroupName.main(2, 2, process=1)]
    for group in (GROUP, GroupName(1, "side"), *prepared, GroupName.main(3, 1)):
        tables.add(record(group, 0))
    tables.begin(GroupName.main(2, 2))
    assert [group for group, _ in tables._tables] == [*prepared[1:], GroupName.main(3, 1)]
    assert tables.add(record(GROUP, 1)) is None
    assert tables.registered(GROUP) is None


@pytest.mark.parametrize("size", [0, 1, 7, 8, 512, 1031])
def test_packed_value_of_any_size_comes_back(size):
    value = random.Random(size).randbytes(size)
    assert unpacked(packed(value)) == value


def forming(meet, rank, generation=1, timeout_s=PATIENCE_S):
    name = GroupName(generation, "main")
    how = {"rank": rank, "world_size": 2, "device": CPU, "timeout_s": timeout_s}
    return GroupFormation(meet, name, **how).start()


def test_member_that_is_alone_says_that_others_are_missing():
    with pytest.raises(MembersMissing):
        forming(InMemory(), 0, timeout_s=0.05).wait()


def test_member_without_the_secret_joins_no_group():
    """It may have got into the exchange of addresses, and does not get into the group."""
    meet, stranger = InMemory(), InMemory(b"another")
    stranger.tables = meet.tables
    deliver = meet.deliver
    both = lambda records: (deliver(records), InMemory.deliver(stranger, records))  # noqa: E731
    meet.deliver = stranger.deliver = both  # whoever is the last one to register
    members = [forming(meet, 0, timeout_s=2.0), forming(stranger, 1, timeout_s=2.0)]
    for member in members:
        with pytest.raises(FormingFailed) as failed:
            member.wait()
        assert not isinstance(failed.value, MembersMissing)


def test_forming_fails_for_all_where_one_member_gets_no_proof(monkeypatch):
    """So that no member uses a port again whose connections a stranger may have."""
    prove = process_group.prove

    class Deaf:
        def __init__(self, backend):
            self.backend = backend

        def alltoall_base(self, taken, *others):
            self.backend.alltoall_base(taken, *others).wait()
            taken.zero_()
            return self

        def wait(self):
            return True

    def one_is_deaf(backend, *others, rank, world_size):
        prove(backend if rank else Deaf(backend), *others, rank=rank, world_size=world_size)

    monkeypatch.setattr(process_group, "prove", one_is_deaf)
    meet = InMemory()
    for member in [forming(meet, rank, timeout_s=2.0) for rank in (0, 1)]:
        with pytest.raises(FormingFailed):
            member.wait()


class Impostor:
    """Stands where Gloo's backend does: has the connections, and not the secret."""

    def __init__(self, proof):
        self.proof = proof

    def alltoall_base(self, taken, given, *_):
        taken.copy_(given)
        taken[-32:] = self.proof
        return self

    def wait(self):
        return True


@pytest.mark.parametrize("proof", [torch.zeros(32, dtype=torch.uint8), "own"])
def test_connection_without_a_proof_is_no_member(proof):
    """Zeros; and our own proof, sent back."""
    backend = Impostor(proof) if proof != "own" else Impostor(slice(None))
    if proof == "own":
        backend.alltoall_base = lambda taken, given, *_: (taken.copy_(given), backend)[1]
    with pytest.raises(ConnectionError, match="rank"):
        process_group.prove(backend, b"secret", "g", rank=0, world_size=2)


@pytest.fixture
def port():
    """Gloo's address in this process, from now on and afterwards another one."""

    def listening():
        found = set()
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # what listed them is closed by now
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    with socket.socket(fileno=os.dup(fd)) as one:
                        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            found.add(one.getsockname())
        return found

    before = listening()
    process_group.use_interface("127.0.0.1")
    (found,) = listening() - before
    yield found
    process_group.use_interface("127.0.0.1")


@pytest.mark.parametrize("first", [b"", bytes(64)], ids=["closed", "names no buffer"])
def test_group_forms_after_strangers_took_its_pairs(port, monkeypatch, first):
    """A connection that names a later pair is taken for the peer: that group fails soon, and the
    next has another port."""
    monkeypatch.setattr(process_group, "_CONNECTING_LIMIT", timedelta(seconds=1))
    gc.collect()  # groups that did not form
    strangers, process = [], psutil.Process()
    for number in range(100):
        stranger = socket.create_connection(port)
        stranger.sendall(number.to_bytes(8, "little") + first)
        strangers.append(stranger)

    def taken():
        return [one for one in process.net_connections("tcp") if one.laddr == port and one.raddr]

    eventually(lambda: len(taken()) >= len(strangers))
    for stranger in strangers:
        stranger.close()
    outcomes, meet, gloo = [], InMemory(), process_group._gloo_device
    for attempt in range(2):
        members = [forming(meet, r, attempt, timeout_s=20 * PATIENCE_S) for r in (0, 1)]
        for member in members:
            try:
                group = member.wait()
                outcomes.append(group.world_size)
                group.close()
            except FormingFailed:
                outcomes.append(0)
    assert outcomes[2:] == [2, 2] and 0 in outcomes[:2]
    assert process_group._gloo_device is not gloo


@pytest.mark.usefixtures("port")
def test_port_of_a_forming_that_was_aborted_is_left():
    """Strangers may have taken pairs of it."""
    meet, gloo = InMemory(), process_group._gloo_device
    forming(meet, 0).abort()
    members = [forming(meet, r, generation=2) for r in (0, 1)]
    for member in members:
        member.wait().close()
    assert process_group._gloo_device is not gloo
