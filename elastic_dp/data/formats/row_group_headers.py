"""A cache of shard headers: bytes that are needed to decode any row group of a shard, such as the
header line of CSV, or the schema of Arrow."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from elastic_dp.data.formats.file_format import ShardAt, ShardKey

HEAD_BYTES_KEPT = 16 << 20


class RowGroupHeaders:
    """Keeps up to `HEAD_BYTES_KEPT`, the least recently used go first. Thread safe; threads that
    miss one header at the same time may each read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[ShardKey, bytes] = OrderedDict()  # oldest use first
        self._bytes = 0

    def read(
        self, shard: ShardAt, end: int, make: Callable[[ShardAt], bytes] | None = None
    ) -> bytes:
        """The first `end` bytes of the shard, or what `make(shard)` returns."""
        with self._lock:
            if shard.key in self._kept:
                self._kept.move_to_end(shard.key)
                return self._kept[shard.key]
        head = bytes(shard.read(0, end)) if make is None else make(shard)
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
