"""What reaches the ports of heartbeats, from whomever: only a worker of this run is heard, and
nothing ends a thread."""

import random
import signal
import socket
import subprocess
import threading
import time

import pytest

from elastic_dp.cluster.heartbeat import heartbeat_sidecar
from elastic_dp.cluster.heartbeat.heartbeat_server import HeartbeatServer
from elastic_dp.cluster.heartbeat.shared_memory_page import SharedMemoryPage
from elastic_dp.coordinator.messages import HeartbeatReceived
from tests.patience import PATIENCE_S, eventually

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
BEAT = {
    "worker": "w1",
    "generation": 1,
    "step": 2,
    "phase": "compute",
    "at": 1.0,
    "cpu_s": 0.5,
    "virtual_s": 0.1,
}
HOSTILE = [b"[" * 4000, b"[]", b"{}", b"", b"null", b'"x"', b"\xff" * 100, b"[" * 60000, b"{" * 25]
SOURCE = ("127.0.0.1", 9)


@pytest.fixture
def heard():
    return []


@pytest.fixture
def server(heard):
    server = HeartbeatServer(SECRET, "127.0.0.1", heard.append)
    yield server
    server.close()


def signed(server, counter, message=BEAT, secret=SECRET, nonce=None):
    return heartbeat_sidecar.Channel(secret, nonce or server.address.nonce, "").sign(
        counter, message
    )


