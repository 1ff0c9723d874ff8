"""Drops abandoned groups on threads of their own, since dropping one with a stuck operation blocks.

Each rests first: Gloo's destructor takes about 4 ms for every peer and holds the GIL, which would
add to the pause of the next generation.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from elastic_dp.threads import background

REST_S = 3.0  # from the end of a group until it is dropped

# A backend, its operations in flight, which keep their buffers, and what else it needs.
Abandoned = tuple[Any, Collection[Any], Any]


class AbandonedGroups:
    """Takes groups that nobody uses any more. Any thread may call `add`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Abandoned] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, abandoned: Abandoned) -> None:
        if abandoned[0] is None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = background("abandoned-groups", self._drop_in_turn)
                self._thread.start()
        self._waiting.put(abandoned)

    def _drop_in_turn(self) -> None:
        while True:
            abandoned = self._waiting.get()
            # One thread each: a group that is stuck for hours must not delay the next ones.
            background("drop-group", partial(_drop, abandoned)).start()
            del abandoned


def _drop(abandoned: Abandoned) -> None:
    _backend, operations, _store = abandoned
    time.sleep(REST_S)
    for operation in operations:
        with contextlib.suppress(RuntimeError):
            operation.work.wait()
