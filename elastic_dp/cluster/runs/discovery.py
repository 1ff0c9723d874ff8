"""Which runs a Ray cluster has. A run is found by the name of its controller's actor.

Nothing here imports torch: the command line asks without it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors

from elastic_dp.cluster.run_handle import ask
from elastic_dp.config import JobSpec
from elastic_dp.storage import StorageURL

NAMESPACE = "elastic_dp"  # Ray's, of all our actors
PATIENCE_S = 60.0  # with a controller that restarts, before anything is known of its run
CONTROLLER = "/controller"  # behind the run's name: that of the actor
_ANSWER_S = 10.0  # what a controller may take to say how its run stands


@dataclass(frozen=True)
class LiveController:
    """A controller that is there, and what it says of itself."""

    controller: Any
    spec: JobSpec
    url: StorageURL
    ended: bool


def find(name: str) -> LiveController | None:
    """The controller of that name, if there is one."""
    try:
        controller = controller_of(name)
        spec, url, ended = ask(controller, "about", patience_s=PATIENCE_S)
    except (ValueError, ray.exceptions.RayActorError):
        return None  # none, or one that goes
    return LiveController(controller, spec, url, ended)


def names() -> list[str]:
    """Of the runs that are live, or ended so lately that their controller still answers."""
    actors = list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removesuffix(CONTROLLER) for name in ours if name.endswith(CONTROLLER))


def controller_of(name: str) -> Any:
    """The actor. Raises ValueError where there is none."""
    return ray.get_actor(name + CONTROLLER, namespace=NAMESPACE)


def runs() -> list[dict[str, Any]]:
    """The status of each; of one whose controller does not answer in time, only that."""
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
