"""The one loop that retries storage requests, reports delays, and counts requests.

- A transient fault is retried after a growing, random pause.
- A call without success for `timeout_s` raises or, with `on_wait`, reports once and continues.
  While several calls wait there is one message for all, and one when the last of them succeeds.
- Errors are raised outside of any `except`: their cause and context hold no foreign text.
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
# Retries for a cache that serves an old copy; after them the object counts as rewritten.
STALE_TRIES = 4
_on_retry: list[Callable[[], None]] = []
_chance = random.SystemRandom()  # independent of user code, and different in each fork


def on_retry(tell: Callable[[], None]) -> None:
    """Calls `tell` at each retry of any store of this process, on the thread that waits."""
    _on_retry.append(tell)


@dataclass
class StoreCounts:
    """Counts since the store was opened.

    `requests` includes retries.
    """

    requests: int = 0
    retries: int = 0
    bytes_read: int = 0


@dataclass
class _Call:
    what: str  # "read part-0.parquet"
    stale_tries: int
    began: float
    failures: int = 0
    stale: int = 0
    told: bool = False


class Retry:
    """The retries of one store, for all its threads. `clean` removes credentials from a text."""

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
        self._waiting = 0  # calls that have reported a delay
        self._telling = threading.Lock()
        self._closed = threading.Event()

    @property
    def counts(self) -> StoreCounts:
        with self._counting:
            return replace(self._counts)

    def run(self, what: str, attempt: Callable[[], T], *, stale_tries: int = 0) -> T:
        """Returns the result of `attempt` once it succeeds.

        Raises StorageError (ObjectMissing, ObjectRewritten) or FileExistsError.
        """
        call = _Call(what, stale_tries, time.monotonic())
        try:
            while True:
                results, fault = self._try_once(attempt)
                if fault is None:
                    return results[0]
                self._raise_if_final(call, fault)
                self._pause(call)
        finally:
            if call.told:
                self._is_through()

    def came(self, nbytes: int) -> None:
        with self._counting:
            self._counts.bytes_read += nbytes

    def raise_when_late(self) -> None:
        """From now on a call without success for `timeout_s` raises StorageError."""
        self._on_wait = None

    def close(self) -> None:
        """Makes calls that wait raise StorageError."""
        self._closed.set()

    def _try_once(self, attempt: Callable[[], T]) -> tuple[list[T], Fault | None]:
        with self._counting:
            self._counts.requests += 1
        try:
            return [attempt()], None
        except (AssertionError, FileDamaged):  # a bug, or damage that no retry can repair
            raise
        except Exception as error:  # from foreign libraries; error_classes.py classifies it
            fault = fault_of(error)
        except BaseException as error:
            if not is_panic(error):
                raise
            fault = Fault(Kind.PERMANENT, f"a panic in the store's library: {error}")
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

    def _pause(self, call: _Call) -> None:
        pause = min(FIRST_PAUSE_S * 2**call.failures, LONGEST_PAUSE_S) * _chance.uniform(0.5, 1.0)
        call.failures = min(call.failures + 1, 30)
        if not call.told:  # one more attempt when the time is up
            pause = min(pause, max(0.0, call.began + self._timeout_s - time.monotonic()))
        with self._counting:
            self._counts.retries += 1
        for tell in _on_retry:
            tell()
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


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic in Rust, which is not an Exception."""
    return type(error).__name__ == "PanicException"
