"""The resources of each node that the runs of this package can have.

What other programs use is what is neither free nor held by a run. A worker that has just got its
place is not published yet, so the smallest value of the last `_WINDOW_S` counts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from elastic_dp.cluster.ray import private
from elastic_dp.coordinator.planning.cluster_shares import RunDemand

_WINDOW_S = 10.0


class ClusterRoom:
    """The room for all runs together, from one look to the next."""

    def __init__(self) -> None:
        self._foreign: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._may_grow, self._asked_at = False, -_WINDOW_S

    def of(self, demands: Iterable[RunDemand], now: float) -> dict[str, dict[str, float]]:
        """Return what is free or held by the runs. Raises what Ray raises."""
        totals, free = private.total_resources(), private.free_resources()
        draining = private.draining_nodes()
        ours: Counter[tuple[str, str]] = Counter()
        for run in demands:
            for node in run.nodes:
                for kind, need in run.needs.items():
                    ours[node, kind] += need  # type: ignore[assignment]
        used: Counter[tuple[str, str]] = Counter()
        for node, resources in totals.items():
            for kind, total in resources.items():
                used[node, kind] = max(  # type: ignore[assignment]
                    0.0, total - free.get(node, {}).get(kind, 0.0) - ours[node, kind]
                )
        self._foreign.append((now, used))
        while now - self._foreign[0][0] > _WINDOW_S:
            self._foreign.popleft()
        return {
            node: {
                kind: total - min(seen[node, kind] for _, seen in self._foreign)
                for kind, total in resources.items()
            }
            for node, resources in totals.items()
            if node not in draining
        }

    def may_grow(self, now: float) -> bool:
        """Return whether an autoscaler adds nodes to this cluster."""
        if now - self._asked_at >= _WINDOW_S:
            self._may_grow, self._asked_at = private.has_autoscaler(), now
        return self._may_grow
