"""When the coordinator has to look again, and at what. A timer fires once, even if it no longer
means anything."""

import heapq
import math
from collections.abc import Iterable

from elastic_dp.coordinator.messages import WorkerId


class Timers:
    def __init__(self) -> None:
        self._times: list[float] = []  # a heap
        self._at: dict[float, dict[tuple[str, WorkerId], None]] = {}  # each in the order of setting
        self.due = math.inf  # when the next ones fire

    def wake(self, at: float, kind: str = "", worker: WorkerId = "") -> None:
        if at == math.inf:
            return
        if at not in self._at:
            self._at[at] = {}
            heapq.heappush(self._times, at)
            self.due = self._times[0]
        self._at[at][kind, worker] = None

    def pop(self) -> Iterable[tuple[str, WorkerId]]:
        """What the next ones were set for."""
        at = heapq.heappop(self._times)
        self.due = self._times[0] if self._times else math.inf
        return self._at.pop(at)

    def clear(self) -> None:
        self._times.clear()
        self._at.clear()
        self.due = math.inf
