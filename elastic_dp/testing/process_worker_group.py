"""A worker group of plain processes on this machine, without Ray, with the same workers and
controller.

It is for tests that kill workers at named points many times, for benchmarks, and for machines
without Ray. Workers are forked from a server that has imported torch once (`multiprocessing`'s
forkserver), so a worker starts in well under a second. Commands and events travel over a pipe per
worker; a closed pipe shows that a worker has died.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import queue
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.runs.controller_state import ControllerStateStore
from elastic_dp.cluster.worker import (
    GANG_CONNECTIONS,
    GANGS,
    FollowerProcess,
    Request,
    Worker,
    WorkerJob,
    prepare_environment,
)
from elastic_dp.cluster.worker_logs import print_to_file, print_whatever_fits
from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import (
    ReleaseWorker,
    WorkerId,
    WorkerLocation,
    WorkerLost,
    WorkerPlaced,
)
from elastic_dp.errors import ClusterError
from elastic_dp.module_pickling import pickle_by_value
from elastic_dp.run_record import RunOutcome
from elastic_dp.telemetry.journal import Journal
from elastic_dp.threads import background
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.log_sender import MessageLink

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes a second.
_preloaded = ["elastic_dp.cluster.worker", __name__, "torch._dynamo"]
_LAST = "elastic_dp.testing.frozen_heap"
_context.set_forkserver_preload([*_preloaded, _LAST])


def preload(*modules: str, first: bool = False) -> None:
    """Import these modules in the server from which workers are forked, so that no worker imports
    them. It has no effect once a worker of this process has started.

    `first`: before all others. A module that starts a thread must not be among them.
    """
    place = 0 if first else len(_preloaded)
    _preloaded[place:place] = [module for module in modules if module not in _preloaded]
    _context.set_forkserver_preload([*_preloaded, _LAST])


class Host:
    """Where a process of a worker runs: this machine. A test may have a network namespace, or a
    device, in its place."""

    address = "127.0.0.1"

    def enter(self) -> None:
        """This thread, and what it starts, is on this host from now on."""


def _this_machine(worker: WorkerId, node: int) -> Host:
    return Host()


class ProcessWorkerGroup:
    """Implements `WorkerGroup`. At most `limit` processes run; further workers stay pending."""

    def __init__(
        self,
        job: WorkerJob,
        controller: Controller,
        limit: int | None,
        location: Callable[[WorkerId], WorkerLocation] | None,
        host_of: Callable[[WorkerId, int], Host],
    ) -> None:
        """`host_of` takes a worker and the number of one of its nodes."""
        self._job, self._controller = job, controller
        self.limit, self._location, self._host_of = limit, location, host_of
        self._lock = threading.Lock()
        self._pipes: dict[WorkerId, Connection] = {}
        self._outboxes: dict[WorkerId, queue.SimpleQueue[Any]] = {}
        self._pending: list[WorkerId] = []
        # running processes
        self.processes: dict[WorkerId, multiprocessing.process.BaseProcess] = {}
        # of workers with several processes: all but the first
        self.followers: dict[WorkerId, list[multiprocessing.process.BaseProcess]] = {}

    def start(self, worker: WorkerId) -> None:
        """Start a worker, or leave it pending if the limit is reached."""
        if self._location is not None:
            self._controller.post(WorkerPlaced(worker, self._location(worker)))
        with self._lock:
            self._pending.append(worker)
        self._place()

    def send(self, workers: Sequence[WorkerId], command: Request) -> None:
        """Send a command to these workers. A pending worker that is released never starts."""
        message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        for worker in workers:
            with self._lock:
                outbox = self._outboxes.get(worker)
                pending = worker in self._pending
            if pending and isinstance(command, ReleaseWorker):
                self.kill(worker)
            if outbox is not None:
                outbox.put(message)

    def kill(self, worker: WorkerId) -> None:
        """Kill a worker."""
        with self._lock:
            if worker in self._pending:  # it never started
                self._pending.remove(worker)
                self._controller.post(WorkerLost(worker, "was still pending"))
        process = self.processes.get(worker)
        if process is not None:
            process.kill()

    def avoid_node_of(self, worker: WorkerId) -> None:
        """There is only one."""

    def allow(self, limit: int | None) -> None:
        """Change the limit. No process is killed."""
        self.limit = limit
        self._place()

    def close(self) -> None:
        """Kill all workers and wait for their end."""
        processes = list(self.processes.values())
        for process in processes:
            process.kill()
        for process in processes:
            process.join()

    def _place(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    return
                if self.limit is not None and len(self._pipes) >= self.limit:
                    return
                worker = self._pending.pop(0)
                ours, theirs = _context.Pipe()
                self._pipes[worker] = ours
                outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._outboxes[worker] = outbox
            host = self._host_of(worker, 0)
            listener = _listen(host) if self._job.nodes > 1 else None
            followers = self._start_followers(worker, listener)
            process = _context.Process(
                target=_main,
                args=(worker, self._job, theirs, followers, host, listener),
                daemon=True,
            )
            process.start()
            for pipe in (theirs, *(follower.connection for follower in followers)):
                pipe.close()
            if listener is not None:
                listener.close()
            self.processes[worker] = process
            fail = self._controller.fail
            background(f"from {worker}", partial(self._read, worker, ours), fail).start()
            background(f"to {worker}", partial(_write, ours, outbox), fail).start()

    def _start_followers(
        self, worker: WorkerId, listener: socket.socket | None
    ) -> list[FollowerProcess]:
        """Start the processes of a worker beside its first one. Return those on its node, for that;
        the others connect to the `listener`."""
        started = []
        on_a_node = self._job.processes // self._job.nodes
        for number in range(1, self._job.processes):
            ours, theirs = _context.Pipe()
            host = self._host_of(worker, number // on_a_node)
            leader = theirs if listener is None or number < on_a_node else listener.getsockname()
            process = _context.Process(
                target=_follow,
                args=(worker, number, self._job, leader, host),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.followers.setdefault(worker, []).append(process)
            assert process.pid is not None
            if number < on_a_node:
                started.append(FollowerProcess(process.pid, ours))
        return started

    def _read(self, worker: WorkerId, pipe: Connection) -> None:
        try:
            while True:
                method, *content = pipe.recv()
                getattr(self._controller, method)(*content)
        except (EOFError, OSError):
            pass
        process = self.processes[worker]
        process.join()
        for follower in self.followers.pop(worker, ()):
            follower.kill()  # if it is frozen; else it ends by itself
            follower.join()
        with self._lock:
            del self._pipes[worker]
            self._outboxes.pop(worker).put(None)
        del self.processes[worker]  # which also closes its file descriptor
        self._controller.post(WorkerLost(worker, f"its process ended with {process.exitcode}"))
        self._place()


def _write(pipe: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    """Send what is in the outbox. Closes the pipe at the end: if another thread did, this one might
    write to a file that has got the same descriptor."""
    with pipe:
        while (message := outbox.get()) is not None:
            with contextlib.suppress(OSError):
                pipe.send_bytes(message)


class _PipeLink(MessageLink):
    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._lock = pipe, threading.Lock()

    def _call(self, method: str, *content: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send((method, *content))


def _main(
    identity: WorkerId,
    job: WorkerJob,
    pipe: Connection,
    followers: Sequence[FollowerProcess],
    host: Host,
    listener: socket.socket | None,
) -> None:
    host.enter()
    if job.url is not None:  # output is copied to the run's folder
        print_to_file()
        print_whatever_fits()
    link = _PipeLink(pipe)
    worker = Worker(identity, job, link, host.address, followers, listener)

    def listen() -> None:
        while True:
            try:
                command = pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # the controller is gone
            worker.deliver(command)

    background("control", listen, lambda _: os._exit(1)).start()
    try:
        worker.run()
    except ClusterError as error:
        print(error, file=sys.stderr, flush=True)
        link.flush()
        os._exit(1)
    link.flush()
    os._exit(0)  # abandoned groups may block an orderly exit


def _follow(
    identity: WorkerId,
    number: int,
    job: WorkerJob,
    leader: Connection | tuple[str, int],
    host: Host,
) -> None:
    host.enter()
    connection: Any = leader
    if not isinstance(leader, Connection):
        far = importlib.import_module(GANG_CONNECTIONS)
        connection, watched = far.connect(leader, job.secret, identity, number)
        far.watch(watched, lambda: os._exit(1))
    try:
        importlib.import_module(GANGS).follow(identity, number, connection, job, host.address)
    except Exception:
        connection.send(traceback.format_exc())
        raise
    os._exit(0)


def _listen(host: Host) -> socket.socket:
    """Return a socket of this host that listens for followers."""
    made: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def run() -> None:
        host.enter()
        made.put(socket.create_server((host.address, 0), backlog=128))

    background("listener", run).start()
    return made.get()


class ProcessRun:
    """A whole run on plain processes: `with ProcessRun(spec, train) as run: run.wait()`.

    `faults` are injected into the workers, `limit` is the number of processes, `url` the run's
    folder (None: no checkpoints). `check` is called by the controller. `shares_gpu`: see
    `WorkerJob`; on a machine with a GPU, all processes have its first one. `location`: where each
    worker claims to run. `address`: where workers find the controller. `host_of`: where the
    processes of a worker run, by the worker and the number of its node. `state_store`: of the
    controller.
    """

    def __init__(
        self,
        spec: JobSpec,
        train: Callable[..., None],
        *,
        faults: tuple[WorkerFault, ...] = (),
        index: Any = None,
        limit: int | None = None,
        journal: Journal | None = None,
        url: str | None = None,
        check: Callable[[], None] = lambda: None,
        shares_gpu: bool = False,
        location: Callable[[WorkerId], WorkerLocation] | None = None,
        address: str = Host.address,
        host_of: Callable[[WorkerId, int], Host] = _this_machine,
        state_store: ControllerStateStore | None = None,
    ) -> None:
        prepare_environment(os.environ, spec.scaling.num_threads)
        secret, run = secrets.token_bytes(32), f"run-{secrets.token_hex(8)}"
        self.journal = Journal(None) if journal is None else journal
        self.controller = Controller(
            spec,
            self.journal,
            host=address,
            secret=secret,
            state_store=state_store,
            url=url,
            check=check,
        )
        job = WorkerJob(
            pickle_by_value((spec, train)),
            index,
            run,
            url,
            self.controller.heartbeats.address,
            secret,
            self.controller.state_store.state.lease_token,
            faults,
            spec.scaling.processes_per_worker,
            spec.scaling.nodes_per_worker,
            shares_gpu,
        )
        self.worker_group = ProcessWorkerGroup(job, self.controller, limit, location, host_of)

    def __enter__(self) -> ProcessRun:
        self.controller.open(self.worker_group)
        self._thread = background("controller", self.controller.lead, self.controller.broke)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker_group.close()

    def wait(self, timeout_s: float = 120.0) -> RunOutcome:
        """Return how the run ended. Raises TimeoutError with the status if it has not ended in
        time.
        """
        if not self.controller.ended.wait(timeout_s):
            raise TimeoutError(f"the run has not ended: {self.controller.status()}")
        return self.controller.outcome
