"""The actor of one worker. It is detached, so it outlives its controller. Ray never restarts it,
because an identity is used once.
"""

from __future__ import annotations

import importlib
import os
import pickle
from typing import Any

import ray

from elastic_dp.cluster.heartbeat.shared_memory_page import ControllerAddress
from elastic_dp.cluster.ray import worker_placement
from elastic_dp.cluster.ray.actor_link import ActorLink
from elastic_dp.cluster.worker import GANGS, Worker, WorkerJob
from elastic_dp.cluster.worker_logs import print_whatever_fits
from elastic_dp.coordinator.messages import ReportState, WorkerId, WorkerLocation, WorkerPlaced
from elastic_dp.device.gpu import visible_to_processes
from elastic_dp.train.generations.worker_progress import LogCall


@ray.remote(max_restarts=0, concurrency_groups={"control": 2})  # type: ignore[call-overload]
class WorkerActor:
    """One worker. `run` occupies the default concurrency group for the worker's life; `deliver`
    runs concurrently.
    """

    def __init__(self, identity: WorkerId, job: WorkerJob, controller: Any, term: int) -> None:
        print_whatever_fits()
        self._link = ActorLink(controller, term)
        address = ray.util.get_node_ip_address()
        given = job.pickled, job.index, job.secret, job.faults, address
        first, *others = _environments(job.processes)
        os.environ |= first  # before CUDA is asked for GPUs
        followers = []
        if others:
            followers = importlib.import_module(GANGS).start_followers(identity, others, *given)
        self._worker = Worker(identity, job, self._link, address, followers)
        self._placed = WorkerPlaced(identity, _home())
        self._link.post(self._placed)

    def run(self) -> None:
        """Train, and exit. Each controller calls this to learn of the worker's end; only the first
        call trains.
        """
        self._worker.run()
        self._link.flush()
        ray.actor.exit_actor()

    @ray.method(concurrency_group="control")
    def serve(self, term: int, controller: ControllerAddress, logged_to: LogCall) -> None:
        """Send heartbeats and messages to a controller that has taken over, or that lacks logged
        metrics."""
        self._worker.hear_from(controller)
        self._link.serve(term, logged_to)

    @ray.method(concurrency_group="control")
    def deliver(self, message: bytes) -> None:
        """`message` is a pickled `Request`."""
        command = pickle.loads(message)
        if isinstance(command, ReportState):
            # The last metrics of a run have none after them, by which they would be missed.
            self._link.resend()
            self._link.post(self._placed)
        self._worker.deliver(command)


def _environments(processes: int) -> list[dict[str, str]]:
    """Return the variables of each process of this worker. Raises ClusterError."""
    if processes == 1:
        return [{}]  # as Ray has set them
    given = ray.get_runtime_context().get_accelerator_ids()
    return visible_to_processes(given.get("GPU", ()), processes)


def _home() -> WorkerLocation:
    context = ray.get_runtime_context()
    labels = context.get_node_labels()
    return WorkerLocation(
        context.get_node_id(),
        labels.get(worker_placement.MARKET) == "spot",
        str(labels.get(worker_placement.ZONE, "")),
    )
