"""Why workers wait for a node: no node could hold one, none has room now, or what Ray's autoscaler
reports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray._private.state

from elastic_dp.cluster.ray import worker_placement
from elastic_dp.cluster.ray.autoscaler_status import AutoscalerStatus
from elastic_dp.cluster.ray.node_avoidance import can_hold
from elastic_dp.cluster.ray.ray_worker_group import RayWorkerGroup
from elastic_dp.config import ScalingConfig
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.threads import background

_CHECK_EVERY_S = 5.0
# How long a worker waits before this is reported: the room that seems taken may be its own, while
# its process starts.
_NO_ROOM_S = 30.0


class CapacityMonitor:
    """A thread that looks at the cluster while workers wait.

    `stages()` returns the stage of each worker, as in the controller's status. `waits_for` is the
    present reason, empty if no worker waits; `say` is called once for each reason.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        worker_group: RayWorkerGroup,
        stages: Callable[[], Mapping[WorkerId, str]],
        say: Callable[[str], None],
    ) -> None:
        self._scaling, self._worker_group, self._stages, self._say = (
            scaling,
            worker_group,
            stages,
            say,
        )
        self._autoscaler = AutoscalerStatus(scaling.resources_per_worker)
        self._waiting_since: dict[WorkerId, float] = {}
        self.waits_for = ""

    def start(self, ended: threading.Event) -> None:
        """Watch until the run has `ended`."""
        background("capacity", lambda: self._watch(ended)).start()

    def _watch(self, ended: threading.Event) -> None:
        said = {""}
        while not ended.wait(_CHECK_EVERY_S):
            # any error of Ray while the head node is unavailable
            with contextlib.suppress(Exception):
                self._worker_group.withdraw_waiting_needlessly()
                self.look()
            if self.waits_for not in said:
                self._say(self.waits_for)
                said.add(self.waits_for)

    def look(self) -> None:
        """Set `waits_for`. Raises what Ray raises."""
        self.waits_for = self._why_waiting()

    def _why_waiting(self) -> str:
        starting = {worker for worker, stage in self._stages().items() if stage == "starting"}
        waiting = starting - self._worker_group.nodes().keys()
        if not waiting:
            self._waiting_since = {}
            return ""
        now = time.monotonic()
        without = self._worker_group.without_process(waiting)
        self._waiting_since = {w: self._waiting_since.get(w, now) for w in without}
        waited = any(now - since >= _NO_ROOM_S for since in self._waiting_since.values())
        reasons = no_room(self._scaling, ray.nodes()), self._autoscaler.why(time.time())
        said = ". ".join(reason for reason in reasons if reason)
        if not said and waited and not has_room(self._scaling.resources_per_worker):
            return (
                "no node has room for another worker now: what could hold one is taken. Waiting "
                "for room"
            )
        return said


def has_room(needs: Mapping[str, float]) -> bool:
    """Return whether a node has enough free resources for a worker."""
    free = ray._private.state.available_resources_per_node().values()
    return any(can_hold(needs, {"Resources": resources}) for resources in free)


def no_room(scaling: ScalingConfig, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return why no node could hold a worker that the job asks for, even if it were idle; empty if
    one could.
    """
    alive, needs = [node for node in nodes if node["Alive"]], scaling.resources_per_worker
    totals = [node["Resources"] for node in alive]
    if large := [node["Labels"] for node in alive if can_hold(needs, node)]:
        firm = [{worker_placement.MARKET: "on-demand"}] * scaling.min_on_demand
        # What earlier workers requested: for the first worker, and for the first one after
        # `min_on_demand`.
        for others in [[], firm] if scaling.max_workers > scaling.min_on_demand else [[]]:
            if why := worker_placement.why_none_matches(
                worker_placement.placement_preferences(scaling, others), large
            ):
                return f"{why} and large enough, as ScalingConfig asks. Waiting for such a node"
        return ""
    largest = {name: max((has.get(name, 0) for has in totals), default=0) for name in needs}
    return (
        f"no node of this cluster can hold a worker: it needs {dict(needs)}, and the most "
        f"that any node has is {largest}. Waiting for such a node; lower "
        "ScalingConfig.resources_per_worker if none will come"
    )
