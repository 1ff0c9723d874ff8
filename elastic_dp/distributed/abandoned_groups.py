"""Drops abandoned groups on threads of their own, since dropping one with a stuck operation blocks.

Each rests first: Gloo's destructor takes about 4 ms for every peer and holds the GIL, which would
add to the pause of the next generation. But what is in flight keeps its buffers until all members
have dropped the group. So nothing rests where the buffers are large, or where memory is short.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from elastic_dp.threads import background

REST_S = 3.0  # from the end of a group until it is dropped
_LOOK_AGAIN_S = 0.005

# A backend, its operations in flight, which keep their buffers, and what else it needs.
Abandoned = tuple[Any, Collection[Any], Any]


class AbandonedGroups:
    """Takes groups that nobody uses any more. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of the groups that are not gone yet: what ends its rest, and the thread that drops it. One
        # thread each: a group that is stuck for hours must not delay the next ones.
        self._dropping: list[tuple[threading.Event, threading.Thread]] = []
        self._one_has_gone = False  # since `drop` was called last

    def add(self, handed: list[Abandoned]) -> None:
        """Takes the one group out of this list, of which the caller keeps nothing else."""
        if handed[0][0] is None:
            return
        rested = threading.Event()
        thread = background("drop-group", partial(_drop, handed, rested))
        with self._lock:
            self._forget_gone()
            thread.start()
            self._dropping.append((rested, thread))

    def drop(self, limit_s: float, waits: Callable[[], bool]) -> bool:
        """Ends the rest of all, and waits until they are gone: as long as `waits` says so, which
        may raise, and for `limit_s`. Returns whether one has gone, by now or since the last call.
        """
        with self._lock:
            dropping = list(self._dropping)
        for rested, _ in dropping:
            rested.set()
        until = time.monotonic() + limit_s
        for _, thread in dropping:
            while thread.is_alive() and time.monotonic() < until and waits():
                thread.join(_LOOK_AGAIN_S)
        with self._lock:
            self._forget_gone()
            told, self._one_has_gone = self._one_has_gone, False
        return told

    def _forget_gone(self) -> None:
        left = [one for one in self._dropping if one[1].is_alive()]
        self._one_has_gone |= len(left) < len(self._dropping)
        self._dropping = left


def _drop(handed: list[Abandoned], rested: threading.Event) -> None:
    _backend, operations, _store = handed.pop()
    rested.wait(REST_S)
    for operation in operations:
        with contextlib.suppress(RuntimeError):
            operation.work.wait()
