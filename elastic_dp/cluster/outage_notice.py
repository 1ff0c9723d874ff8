"""Calls of Ray that are repeated for the whole life of a run, and may fail.

They fail while the head node is unavailable, and for ever if an upgrade of Ray changed what they
use. So an error ends nothing, and one that lasts is said, again and again.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from elastic_dp.threads import background

T = TypeVar("T")
_SAY_AFTER_S = 10.0  # a head node that restarts is back by then
_SAY_AGAIN_S = 600.0
_RETRY_S = 0.5


class OutageNotice:
    """Says that `what` fails once it has failed for 10 s, every 10 minutes from then on, and when
    it works again. Any thread may call it.
    """

    def __init__(
        self, what: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._say, self._clock = what, say, clock
        self._since: float | None = None
        self._say_at = 0.0

    def attempt(self, call: Callable[[], T]) -> T | None:
        """Return the answer of `call`, or None if it raises."""
        try:
            answer = call()
        except Exception as error:  # any error of Ray
            self._failed(error)
            return None
        since = self._since
        if since is not None and self._say_at > since + _SAY_AFTER_S:  # it was said
            self._say(f"{self._what} works again")
        self._since = None
        return answer

    def insist(self, call: Callable[[], T], gives_up: threading.Event | None = None) -> T | None:
        """Return the answer of `call`, which is repeated until it raises nothing, or it gives up:
        then None.
        """
        answers: list[T] = []
        while True:
            self.attempt(lambda: answers.append(call()))
            if answers:
                return answers[0]
            if gives_up is not None and gives_up.is_set():
                return None
            time.sleep(_RETRY_S)

    def watch(
        self, every_s: float, ended: threading.Event, *calls: Callable[[], object]
    ) -> threading.Thread:
        """Start a thread that attempts these calls at intervals, until it has `ended`."""

        def run() -> None:
            while not ended.wait(every_s):
                for call in calls:
                    self.attempt(call)

        thread = background(self._what, run)
        thread.start()
        return thread

    def _failed(self, error: Exception) -> None:
        now, since = self._clock(), self._since
        if since is None:
            self._since = since = now
            self._say_at = now + _SAY_AFTER_S
        if now >= self._say_at:
            self._say_at = now + _SAY_AGAIN_S
            at = traceback.extract_tb(error.__traceback__)[-1]
            self._say(
                f"{self._what} fails since {now - since:.0f} s: {type(error).__name__}: "
                f"{error} ({at.filename}:{at.lineno}). Either the head node of the cluster is "
                f"unavailable, or this version of Ray is not supported"
            )
