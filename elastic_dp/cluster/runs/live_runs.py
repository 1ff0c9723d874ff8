"""Finds the runs of a Ray cluster. A run is found by the name of its controller's actor.

Nothing here imports torch, because the command line uses it.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors

from elastic_dp.cluster.ray import cluster_connection
from elastic_dp.cluster.run_handle import ask
from elastic_dp.config import JobSpec
from elastic_dp.storage import StorageURL

NAMESPACE = "elastic_dp"  # the Ray namespace of all actors of this package
PATIENCE_S = 60.0  # for a controller that restarts, before anything is known of its run
CONTROLLER = "/controller"  # follows the run's name in the name of its controller's actor
_ANSWER_S = 10.0  # for a controller's status


@dataclass(frozen=True)
class LiveController:
    """A controller that answers, and what it reports of its run."""

    controller: Any
    spec: JobSpec
    url: StorageURL
    ended: bool


def find(name: str) -> LiveController | None:
    """Return the controller of that name, or None."""
    try:
        controller = controller_of(name)
        spec, url, ended = ask(controller, "about", patience_s=PATIENCE_S)
    except (ValueError, ray.exceptions.RayActorError):
        return None  # there is none, or it is ending
    return LiveController(controller, spec, url, ended)


def names() -> list[str]:
    """Return the names of runs that are live, or whose controller still answers after their end."""
    actors = list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removesuffix(CONTROLLER) for name in ours if name.endswith(CONTROLLER))


def controller_of(name: str) -> Any:
    """Return the actor. Raises ValueError if there is none."""
    return ray.get_actor(name + CONTROLLER, namespace=NAMESPACE)


def runs_of(address: str | None) -> list[dict[str, Any]]:
    """Return the status of each run of the cluster at `address`; without one, of the connected
    cluster, of RAY_ADDRESS, or of all clusters of this user on this machine. Each of several
    statuses then has the `address` of its cluster. Raises ClusterError.
    """
    several = []
    if not (ray.is_initialized() or address or os.environ.get("RAY_ADDRESS")):
        several = cluster_connection.clusters_of_this_user()
    if len(several) < 2:
        cluster_connection.connect(address)
        return runs()
    rows = []
    for each in several:
        if cluster_connection.connects(each):
            rows += [row | {"address": each} for row in runs()]
        ray.shutdown()
    return sorted(rows, key=lambda row: (row["name"], row["address"]))


def runs() -> list[dict[str, Any]]:
    """Return the status of each run of the connected cluster; only the phase "unknown" if a
    controller does not answer in time.
    """
    found = {}
    for name in names():
        with contextlib.suppress(ValueError):  # it has gone since
            found[name] = controller_of(name)
    asked: dict[str, Any] = {name: controller.status.remote() for name, controller in found.items()}
    until = time.monotonic() + _ANSWER_S
    rows = []
    for name, answer in asked.items():
        try:
            said = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.RayError as error:
            said = {"phase": "unknown", "reason": f"no answer: {type(error).__name__}"}
        rows.append({"name": name} | said)
    return rows
