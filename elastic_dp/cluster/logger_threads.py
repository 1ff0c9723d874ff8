"""Calls loggers in threads of their own, so neither training nor the display waits for a service.

Functions are called with each line of metrics, one after the other. A `RunLogger` has its own
thread, which follows the run's folder: it is given what the folder holds and its tool lacks, and
then each line that is added. If it fails, it is opened again after a while in the same way, so a
failure leaves no gap.

A service that is unavailable for a moment is no reason to lose days of training. So an exception in
a logger becomes a warning with its traceback.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.report.report_model import RunEvent
from elastic_dp.storage import Store
from elastic_dp.telemetry.journal_reader import JournalTail
from elastic_dp.telemetry.run_logger import LoggedSoFar, RunLogger
from elastic_dp.threads import background, take_all

Line = Mapping[str, Any]
MAX_WAITING = 100_000  # lines that functions have not taken yet
CLOSE_S = 30.0  # how long the end of a run waits for its loggers
_GATHER_S = 1.0  # how long metrics wait, so that functions get those of several steps together
_LOCAL_S, _REMOTE_S = 2.0, 10.0  # between two looks at a folder
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
        self._functions = [_Functions(functions)] if functions else []
        of_tools = [each for each in loggers if isinstance(each, RunLogger)]
        self._followers = [_Follower(each, name, url) for each in of_tools]

    def put(self, line: Line) -> None:
        """Pass on a line of the journal."""
        if not ("event" in line or "command" in line):
            for each in self._functions:
                each.put(line)

    def close(self) -> None:
        """Wait until all lines are logged, at most 30 s. The folder has the run's last line."""
        until = time.monotonic() + CLOSE_S
        threads: list[_Functions | _Follower] = [*self._followers, *self._functions]
        for each in threads:
            each.close()
        for each in threads:
            each.thread.join(max(0.0, until - time.monotonic()))
            if each.thread.is_alive():
                _warn_of(each.logger, TimeoutError(f"not all is logged after {CLOSE_S:.0f} s"))


def catch_up(loggers: Sequence[RunLogger | Callable[[Line], None]], name: str, url: str) -> None:
    """Give each `RunLogger` what its tool lacks of a run that has ended."""
    LoggerThreads([each for each in loggers if isinstance(each, RunLogger)], name, url).close()


class _Functions:
    """Functions of one record, which keep nothing."""

    def __init__(self, functions: Sequence[Callable[[Line], None]]) -> None:
        self.logger, self._functions = functions[0], functions
        self._waiting = queue.SimpleQueue[Line | None]()
        self._closing, self._dropped = threading.Event(), 0
        self.thread = background("logger", self._run)
        self.thread.start()

    def put(self, line: Line) -> None:
        if self._waiting.qsize() >= MAX_WAITING:  # they are in `metrics.jsonl`
            self._dropped += 1
        else:
            self._waiting.put(line)

    def close(self) -> None:
        self._closing.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while True:
            for line in take_all(self._waiting, None, lambda: self._closing.wait(_GATHER_S)):
                if line is None:
                    if self._dropped:
                        slow = TimeoutError(f"it was too slow for {self._dropped} lines")
                        _warn_of(self.logger, slow)
                    return
                for function in self._functions:
                    try:
                        function(line)
                    except Exception as error:  # the user's own code
                        _warn_of(function, error)


class _Follower:
    """The thread of one `RunLogger`."""

    def __init__(self, logger: RunLogger, name: str, url: str) -> None:
        self.logger, self._name, self._url = logger, name, url
        self._closing = threading.Event()
        self.thread = background("logger", self._run)
        self.thread.start()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        feed, last_tries = None, 2
        while last_tries:
            if self._closing.is_set():  # this look is the last one, if it succeeds
                last_tries -= 1
            is_last = last_tries < 2
            try:
                feed = feed or _Feed(self.logger, self._name, self._url)
                feed.pass_on()
                if is_last:
                    return self.logger.close()
                self._closing.wait(feed.pause_s)
            except Exception as error:  # of the tool, or of the store
                feed = None
                _warn_of(self.logger, error)
                with contextlib.suppress(Exception):  # what is broken may also fail to close
                    self.logger.close()
                self._closing.wait(_AGAIN_S)


class _Feed:
    """Gives a logger each metric of a step once, and each event, from the folder's first line."""

    def __init__(self, logger: RunLogger, name: str, url: str) -> None:
        store = Store(url)
        is_local = store.local_path(store.path) is not None
        self.pause_s = _LOCAL_S if is_local else _REMOTE_S
        self._logger, self._name = logger, name
        self._journal = JournalTail(store)
        self._so_far: LoggedSoFar | None = None
        self._steps: dict[str, int] = {}  # the last step of each metric that was logged
        self._at = 0.0
        self._builder = ReportBuilder(name, on_event=self._annotate)

    def pass_on(self) -> None:
        """Log what has been added. The logger is opened with the first line."""
        for line in self._journal.lines():
            self._at = float(line["time"])
            if self._so_far is None:
                self._so_far = self._logger.open(self._name, self._at)
            if "event" in line or "command" in line:
                self._builder.line(line)
            else:
                self._log(line, self._so_far)
                # Events need the step alone, and curves of all metrics cost time.
                self._builder.line({"time": line["time"], "step": line["step"]})
        if self._so_far is not None:
            self._logger.flush()

    def _log(self, line: Line, so_far: LoggedSoFar) -> None:
        step = int(line["step"])
        new = {
            name: float(value)
            for name, value in line.items()
            if name not in ("time", "step")
            and isinstance(value, int | float)
            and step > max(so_far.last_step(name), self._steps.get(name, -1))
        }
        if new:
            self._logger.log(self._at, step, new)
            self._steps |= dict.fromkeys(new, step)

    def _annotate(self, event: RunEvent) -> None:
        if self._so_far is not None and self._at > self._so_far.events_until:
            took = "" if event.seconds is None else f" ({event.seconds:.2f} s)"
            self._logger.annotate(self._at, event.step, f"{event.kind}: {event.text}{took}")


def _warn_of(logger: Any, error: Exception) -> None:
    """Warn that a logger raised `error`. Identical warnings are shown once."""
    what = "".join(traceback.format_exception_only(error)).strip()
    name = getattr(logger, "__name__", type(logger).__name__)
    warnings.warn(
        f"the logger {name!r} raised {what}; training continues, and the logger is called again "
        f"with the next record\n{''.join(traceback.format_exception(error))}",
        stacklevel=3,
    )
