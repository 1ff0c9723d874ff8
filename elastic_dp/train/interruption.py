"""How a run is ended from outside before its last step: its time is up, Ctrl-C, SIGTERM."""

from __future__ import annotations

import signal
import threading

TIME_IS_UP = "max_time_s reached"
INTERRUPTED = "stopping after this step, with a checkpoint; press Ctrl-C again to end at once"


def is_ours_to_handle(number: signal.Signals) -> bool:
    """In the main thread, where the script has not set a handler of its own. (Ray sets one, which
    exits at once.)"""
    if threading.current_thread() is not threading.main_thread():
        return False
    present = signal.getsignal(number)
    plain = present in (signal.SIG_DFL, signal.default_int_handler)
    return plain or getattr(present, "__module__", "").startswith("ray.")
