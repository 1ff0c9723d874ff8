"""The metrics of each step, which its checkpoint stores."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

_REMEMBERED = 1_000  # steps whose metrics are kept


class CheckpointMetrics:
    """What the body of each step logged.

    A checkpoint has the values of its own step only. An older value says nothing about its weights
    and would rank it by another step.
    """

    def __init__(self) -> None:
        self._logged: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds metrics of a step. Any thread and every worker may call it: all workers log the
        same."""
        with self._lock:
            self._logged.setdefault(step, {}).update(metrics)
            if len(self._logged) > _REMEMBERED:
                del self._logged[next(iter(self._logged))]

    def of(self, step: int) -> dict[str, float]:
        """Returns the numbers among the metrics of a step."""
        with self._lock:
            logged = dict(self._logged.get(step, {}))
        return {k: float(v) for k, v in logged.items() if isinstance(v, int | float)}
