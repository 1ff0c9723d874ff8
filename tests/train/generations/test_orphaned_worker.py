"""A worker whose controller is away: it waits for its lease before it goes on, and not for ever."""

import subprocess
import sys
import threading
import time

import pytest

from elastic_dp.cluster.heartbeat.heartbeat_server import HeartbeatServer
from elastic_dp.cluster.heartbeat.shared_memory_page import SharedMemoryPage
from elastic_dp.cluster.worker import Worker
from elastic_dp.config import FailureConfig
from elastic_dp.coordinator.messages import (
    HeartbeatReceived,
    Member,
    Membership,
    TrainingPosition,
    WorkerLost,
)
from elastic_dp.train.fault_injection import FaultInjector
from elastic_dp.train.generations.worker_control import ORPHANED, Orphaned, Released, WorkerControl
from elastic_dp.train.train_function import fail_worker
from elastic_dp.train.worker_session import WorkerSession
from tests.cluster.runs.test_takeover import Heard, job_of
from tests.patience import PATIENCE_S
from tests.runs import spec_of

LONG_AGO = 1e6
SECRET = b"secret"


def control(renewed_s_ago, **timeouts):
    renewed_at = time.monotonic() - renewed_s_ago
    return WorkerControl(renewed_at=lambda: renewed_at, **timeouts)


def test_worker_that_waits_for_a_generation_in_vain_is_an_orphan():
    left = control(0.0, lease_s=0.01, orphan_timeout_s=0.05)
    assert left.wait() == Orphaned()
    assert fail_worker("w1", Heard(), left, SharedMemoryPage(), ValueError()) == ORPHANED


def test_a_session_ends_outside_of_every_generation():
    session = WorkerSession(
        *(spec_of(), "w1", None, None, False, Heard(), SharedMemoryPage()),
        control(LONG_AGO, lease_s=1.0, orphan_timeout_s=2.0),
        is_source=False,
        faults=FaultInjector(),
    )
    with pytest.raises(Released, match=ORPHANED):
        session.ensure_generation()


def test_a_worker_that_never_begins_ends(monkeypatch):
    monkeypatch.setattr(SharedMemoryPage, "start_sidecar", lambda *_: None)
    spec = spec_of(failure=FailureConfig(heartbeat_timeout_s=0.1, orphan_timeout_s=0.2))
    assert Worker("w1", job_of(spec), Heard()).run() == ORPHANED


def test_a_finished_worker_that_waits_in_its_generation_notices():
    left = control(0.0, lease_s=0.01, orphan_timeout_s=0.1)
    left._generation, left._inside = 1, True
    assert not left.wait_until_ended() and not left.idle


def test_a_generation_is_entered_with_a_lease():
    """A controller that took over forms it sooner than the next heartbeat is answered."""
    renewed_at = [time.monotonic() - 2000.0]
    late = WorkerControl(lease_s=1000.0, orphan_timeout_s=1e6, renewed_at=lambda: renewed_at[0])
    membership = Membership(3, (Member("w1", ((0, 1),), TrainingPosition(0), True),), "w1", 5.0)
    late.form(membership)
    entered = []
    thread = threading.Thread(target=lambda: entered.append(late.wait()))
    thread.start()
    thread.join(0.2)
    assert not entered
    renewed_at[0] = time.monotonic()
    thread.join(PATIENCE_S)
    assert entered == [membership]


def test_a_sidecar_follows_the_controller():
    heard = [threading.Event(), threading.Event()]
    first, second = (HeartbeatServer(SECRET, "127.0.0.1", lambda _, e=e: e.set()) for e in heard)
    first.start()
    second.start()
    page = SharedMemoryPage()
    page.point_at(first.address)
    sidecar = page.start_sidecar("w1", SECRET, 0.05)
    assert heard[0].wait(PATIENCE_S) and not heard[1].is_set()
    page.point_at(second.address)
    assert heard[1].wait(PATIENCE_S)
    sidecar.kill()
    sidecar.wait()
    first.close()
    second.close()


DIES_WITH_ITS_GROUP = """
import os, signal, sys
from elastic_dp.cluster.heartbeat.shared_memory_page import ControllerAddress, SharedMemoryPage
page = SharedMemoryPage()
page.point_at(ControllerAddress("127.0.0.1", int(sys.argv[1]), bytes.fromhex(sys.argv[2])))
page.start_sidecar("w1", b"secret", 0.05)
sys.stdin.readline()
os.killpg(0, signal.SIGKILL)
"""


def test_a_sidecar_outlives_the_process_group_of_its_worker():
    """Ray kills all that is left in it as soon as it hears of the death."""
    heard = {HeartbeatReceived: threading.Event(), WorkerLost: threading.Event()}
    server = HeartbeatServer(SECRET, "127.0.0.1", lambda event: heard[type(event)].set())
    server.start()
    code = [sys.executable, "-c", DIES_WITH_ITS_GROUP, str(server.address.port)]
    code.append(server.address.nonce.hex())
    with subprocess.Popen(code, stdin=subprocess.PIPE, process_group=0) as worker:
        assert heard[HeartbeatReceived].wait(PATIENCE_S)
        worker.communicate(b"now\n")
    assert heard[WorkerLost].wait(PATIENCE_S)
    server.close()
