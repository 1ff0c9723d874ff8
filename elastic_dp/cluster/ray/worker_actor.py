"""The actor of one worker. It is detached, so it outlives its controller. Ray never restarts it,
because an identity is used once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_dp.cluster.heartbeat.heartbeat_sidecar import family_of
from elastic_dp.cluster.heartbeat.shared_memory_page import ControllerAddress
from elastic_dp.cluster.ray import worker_placement
from elastic_dp.cluster.ray.actor_link import ActorLink
from elastic_dp.cluster.runs.attach import NAMESPACE
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
        first, *others = _environments(job.processes // job.nodes)
        os.environ |= first  # before CUDA is asked for GPUs
        followers, listener = [], None
        if job.processes > 1:
            gangs = importlib.import_module(GANGS)
            followers = gangs.start_followers(identity, others, job, address)
        if job.nodes > 1:
            listener = socket.create_server((address, 0), family=family_of(address), backlog=128)
            _start_hosts(identity, job, listener.getsockname())
        self._worker = Worker(identity, job, self._link, address, followers, listener)
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


@ray.remote(max_restarts=0)
class HostActor:
    """Has the processes of a worker on a node that is not its first, and frees the nodes of the
    worker when its first process has ended. It is detached, so that Ray does not end it before."""

    def __init__(self, identity: WorkerId, job: WorkerJob, first: int, leader: Any) -> None:
        print_whatever_fits()
        address = ray.util.get_node_ip_address()
        environments = _environments(job.processes // job.nodes)
        group = ray.util.get_current_placement_group()

        def free() -> None:  # which ends this process
            while True:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.util.remove_placement_group(group)
                time.sleep(1)

        importlib.import_module(GANGS).start_followers(
            identity, environments, job, address, first=first, leader=leader, on_end=free
        )


def _start_hosts(identity: WorkerId, job: WorkerJob, leader: Any) -> None:
    """Start the processes of a worker on its other nodes."""
    group, each = ray.util.get_current_placement_group(), job.processes // job.nodes
    assert group is not None
    for node, bundle in enumerate(group.bundle_specs[1:], 1):
        HostActor.options(  # type: ignore[attr-defined]
            name=f"{job.run}/{identity}/{node}",
            namespace=f"{NAMESPACE}.hosts",
            lifetime="detached",
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
            **worker_placement.resource_options(bundle),
        ).remote(identity, job, node * each, leader)


def _environments(processes: int) -> list[dict[str, str]]:
    """Return the variables of each process of this worker on this node. Raises ClusterError."""
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
