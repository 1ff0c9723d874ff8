"""How long tests wait for what must happen: far longer than it takes, since a machine may be busy
with others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 150.0  # and never a matter of how fast the machine is
T = TypeVar("T")


def eventually(
    condition: Callable[[], T], told: Callable[[], object] = lambda: "", every_s: float = 0.01
) -> T:
    """What `condition` gives once it holds. `told()` is said where it never does. A look that takes
    long is taken less often than every `every_s`: else it keeps the processor from what it waits
    for."""
    until = (looked := time.monotonic()) + PATIENCE_S
    while not (found := condition()):
        now = time.monotonic()
        assert now < until, told()
        time.sleep(min(0.1, max(every_s, 4 * (now - looked))))
        looked = time.monotonic()
    return found


class Stalls:
    """What a busy machine takes from one who only sleeps, moment by moment: no deadline that a test
    measures can be kept better. `with Stalls() as stalls: … stalls.lost_s`"""

    def __enter__(self) -> Stalls:
        self.lost_s, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            self.lost_s += time.monotonic() - began - 0.01
