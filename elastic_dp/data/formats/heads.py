"""The bytes before a shard's first row group, which every row group of it is read with; kept, within a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict

from elastic_dp.data.formats.format import ShardAt, ShardKey

HEAD_BYTES_KEPT = 16 << 20


class Heads:
    """Thread safe. A head that several threads miss at once may be read more than once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[ShardKey, bytes] = OrderedDict()  # oldest use first
        self._bytes = 0

    def read(self, shard: ShardAt, end: int) -> bytes:
        with self._lock:
            if shard.key in self._kept:
                self._kept.move_to_end(shard.key)
                return self._kept[shard.key]
        head = bytes(shard.read(0, end))
        with self._lock:
            if shard.key not in self._kept:
                self._kept[shard.key] = head
                self._bytes += len(head)
            while self._bytes > HEAD_BYTES_KEPT and len(self._kept) > 1:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return head

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._bytes = 0
