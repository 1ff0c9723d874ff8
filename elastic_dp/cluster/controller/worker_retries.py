"""How many requests to stores the workers of a run have retried, from their heartbeats."""

from __future__ import annotations

from elastic_dp.coordinator.messages import HeartbeatReceived, WorkerId


class WorkerRetries:
    """The counts of all workers so far. `heard` is called by the controller's thread."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, int] = {}

    def heard(self, event: HeartbeatReceived) -> None:
        if event.store_retries > self._of.get(event.worker, 0):
            self._of[event.worker] = event.store_retries

    @property
    def total(self) -> int:
        """The sum, also over workers that are gone. Any thread may call it."""
        return sum(list(self._of.values()))
