"""A queue whose reader takes all items at once, a few times a second.

Each wakeup of a thread takes processor time from the training beside it, and a run may log a
thousand steps a second. So an item wakes the reader only if it is urgent or the first one.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BatchQueue(Generic[Item]):
    """Any thread may put items. One thread takes them, in their order."""

    def __init__(self, gather_s: float) -> None:
        """`gather_s`: how long an item that is not urgent waits for others."""
        self._gather_s = gather_s
        self._changed = threading.Condition()
        self._items: list[Item] = []
        self._urgent = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, *, urgent: bool) -> None:
        """Add an item. An urgent one is taken at once, with all before it."""
        with self._changed:
            self._items.append(item)
            if (urgent and not self._urgent) or len(self._items) == 1:
                self._urgent |= urgent
                self._changed.notify()

    def take(self, timeout_s: float | None = None) -> list[Item]:
        """Return all items. Waits for one, up to `timeout_s` (None: for ever)."""
        with self._changed:
            if self._changed.wait_for(lambda: bool(self._items), timeout=timeout_s):
                self._changed.wait_for(lambda: self._urgent, timeout=self._gather_s)
            items, self._items, self._urgent = self._items, [], False
            return items
