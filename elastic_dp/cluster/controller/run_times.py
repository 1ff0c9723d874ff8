"""What workers do with their time, how fast they get rows, and how many requests to stores they
retry, from their heartbeats; and the goodput of the run.

A heartbeat is only remembered. The journal gets the times of all workers at intervals, and those of
a worker before its end, so that the goodput is a function of the journal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from elastic_dp.coordinator.messages import HeartbeatReceived, WorkerId
from elastic_dp.telemetry.data_rates import DataRate
from elastic_dp.telemetry.goodput import (
    ControllerStarted,
    Goodput,
    GoodputMeter,
    TimesReported,
)
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.phase_clock import PhaseTimes

# Between two lines with the times of all workers; with many workers their lines are longer.
INTERVAL_S = 10.0
INTERVAL_S_PER_WORKER = 0.1


class RunTimes:
    """The times of all workers. `heard` and `lost` are called by the controller's thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._lock = journal, threading.Lock()
        self._retries: dict[WorkerId, int] = {}  # also of workers that are gone
        self._meter, self._rates = GoodputMeter(), DataRate({})
        self._newest: dict[WorkerId, tuple[float, ...]] = {}  # not in the journal yet
        self._step = 0
        self._due = time.monotonic() + INTERVAL_S
        journal.listen(self._line)

    def begin(self, size: int, takes_over: bool, rows_by_step: Mapping[int, int]) -> None:
        """Record that a controller leads from now on. `rows_by_step`: the rows of a step, by the
        step after which they hold.
        """
        with self._lock:
            self._rates = DataRate(rows_by_step)
        self._journal.event(ControllerStarted(size, takes_over))

    def heard(self, event: HeartbeatReceived) -> None:
        self._step = max(self._step, event.step)
        known = self._retries.get(event.worker, 0)
        self._retries[event.worker] = max(known, event.store_retries)
        with self._lock:
            self._rates.reached(time.time(), self._step)
        if event.times:
            self._newest[event.worker] = event.times
        if time.monotonic() >= self._due:
            self.flush()

    def lost(self, worker: WorkerId) -> None:
        """Write down the last report of a worker, before its end is recorded."""
        times = self._newest.pop(worker, None)
        if times is not None:
            self._write({worker: times})

    def flush(self) -> None:
        """Write down the newest report of each worker."""
        newest, self._newest = self._newest, {}
        if newest:
            self._write(newest)
        self._due = time.monotonic() + max(INTERVAL_S, INTERVAL_S_PER_WORKER * len(newest))

    def goodput(self) -> Goodput:
        """Return the goodput of the run so far. Any thread may call it."""
        with self._lock:
            self._take([*self._newest.items()])
            return self._meter.goodput(time.time())

    def times(self) -> PhaseTimes:
        """Return what all workers of the run have reported so far. Any thread may call it."""
        with self._lock:
            self._take([*self._newest.items()])
            return self._meter.times

    def rows_per_s(self) -> float | None:
        """Return the rows of committed steps per second in the last minute. Any thread may call
        it.
        """
        with self._lock:
            return self._rates.rows_per_s

    @property
    def store_retries(self) -> int:
        """How many requests to stores all workers have retried. Any thread may call it."""
        return sum(list(self._retries.values()))

    # ------------------------------------------------------------------------------ private

    def _take(self, reports: list[tuple[WorkerId, tuple[float, ...]]]) -> None:
        for worker, times in reports:
            self._meter.report(worker, PhaseTimes.of(times))
        self._meter.reached(self._step)

    def _write(self, newest: dict[WorkerId, tuple[float, ...]]) -> None:
        self._journal.event(TimesReported(self._step, newest))

    def _line(self, line: dict[str, Any]) -> None:
        if line.get("event") == "CheckpointFound":
            self._step = min(self._step, line["step"] or 0)  # the run goes back to it
        with self._lock:
            self._meter.line(line)
