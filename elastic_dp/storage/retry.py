"""The one loop in which storage is tried again, and what is told and counted of it.

- A fault that may pass is tried again after a growing, random pause, or the one that the server
  asked for.
- A call that has gone `timeout_s` without success raises, or, with someone to tell, tells once and
  goes on. While several calls wait there is one message for all, and one when the last of them is
  through.
- What is raised is raised outside of any `except`: its cause and its context hold no foreign text.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from elastic_dp.errors import FileDamaged, StorageError
from elastic_dp.storage.error_classes import Fault, Kind, ObjectMissing, ObjectRewritten, fault_of

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_RETRY_AFTER_S = 60.0
# A cache that serves an old copy gets this many more chances; then the object is another one.
STALE_TRIES = 4
_chance = random.SystemRandom()  # not what user code draws from, nor alike in all forks


@dataclass
class StoreCounts:
    """Since the store was opened. `requests`: retried ones included. `wait_s`: failed requests and
    the pauses after them, added up over all threads."""

    requests: int = 0
    retries: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    wait_s: float = 0.0


@dataclass
class _Call:
    what: str  # "read part-0.parquet"
    stale_tries: int
    began: float
    failures: int = 0
    stale: int = 0
    told: bool = False


class Retry:
    """Of one store, for all its threads. `clean` takes credentials out of a text; `name` is the
    store's."""

    def __init__(
        self,
        name: str,
        clean: Callable[[str], str],
        timeout_s: float,
        on_wait: Callable[[str], None] | None,
    ) -> None:
        self._name, self._clean = name, clean
        self._timeout_s, self._on_wait = timeout_s, on_wait
        self._counts = StoreCounts()
        self._counting = threading.Lock()
        self._waiting = 0  # calls that have told of themselves
        self._telling = threading.Lock()
        self._closed = threading.Event()

    @property
    def counts(self) -> StoreCounts:
        with self._counting:
            return replace(self._counts)

    def run(self, what: str, attempt: Callable[[], T], *, stale_tries: int = 0) -> T:
        """What `attempt` returns in the end. Raises StorageError (ObjectMissing, ObjectRewritten)
        or FileExistsError."""
        call = _Call(what, stale_tries, time.monotonic())
        try:
            while True:
                results, fault = self._try_once(attempt)
                if fault is None:
                    return results[0]
                self._raise_if_final(call, fault)
                self._pause(call, fault)
        finally:
            if call.told:
                self._is_through()

    def moved(self, *, read: int = 0, written: int = 0) -> None:
        with self._counting:
            self._counts.bytes_read += read
            self._counts.bytes_written += written

    def close(self) -> None:
        """Calls that wait raise."""
        self._closed.set()

    def _try_once(self, attempt: Callable[[], T]) -> tuple[list[T], Fault | None]:
        with self._counting:
            self._counts.requests += 1
        began = time.monotonic()
        try:
            return [attempt()], None
        except (AssertionError, FileDamaged):  # a bug; what no retry can mend
            raise
        except Exception as error:  # the seam to foreign libraries: sorted in faults.py
            fault = fault_of(error)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no Exception
                raise
            fault = Fault(Kind.PERMANENT, f"a panic in the store's library: {error}")
        with self._counting:
            self._counts.wait_s += time.monotonic() - began
        return [], fault

    def _raise_if_final(self, call: _Call, fault: Fault) -> None:
        words = self._clean(f"cannot {call.what} of {self._name}: {fault.words}")
        if fault.kind is Kind.MISSING:
            raise ObjectMissing(words)
        if fault.kind is Kind.EXISTS:
            raise FileExistsError(words)
        if fault.kind is Kind.PERMANENT:
            raise StorageError(words)
        call.stale += fault.kind is Kind.OTHER_VERSION
        if call.stale > call.stale_tries:
            raise ObjectRewritten(words)
        if self._closed.is_set():
            raise StorageError(f"{words} (and the store was closed)")
        if time.monotonic() - call.began < self._timeout_s:
            return
        if self._on_wait is None:
            raise StorageError(f"{words} (tried for {self._timeout_s:g} s)")
        if not call.told:
            call.told = True
            self._tell(self._on_wait, words)

    def _pause(self, call: _Call, fault: Fault) -> None:
        pause = min(FIRST_PAUSE_S * 2**call.failures, LONGEST_PAUSE_S) * _chance.uniform(0.5, 1.0)
        pause = max(pause, min(fault.retry_after_s, LONGEST_RETRY_AFTER_S))
        call.failures = min(call.failures + 1, 30)
        if not call.told:  # one more try just when the time is up
            pause = min(pause, max(0.0, call.began + self._timeout_s - time.monotonic()))
        with self._counting:
            self._counts.retries += 1
            self._counts.wait_s += pause
        self._closed.wait(pause)

    def _tell(self, on_wait: Callable[[str], None], words: str) -> None:
        with self._telling:
            self._waiting += 1
            if self._waiting == 1:
                on_wait(f"{words}; tried for {self._timeout_s:g} s, and going on until it is back")

    def _is_through(self) -> None:
        with self._telling:
            self._waiting -= 1
            if self._waiting == 0 and self._on_wait is not None and not self._closed.is_set():
                self._on_wait(f"{self._name} is back")
