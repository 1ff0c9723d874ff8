"""Calls loggers in threads of their own, so neither training nor the display waits for a service.

Functions are called with each line of metrics, one after the other. A `RunLogger` has its own
thread: it is opened with the first line, is given what the run's folder holds and its tool lacks,
and then each line as it comes. If it fails, it is opened again after a while in the same way, so a
failure leaves no gap.

A service that is unavailable for a moment is no reason to lose days of training. So an exception in
a logger becomes a warning with its traceback.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.report.report_model import RunEvent
from elastic_dp.telemetry.journal import MAX_KEPT
from elastic_dp.telemetry.journal_reader import read_events
from elastic_dp.telemetry.run_logger import LoggedSoFar, RunLogger
from elastic_dp.threads import background, take_all

Line = Mapping[str, Any]
MAX_WAITING = 100_000  # lines that a logger has not taken yet
CLOSE_S = 30.0  # how long the end of a run waits for its loggers
_GATHER_S = 1.0  # how long metrics wait, so that several steps are logged together
_FLUSH_S = 2.0
_AGAIN_S = 10.0  # until a logger that failed is opened again


class LoggerThreads:
    """The loggers of one run. `put` never waits."""

    def __init__(
        self,
        loggers: Sequence[RunLogger | Callable[[Line], None]],
        name: str,
        url: str,
    ) -> None:
        functions = [each for each in loggers if not isinstance(each, RunLogger)]
        takers: list[_Taker] = [_Functions(functions)] if functions else []
        takers += [_Feed(each, name, url) for each in loggers if isinstance(each, RunLogger)]
        self._threads = [_LoggerThread(taker) for taker in takers]

    def put(self, line: Line) -> None:
        """Pass on a line of the journal."""
        for thread in self._threads:
            thread.put(line)

    def close(self) -> None:
        """Wait until all lines are logged, at most 30 s."""
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def catch_up(loggers: Sequence[RunLogger | Callable[[Line], None]], name: str, url: str) -> None:
    """Give each `RunLogger` what its tool lacks of a run that has ended."""
    LoggerThreads([each for each in loggers if isinstance(each, RunLogger)], name, url).close()


class _Taker(Protocol):
    """What a thread calls."""

    logger: Any

    def take(self, line: Line) -> None: ...
    def miss(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _Functions:
    """Functions of one record, which keep nothing."""

    def __init__(self, functions: Sequence[Callable[[Line], None]]) -> None:
        self.logger = functions[0]
        self._functions = functions

    def take(self, line: Line) -> None:
        if not _is_metrics(line):
            return
        for function in self._functions:
            try:
                function(line)
            except Exception as error:  # the user's own code
                _warn_of(function, error)

    def miss(self) -> None:
        """Lines were dropped. They are in `metrics.jsonl`."""

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Feed:
    """Gives one `RunLogger` each metric of a step once, and each event."""

    def __init__(self, logger: RunLogger, name: str, url: str) -> None:
        self.logger = logger
        self._name, self._url = name, url
        self._recent: deque[Line] = deque(maxlen=MAX_KEPT)  # may not be in the folder yet
        self._is_open = False
        self._again_at = 0.0
        self._forget(LoggedSoFar())

    def take(self, line: Line) -> None:
        self._recent.append(line)
        if self._is_open:
            self._guarded(lambda: self._pass_on(line))
        elif time.monotonic() >= self._again_at:
            self._guarded(self._open)

    def miss(self) -> None:
        """Lines were dropped: read them from the folder."""
        self._is_open = False

    def flush(self) -> None:
        if self._is_open:
            self._guarded(self.logger.flush)

    def close(self) -> None:
        if not self._is_open:
            self._guarded(self._open)
        if self._is_open:
            self._guarded(self.logger.close)
            self._is_open = False

    # ------------------------------------------------------------------------------ private

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # of the tool, or of the store
            self._is_open = False
            self._again_at = time.monotonic() + _AGAIN_S
            _warn_of(self.logger, error)
            with contextlib.suppress(Exception):  # what is broken may also fail to close
                self.logger.close()

    def _open(self) -> None:
        lines: Iterable[Line] = itertools.chain(read_events(self._url), list(self._recent))
        for line in lines:
            if not self._is_open:
                self._forget(self.logger.open(self._name, float(line["time"])))
                self._is_open = True
            self._pass_on(line)
        if self._is_open:
            self.logger.flush()

    def _forget(self, so_far: LoggedSoFar) -> None:
        self._so_far = so_far
        self._steps: dict[str, int] = {}  # the last step of each metric that was logged since
        self._seen: dict[int, None] = {}  # lines of events that may come again
        self._at = 0.0
        self._builder = ReportBuilder(self._name, on_event=self._annotate)

    def _pass_on(self, line: Line) -> None:
        self._at = float(line["time"])
        if _is_metrics(line):
            self._log(line)
            # Events need the step alone, and curves of all metrics cost time.
            self._builder.line({"time": line["time"], "step": line["step"]})
            return
        key = hash(json.dumps(line, default=str))
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > 2 * MAX_KEPT:
                del self._seen[next(iter(self._seen))]
            self._builder.line(line)

    def _log(self, line: Line) -> None:
        step = int(line["step"])
        new = {
            name: float(value)
            for name, value in line.items()
            if name not in ("time", "step")
            and isinstance(value, int | float)
            and step > max(self._so_far.last_step(name), self._steps.get(name, -1))
        }
        if new:
            self.logger.log(self._at, step, new)
            self._steps |= dict.fromkeys(new, step)

    def _annotate(self, event: RunEvent) -> None:
        if self._at > self._so_far.events_until:
            took = "" if event.seconds is None else f" ({event.seconds:.2f} s)"
            self.logger.annotate(self._at, event.step, f"{event.kind}: {event.text}{took}")


class _LoggerThread:
    """One thread with a queue."""

    def __init__(self, taker: _Taker) -> None:
        self._taker = taker
        self._waiting = queue.SimpleQueue[Line | None]()
        self._is_urgent = threading.Event()
        self._taken: deque[Line | None] = deque()  # from the queue, and not logged yet
        self._dropped = 0
        self._lock = threading.Lock()
        self._thread = background("logger", self._run)
        self._thread.start()

    def put(self, line: Line | None) -> None:
        if line is not None and self._left >= MAX_WAITING:
            with self._lock:
                self._dropped += 1
        else:
            self._waiting.put(line)
            if line is None or not _is_metrics(line):
                self._is_urgent.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            slow = TimeoutError(f"{self._left} lines wait after {CLOSE_S:.0f} s")
            _warn_of(self._taker.logger, slow)

    @property
    def _left(self) -> int:
        return self._waiting.qsize() + len(self._taken)

    def _run(self) -> None:
        due = None
        while True:
            if not self._taken:
                wait_s = None if due is None else max(0.0, due - time.monotonic())
                self._taken.extend(take_all(self._waiting, wait_s, self._gather))
            if self._taken:
                line = self._taken.popleft()
                if line is None:
                    break
                due = due or time.monotonic() + _FLUSH_S
                self._note_dropped()
                self._taker.take(line)
            if due is not None and time.monotonic() >= due:
                self._taker.flush()
                due = None
        self._note_dropped()
        self._taker.close()

    def _gather(self) -> None:
        self._is_urgent.wait(_GATHER_S)
        self._is_urgent.clear()

    def _note_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            _warn_of(self._taker.logger, TimeoutError(f"it was too slow for {dropped} lines"))
            self._taker.miss()


def _is_metrics(line: Line) -> bool:
    return "event" not in line and "command" not in line


def _warn_of(logger: Any, error: Exception) -> None:
    """Warn that a logger raised `error`. Identical warnings are shown once."""
    what = "".join(traceback.format_exception_only(error)).strip()
    name = getattr(logger, "__name__", type(logger).__name__)
    warnings.warn(
        f"the logger {name!r} raised {what}; training continues, and the logger is called again "
        f"with the next record\n{''.join(traceback.format_exception(error))}",
        stacklevel=3,
    )
