"""Starts the processes of a worker beside its actor, as children of it.

They are on its node and use its resources. Each has one connection, to the actor, and ends when
that closes. Three things would keep a connection open or a process alive, and do not: a process
that user code has forked and that holds a copy of the connection, a child that is frozen, and a
child whose interpreter is locked. The actor waits for the end of each child, and the kernel ends a
child whose parent has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from elastic_dp.cluster.followers.follower import FollowerProcess, follow
from elastic_dp.cluster.worker_logs import print_whatever_fits
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.threads import background

# What fails before the child has a session is told to the actor, which reports it.
_MAIN = """
import sys, traceback
try:
    from elastic_dp.cluster.followers.child_processes import main
    main()
except Exception:
    from multiprocessing.connection import Connection
    Connection(int(sys.argv[1])).send(traceback.format_exc())
    raise
"""
_PR_SET_PDEATHSIG = 1


def start_followers(
    identity: WorkerId, environments: Sequence[Mapping[str, str]], *given: Any
) -> list[FollowerProcess]:
    """Return the processes of a worker beside its first one, for that one. `environments` has the
    variables of each in which it differs from this one. `given` are the further arguments of
    `follow`."""
    return [
        _start(number, environment, (identity, number, given))
        for number, environment in enumerate(environments, 1)
    ]


def _start(number: int, environment: Mapping[str, str], arguments: Any) -> FollowerProcess:
    ours, theirs = socket.socketpair()
    started: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    run = partial(_run_child, ours, theirs, environment, arguments, started)
    background(f"child-{number}", run, started.put).start()
    pid = started.get()
    if isinstance(pid, Exception):
        raise pid
    return FollowerProcess(pid, Connection(os.dup(ours.fileno())))


def _run_child(
    ours: socket.socket,
    theirs: socket.socket,
    environment: Mapping[str, str],
    arguments: Any,
    started: queue.SimpleQueue[int | Exception],
) -> None:
    """Starts a child and waits for its end. On a thread that ends with this process: the kernel
    takes it for the parent."""
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            | dict(environment),
            stdin=subprocess.PIPE,  # `ps` shows arguments to everybody
            pass_fds=[theirs.fileno()],
        )
    started.put(child.pid)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        pickle.dump(arguments, child.stdin)
    child.wait()
    with contextlib.suppress(OSError), ours:
        ours.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Run one of them. Its arguments are the descriptor of its connection and its parent."""
    _end_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides what it means
    print_whatever_fits()
    identity, number, given = pickle.load(sys.stdin.buffer)
    follow(identity, number, Connection(int(sys.argv[1])), *given)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # abandoned groups may block an orderly exit


def _end_with(parent: int) -> None:
    """Has the kernel end this process when its parent ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
