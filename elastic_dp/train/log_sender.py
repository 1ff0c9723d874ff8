"""Messages on their way to the controller. Calls of ctx.log are sent several at a time.

A message costs the training thread the time to write it, and it wakes threads of both processes.
Nothing is lost by waiting. A call is sent before every later message of this worker. What a worker
had not sent when it died, the others have logged as well, or the run goes back to a checkpoint that
was reported after all calls before it.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_dp.coordinator.messages import Event, WorkerId
from elastic_dp.distributed.rendezvous import MemberRecord
from elastic_dp.threads import background
from elastic_dp.train.controller_link import ControllerLink
from elastic_dp.train.generations.worker_progress import LogCall

if TYPE_CHECKING:
    from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs

GATHER_S = 0.4  # how long a call waits for others


class LoggedCall(NamedTuple):
    """A call of ctx.log. `previous` is the call before it, if it is known; `logged_at` is of the
    worker's `time.monotonic`."""

    call: LogCall
    previous: LogCall | None
    metrics: Mapping[str, Any]
    logged_at: float


class MessageLink(ControllerLink):
    """A link whose messages are calls of methods of the controller. Any thread may call it."""

    def __init__(self) -> None:
        self._holding, self._sending = threading.Lock(), threading.Lock()
        self._held: list[LoggedCall] = []
        self._holds_some = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _call(self, method: str, *content: Any) -> None:
        """Have the controller call this method of its own. Does not wait, and never fails."""

    def _send_logs(self, calls: Sequence[LoggedCall]) -> None:
        self._call("log_all", calls, time.monotonic())

    def log(self, call: LogCall, previous: LogCall | None, metrics: Mapping[str, Any]) -> None:
        with self._holding:
            self._held.append(LoggedCall(call, previous, dict(metrics), time.monotonic()))
            if len(self._held) == 1:
                self._holds_some.set()
            if self._thread is None:
                self._thread = background("metrics", self._run)
                self._thread.start()

    def flush(self) -> None:
        """Send what is held. Returns when it is sent, also if another thread does it."""
        with self._sending:
            with self._holding:
                held, self._held = self._held, []
                self._holds_some.clear()
            if held:
                self._send_logs(held)

    def register(self, record: MemberRecord) -> None:
        self._call("register", record)  # nothing logged follows from it

    def post(self, event: Event) -> None:
        self._after_logs("post", event)

    def say(self, text: str) -> None:
        self._after_logs("say", text)

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        self._after_logs("wrote", worker, written)

    def skipped(self, row_groups: Sequence[str]) -> None:
        self._after_logs("skipped", tuple(row_groups))

    def _after_logs(self, method: str, *content: Any) -> None:
        self.flush()
        self._call(method, *content)

    def _run(self) -> None:
        while True:
            self._holds_some.wait()
            time.sleep(GATHER_S)
            self.flush()
