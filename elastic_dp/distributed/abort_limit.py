"""Aborts communicators of devices on threads of their own, in a limited time.

NCCL may block in an abort for as long as it likes. A process in which that happens cannot be
trusted with its device any more, so it ends, and counts as a lost worker.

The limit leaves time for what the device was given before, such as a long micro-batch: an abort
frees memory, and CUDA may do that only when the kernels of all streams have ended.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from elastic_dp.threads import background

ABORT_LIMIT_S = 60.0
_EXIT_CODE = 70  # of a process whose device has failed (EX_SOFTWARE)


def abort_in_background(abort: Callable[[], None], limit_s: float | None = None) -> None:
    """Returns at once. The process ends if `abort` takes longer than the limit."""
    limit_s = ABORT_LIMIT_S if limit_s is None else limit_s
    ended = threading.Event()

    def run() -> None:
        try:
            abort()
        except RuntimeError as error:  # of a device that has failed: its worker is about to end
            print(f"aborting a communicator: {error}", file=sys.stderr, flush=True)
        finally:
            ended.set()

    def watch() -> None:
        if not ended.wait(limit_s):
            end_process(f"aborting a communicator has taken more than {limit_s:g} s")

    background("abort", run).start()
    background("abort-limit", watch).start()


def end_process(why: str) -> None:
    """Ends this process, whose device cannot be used any more."""
    print(f"{why}; this worker ends", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)
