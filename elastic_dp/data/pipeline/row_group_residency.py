"""The state of a `RowGroupReader`, without its threads: which row groups are needed and which are
in memory. It decides what to read next, and what to drop for it.

The reader calls all methods under its lock. Three things always hold:

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from elastic_dp.data.columns.arrow_arrays import Column
from elastic_dp.data.pipeline.row_groups import RowGroups

Key = tuple[int, ...]  # identifies a consumer of row groups; smaller keys come first
Columns = Mapping[str, Column]


@dataclass(slots=True, eq=False)
class ResidentRowGroup:
    """A row group that is needed, being read, or in memory."""

    number: int
    nbytes: int  # an estimate until it is in memory
    uses: set[Key] = field(default_factory=set)
    queued_at: Key | None = None
    reading: bool = False
    content: Columns | Exception | None = None
    pins: int = 0  # number of consumers that are copying rows from it


class Room(Enum):
    """Whether a row group may be read now. NONE: not until memory is given back."""

    FREE = auto()
    NONE = auto()


@dataclass(slots=True)
class MemoryBudget:
    """Bytes of row groups. `held`: decoded or being read. `needed`: of all that are needed, in
    memory or not. `peak`: the largest value of `held`."""

    limit: int
    held: int = 0
    peak: int = 0
    needed: int = 0

    def take(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


class RowGroupResidency:
    def __init__(self, row_groups: RowGroups, memory_bytes: int, keep: bool) -> None:
        self._row_groups, self._keep = row_groups, keep
        self.budget = MemoryBudget(memory_bytes)
        self.evicted = 0  # row groups dropped although they were still needed
        self._freed = False  # whether memory was freed since the last `look`
        self.waiting: set[Key] = set()  # of which no row group is in memory
        self._groups: dict[int, ResidentRowGroup] = {}
        self._needs: dict[Key, set[int]] = {}
        self._queue: list[tuple[Key, int]] = []  # unread row groups by their first key; a heap
        self._unneeded: dict[int, None] = {}  # in memory, but not needed; oldest first
        self._in_flight = self._pinned = 0

    def __getitem__(self, number: int) -> ResidentRowGroup:
        return self._groups[number]

    def look(self) -> bool:
        """Whether there may be something to read: unread row groups, or memory that was freed since
        the last call."""
        found = bool(self._queue) or self._freed
        self._freed = False
        return found

    def clear(self) -> None:
        self._groups.clear()
        self._needs.clear()
        self._unneeded.clear()

    # ------------------------------------------------------------------------------------- needs

    def add(self, key: Key, groups: Sequence[int]) -> None:
        needs = self._needs.setdefault(key, set())
        for number in groups:
            if number in needs:
                continue
            needs.add(number)
            group = self._groups.get(number)
            if group is None:
                size = int(self._row_groups.nbytes[number])
                group = self._groups[number] = ResidentRowGroup(number, size)
            if not group.uses:
                self.budget.needed += group.nbytes
            group.uses.add(key)
            self._unneeded.pop(number, None)
            if group.content is None and not group.reading:
                self._enqueue(group, key)

    def forget(self, key: Key) -> None:
        for number in list(self._needs.get(key, ())):
            self._remove(key, number)

    def begin_waiting(self, key: Key) -> None:
        self.waiting.add(key)

    def end_waiting(self, key: Key) -> None:
        self.waiting.discard(key)

    def is_waited_for(self, group: ResidentRowGroup) -> bool:
        """Whether a `take` waits for a key that needs the row group."""
        return not self.waiting.isdisjoint(group.uses)

    def pin(self, groups: Sequence[ResidentRowGroup]) -> None:
        """Keeps these in memory while rows are copied from them."""
        for group in groups:
            group.pins += 1
        self._pinned += len(groups)

    def unpin(self, key: Key, number: int) -> None:
        """The rows are copied: `key` does not need the row group any more."""
        self._groups[number].pins -= 1
        self._pinned -= 1
        self._remove(key, number)

    def replace(self, number: int, content: Columns) -> None:
        """Replaces the content of a pinned row group; the bytes stay those that were counted."""
        self._groups[number].content = content

    def is_sole_user(self, key: Key, number: int) -> bool:
        """Whether only `key` needs a pinned row group, now and later."""
        group = self._groups[number]
        return not (self._keep or group.pins > 1 or group.uses - {key})

    def unread(self, group: ResidentRowGroup) -> None:
        """Drops the content of a row group that is still needed, and queues it again."""
        self.budget.held -= group.nbytes
        group.content, nbytes = None, int(self._row_groups.nbytes[group.number])
        self.budget.needed += nbytes - group.nbytes
        group.nbytes = nbytes
        group.queued_at = None
        self._enqueue(group, min(group.uses))

    def _enqueue(self, group: ResidentRowGroup, key: Key) -> None:
        if group.queued_at is None or key < group.queued_at:
            group.queued_at = key
            heapq.heappush(self._queue, (key, group.number))

    def _remove(self, key: Key, number: int) -> None:
        group, needs = self._groups[number], self._needs.get(key, set())
        needs.discard(number)
        if not needs:
            self._needs.pop(key, None)
        if key in group.uses:
            group.uses.discard(key)
            if not group.uses:
                self.budget.needed -= group.nbytes
        if not group.uses:
            self._let_go(group)

    def _let_go(self, group: ResidentRowGroup) -> None:
        if group.reading or group.pins:
            return  # decided when it is read, or unpinned
        if self._keep and isinstance(group.content, dict):
            self._unneeded[group.number] = None
        else:
            self._drop(group)

    def _drop(self, group: ResidentRowGroup) -> None:
        if group.content is not None:
            self.budget.held -= group.nbytes
            group.content, self._freed = None, True  # a waiting `take` may still refer to the group
        self._unneeded.pop(group.number, None)
        del self._groups[group.number]

    # ------------------------------------------------------------------------------------ reading

    def next_to_read(self) -> ResidentRowGroup | None:
        """The unread row group that is needed first; None if there is no memory for it."""
        while self._queue:
            key, number = heapq.heappop(self._queue)
            group = self._groups.get(number)
            if group is None or group.reading or group.content is not None:
                continue
            if key not in group.uses:
                heapq.heappush(self._queue, (min(group.uses), number))
                continue
            size = self._reading_bytes(group)
            while isinstance(room := self._room(size, key), ResidentRowGroup):
                self._evict(room)
            if room is Room.NONE:
                heapq.heappush(self._queue, (key, number))
                return None
            group.queued_at, group.reading = None, True
            self._in_flight += 1
            self.budget.take(size)
            return group
        return None

    def landed(self, group: ResidentRowGroup, content: Columns | Exception, nbytes: int) -> None:
        """A read ended, with `content` of `nbytes` bytes, or with an exception."""
        self._in_flight -= 1
        self.budget.take(nbytes - self._reading_bytes(group))
        if group.uses:
            self.budget.needed += nbytes - group.nbytes
        group.reading, group.content, group.nbytes = False, content, nbytes
        if not group.uses:
            self._let_go(group)

    def _reading_bytes(self, group: ResidentRowGroup) -> int:
        return int(self._row_groups.reading_bytes[group.number])

    def _room(self, nbytes: int, key: Key) -> Room | ResidentRowGroup:
        """Whether there is room for `nbytes` that `key` needs, or the row group to drop first.
        Changes nothing."""
        if self.budget.held + nbytes <= self.budget.limit:
            return Room.FREE
        victim = self._victim(key)
        if victim is not None:
            return victim
        return Room.FREE if self._never_fits(key) else Room.NONE

    def _evict(self, victim: ResidentRowGroup) -> None:
        if victim.uses:
            self.evicted += 1
            self.unread(victim)
        else:
            self._drop(victim)

    def _victim(self, key: Key) -> ResidentRowGroup | None:
        """The row group to drop next for `key`: first one that is not needed; then, if a `take` of
        `key` waits, the one that is needed last; and if `key` comes first of all and no memory will
        be freed, any one that it does not need itself."""
        if self._unneeded:
            return self._groups[next(iter(self._unneeded))]
        if not self.waiting or key > max(self.waiting):
            return None  # no `take` waits for it yet
        here = list(self._evictable())
        latest = max(here, key=lambda g: min(g.uses), default=None)
        if latest is not None and min(latest.uses) > key:
            return latest
        if not self._is_stuck(key):
            return None
        return next((group for group in here if key not in group.uses), None)

    def _is_stuck(self, key: Key) -> bool:
        """Whether `key` is the first that is waited for, and no read or copy in progress will free
        memory for it."""
        return (
            bool(self.waiting)
            and key == min(self.waiting)
            and not (self._in_flight or self._pinned)
        )

    def _never_fits(self, key: Key) -> bool:
        """Whether a row group does not fit although nothing can be dropped. Then it is read all the
        same."""
        waited_for = bool(self.waiting) and key <= max(self.waiting)
        return waited_for and self._is_stuck(key) and not any(True for _ in self._evictable())

    def _evictable(self) -> Iterator[ResidentRowGroup]:
        return (g for g in self._groups.values() if isinstance(g.content, dict) and not g.pins)
