"""Times at which the coordinator must act. A timer fires once, even if it no longer has a
meaning.
"""

import heapq
import math
from collections.abc import Iterable

from elastic_dp.coordinator.messages import WorkerId


class Timers:
    """A queue of timers, each with a kind and perhaps a worker."""

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap
        # by time, in the order in which they were set
        self._at: dict[float, dict[tuple[str, WorkerId], None]] = {}
        self.due = math.inf  # when the next timers fire

    def wake(self, at: float, kind: str = "", worker: WorkerId = "") -> None:
        """Set a timer for time `at`; inf sets none."""
        if at == math.inf:
            return
        if at not in self._at:
            self._at[at] = {}
            heapq.heappush(self._times, at)
            self.due = self._times[0]
        self._at[at][kind, worker] = None

    def take_due(self) -> Iterable[tuple[str, WorkerId]]:
        """Remove the next timers and return their kinds and workers."""
        at = heapq.heappop(self._times)
        self.due = self._times[0] if self._times else math.inf
        return self._at.pop(at)

    def cancel_all(self) -> None:
        self._times.clear()
        self._at.clear()
        self.due = math.inf
