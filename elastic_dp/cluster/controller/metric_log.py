"""The metrics of a run: each call of `ctx.log` is written to the journal once, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic_dp.telemetry.journal import Journal
from elastic_dp.train.generations.worker_progress import LogCall

_LACKING_S = 5.0  # how long calls wait for an earlier one that no worker may have any more

_Waiting = tuple[LogCall | None, Mapping[str, Any], float | None]  # the call before, what, when


class MetricLog:
    """Records metrics from any thread, and continues what a previous controller recorded."""

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._clock, self._lock = journal, clock, threading.Lock()
        self.newest: dict[str, Any] = {}  # the newest value of each metric
        self.logged_to: LogCall = (0, 0)  # the last recorded call
        # Calls that came before an earlier one, and since when.
        self._waiting: dict[LogCall, _Waiting] = {}
        self._lacks_since: float | None = None
        for step, metrics in self.recorded():
            last, call = self.logged_to
            self.logged_to = step, call + 1 if step == last else 1
            self.newest |= metrics

    def log(
        self,
        call: LogCall,
        previous: LogCall | None,
        metrics: Mapping[str, Any],
        at: float | None = None,
    ) -> bool:
        """Record a call of `ctx.log` that was made at `at` (of `time.time`; None: now). Every
        worker sends each call in order; the first report counts.

        Returns False if `previous`, the call before it, is not recorded yet. The call then waits
        for that one, but not for ever: its workers may all be lost.
        """
        with self._lock:
            if call > self.logged_to:
                self._waiting.setdefault(call, (previous, metrics, at))
                self._record(or_lacking=False)
            if self._waiting and self._clock() - (self._lacks_since or 0.0) > _LACKING_S:
                self._record(or_lacking=True)
            return not self._waiting

    def close(self) -> None:
        """Record what waits for calls that will not come any more."""
        with self._lock:
            self._record(or_lacking=True)

    def recorded(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (step, metrics) of each call that the journal has in memory."""
        for line in self._journal.recorded():
            yield line["step"], {k: v for k, v in line.items() if k not in ("time", "step")}

    def _record(self, *, or_lacking: bool) -> None:
        for call in sorted(self._waiting):
            previous, metrics, at = self._waiting[call]
            if previous is not None and previous > self.logged_to and not or_lacking:
                if self._lacks_since is None:
                    self._lacks_since = self._clock()
                return
            del self._waiting[call]
            if call > self.logged_to:
                self.logged_to = call
                self.newest |= metrics
                self._journal.metrics(call[0], metrics, at)
        self._lacks_since = None
