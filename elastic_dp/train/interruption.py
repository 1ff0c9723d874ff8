"""Words and rules for runs that end before their last step: a time limit, Ctrl-C, SIGTERM. Who
handles the signals: cluster/console.py, and train/local_run.py without Ray."""

from __future__ import annotations

import signal
import threading
from typing import Any

TIME_IS_UP = "max_time_s reached"
INTERRUPTED_REASON = "interrupted"  # of a run that ends with its driver
INTERRUPTED = "stopping after this step, with a checkpoint; press Ctrl-C again to end at once"

NO_HANDLERS = (
    "the train function(ctx) sets a signal handler, and it does not run in the main thread of a "
    "worker: set handlers in the script that calls fit(). To end a run, send the script a SIGTERM "
    "or call ctx.stop(reason); for a checkpoint, ctx.checkpoint()"
)


def is_ours_to_handle(number: signal.Signals) -> bool:
    """Returns whether to handle this signal: in the main thread, unless the script has a handler of
    its own. Ray installs a handler that exits at once; it does not count."""
    if threading.current_thread() is not threading.main_thread():
        return False
    present = signal.getsignal(number)
    plain = present in (signal.SIG_DFL, signal.default_int_handler)
    return plain or getattr(present, "__module__", "").startswith("ray.")


def handlers() -> dict[signal.Signals, Any]:
    """Returns the present handler of each signal."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}
