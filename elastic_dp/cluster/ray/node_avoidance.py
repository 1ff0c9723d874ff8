"""Selects nodes for the next worker: all except those where workers failed repeatedly.

A label selector excludes a node, because Ray has no other way to say "anywhere but there". The
worker then waits, as demand that the autoscaler sees, until another node has room. A selector is
fixed when the actor is created, so a worker that waits because of a node that is no longer avoided
is replaced. Ray still knows the node of an actor that has died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray

from elastic_dp.cluster.ray import private, worker_placement
from elastic_dp.cluster.ray.worker_placement import Labels
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.wording import counted

FAILURES = 3
WITHIN_S = 1800.0


class NodeAvoidance:
    """Thread-safe. `needs` are the resources of one worker, `selector` the labels of its node.

    After three failures within 30 minutes, a node is avoided for 30 minutes from the last one. If
    every node that could hold a worker is bad, none is avoided, because a run must not stop where
    it could continue (and a step that kills every worker makes every node look bad).
    """

    def __init__(
        self, needs: Mapping[str, float], selector: Labels, say: Callable[[str], None]
    ) -> None:
        self._needs, self._selector, self._say = needs, selector, say
        self._failures: dict[str, list[float]] = {}  # by node, whose ids are never reused
        self._lock = threading.Lock()
        self._excluded: dict[WorkerId, list[str]] = {}  # the nodes that were excluded for it
        self.avoided: dict[str, int] = {}  # node -> failures, as of the last look

    def selector_of(self, worker: WorkerId) -> Labels:
        """Return the new worker's selector, without the avoided nodes."""
        avoided = self._avoided_nodes()
        if not avoided:
            return self._selector
        self._excluded[worker] = avoided
        return self._selector | {"ray.io/node-id": f"!in({','.join(avoided)})"}

    def waiting_needlessly(
        self, placed: Collection[WorkerId], there: Collection[WorkerId]
    ) -> list[WorkerId]:
        """Return those of `there` that wait although a node that they exclude is no longer
        avoided.
        """
        found = []
        for worker, avoided in list(self._excluded.items()):
            free = worker in there and not {*avoided} <= {*self._avoided_nodes()}
            if free and worker not in placed:
                found.append(worker)
            if free or worker in placed or worker not in there:
                del self._excluded[worker]
        return found

    def failed(self, actor: Any, times: int = 1) -> None:
        """Record the loss of a worker that was neither released nor preempted. `times`: as many as
        it counts for; a slow one that is to be replaced counts for `FAILURES`."""
        entry = private.actor(actor)
        if entry is None or not entry.node:
            return  # the worker was never placed
        node = entry.node
        with self._lock:
            before = self._recent(node)
            self._failures[node] = [*before, *[time.monotonic()] * times]
        if len(before) < FAILURES <= len(before) + times and node in self._avoided_nodes():
            self._say(
                f"node {node} is avoided for now: {counted(FAILURES, 'worker')} failed on it "
                "within 30 minutes, or one was slow"
            )

    def _avoided_nodes(self) -> list[str]:
        candidates = {
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"]
            and can_hold(self._needs, node)
            and worker_placement.matches(self._selector, node["Labels"])
        }
        with self._lock:
            failures = {node: len(self._recent(node)) for node in sorted(candidates)}
        bad = {node: count for node, count in failures.items() if count >= FAILURES}
        self.avoided = avoided = bad if len(bad) < len(candidates) else {}
        return [*avoided]

    def _recent(self, node: str) -> list[float]:
        return [at for at in self._failures.get(node, ()) if at > time.monotonic() - WITHIN_S]


def can_hold(needs: Mapping[str, float], node: Mapping[str, Any]) -> bool:
    """Return whether the node could hold a worker if it were idle."""
    return all(node["Resources"].get(name, 0) >= need for name, need in needs.items())
