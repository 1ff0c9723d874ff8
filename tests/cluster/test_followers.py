"""No process of a worker outlives its first one, and the first one hears of the end of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_dp.cluster.heartbeat.heartbeat_sidecar import _look_at
from tests.patience import eventually
from tests.processes import lives

pytestmark = pytest.mark.slow

# A child that says who it is, and freezes. With a grandchild that keeps a copy of the connection.
CHILD = """
import os, signal, sys, time
from multiprocessing.connection import Connection
from elastic_dp.extensions.gangs import followers
followers._end_with(int(sys.argv[2]))
sys.stdin.buffer.read()
grandchild = os.fork()
if not grandchild:
    time.sleep(1000)
Connection(int(sys.argv[1])).send((os.getpid(), grandchild))
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = f"""
from elastic_dp.extensions.gangs import followers
followers._MAIN = {CHILD!r}
[follower] = followers.start_followers("w1", [{{}}])
print(*follower.connection.recv(), flush=True)
try:
    follower.connection.recv()
except EOFError:
    print("ended", flush=True)
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Returns a parent, and the child that is frozen."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, grandchild = map(int, parent.stdout.readline().split())
    eventually(lambda: _look_at(child)[0])
    yield parent, child
    parent.kill()
    parent.wait()
    parent.stdout.close()
    os.kill(grandchild, signal.SIGKILL)


def test_frozen_process_ends_with_the_first_one(
    family: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = family
    parent.kill()
    eventually(lambda: not lives(child))


def test_first_process_hears_of_an_end_although_another_holds_the_connection(
    family: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = family
    os.kill(child, signal.SIGKILL)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ended\n"


BROKEN = """
import pickle
from elastic_dp.extensions.gangs import followers
given = b"not a pickle", None, b"", ()
[follower] = followers.start_followers("w1", [{}], *given)
print(follower.connection.recv().splitlines()[-1], flush=True)
"""


def test_process_that_cannot_start_says_why() -> None:
    """Here what the driver has pickled cannot be read, as where a module is missing."""
    ran = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, check=True)
    assert "UnpicklingError" in ran.stdout
