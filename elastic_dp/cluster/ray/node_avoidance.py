"""Which nodes get no new worker: those where workers failed repeatedly.

Three failures on one node within 30 minutes, and it is avoided for 30 minutes from the last. If
every node that could hold a worker is bad, none is avoided, since a run must not stop where it
could go on (and a step that ends whoever runs it makes every node look bad). Here is no clock and
no Ray.
"""

from __future__ import annotations

from collections.abc import Collection

FAILURES = 3
WITHIN_S = 1800.0


class NodeAvoidance:
    """Times are of one clock, in seconds; node ids are never reused."""

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}

    def failed(self, node: str, now: float) -> bool:
        """A worker was lost there. Returns whether that makes the node bad, and it was not
        before."""
        before = self._is_bad(node, now)
        self._failures.setdefault(node, []).append(now)
        return not before and self._is_bad(node, now)

    def failures(self, node: str, now: float) -> int:
        """That still count."""
        recent = [at for at in self._failures.get(node, ()) if at > now - WITHIN_S]
        self._failures[node] = recent
        return len(recent)

    def avoided(self, candidates: Collection[str], now: float) -> list[str]:
        """Of the nodes that could hold a worker, those not to be used."""
        bad = sorted(node for node in candidates if self._is_bad(node, now))
        return bad if len(bad) < len(candidates) else []

    def _is_bad(self, node: str, now: float) -> bool:
        return self.failures(node, now) >= FAILURES
