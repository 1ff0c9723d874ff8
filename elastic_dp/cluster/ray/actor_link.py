"""The link from a worker to its controller: actor calls that are not waited for.

While the controller restarts, posted messages are lost, and the coordinator asks again for what it
needs. Metrics are buffered here. Each controller has a term. Logged metrics carry the term that
this worker knows, and a controller ignores those of another term. A new controller says how far its
record goes, and is sent the rest first, in order. Some of that may be lost, too, if this process
has not heard yet that the controller has a new address. So each logged call names the call before
it: a controller that lacks that one asks the workers once more. No metric is recorded twice, and
none is lost as long as one worker that logged it lives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.generations.worker_progress import LogCall
from elastic_dp.train.log_sender import LoggedCall, MessageLink

_REMEMBERED = 10_000  # buffered calls of ctx.log


class ActorLink(MessageLink):
    """The link to a controller that is an actor."""

    def __init__(self, controller: Any, term: int) -> None:
        super().__init__()
        self._controller, self._term = controller, term
        self._lock = threading.Lock()
        self._logged: deque[LoggedCall] = deque(maxlen=_REMEMBERED)  # and sent
        self._recorded: LogCall = (0, 0)  # as far as a controller has said
        self._written: tuple[WorkerId, WrittenBlobs] | None = None

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        with self._lock:
            self._written = worker, written
        super().wrote(worker, written)

    def serve(self, term: int, logged_to: LogCall) -> None:
        """Send a controller what it lacks: its record ends with `logged_to`."""
        with self._lock:
            self._term, self._recorded = term, logged_to
            self._resend()

    def resend(self) -> None:
        """Send again what the controller may lack."""
        self.flush()
        with self._lock:
            self._resend()

    def _send_logs(self, calls: Sequence[LoggedCall]) -> None:
        with self._lock:
            self._logged.extend(calls)
            self._log_all(calls)

    def _resend(self) -> None:
        if calls := [call for call in self._logged if call.call > self._recorded]:
            self._log_all(calls)
        # parts of the newest checkpoint, which may not be committed
        if self._written is not None:
            self._call("wrote", *self._written)

    def _log_all(self, calls: Sequence[LoggedCall]) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._controller.log_all.remote(self._term, calls, time.monotonic())

    def _call(self, method: str, *content: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._controller.tell.remote(method, *content)
