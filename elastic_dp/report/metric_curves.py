"""Curves of the metrics of a run, with a limit on their points that keeps each peak."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elastic_dp.report.report_model import CurvePoint

MOST_POINTS = 1200  # of one curve; there are twice as many before it is thinned
MOST_CURVES = 24  # and the loss
_NOT_METRICS = ("time", "step")
_Point = tuple[float, int, float | None]  # time, step, value


class MetricCurves:
    """The numbers that a run has logged, by name, in the order of their first appearance."""

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line of `metrics.jsonl`. What is no number is no curve."""
        for name, value in line.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in _NOT_METRICS or not is_number:
                continue
            if name in self._curves or name == "loss" or len(self._curves) < MOST_CURVES:
                point = float(line["time"]), int(line["step"]), _finite(value)
                self._curves.setdefault(name, _Curve()).add(point)

    def points(self) -> dict[str, list[CurvePoint]]:
        return {name: _counted(curve.points()) for name, curve in self._curves.items()}


class _Curve:
    """One curve. Of each `_width` points the lowest and the highest are kept; when there are too
    many, of twice as many. So all parts of a long run are equally fine.
    """

    def __init__(self) -> None:
        self._kept: list[_Point] = []
        self._width = 2
        self._open: list[_Point] = []  # the newest, at most `_width`

    def add(self, point: _Point) -> None:
        if len(self._open) == self._width:
            self._kept += _extremes(self._open)
            self._open = []
            if len(self._kept) >= 2 * MOST_POINTS:
                fours = range(0, len(self._kept), 4)
                self._kept = [p for at in fours for p in _extremes(self._kept[at : at + 4])]
                self._width *= 2
        self._open.append(point)

    def points(self) -> list[_Point]:
        *rest, newest = self._open
        return [*self._kept, *(_extremes(rest) if len(rest) > 2 else rest), newest]


def _extremes(points: list[_Point]) -> list[_Point]:
    """Return the lowest and the highest of two or more points, in their order.

    What is no finite number counts as the highest, so that a gap stays.
    """

    def height(at: int) -> tuple[float, int]:
        value = points[at][2]
        return math.inf if value is None else value, at

    lowest, highest = min(range(len(points)), key=height), max(range(len(points)), key=height)
    return [points[at] for at in sorted((lowest, highest))]


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _counted(points: list[_Point]) -> list[CurvePoint]:
    """Mark the points whose step was logged again later, because the run went back."""
    found: list[CurvePoint] = []
    lowest: float = math.inf
    for time, step, value in reversed(points):
        found.append(CurvePoint(time, step, value, step < lowest))
        lowest = min(lowest, step)
    return found[::-1]
