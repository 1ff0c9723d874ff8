"""The processes of a worker beside its first one, and what all of them are told at the start.

The controller knows a worker by its first process. The others hear from that alone, run the same
train function in step with it, and end with it.

They are children of the worker's actor, or of a host actor on another node of the worker, and use
its resources. Each has one connection, to the first process, and ends when that closes. On other
nodes, `gang_connections` makes it. Three things would keep a connection open or a process alive,
and do not: a process that user code has forked and that holds a copy of the connection, a child
that is frozen, and a child whose interpreter is locked. The actor waits for the end of each child,
and the kernel ends a child whose parent has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from elastic_dp.cluster.worker import (
    FollowerProcess,
    WorkerJob,
    find_device,
    set_up,
    train_in_process,
)
from elastic_dp.cluster.worker_logs import print_whatever_fits
from elastic_dp.config import JobSpec, ScalingConfig
from elastic_dp.coordinator.messages import Event, WorkerFailed, WorkerId
from elastic_dp.distributed.rendezvous import MemberRecord, Rendezvous
from elastic_dp.extensions.gangs.gang_connections import connect, shut, watch
from elastic_dp.extensions.gangs.gang_control import (
    Faulted,
    FollowerControl,
    LeaderControl,
    Waiting,
)
from elastic_dp.extensions.gangs.gang_mesh import open_mesh
from elastic_dp.threads import background
from elastic_dp.train.controller_link import ControllerLink, HeartbeatStatus
from elastic_dp.train.gang import Gang

# What fails before the child has a session is told to the actor, which reports it.
_MAIN = """
import sys, traceback
try:
    from elastic_dp.extensions.gangs.followers import main
    main()
except Exception:
    from multiprocessing.connection import Connection
    Connection(int(sys.argv[1])).send(traceback.format_exc())
    raise
"""
_PR_SET_PDEATHSIG = 1


def lead(
    control: LeaderControl,
    identity: WorkerId,
    job: WorkerJob,
    scaling: ScalingConfig,
    device: torch.device,
    address: str | None,
    *,
    is_source: bool,
) -> Gang:
    """Tells the followers how to begin. Returns the gang of the first process. `address`: of its
    node. Raises ClusterError."""
    control.exchange(bytes([is_source]))
    mesh = open_mesh(control.store, identity, job, 0, scaling, device, address)
    return Gang(0, scaling.processes_per_worker, mesh, control)


def follow(
    identity: WorkerId,
    number: int,
    leader: Connection,
    job: WorkerJob,
    address: str | None,
) -> str:
    """Runs process `number` of a worker until that is released. Returns why it was."""
    given: tuple[JobSpec, Any] = cloudpickle.loads(job.pickled)
    spec, train = given
    set_up(spec, address)  # the first process says what is overridden
    # Before the first process waits for this one to connect: it hears why this one ends.
    device = find_device(spec, job)
    control = FollowerControl(leader, number)
    rendezvous = Rendezvous(identity, job.secret, control.tell, number)
    control.follow(rendezvous.deliver)
    link = _FollowerLink(control)
    is_source = bool(control.exchange(b"")[0][0])
    mesh = open_mesh(control.store, identity, job, number, spec.scaling, device, address)
    # The first process takes checkpoints, if there is a place for them.
    gang = Gang(number, job.processes, mesh, control, helps_to_gather=job.url is not None)
    return train_in_process(
        job,
        spec,
        train,
        on_wait=lambda text: control.tell(Waiting(f"process {number + 1} of {identity}: {text}")),
        worker=identity,
        device=device,
        link=link,
        status=link,
        control=control,
        gang=gang,
        is_source=is_source,
        rendezvous=rendezvous,
    )


class _FollowerLink(ControllerLink, HeartbeatStatus):
    """The first process says the same."""

    def __init__(self, control: FollowerControl) -> None:
        self._control = control

    def post(self, event: Event) -> None:
        if isinstance(event, WorkerFailed):
            self._control.tell(event)

    def register(self, record: MemberRecord) -> None:
        self._control.tell(record)

    def write_fault(self, kind: str, text: str) -> None:
        self._control.tell(Faulted(kind, text))  # this process ends now, and the worker with it


def start_followers(
    identity: WorkerId,
    environments: Sequence[Mapping[str, str]],
    job: WorkerJob,
    address: str | None,
    *,
    first: int = 1,
    leader: tuple[str, int] | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> list[FollowerProcess]:
    """Return processes of a worker beside its first one: that which is numbered `first`, and
    following ones. `environments` has the variables of each in which it differs from this one.
    `address`: of this node. `leader`: where the first process listens, if it is on another node;
    then `on_end` is called when it has ended. Raises OSError and EOFError if it does not answer."""
    followers = []
    for number, environment in enumerate(environments, first):
        if leader is None:
            ours, theirs = Pipe()
        else:
            theirs, watched = connect(leader, job.secret, identity, number)
            ours = Connection(os.dup(theirs.fileno()))
            watch(watched, on_end)
        started: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        arguments = identity, number, job, address
        run = partial(_run_child, ours, theirs, environment, arguments, started)
        background(f"child-{number}", run, started.put).start()
        pid = started.get()
        if isinstance(pid, Exception):
            raise pid
        followers.append(FollowerProcess(pid, ours))
    return followers


def _run_child(
    ours: Connection,
    theirs: Connection,
    environment: Mapping[str, str],
    arguments: Any,
    started: queue.SimpleQueue[int | Exception],
) -> None:
    """Starts a child and waits for its end. On a thread that ends with this process: the kernel
    takes it for the parent."""
    ends = Connection(os.dup(ours.fileno()))
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
    with ends:
        shut(ends)


def main() -> None:
    """Run one of them. Its arguments are the descriptor of its connection and its parent."""
    _end_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides what it means
    print_whatever_fits()
    identity, number, job, address = pickle.load(sys.stdin.buffer)
    follow(identity, number, Connection(int(sys.argv[1])), job, address)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # abandoned groups may block an orderly exit


def _end_with(parent: int) -> None:
    """Has the kernel end this process when its parent ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
