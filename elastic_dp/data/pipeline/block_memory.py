"""Which row groups are needed, which are in memory, and what to read or drop next. No threads.

Three things always hold:

- The bytes of decoded row groups plus the estimates of those being read stay within the budget,
  unless an estimate was too low.
- A row group that is not needed any more is dropped. With `keep`, it stays until its memory is
  needed, for orders that come back to it.
- The key that comes first gets memory. Row groups that are needed later are dropped for it, and
  read again. Row groups are dropped one by one, so that no key waits forever, however small the
  budget is, as long as each single row group fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.data.columns.arrow_arrays import Column
from elastic_dp.data.pipeline.row_groups import RowGroups

Key = tuple[int, ...]  # identifies a consumer of row groups; smaller keys come first
Columns = Mapping[str, Column]


@dataclass(slots=True, eq=False)
class Block:
    """A row group that is needed, being read, or in memory.

    `lent`: a consumer has the content, and nobody else may see it. `pins`: number of consumers that
    copy rows from it.
    """

    number: int
    nbytes: int  # an estimate until it is in memory
    uses: set[Key] = field(default_factory=set)
    queued_at: Key | None = None
    reading: bool = False
    lent: bool = False
    content: Columns | Exception | None = None
    pins: int = 0


class BlockMemory:
    """`waiting`: the keys of consumers that wait for a row group, and have none."""

    def __init__(self, row_groups: RowGroups | None, limit: int, keep: bool) -> None:
        self._row_groups, self._keep = row_groups, keep
        self.limit = limit
        self.held = 0  # bytes decoded or being read
        self.needed = 0  # bytes of all that are needed, in memory or not
        self.evicted = 0  # row groups dropped although they were still needed
        self.waiting: set[Key] = set()
        self._blocks: dict[int, Block] = {}
        self._needs: dict[Key, set[int]] = {}
        self._queue: list[tuple[Key, int]] = []  # unread row groups by their first key; a heap
        self._unneeded: dict[int, None] = {}  # in memory, but not needed; oldest first
        self._in_flight = self._in_use = 0

    # ------------------------------------------------------------------------------------- needs

    def add(self, key: Key, numbers: Iterable[int]) -> None:
        needs = self._needs.setdefault(key, set())
        for number in numbers:
            needs.add(number)
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = Block(number, self._bytes(number))
            if not block.uses:
                self.needed += block.nbytes
            block.uses.add(key)
            self._unneeded.pop(number, None)
            self._enqueue(block, key)

    def forget(self, key: Key) -> None:
        """The key needs nothing any more."""
        self.waiting.discard(key)
        for number in list(self._needs.get(key, ())):
            self._remove(key, self._blocks[number])

    def content(self, number: int) -> Columns | Exception | None:
        """None: it is not in memory, or lent."""
        block = self._blocks.get(number)
        return None if block is None else block.content

    def lend(self, key: Key, number: int, alone: bool) -> tuple[Any, int] | None:
        """A row group that is in memory, until `give_back`.

        Returns the content, and its bytes if the consumer may keep it, since nothing else needs it.
        `alone`: nobody else may have it meanwhile; None if somebody has.
        """
        block = self._blocks[number]
        if alone and block.pins:
            return None
        content, may_keep = block.content, not (self._keep or block.pins or block.uses - {key})
        if alone or may_keep:
            block.lent, block.content = True, None  # the consumer has the only reference
        else:
            block.pins += 1
        self._in_use += 1
        return content, block.nbytes if may_keep else 0

    def give_back(self, key: Key, number: int, content: Any) -> None:
        """The rows are copied: `key` does not need the row group any more. `content`: None if the
        consumer keeps it; otherwise it takes the place of what was lent alone."""
        block = self._blocks[number]
        self._in_use -= 1
        if block.lent:
            block.lent, block.content = False, content
        else:
            block.pins -= 1
        if content is None:
            self.held -= block.nbytes
        self._remove(key, block)
        if content is None and block.uses:
            self._estimate(block)
            self._enqueue(block, min(block.uses))

    def unread(self, number: int) -> None:
        """Drops the content of a row group that is still needed, and queues it again."""
        block = self._blocks[number]
        self.held -= block.nbytes
        block.content = None
        self._estimate(block)
        self._enqueue(block, min(block.uses))

    def release(self, key: Key, number: int) -> None:
        """`key` does not need the row group any more."""
        self._remove(key, self._blocks[number])

    def _estimate(self, block: Block) -> None:
        nbytes = self._bytes(block.number)
        self.needed += nbytes - block.nbytes
        block.nbytes, block.queued_at = nbytes, None

    def _enqueue(self, block: Block, key: Key) -> None:
        if block.content is not None or block.reading or block.lent:
            return
        if block.queued_at is None or key < block.queued_at:
            block.queued_at = key
            heapq.heappush(self._queue, (key, block.number))

    def _remove(self, key: Key, block: Block) -> None:
        needs = self._needs.get(key, set())
        needs.discard(block.number)
        if not needs:
            self._needs.pop(key, None)
        if key in block.uses:
            block.uses.discard(key)
            if not block.uses:
                self.needed -= block.nbytes
        if not (block.uses or block.reading or block.lent or block.pins):
            self._let_go(block)

    def _let_go(self, block: Block) -> None:
        if self._keep and isinstance(block.content, dict):
            self._unneeded[block.number] = None
        else:
            self._drop(block)

    def _drop(self, block: Block) -> None:
        if block.content is not None:
            self.held -= block.nbytes
        self._unneeded.pop(block.number, None)
        del self._blocks[block.number]

    # ------------------------------------------------------------------------------------ reading

    def next_to_read(self) -> int | None:
        """The unread row group that is needed first; None if there is no memory for it."""
        while self._queue:
            key, number = heapq.heappop(self._queue)
            block = self._blocks.get(number)
            if block is None or block.reading or block.lent or block.content is not None:
                continue
            if key not in block.uses:
                if block.uses:
                    heapq.heappush(self._queue, (min(block.uses), number))
                continue
            size = self._reading_bytes(number)
            if not self._make_room(size, key):
                heapq.heappush(self._queue, (key, number))
                return None
            block.queued_at, block.reading = None, True
            self._in_flight += 1
            self.held += size
            return number
        return None

    def landed(self, number: int, content: Columns | Exception, nbytes: int) -> None:
        """A read ended, with `content` of `nbytes` bytes, or with an exception."""
        block = self._blocks[number]
        self._in_flight -= 1
        self.held += nbytes - self._reading_bytes(number)
        if block.uses:
            self.needed += nbytes - block.nbytes
        block.reading, block.content, block.nbytes = False, content, nbytes
        if not block.uses:
            self._let_go(block)

    def _bytes(self, number: int) -> int:
        assert self._row_groups is not None
        return int(self._row_groups.nbytes[number])

    def _reading_bytes(self, number: int) -> int:
        assert self._row_groups is not None
        return int(self._row_groups.reading_bytes[number])

    def _make_room(self, nbytes: int, key: Key) -> bool:
        """Drops row groups until there is room for `nbytes` that `key` needs. Returns whether that
        can be read now: also one that does not fit although nothing can be dropped."""
        while self.held + nbytes > self.limit:
            victim = self._victim(key)
            if victim is None:
                return self._is_stuck(key) and next(self._evictable(), None) is None
            if victim.uses:
                self.evicted += 1
                self.unread(victim.number)
            else:
                self._drop(victim)
        return True

    def _victim(self, key: Key) -> Block | None:
        """The row group to drop next for `key`: first one that is not needed; then, if a consumer
        waits for `key`, the one that is needed last; and if `key` comes first of all and no memory
        will be freed, any one that it does not need itself."""
        if self._unneeded:
            return self._blocks[next(iter(self._unneeded))]
        if not self.waiting or key > max(self.waiting):
            return None  # nobody waits for it yet
        here = list(self._evictable())
        latest = max(here, key=lambda block: min(block.uses), default=None)
        if latest is not None and min(latest.uses) > key:
            return latest
        if not self._is_stuck(key):
            return None
        return next((block for block in here if key not in block.uses), None)

    def _is_stuck(self, key: Key) -> bool:
        """Whether `key` is the first that is waited for, and no read or copy in progress will free
        memory for it."""
        if self._in_flight or self._in_use or not self.waiting:
            return False
        return key == min(self.waiting)

    def _evictable(self) -> Iterator[Block]:
        blocks = self._blocks.values()
        return (b for b in blocks if b.uses and isinstance(b.content, dict) and not b.pins)
