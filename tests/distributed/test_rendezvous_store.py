"""Who has not the run's secret neither reads nor writes where a group forms, is no member of it,
and stops nobody."""

import os
import random
import resource
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elastic_dp.distributed import process_group, rendezvous_store
from elastic_dp.distributed.process_group import GroupFormation, Rendezvous, open_rendezvous_store
from elastic_dp.distributed.rendezvous_store import RendezvousStoreClient
from elastic_dp.errors import FormingFailed
from tests.patience import PATIENCE_S, eventually

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
PATIENT = timedelta(seconds=PATIENCE_S)


@pytest.fixture
def server():
    server = open_rendezvous_store("127.0.0.1", SECRET)
    yield server
    server.close()


def client(server, secret=SECRET, timeout=PATIENT):
    return RendezvousStoreClient("127.0.0.1", server.port, secret, timeout)


def test_values_come_back_to_whoever_waits(server):
    one, below = client(server), client(server)
    other = dist.PrefixStore("a", below)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(other.get, "b")
        one.set("a/b", bytes(range(256)))
        assert waits.result(PATIENCE_S) == bytes(range(256))
    other.wait(["b"], PATIENT)
    assert one.check(["a/b"]) and not one.check(["a/b", "c"])
    assert (one.add("n", 2), one.add("n", 3), one.get("n")) == (2, 5, b"5")
    assert one.delete_key("n") and not one.check(["n"])


def test_client_gives_up_in_time_and_goes_on(server):
    one = client(server)
    with pytest.raises(dist.DistStoreError, match="no answer"):
        one.wait(["never"], timedelta(milliseconds=20))
    client(server).set("never", b"1")
    assert eventually(lambda: one.check(["never"]))


def test_client_without_the_secret_is_refused(server):
    """TCPStore took anyone: whoever reached it could join, and run code in all members."""
    with pytest.raises(dist.DistStoreError, match="lost"):
        client(server, OTHER).check(["a"])
    client(server).set("a", b"genuine")
    stranger = client(server, OTHER)
    stranger.set("a", b"foreign")
    with pytest.raises(dist.DistStoreError):
        stranger.get("a")
    assert client(server).get("a") == b"genuine"


def recorded(server):
    """What a genuine client sends after the nonces, and what it has sent before."""
    one = client(server)
    sent = []
    plain = one._connection
    one._connection = type("Tap", (), {
        "settimeout": plain.settimeout, "recv": plain.recv,
        "sendall": lambda _, content: (sent.append(content), plain.sendall(content)),
    })()  # fmt: skip
    one.set("replayed", b"1")
    one.delete_key("replayed")
    return sent


def test_replayed_connection_is_refused(server):
    sent = recorded(server)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(bytes(16) + b"".join(sent))
        stranger.settimeout(PATIENCE_S)
        received = stranger.recv(100)
        while received:  # its nonce, and then the end
            received = stranger.recv(100)
    assert not client(server).check(["replayed"])


def garbage(rng, genuine):
    kind = rng.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:
        return rng.randbytes(rng.randrange(300))
    if kind == 2:
        return rng.randbytes(16) + struct.pack(">I", rng.choice([0, 1, 2**31, 2**32 - 1]))
    if kind == 3:
        return rng.randbytes(16) + genuine
    return rng.randbytes(16) + struct.pack(">I", 4000) + bytes(16) + b"[" * 4000


def test_ten_thousand_garbage_connections_cost_the_store_nothing(server):
    rng, genuine = random.Random(1), b"".join(recorded(server))
    before, kept = len(os.listdir("/proc/self/fd")), []
    for i in range(10_000):
        stranger = socket.create_connection(("127.0.0.1", server.port))
        stranger.sendall(garbage(rng, genuine))
        if i % 20:
            stranger.close()
        else:  # stays, and says no more
            kept.append(stranger)
        if i % 1000 == 0:
            assert client(server).add("n", 1) == i // 1000 + 1
    assert (
        len(os.listdir("/proc/self/fd")) < before + len(kept) + rendezvous_store._MAX_STRANGERS + 50
    )
    for stranger in kept:
        stranger.close()


def record_of(rank, count):
    """Return a record as Gloo's of a rank: its address, and a number for each peer."""
    address = random.Random(rank).randbytes(24) + bytes(126)
    return address + b"".join((rank * count + r).to_bytes(8, "little") for r in range(count))


def cpu_s(name):
    """Return the processor time of the newest thread of this name."""
    thread = [one for one in threading.enumerate() if one.name == name][-1]
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def test_store_serves_a_group_of_1024_within_a_second(server):
    """An answer had 46 bytes for each two ranks, and was encoded for each rank: no group of 600
    could form, since it had more than 16 MiB."""
    count = 1024
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 8192), limit))
    members = []
    for _ in range(count):
        members.append(client(server))
        members[-1].check(["any"])  # so that it is no stranger, of whom few are tolerated
    before = cpu_s("rendezvous")
    for rank, member in enumerate(members):
        member.asks_for_all(rank, count)
        member.set(f"run/1/main/0/{rank}", record_of(rank, count))
    # The members are on machines of their own: only what the store does is measured.
    with ThreadPoolExecutor(8) as pool:
        first = members.pop(0)
        sizes = list(pool.map(lambda member: arrived(member, count), members))
        values = [first.get(f"run/1/main/0/{rank}") for rank in range(count)]
    took = cpu_s("rendezvous") - before
    assert values == [record_of(rank, count) for rank in range(count)]
    assert max(sizes) < 1 << 18
    assert took < 1.0


