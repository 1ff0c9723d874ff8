"""Calls of ctx.log on their way to the controller: several are sent together, a few times a second.

A message costs the training thread the time to write it, and it wakes threads of both processes.
Nothing is lost by waiting. A call is sent before every later message of this worker. What a worker
had not sent when it died, the others have logged as well, or the run goes back to a checkpoint that
was reported after all calls before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from elastic_dp.threads import background
from elastic_dp.train.generations.worker_progress import LogCall

GATHER_S = 0.4  # how long a call waits for others


class LoggedCall(NamedTuple):
    """A call of ctx.log. `previous` is the call before it, if it is known; `logged_at` is of the
    worker's `time.monotonic`."""

    call: LogCall
    previous: LogCall | None
    metrics: Mapping[str, Any]
    logged_at: float


class LogSender:
    """Collects calls and passes them to `send`, in their order. Any thread may call it."""

    def __init__(self, send: Callable[[Sequence[LoggedCall]], None]) -> None:
        self._send = send
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._held: list[LoggedCall] = []
        self._holds_some = threading.Event()
        self._thread: threading.Thread | None = None

    def log(self, call: LogCall, previous: LogCall | None, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            self._held.append(LoggedCall(call, previous, dict(metrics), time.monotonic()))
            if len(self._held) == 1:
                self._holds_some.set()
            if self._thread is None:
                self._thread = background("metrics", self._run)
                self._thread.start()

    def flush(self) -> None:
        """Send what is held. Returns when it is sent, also if another thread does it."""
        with self._sending:
            with self._lock:
                held, self._held = self._held, []
                self._holds_some.clear()
            if held:
                self._send(held)

    def _run(self) -> None:
        while True:
            self._holds_some.wait()
            time.sleep(GATHER_S)
            self.flush()
