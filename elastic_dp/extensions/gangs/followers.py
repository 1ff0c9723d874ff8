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
import json
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

from elastic_dp.cluster.worker import FollowerProcess, connects_devices
from elastic_dp.cluster.worker_logs import print_whatever_fits
from elastic_dp.config import JobSpec, ScalingConfig
from elastic_dp.coordinator.messages import Event, WorkerFailed, WorkerId
from elastic_dp.data import Index, open_data
from elastic_dp.device.device_checks import admit
from elastic_dp.device.gpu import is_gpu, pick_device
from elastic_dp.distributed.nccl_environment import set_nccl_environment
from elastic_dp.distributed.process_group import use_interface
from elastic_dp.distributed.rendezvous import MemberRecord, Rendezvous
from elastic_dp.extensions.gangs.gang_connections import connect, shut, watch
from elastic_dp.extensions.gangs.gang_control import Faulted, FollowerControl, LeaderControl
from elastic_dp.extensions.gangs.gang_mesh import open_mesh
from elastic_dp.threads import background
from elastic_dp.torch_settings import apply_torch_settings
from elastic_dp.train.controller_link import ControllerLink, HeartbeatStatus
from elastic_dp.train.exactness.code_fingerprint import code_fingerprint
from elastic_dp.train.fault_injection import FaultInjector, WorkerFault
from elastic_dp.train.gang import Gang, process_batches
from elastic_dp.train.train_function import fail_worker, train_until_released
from elastic_dp.train.worker_session import WorkerSession

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
    secret: bytes,
    scaling: ScalingConfig,
    device: torch.device,
    *,
    is_source: bool,
    stores: bool,
    address: str | None,
    shares_gpu: bool = False,
) -> Gang:
    """Tells the followers how to begin. Returns the gang of the first process. `stores`: it takes
    checkpoints. `address`: of its node. `shares_gpu`: see `WorkerJob`. Raises ClusterError."""
    control.exchange(json.dumps({"is_source": is_source, "stores": stores}).encode())
    mesh = open_mesh(control.store, identity, secret, 0, scaling, device, address, shares_gpu)
    return Gang(0, scaling.processes_per_worker, mesh, control)


def follow(
    identity: WorkerId,
    number: int,
    leader: Connection,
    pickled: bytes,
    index: Index | None,
    secret: bytes,
    faults: tuple[WorkerFault, ...],
    address: str | None = None,
    shares_gpu: bool = False,
) -> str:
    """Runs process `number` of a worker until that is released. `pickled`, `index`, `secret`,
    `faults` and `shares_gpu` are those of the `WorkerJob`. Returns why it was released."""
    given: tuple[JobSpec, Any] = cloudpickle.loads(pickled)
    spec, train = given
    torch.set_num_threads(spec.scaling.num_threads)
    apply_torch_settings(spec.torch_settings)
    set_nccl_environment(os.environ)  # the first process says what is overridden
    use_interface(address)
    # Before the first process waits for this one to connect: it hears why this one ends.
    resources, labels = spec.scaling.resources_per_worker, spec.scaling.label_selector
    device = pick_device(resources)
    admit(device, resources, labels, exact=spec.exact, shared=shares_gpu)
    control = FollowerControl(leader, number)
    rendezvous = Rendezvous(identity, secret, control.tell, number)
    control.follow(rendezvous.deliver)
    link = _FollowerLink(control)
    told = json.loads(control.exchange(b"")[0])
    scaling = spec.scaling
    mesh = open_mesh(control.store, identity, secret, number, scaling, device, address, shares_gpu)
    size, helps = scaling.processes_per_worker, told["stores"]
    gang = Gang(number, size, mesh, control, helps_to_gather=helps)
    try:
        data = open_data(
            spec.data,
            virtual_workers=spec.micro_batches_by_step,
            index=index,
            left_out=spec.left_out,
            pin=is_gpu(device),
            timeout_s=spec.failure.storage_timeout_s,
        )
    except Exception as error:  # also what a user's dataset raises
        return fail_worker(identity, link, control, link, error)
    session = WorkerSession(
        spec=spec,
        worker=identity,
        data=process_batches(data, gang),
        device=device,
        connects_devices=connects_devices(spec, shares_gpu),
        link=link,
        status=link,
        control=control,
        is_source=told["is_source"],
        code=code_fingerprint(train, constants=False),
        faults=FaultInjector(faults, identity, number),
        gang=gang,
        rendezvous=rendezvous,
    )
    return train_until_released(train, session)


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
    *given: Any,
    first: int = 1,
    leader: tuple[str, int] | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> list[FollowerProcess]:
    """Return processes of a worker beside its first one: that which is numbered `first`, and
    following ones. `environments` has the variables of each in which it differs from this one.
    `given` are the further arguments of `follow`. `leader`: where the first process listens, if it
    is on another node; then `on_end` is called when it has ended. Raises OSError and EOFError if it
    does not answer."""
    return [
        _start(number, environment, (identity, number, given), leader, on_end)
        for number, environment in enumerate(environments, first)
    ]


def _start(
    number: int,
    environment: Mapping[str, str],
    arguments: Any,
    leader: tuple[str, int] | None,
    on_end: Callable[[], object],
) -> FollowerProcess:
    if leader is None:
        ours, theirs = Pipe()
    else:
        identity, number, given = arguments
        theirs, watched = connect(leader, given[2], identity, number)
        ours = Connection(os.dup(theirs.fileno()))
        watch(watched, on_end)
    started: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    run = partial(_run_child, ours, theirs, environment, arguments, started)
    background(f"child-{number}", run, started.put).start()
    pid = started.get()
    if isinstance(pid, Exception):
        raise pid
    return FollowerProcess(pid, ours)


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
