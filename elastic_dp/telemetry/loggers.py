"""Calls the user's loggers. Each gets every record, and none can end a run or stop a client.

A service that is unavailable for a moment is no reason to lose days of training. So an exception in
a logger becomes a warning with its traceback, and the logger is called again with the next record.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Logger = Callable[[Mapping[str, Any]], None]


def log_to(loggers: Sequence[Logger], record: Mapping[str, Any]) -> None:
    """Call each logger with `record`. Exceptions become warnings."""
    for logger in loggers:
        try:
            logger(record)
        except Exception as error:  # the user's own code
            warn_of(logger, error)


def warn_of(logger: Any, error: Exception) -> None:
    """Warn that a logger raised `error`. Identical warnings are shown once."""
    what = "".join(traceback.format_exception_only(error)).strip()
    name = getattr(logger, "__name__", type(logger).__name__)
    warnings.warn(
        f"the logger {name!r} raised {what}; training continues, and the logger is called again "
        f"with the next record\n{''.join(traceback.format_exception(error))}",
        stacklevel=3,
    )
