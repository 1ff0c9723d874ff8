"""How fast a run gets rows, from the number of committed steps over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

_WINDOW_S = 60.0  # of the rate: so many seconds up to the newest report
_APART_S = 1.0  # between two reports that are remembered


class DataRate:
    """`rows_by_step`: the rows of a step, by the step after which they hold. Reads no clock."""

    def __init__(self, rows_by_step: Mapping[int, int]) -> None:
        self._rows_by_step = dict(rows_by_step)
        self._points: deque[tuple[float, int]] = deque()  # (time, committed steps)

    def reached(self, now: float, step: int) -> None:
        """Take the number of committed steps at `now`."""
        points = self._points
        if points and (step < points[-1][1] or now < points[-1][0]):
            points.clear()  # the run went back to a checkpoint
        if not points or now - points[-1][0] >= _APART_S:
            points.append((now, step))
        while len(points) > 2 and now - points[1][0] >= _WINDOW_S:
            points.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """The rows of committed steps per second, over the last minute of reports; None before the
        second report."""
        if len(self._points) < 2:
            return None
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (self._rows_until(last) - self._rows_until(first)) / (ended - began)

    def _rows_until(self, step: int) -> int:
        """Return the rows of the first `step` steps."""
        return sum(
            self._rows_by_step[begin] * max(0, min(end, step) - begin)
            for begin, end in pairwise([*sorted(self._rows_by_step), step])
        )
