"""Calls the user's loggers. Each gets every record, and none can end a run or stop a client.

A logger is a function of a record (a dict with `step` and metrics). A `RunLogger` is also told of
the events of the run, in words, and of its end.

A service that is unavailable for a moment is no reason to lose days of training. So an exception in
a logger becomes a warning with its traceback, and the logger is called again with the next record.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_dp.telemetry.progress import words_of

Logger = Callable[[Mapping[str, Any]], None]


class RunLogger:
    """A logger that is told more than records. Methods do nothing here."""

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record: `step`, `time` (of `time.time`) and metrics."""

    def event(self, text: str, step: int, at: float) -> None:
        """Take an event that came after `step`, at that time (of `time.time`)."""

    def close(self) -> None:
        """Write what is left: the run has ended, or this process no longer waits for it."""


def log_to(loggers: Sequence[Logger], record: Mapping[str, Any]) -> None:
    """Call each logger with `record`. Exceptions become warnings."""
    for logger in loggers:
        _call(logger, logger, record)


def tell_loggers(loggers: Sequence[Logger], line: Mapping[str, Any], step: int) -> None:
    """Call `event` of each `RunLogger`, if this line of the journal is worth a note."""
    text = words_of(line)
    for logger in loggers if text else ():
        if isinstance(logger, RunLogger):
            _call(logger, logger.event, text, step, line.get("time", time.time()))


def close_loggers(loggers: Sequence[Logger]) -> None:
    """Call `close` of each `RunLogger`."""
    for logger in loggers:
        if isinstance(logger, RunLogger):
            _call(logger, logger.close)


def _call(logger: Logger, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception as error:  # the user's own code
        what = traceback.format_exception_only(error)[-1].strip()
        warnings.warn(  # identical warnings are shown once
            f"the logger {getattr(logger, '__name__', logger)!r} raised {what}; training "
            f"continues, and the logger is called again with the next record\n"
            f"{traceback.format_exc()}",
            stacklevel=2,
        )
