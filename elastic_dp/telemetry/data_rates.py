"""How fast a run gets rows, and how much of its data came from caches on the disks of workers, from
the lines of its journal."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_WINDOW_S = 60.0  # of the rate: so many seconds up to the newest report
_APART_S = 1.0  # between two reports that are remembered


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes of data that workers with a cache have read. `from_cache`: from the disk, so they were
    not read from the store. `from_store`: what the cache did not have.
    """

    from_cache: int = 0
    from_store: int = 0

    @property
    def total(self) -> int:
        return self.from_cache + self.from_store


class DataRates:
    """Takes the lines of a journal in their order, or the reports themselves. It reads no clock."""

    def __init__(self) -> None:
        self._rows_per_step: dict[int, int] = {}  # by the step after which it holds
        self._points: deque[tuple[float, int]] = deque()  # (time, committed steps)
        self._of_worker: dict[str, tuple[int, int]] = {}
        self._of_former_starts = CacheBytes()  # whose workers had the same names

    @property
    def rows_per_s(self) -> float | None:
        """The rows of committed steps per second, over the last minute of reports; None before the
        second report, or if the journal does not say how many rows a step has.
        """
        if len(self._points) < 2 or not self._rows_per_step:
            return None
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (self._rows_until(last) - self._rows_until(first)) / (ended - began)

    @property
    def cache(self) -> CacheBytes:
        """The sum over all workers so far, also those that are gone."""
        counts = [*self._of_worker.values()]
        return CacheBytes(
            self._of_former_starts.from_cache + sum(count for count, _ in counts),
            self._of_former_starts.from_store + sum(count for _, count in counts),
        )

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line of the journal. Lines that say nothing about data, or that another program
        has damaged, are ignored.
        """
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._take(line)

    def report(self, worker: str, counts: Sequence[int]) -> None:
        """Take what a worker has read so far: bytes from its cache, and from the store."""
        from_cache, from_store = map(int, counts)
        before = self._of_worker.get(worker, (0, 0))
        self._of_worker[worker] = max(before[0], from_cache), max(before[1], from_store)

    def reached(self, now: float, step: int) -> None:
        """Take the number of committed steps at `now`."""
        points = self._points
        if points and (step < points[-1][1] or now < points[-1][0]):
            points.clear()  # the run went back to a checkpoint
        if points and now - points[-1][0] < _APART_S:
            return
        points.append((now, step))
        while len(points) > 2 and now - points[1][0] >= _WINDOW_S:
            points.popleft()

    def _rows_until(self, step: int) -> int:
        """Return the rows of the first `step` steps."""
        begins = sorted(self._rows_per_step)
        return sum(
            self._rows_per_step[begin] * max(0, min(end, step) - begin)
            for begin, end in pairwise([*begins, step])
        )

    def _take(self, line: Mapping[str, Any]) -> None:
        match line.get("event"):
            case "ControllerStarted":
                if not line["takes_over"]:
                    self._of_former_starts, self._of_worker = self.cache, {}
                    self._points.clear()
                first, later = int(line.get("rows_per_step", 0)), line.get("rows_later", {})
                growth = {int(step): int(rows) for step, rows in later.items()}
                self._rows_per_step = {0: first, **growth} if first else {}
            case "CheckpointFound":
                self._points.clear()
            case "TimesReported":
                self.reached(float(line["time"]), int(line["step"]))
                for worker, counts in line.get("cache_bytes", {}).items():
                    self.report(worker, counts)
