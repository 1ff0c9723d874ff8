"""How fast a run gets rows, from the lines of its journal."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_WINDOW_S = 60.0  # of the rate: so many seconds up to the newest report
_APART_S = 1.0  # between two reports that are remembered


class DataRates:
    """Takes the lines of a journal in their order, or the reports themselves. It reads no clock."""

    def __init__(self) -> None:
        self._rows_per_step: dict[int, int] = {}  # by the step after which it holds
        self._points: deque[tuple[float, int]] = deque()  # (time, committed steps)

    @property
    def rows_per_s(self) -> float | None:
        """The rows of committed steps per second, over the last minute of reports; None before the
        second report, or if the journal does not say how many rows a step has.
        """
        if len(self._points) < 2 or not self._rows_per_step:
            return None
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (self._rows_until(last) - self._rows_until(first)) / (ended - began)

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line of the journal. Lines that say nothing about rows, or that another program
        has damaged, are ignored.
        """
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._take(line)

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
                    self._points.clear()
                first, later = int(line.get("rows_per_step", 0)), line.get("rows_later", {})
                growth = {int(step): int(rows) for step, rows in later.items()}
                self._rows_per_step = {0: first, **growth} if first else {}
            case "CheckpointFound":
                self._points.clear()
            case "TimesReported":
                self.reached(float(line["time"]), int(line["step"]))
