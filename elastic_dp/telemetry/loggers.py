"""The user's loggers: each gets every record, and none of them can end a run, or the following of
one.

A service that is away for a moment is no reason to lose days of training. So what a logger raises
is a warning, with its traceback, and the logger is called again with the next record.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Logger = Callable[[Mapping[str, Any]], None]


def log_to(loggers: Sequence[Logger], record: Mapping[str, Any]) -> None:
    for logger in loggers:
        try:
            logger(record)
        except Exception as error:  # the user's own code
            what = traceback.format_exception_only(error)[-1].strip()
            warnings.warn(  # the same words each time are shown once
                f"the logger {getattr(logger, '__name__', logger)!r} raised {what}; training "
                "goes on, and the logger "
                f"is called again with the next record\n{traceback.format_exc()}",
                stacklevel=2,
            )