def mutated(rng, genuine):
    """A datagram that differs from a genuine one, or has nothing of one."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return rng.choice(HOSTILE)
    if kind == 2:
        return genuine[: rng.randrange(len(genuine))]
    if kind == 3:
        return genuine + rng.randbytes(1 + rng.randrange(9))
    if kind == 4:
        return genuine[:16] + rng.choice(HOSTILE)
    at = rng.randrange(len(genuine))
    return genuine[:at] + bytes([genuine[at] ^ 1 << rng.randrange(8)]) + genuine[at + 1 :]


def test_worker_tells_how_many_requests_to_stores_it_has_retried(server, heard):
    page = SharedMemoryPage()
    page.point_at(server.address)
    page.count_retry()
    page.count_retry()
    server.start()
    sidecar = page.start_sidecar("w1", SECRET, 0.01)
    try:
        eventually(lambda: heard)
        assert heard[0].store_retries == 2
        page.count_retry()
        eventually(lambda: heard[-1].store_retries == 3)
    finally:
        sidecar.kill()
        sidecar.wait()


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_hundred_thousand_and_a_million_mutated_datagrams_reach_nobody(times, server, heard):
    rng = random.Random(7)
    strange = [signed(server, 1, secret=OTHER), signed(server, 1, nonce=bytes(16))]
    strange += [mutated(rng, signed(server, i)) for i in range(20_000)]
    for datagram in strange * times:
        server.receive(datagram, SOURCE)
    assert server.refused == times * len(strange) > times * 20_000 and not heard
    server.receive(signed(server, 1), SOURCE)
    assert [event.worker for event in heard] == ["w1"]


@pytest.mark.parametrize("datagram", HOSTILE)
def test_server_goes_on_after_a_hostile_datagram(datagram, server, heard):
    """4,000 brackets ended the thread, and so the run."""
    server.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(datagram, server.address[:2])
        stranger.sendto(signed(server, 1), server.address[:2])
        eventually(lambda: heard)
    assert server.refused == 1


@pytest.mark.parametrize("message", [[], None, "x", {}, {"worker": "w1"}, {**BEAT, "at": []}])
def test_server_goes_on_after_a_signed_message_of_another_form(message, server, heard):
    """A worker of another version."""
    server.receive(
        heartbeat_sidecar.Channel(SECRET, server.address.nonce, "").sign(1, message), SOURCE
    )
    assert server.refused == 1 and not heard


def test_bug_in_a_listener_costs_one_message(capsys):
    def fails(event):
        raise RuntimeError("ours")

    server = HeartbeatServer(SECRET, "127.0.0.1", fails)
    server.receive(signed(server, 1), SOURCE)
    assert "RuntimeError: ours" in capsys.readouterr().err
    server.close()


def test_socket_stays_open_until_the_thread_that_reads_from_it_has_ended():
    """Else it reads from a file that has got the same descriptor."""
    hears, goes_on = threading.Event(), threading.Event()
    server = HeartbeatServer(
        SECRET, "127.0.0.1", lambda event: (hears.set(), goes_on.wait(PATIENCE_S))
    )
    server.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as worker:
        worker.sendto(signed(server, 1), server.address[:2])
    assert hears.wait(PATIENCE_S)
    server.close()
    assert server._socket.fileno() >= 0
    goes_on.set()
    eventually(lambda: server._socket.fileno() < 0)


def test_replayed_datagram_keeps_no_worker_alive(server, heard):
    recorded = [signed(server, i) for i in range(1, 200)]
    for datagram in recorded:
        server.receive(datagram, SOURCE)
    assert len(heard) == 199
    for datagram in recorded * 2:
        server.receive(datagram, ("10.0.0.1", 1))
    assert len(heard) == 199 and server._peers["w1"].source == SOURCE


def test_replayed_datagram_is_refused_by_the_next_controller(server, heard):
    later = HeartbeatServer(SECRET, "127.0.0.1", heard.append)
    later.receive(signed(server, 7), SOURCE)
    assert not heard and later.refused == 1
    later.close()


def test_reordered_datagrams_are_all_heard(server, heard):
    order = list(range(1, 500))
    rng = random.Random(3)
    for at in range(0, len(order), 30):
        part = order[at : at + 30]
        rng.shuffle(part)
        order[at : at + 30] = part
    for counter in order:
        server.receive(signed(server, counter, {**BEAT, "step": counter}), SOURCE)
    assert [event.step for event in heard] == order


def test_strangers_are_said_once_a_minute():
    said = []
    server = HeartbeatServer(SECRET, "127.0.0.1", print, say=said.append)
    for _ in range(1000):
        server.receive(b"[]", ("10.1.2.3", 5))
    server.close()
    (text,) = said
    assert "10.1.2.3" in text and f"127.0.0.1:{server.address.port}" in text


class Relay:
    """Between a sidecar and its controller; shows the sidecar's socket, so that one can write to
    it."""

    def __init__(self, server):
        self.server, self.heard, self.sidecar = server, threading.Event(), None
        server._heard = self._hear
        server.start()

    def _hear(self, event):
        if isinstance(event, HeartbeatReceived):
            self.sidecar = self.server._peers[event.worker].source
            self.server.renew(event.worker, event.beat)
            self.heard.set()


@pytest.fixture
def page_and_sidecar(server):
    page = SharedMemoryPage()
    page.point_at(server.address)
    # A process that stands for the worker: a sidecar may kill it.
    process = page.start_sidecar("w1", SECRET, 0.02)
    yield page, process
    process.kill()
    process.wait()


def renewed_again(page, relay):
    before = page.renewed_at()
    return eventually(lambda: page.renewed_at() > before)


def test_sidecar_goes_on_after_hostile_datagrams_from_the_controllers_own_address(
    server, page_and_sidecar
):
    """`[]` ended it. Its socket hears the controller alone, so that is where these come from."""
    page, process = page_and_sidecar
    relay = Relay(server)
    assert relay.heard.wait(PATIENCE_S)
    rng = random.Random(5)
    genuine = heartbeat_sidecar.Channel(SECRET, server.address.nonce, "w1").sign(0, {"die": True})
    strange = [mutated(rng, genuine) for _ in range(2000)]
    strange += [  # signed for another worker, by another run, under another controller
        heartbeat_sidecar.Channel(SECRET, server.address.nonce, "w2").sign(0, {"die": True}),
        heartbeat_sidecar.Channel(OTHER, server.address.nonce, "w1").sign(0, {"die": True}),
        heartbeat_sidecar.Channel(SECRET, bytes(16), "w1").sign(0, {"die": True}),
    ]
    for datagram in strange:
        server._socket.sendto(datagram, relay.sidecar)
    assert renewed_again(page, relay) and process.poll() is None


def test_sidecar_hears_no_other_address(server, page_and_sidecar):
    page, _ = page_and_sidecar
    relay = Relay(server)
    assert relay.heard.wait(PATIENCE_S)
    renews = heartbeat_sidecar.Channel(SECRET, server.address.nonce, "w1").sign(0, {"at": 1e12})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(100):
            stranger.sendto(renews, relay.sidecar)
    assert renewed_again(page, relay) and page.renewed_at() < 1e12


def test_secret_never_travels(server):
    datagrams = [
        signed(server, 1),
        heartbeat_sidecar.Channel(SECRET, b"n", "w1").sign(0, {"at": 1.0}),
    ]
    for datagram in datagrams:
        assert SECRET not in datagram and SECRET.hex().encode() not in datagram


def test_worker_is_silent_while_another_process_of_it_is_stopped(server, heard):
    """A frozen process holds up its worker as a frozen worker would."""
    page = SharedMemoryPage()
    page.point_at(server.address)
    server.start()
    with subprocess.Popen(["sleep", "1000"]) as other:
        sidecar = page.start_sidecar("w1", SECRET, 0.01, [other.pid])
        try:
            eventually(lambda: heard)
            other.send_signal(signal.SIGSTOP)
            eventually(lambda: heartbeat_sidecar._look_at(other.pid)[0])
            stopped_at = 1e6 * time.monotonic()  # in `beat`'s unit, by the same clock
            time.sleep(0.3)
            assert heard[-1].beat < stopped_at, "it was on its way, or nothing was sent since"
            other.send_signal(signal.SIGCONT)
            eventually(lambda: heard[-1].beat > stopped_at)
        finally:
            sidecar.kill()
            sidecar.wait()
            other.kill()
