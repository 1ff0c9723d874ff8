"""The actors: a controller that leads one run, and workers as detached actors beside it.

Workers are never one placement group, which cannot be resized: each is an actor of its own that waits, as demand
the autoscaler sees, until it can be placed. They are detached, so they outlive their controller, named
run/identity, and never restarted by Ray: an identity is used once. Every name lives in the namespace "elastic_dp".
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import ray
from ray.experimental import internal_kv

from elastic_dp.cluster.controller import Controller, Outcome
from elastic_dp.cluster.worker import Job, Worker, prepare_environment
from elastic_dp.distributed.process_group import Rendezvous
from elastic_dp.protocol.messages import (
    Command,
    DrainNoticed,
    Event,
    Explain,
    SizeRequested,
    StopRequested,
    WorkerId,
    WorkerLost,
)
from elastic_dp.spec import JobSpec
from elastic_dp.telemetry.journal import Journal
from elastic_dp.train.faults import Fault

NAMESPACE = "elastic_dp"
_LOOK_FOR_ROOM_S = 5.0  # how often it is checked that some node could hold a worker


@ray.remote(max_restarts=0, concurrency_groups={"control": 2})  # type: ignore[call-overload]
class WorkerActor:
    """One worker. `run` occupies the default group for the worker's life; `deliver` gets in beside it."""

    def __init__(self, identity: WorkerId, job: Job, controller: Any) -> None:
        self._worker = Worker(identity, job, _ActorLink(controller), ray.util.get_node_ip_address())

    def run(self) -> None:
        self._worker.run()
        ray.actor.exit_actor()

    @ray.method(concurrency_group="control")
    def deliver(self, command: Command, rendezvous: Rendezvous | None) -> None:
        self._worker.deliver(command, rendezvous)

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        return os.getpid()


class _ActorLink:
    """Implements `train.session.Link` over actor calls that nobody waits for."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def post(self, event: Event) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._controller.post.remote(event)

    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._controller.log.remote(step, call, dict(metrics))


class RayFleet:
    """Implements `Fleet` with detached actors."""

    def __init__(self, job: Job, spec: JobSpec, controller: Controller, handle: Any) -> None:
        self._job = ray.put(job)
        self._spec, self._run, self._controller, self._handle = spec, job.run, controller, handle
        self._actors: dict[WorkerId, Any] = {}
        self._lock = threading.Lock()

    def start(self, worker: WorkerId) -> None:
        resources = dict(self._spec.scaling.resources_per_worker)
        environment: dict[str, str] = {}
        prepare_environment(environment, self._spec.scaling.num_threads)
        actor = WorkerActor.options(  # type: ignore[attr-defined]
            name=f"{self._run}/{worker}",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources or None,
            runtime_env={"env_vars": environment},
        ).remote(worker, self._job, self._handle)
        with self._lock:
            self._actors[worker] = actor
        actor.run.remote().future().add_done_callback(lambda f: self._ended(worker, f))

    def send(self, worker: WorkerId, command: Command, rendezvous: Rendezvous | None) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                actor.deliver.remote(command, rendezvous)

    def kill(self, worker: WorkerId) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)

    def close(self) -> None:
        for worker in list(self._actors):
            self.kill(worker)

    def actors(self) -> dict[WorkerId, Any]:
        return dict(self._actors)

    def _ended(self, worker: WorkerId, future: Any) -> None:
        error = future.exception()
        with self._lock:
            self._actors.pop(worker, None)
        reason = "left" if error is None else str(error).strip().splitlines()[0][:300]
        self._controller.post(WorkerLost(worker, reason))


@ray.remote(  # type: ignore[call-overload]
    num_cpus=0, max_restarts=0, concurrency_groups={"events": 4, "follow": 16}
)
class ControllerActor:
    """Leads one run until it has ended. Its name is the run's: two drivers cannot lead one run."""

    def __init__(
        self,
        pickled: bytes,
        manifest: Any,
        run: str,
        token: str,
        url: str | None,
        faults: tuple[Fault, ...],
    ) -> None:
        spec, _ = cloudpickle.loads(pickled)
        host = ray.util.get_node_ip_address()
        self._journal = Journal(url)
        self._controller = Controller(spec, run, host, token, self._journal, self._claim)
        self._run_name = run
        job = Job(pickled, manifest, run, host, self._controller.heartbeats.port, token, faults)
        handle = ray.get_runtime_context().current_actor
        self._fleet = RayFleet(job, spec, self._controller, handle)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._controller.open(self._fleet)
        self._thread = threading.Thread(
            target=self._controller.lead, name="controller", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._look_for_room, name="room", daemon=True).start()

    @ray.method(concurrency_group="events")
    def post(self, event: Event) -> None:
        self._controller.post(event)

    @ray.method(concurrency_group="events")
    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        self._controller.log(step, call, metrics)

    @ray.method(concurrency_group="events")
    def status(self) -> dict[str, Any]:
        return self._controller.status()

    @ray.method(concurrency_group="events")
    def scale(self, size: int) -> None:
        self._controller.post(SizeRequested(size))

    @ray.method(concurrency_group="events")
    def stop(self, reason: str) -> None:
        self._controller.post(StopRequested(reason))

    @ray.method(concurrency_group="events")
    def drain(self, worker: WorkerId, within_s: float | None) -> None:
        deadline = None if within_s is None else time.monotonic() + within_s
        self._controller.post(DrainNoticed(worker, deadline))

    @ray.method(concurrency_group="follow")
    def follow(self, position: int, timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
        return self._journal.since(position, timeout_s)

    @ray.method(concurrency_group="follow")
    def wait(self, timeout_s: float | None) -> Outcome | None:
        """How the run ended, or None while it goes on."""
        return self._controller.outcome if self._controller.ended.wait(timeout_s) else None

    @ray.method(concurrency_group="follow")
    def pids(self) -> dict[WorkerId, int]:
        """The process of each worker that is up."""
        found = {}
        for worker, actor in self._fleet.actors().items():
            with contextlib.suppress(ray.exceptions.RayError):
                found[worker] = ray.get(actor.pid.remote(), timeout=1.0)
        return found

    @ray.method(concurrency_group="follow")
    def close(self) -> None:
        self._journal.close()

    def _look_for_room(self) -> None:
        """Say it, once for each reason, when workers wait that no node of the cluster could hold."""
        said = ""
        needs = self._controller.spec.scaling.resources_per_worker
        while not self._controller.ended.wait(_LOOK_FOR_ROOM_S):
            waiting = "starting" in self._controller.status()["workers"].values()
            reason = no_room(needs, ray.nodes()) if waiting else ""
            if reason and reason != said:
                self._journal.command(Explain(reason))
            said = reason or said

    def _claim(self, generation: int) -> bool:
        key = f"elastic_dp/{self._run_name}/generation/{generation}".encode()
        return not internal_kv._internal_kv_put(key, b"claimed", overwrite=False)


def no_room(needs: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why no node could ever hold a worker, however idle; empty when one could."""
    totals = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(has.get(name, 0) >= need for name, need in needs.items()) for has in totals):
        return ""
    largest = {name: max((has.get(name, 0) for has in totals), default=0) for name in needs}
    return (
        f"no node of this cluster can hold a worker: it needs {dict(needs)}, and the most that any node has is "
        f"{largest}. Waiting for such a node; lower ScalingConfig.resources_per_worker if none will come"
    )
