"""Why workers wait for a node: no node could hold one, none has room now, Kubernetes waits for one
that is lost, or what Ray's autoscaler reports to the GCS.

The autoscaler reports whenever it has looked at the cluster. If it cannot look, because Kubernetes
refuses its requests, it reports nothing, and only its log has the reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.ray import kubernetes_pods, private, worker_placement
from elastic_dp.cluster.ray.node_avoidance import can_hold
from elastic_dp.cluster.ray.ray_worker_group import RayWorkerGroup
from elastic_dp.config import ScalingConfig
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.wording import counted

_CHECK_EVERY_S = 5.0
# How long a worker waits before this is reported: the room that seems taken may be its own, while
# its process starts.
_NO_ROOM_S = 30.0
_SILENT_S = 30.0  # the autoscaler looks every 5 s, or AUTOSCALER_UPDATE_INTERVAL_S
_RECENT_S = 60.0  # age of a failed launch; while it lasts, every look adds a new one
_LOG = "its log has the reason (monitor.log on the head node, or its container's)"


class CapacityMonitor:
    """A thread that looks at the cluster while workers wait, and keeps warm processes.

    `stages()` returns the stage of each worker, as in the controller's status. `waits_for` is the
    present reason, empty if no worker waits; `say` is called once for each reason, and again once
    no worker waited in between.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        worker_group: RayWorkerGroup,
        stages: Callable[[], Mapping[WorkerId, str]],
        say: Callable[[str], None],
    ) -> None:
        self._scaling, self._worker_group = scaling, worker_group
        self._stages, self._say = stages, say
        # the autoscaler's newest look, and since when it is known
        self._autoscaler_looked, self._looked_since = -1, 0.0
        self._waiting_since: dict[WorkerId, float] = {}
        self.waits_for = ""
        self._said: set[str] = set()

    def start(self, ended: threading.Event) -> threading.Thread:
        """Watch until the run has `ended`."""
        notice = OutageNotice("the search for what workers wait for", self._say)
        withdraw = self._worker_group.withdraw_waiting_needlessly
        return notice.watch(_CHECK_EVERY_S, ended, withdraw, self.look, self._refill)

    def _refill(self) -> None:
        self._worker_group.warm_processes.refill(self._worker_group.nodes(), self._stages())

    def look(self) -> None:
        """Set `waits_for`, and say it. Raises what Ray raises."""
        self.waits_for = self._why_waiting()
        if self.waits_for not in {"", *self._said}:
            self._say(self.waits_for)
            self._said.add(self.waits_for)

    def _why_waiting(self) -> str:
        starting = {worker for worker, stage in self._stages().items() if stage == "starting"}
        waiting = starting - self._worker_group.nodes().keys()
        if not waiting:
            self._waiting_since = {}
            self._said.clear()
            return ""
        now = time.monotonic()
        without = self._worker_group.without_process(waiting)
        self._waiting_since = {w: self._waiting_since.get(w, now) for w in without}
        waited = any(now - since >= _NO_ROOM_S for since in self._waiting_since.values())
        lacking = no_room(self._scaling, ray.nodes())
        lost = ""
        with contextlib.suppress(OSError):  # the API of Kubernetes does not answer
            lost = kubernetes_pods.on_lost_nodes(kubernetes_pods.pods_of_this_cluster())
        reasons = lost, lacking, self._autoscaler(has_large_nodes=not lacking)
        said = ". ".join(reason for reason in reasons if reason)
        if not said and waited and not has_room(self._scaling):
            return (
                "no node has room for another worker now: what could hold one is taken. Waiting "
                "for room"
            )
        return said

    def _autoscaler(self, has_large_nodes: bool) -> str:
        """Return why Ray's autoscaler adds no node; empty if it adds one, or there is none."""
        state, now = private.cluster_status().autoscaling_state, time.time()
        looked = state.last_seen_cluster_resource_state_version
        if looked != self._autoscaler_looked:
            self._autoscaler_looked, self._looked_since = looked, now
        if not looked:
            return ""
        if now - self._looked_since > _SILENT_S:
            return f"Ray's autoscaler does not look at the cluster: {_LOG}"
        said = autoscaler_words(state, self._scaling.resources_per_node, has_large_nodes, now)
        return said and f"Ray's autoscaler: {said}"


def autoscaler_words(
    state: Any, needs: Mapping[str, float], has_large_nodes: bool, now: float
) -> str:
    """Return an autoscaler's report in words. `has_large_nodes`: a node could hold a worker if it
    were idle. `now` is of `time.time`.
    """
    sentences = []
    failed = [f for f in state.failed_instance_requests if f.failed_ts > now - _RECENT_S]
    if groups := sorted({request.ray_node_type_name for request in failed}):
        capped = any("maxReplicas" in request.reason for request in failed)
        why = "it has as many as maxReplicas lets it have" if capped else _LOG
        sentences.append(f"it cannot add nodes of group {', '.join(groups)}: {why}")
    wanted = {name: need for name, need in needs.items() if need}
    if any(dict(r.resources_bundle) == wanted for r in state.infeasible_resource_requests):
        sentences.append(
            f"no group may add a node for {wanted}: those with such nodes have as many as they "
            "may (maxReplicas in Kubernetes, max_workers elsewhere)"
            if has_large_nodes
            else f"no group of nodes has one with {wanted} and the labels that the job asks for"
        )
    waits: Counter[str] = Counter(i.ray_node_type_name for i in state.pending_instances)
    for request in state.pending_instance_requests:
        waits[request.ray_node_type_name] += request.count
    if waits:
        named = ", ".join(f"{count} of group {group}" for group, count in sorted(waits.items()))
        sentences.append(f"it has asked for nodes that are not up yet: {named}")
    return "; ".join(sentences)


def has_room(scaling: ScalingConfig) -> bool:
    """Return whether a node, or enough of them, have free resources for a worker."""
    free = [{"Resources": resources} for resources in private.free_resources().values()]
    having = [node for node in free if can_hold(scaling.resources_per_node, node)]
    return len(having) >= scaling.nodes_per_worker


def no_room(scaling: ScalingConfig, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return why no node could hold a worker that the job asks for, even if it were idle; empty if
    one could.
    """
    alive, needs = [node for node in nodes if node["Alive"]], scaling.resources_per_node
    totals = [node["Resources"] for node in alive]
    if large := [node["Labels"] for node in alive if can_hold(needs, node)]:
        selector, wanted = worker_placement.node_selector(scaling), scaling.nodes_per_worker
        fitting = [labels for labels in large if worker_placement.matches(selector, labels)]
        if fitting and len(fitting) < wanted:
            return (
                f"a worker needs {wanted} nodes with {dict(needs)} each, and this cluster has "
                f"{counted(len(fitting), 'such node')}. Waiting for more; lower "
                "ScalingConfig.nodes_per_worker if none will come"
            )
        why = worker_placement.why_none_matches(selector, large)
        return why and f"{why} and large enough, as ScalingConfig asks. Waiting for such a node"
    largest = {name: max((has.get(name, 0) for has in totals), default=0) for name in needs}
    return (
        f"no node of this cluster can hold a worker: it needs {dict(needs)}, and the most "
        f"that any node has is {largest}. Waiting for such a node; lower "
        "ScalingConfig.resources_per_worker if none will come"
    )