def arrived(member, count):
    """Ask for the values of all ranks. Return the size of the answer, which is not read."""
    member._send(["all", "run/1/main/0", count], time.monotonic() + PATIENCE_S)
    member._connection.settimeout(None)
    head = member._connection.recv(20, socket.MSG_WAITALL)
    (size,) = struct.unpack(">I", head[:4])
    assert len(member._connection.recv(size, socket.MSG_WAITALL)) == size
    return size


def test_keys_of_generations_that_have_ended_are_dropped(server):
    one = client(server)
    one.set("run/mesh", b"stays")
    for generation in range(1, 6):
        one.set(f"run/{generation}/main-0/present/0", b"1")
        one.set(f"run/{generation}/side/0/0", bytes(600))
    kept = {one.check([f"run/{g}/side/0/0"]): None for g in (1, 2, 3)}
    assert list(kept) == [False]
    assert one.check(["run/4/side/0/0", "run/5/side/0/0", "run/mesh"])
    assert len(server._values) == 5


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1024, 1031])
def test_value_of_any_size_comes_back(server, size):
    value = random.Random(size).randbytes(size)
    client(server).set("run/1/a/b", value)
    assert client(server).get("run/1/a/b") == value


def rendezvous(server, prefix, secret=SECRET):
    return Rendezvous("127.0.0.1", server.port, prefix, secret)


def forming(server, rank, prefix="g", secret=SECRET, timeout_s=PATIENCE_S):
    return GroupFormation(
        rendezvous(server, prefix, secret),
        rank=rank,
        world_size=2,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
    )


def test_stranger_joins_no_group(server):
    member = forming(server, 0, timeout_s=2.0).start()
    stranger = forming(server, 1, secret=OTHER, timeout_s=2.0).start()
    for one in (member, stranger):
        with pytest.raises(FormingFailed):
            one.wait()
    assert member.absent == [1]


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
def test_connection_without_a_proof_is_no_member(server, proof):
    """Zeros; and our own proof, sent back."""
    meet = rendezvous(server, "g")
    backend = Impostor(proof) if proof != "own" else Impostor(slice(None))
    if proof == "own":
        backend.alltoall_base = lambda taken, given, *_: (taken.copy_(given), backend)[1]
    with pytest.raises(ConnectionError, match="rank"):
        process_group.prove(backend, meet, 0, 2)


@pytest.fixture
def gloo():
    process_group.use_interface("127.0.0.1")
    yield process_group._gloo_device
    process_group.use_interface("127.0.0.1")


def port_of(device):
    with socket.socket(fileno=os.dup(device._port)) as one:
        return one.getsockname()


def test_gloo_port_is_shut_while_no_group_forms(gloo):
    """Gloo keeps each connection that anybody makes, and ends the process when no descriptor is
    left."""
    with pytest.raises(TimeoutError):
        socket.create_connection(port_of(gloo), timeout=0.2)
    with gloo.open(), gloo.open():
        pass
    with gloo.open():
        socket.create_connection(port_of(gloo), timeout=PATIENCE_S).close()
    with pytest.raises(TimeoutError):
        socket.create_connection(port_of(gloo), timeout=0.2)


@pytest.mark.parametrize("first", [b"", bytes(64)], ids=["closed", "names no buffer"])
def test_group_forms_after_strangers_took_its_pairs(server, gloo, monkeypatch, first):
    """A connection that names a later pair is taken for the peer: that group fails soon, and the
    next has another port."""
    monkeypatch.setattr(process_group, "_CONNECTING_LIMIT", timedelta(seconds=1))
    strangers, before = [], len(os.listdir("/proc/self/fd"))
    with gloo.open():
        for number in range(100):
            stranger = socket.create_connection(port_of(gloo))
            stranger.sendall(number.to_bytes(8, "little") + first)
            strangers.append(stranger)
    eventually(lambda: len(os.listdir("/proc/self/fd")) >= before + 2 * len(strangers))
    for stranger in strangers:
        stranger.close()
    outcomes = []
    for attempt in range(2):
        members = [
            forming(server, r, f"g{attempt}", timeout_s=20 * PATIENCE_S).start() for r in (0, 1)
        ]
        for member in members:
            try:
                group = member.wait()
                outcomes.append(group.world_size)
                group.close()
            except FormingFailed:
                outcomes.append(0)
    assert outcomes[2:] == [2, 2] and 0 in outcomes[:2]
    assert process_group._gloo_device is not gloo


def test_port_of_a_forming_that_was_aborted_is_left(server, gloo):
    """Strangers may have taken pairs of it."""
    alone = forming(server, 0, "g0").start()
    alone.abort()
    members = [forming(server, r, "g1").start() for r in (0, 1)]
    for member in members:
        member.wait().close()
    assert process_group._gloo_device is not gloo
