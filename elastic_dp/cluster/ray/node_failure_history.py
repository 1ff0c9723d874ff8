"""Decides which nodes get no new worker: those where workers failed repeatedly. Pure, without clock
and Ray.

After three failures within 30 minutes, a node is avoided for 30 minutes from the last one. If every
node that could hold a worker is bad, none is avoided, because a run must not stop where it could
continue (and a step that kills every worker makes every node look bad).
"""

from __future__ import annotations

from collections.abc import Collection

FAILURES = 3
WITHIN_S = 1800.0


class NodeFailureHistory:
    """The recent failures by node. Times are of one clock, in seconds; node ids are never
    reused.
    """

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}

    def failed(self, node: str, now: float) -> bool:
        """Record the loss of a worker. Return whether the node becomes bad by it."""
        before = self._is_bad(node, now)
        self._failures.setdefault(node, []).append(now)
        return not before and self._is_bad(node, now)

    def failures(self, node: str, now: float) -> int:
        """Return the number of recent failures."""
        recent = [at for at in self._failures.get(node, ()) if at > now - WITHIN_S]
        self._failures[node] = recent
        return len(recent)

    def avoided(self, candidates: Collection[str], now: float) -> list[str]:
        """Return the nodes to avoid among `candidates`, the nodes that could hold a worker."""
        bad = sorted(node for node in candidates if self._is_bad(node, now))
        return bad if len(bad) < len(candidates) else []

    def _is_bad(self, node: str, now: float) -> bool:
        return self.failures(node, now) >= FAILURES
