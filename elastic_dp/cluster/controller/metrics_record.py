"""The metrics of a run: each call of `ctx.log` is written to the journal once, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_dp.telemetry.journal import Journal


class MetricsRecord:
    """Records metrics from any thread, and continues what a previous controller recorded."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._lock = journal, threading.Lock()
        self.newest: dict[str, Any] = {}  # the newest value of each metric
        self.logged_to = (0, 0)  # the last recorded step and call
        for step, metrics in self.recorded():
            last, call = self.logged_to
            self.logged_to = step, call + 1 if step == last else 1
            self.newest |= metrics

    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        """Record a call of `ctx.log`. Every worker sends each call in order; the first report
        counts.
        """
        with self._lock:
            if (step, call) > self.logged_to:
                self.logged_to = step, call
                self.newest |= metrics
                self._journal.metrics(step, metrics)

    def recorded(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (step, metrics) of each call that the journal has in memory."""
        for line in self._journal.recorded():
            yield line["step"], {k: v for k, v in line.items() if k not in ("time", "step")}
