"""The worker group of a run on Ray: each worker is a detached actor.

Workers are not a placement group, because that cannot be resized. Each actor waits, as demand that
the autoscaler sees, until it can be placed. It is named run/identity in the namespace "elastic_dp",
so that a controller that takes over finds it.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import ray

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.ray import private, worker_placement
from elastic_dp.cluster.ray.node_avoidance import FAILURES, NodeAvoidance
from elastic_dp.cluster.ray.warm_processes import WarmProcesses
from elastic_dp.cluster.ray.worker_actor import WorkerActor
from elastic_dp.cluster.runs.attach import NAMESPACE
from elastic_dp.cluster.worker import Request, WorkerJob, prepare_environment
from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import Cause, ReleaseWorker, WorkerId, WorkerLost
from elastic_dp.threads import background
from elastic_dp.train.generations.worker_progress import LogCall

# part of Ray's message about workers that its memory monitor killed
_LOW_ON_MEMORY = "low on memory"
# Ray sends longer arguments as objects of their own, one for each call.
_INLINE_BYTES = 100_000
_ASKED_EACH_S = 1.0  # workers are asked for metrics at most so often
# A replacement takes seconds to start, and asking Ray for it takes the interpreter's lock for
# milliseconds in which the survivors form the next generation.
_STARTS_AFTER_S = 0.1


class RayWorkerGroup:
    """Implements `WorkerGroup` with detached actors.

    A thread creates and kills actors, which takes answers of the GCS; nobody waits for it. While
    the GCS is unavailable, it tries again.
    """

    def __init__(self, job: WorkerJob, spec: JobSpec, controller: Controller, handle: Any) -> None:
        self._job, self._stored = job, ray.put(job)
        self._spec, self._controller, self._handle = spec, controller, handle
        self._term = controller.state_store.state.term
        self._actors: dict[WorkerId, Any] = {}
        self._told_to_go: set[WorkerId] = set()
        self._withdrawn: set[WorkerId] = set()
        several = spec.scaling.nodes_per_worker > 1
        placement = worker_placement.NodeGroups if several else worker_placement.WorkerNodes
        self._worker_nodes = placement(job.run, spec.scaling)
        self.node_avoidance = NodeAvoidance(
            spec.scaling.resources_per_node,
            worker_placement.node_selector(spec.scaling),
            controller.say,
        )
        self._nodes: dict[WorkerId, str] = {}  # as far as they are known
        environment: dict[str, str] = {}
        prepare_environment(environment, spec.scaling.num_threads)
        self.warm_processes = WarmProcesses(environment)
        self._asked_for_metrics = -_ASKED_EACH_S  # when
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._notes = OutageNotice("looking for the nodes of lost workers", controller.say)
        self._sends = OutageNotice("sending commands to workers", controller.say)
        self._thread = background("actors", self._run_tasks, controller.fail)
        self._thread.start()

    def start(self, worker: WorkerId) -> None:
        begin = partial(self._tasks.put, partial(self._start, worker))
        threading.Timer(_STARTS_AFTER_S, begin).start()  # ends of workers do not wait for it

    def kill(self, worker: WorkerId) -> None:
        self._tasks.put(lambda: self._kill(worker))

    def avoid_node_of(self, worker: WorkerId) -> None:
        if (actor := self._actors.get(worker)) is not None:
            self._tasks.put(partial(self._note_failure, actor, FAILURES))

    def _run_tasks(self) -> None:
        notice = OutageNotice("starting and ending workers", self._controller.say)
        while (task := self._tasks.get()) is not None:
            notice.insist(task, self._closing)

    def _start(self, worker: WorkerId) -> None:
        if worker in self._told_to_go:  # meanwhile
            self._controller.post(WorkerLost(worker, "was not started"))
            return
        name = f"{self._job.run}/{worker}"
        options = WorkerActor.options(  # type: ignore[attr-defined]
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            runtime_env={"env_vars": self.warm_processes.environment},
            **self._worker_nodes.options(worker, self.node_avoidance.selector_of(worker)),
        )
        try:
            actor = options.remote(worker, self._stored, self._handle, self._term)
        except ValueError:  # an attempt that seemed to fail has created it, or the error is another
            actor = ray.get_actor(name, namespace=NAMESPACE)
        self._watch(worker, actor)

    def adopt(self, logged_to: LogCall) -> list[WorkerId]:
        """Return the running workers of earlier controllers, and watch them.

        Workers that still wait for a node are killed: they are not needed.
        """
        for worker, actor in self._named("PENDING_CREATION", "DEPENDENCIES_UNREADY"):
            self._controller.state_store.record(ReleaseWorker(worker, "was still pending"))
            ray.kill(actor, no_restart=True)
        found = self._named("ALIVE")
        for worker, actor in found:
            actor.serve.remote(self._term, self._job.controller, logged_to)
            self._watch(worker, actor)
        self._worker_nodes.keep(self.actors())
        return [worker for worker, _ in found]

    def ask_for_metrics(self, logged_to: LogCall) -> None:
        """Ask the workers for the metrics that follow `logged_to`: a part was lost while this
        controller took over."""
        now = time.monotonic()
        if now < self._asked_for_metrics + _ASKED_EACH_S:
            return  # what is under way may answer it
        self._asked_for_metrics = now
        for actor in self.actors().values():
            with contextlib.suppress(ray.exceptions.RayError):
                actor.serve.remote(self._term, self._job.controller, logged_to)

    def _named(self, *states: str) -> list[tuple[WorkerId, Any]]:
        """Return the workers of this run that the GCS has in one of these states."""
        prefix, named = f"{self._job.run}/", []
        for entry in private.actors_in(*states):
            if entry.name.startswith(prefix):
                with contextlib.suppress(ValueError):  # it died since
                    actor = ray.get_actor(entry.name, namespace=NAMESPACE)
                    named.append((entry.name.removeprefix(prefix), actor))
        return named

    def send(self, workers: Sequence[WorkerId], command: Request) -> None:
        if isinstance(command, ReleaseWorker):
            self._told_to_go.update(workers)
        message: Any = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if len(message) > _INLINE_BYTES:
            message = self._sends.attempt(partial(ray.put, message)) or message
        for worker in workers:
            actor = self._actors.get(worker)
            if actor is not None:
                self._sends.attempt(partial(actor.deliver.remote, message))

    def _kill(self, worker: WorkerId) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            _kill(actor)

    def withdraw_waiting_needlessly(self) -> None:
        """Kill workers that wait although a node that they exclude could be used now.

        The coordinator replaces them.
        """
        for worker in self.node_avoidance.waiting_needlessly(self.nodes(), self.actors()):
            self._controller.withdrawn(worker)
            self._withdrawn.add(worker)
            self.kill(worker)

    def close(self) -> None:
        for worker in list(self._actors):
            self._told_to_go.add(worker)
            self.kill(worker)
        self._tasks.put(partial(self._worker_nodes.keep, ()))
        self._closing.set()
        self._tasks.put(None)
        self._thread.join()

    def actors(self) -> dict[WorkerId, Any]:
        return dict(self._actors)

    def _watch(self, worker: WorkerId, actor: Any) -> None:
        self._actors[worker] = actor
        actor.run.remote().future().add_done_callback(lambda f: self._ended(worker, actor, f))

    def nodes(self) -> dict[WorkerId, str]:
        """Return the node of each worker that has one, or its first.

        Each is looked up once, because the actor is never restarted on another node.
        """
        actors = self.actors()
        known = {worker: node for worker, node in self._nodes.items() if worker in actors}
        for worker in actors.keys() - known.keys():
            entry = private.actor(actors[worker])
            if entry is not None and entry.state == "ALIVE":
                known[worker] = entry.node
        self._nodes = known
        return known

    def all_nodes(self) -> list[tuple[WorkerId, str]]:
        """Return each worker that has a node, with each of its nodes."""
        return self._worker_nodes.all_of(self.nodes())

    def held_nodes(self) -> list[str]:
        """Return the nodes of each worker that holds a place there, also if its process is still
        starting.
        """
        placed = self.nodes()
        others = [private.actor(a) for w, a in self.actors().items() if w not in placed]
        starting = [entry.node for entry in others if entry is not None and entry.pid]
        return [*(node for _, node in self._worker_nodes.all_of(placed)), *starting]

    def without_process(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Return the workers for which Ray has no process yet: they wait for a node, or their
        process is starting.
        """
        actors = self.actors()
        entries = {w: private.actor(actors[w]) for w in workers if w in actors}
        return [w for w, entry in entries.items() if entry is None or not entry.pid]

    def _note_failure(self, actor: Any, times: int = 1) -> None:
        """Count a loss against its node, if it has one. A replacement does not wait for that."""
        if self._spec.scaling.nodes_per_worker == 1:
            self._notes.attempt(lambda: self.node_avoidance.failed(actor, times))

    def _ended(self, worker: WorkerId, actor: Any, future: Any) -> None:
        error = future.exception()
        self._actors.pop(worker, None)
        if isinstance(error, ray.exceptions.RayTaskError):
            # The worker raised, and holds its node's GPU until it is killed. Not in this thread of
            # Ray, where that call never returns.
            self._tasks.put(lambda: _kill(actor))
        reason, cause = _death(error)
        if worker in self._withdrawn:
            reason, cause = (
                "waited although a node that it excludes can be used again, and is replaced",
                Cause.PREEMPTED,
            )
        if worker not in self._told_to_go and cause is not Cause.PREEMPTED:
            # before another is asked for
            self._tasks.put(lambda: self._note_failure(actor))
        if not self._closing.is_set():
            self._tasks.put(lambda: self._worker_nodes.keep(self.actors()))
        self._told_to_go.discard(worker)
        self._withdrawn.discard(worker)
        self._controller.post(WorkerLost(worker, reason, cause))


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor, no_restart=True)


def _death(error: BaseException | None) -> tuple[str, Cause]:
    """Return why an actor ended, as Ray reports it."""
    if error is None:
        return "left", Cause.UNKNOWN
    if isinstance(error, ray.exceptions.RayTaskError):  # the text begins with Ray's own frames
        return f"{type(error.cause).__name__}: {error.cause}"[:600], Cause.UNKNOWN
    text = str(error).strip()
    reason = text.splitlines()[0][:300]
    if getattr(error, "preempted", False):
        return f"its node was preempted: {reason}", Cause.PREEMPTED
    if isinstance(error, ray.exceptions.OutOfMemoryError) or _LOW_ON_MEMORY in text:
        return f"Ray killed it, since its node ran low on memory: {reason}", Cause.OUT_OF_MEMORY
    return reason, Cause.UNKNOWN
