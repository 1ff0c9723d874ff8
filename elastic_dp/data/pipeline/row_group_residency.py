"""Which row groups are needed, by whom, and which are in memory: what to read next, and what to let
go of for it.

The state of a `RowGroupReader`, without its threads: the reader calls all of this under its lock.
Three things always hold:

- The bytes of decoded row groups plus the estimates of those being read stay within the budget,
  unless an estimate was too low.
- A row group that nobody needs any more is dropped. (`keep`: it stays for as long as nothing else
  wants its memory, which is for orders that come back to it.)
- Whoever needs something first gets memory for it: from what is needed later, which is then read
  again. Row groups are let go of one by one, so nothing waits for ever, however small the budget,
  as long as each one fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_dp.data.columns.arrow_arrays import Column
from elastic_dp.data.pipeline.row_groups import RowGroups

Key = tuple[int, ...]  # whose need it is; the smaller, the sooner
Columns = Mapping[str, Column]


@dataclass(slots=True, eq=False)
class ResidentRowGroup:
    """One that is needed, being read, or in memory."""

    number: int
    nbytes: int  # an estimate until it is here
    uses: set[Key] = field(default_factory=set)
    queued_at: Key | None = None
    reading: bool = False
    content: Columns | Exception | None = None
    pins: int = 0  # how many are copying rows from it


@dataclass(slots=True)
class MemoryBudget:
    """Bytes of row groups. `held`: decoded or being read; `needed`: of all that somebody needs,
    here or not."""

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
        self.evicted = 0  # dropped although still needed
        self._freed = False  # memory, since somebody looked
        self.waiting: set[Key] = set()
        self._groups: dict[int, ResidentRowGroup] = {}
        self._needs: dict[Key, set[int]] = {}
        self._queue: list[tuple[Key, int]] = []  # unread ones, by the first need; a heap
        self._unneeded: dict[int, None] = {}  # here, but not needed; oldest first
        self._in_flight = self._pinned = 0

    def __getitem__(self, number: int) -> ResidentRowGroup:
        return self._groups[number]

    def look(self) -> bool:
        """Whether there may be something to read: unread row groups, or memory that came free since
        the last look."""
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

    def pin(self, groups: Sequence[ResidentRowGroup]) -> None:
        """Rows are being copied from these: they stay."""
        for group in groups:
            group.pins += 1
        self._pinned += len(groups)

    def unpin(self, key: Key, number: int) -> None:
        """The rows are copied, and the need is met."""
        self._groups[number].pins -= 1
        self._pinned -= 1
        self._remove(key, number)

    def is_sole_user(self, key: Key, number: int) -> bool:
        """Whether nobody but `key` needs a pinned row group, now or later."""
        group = self._groups[number]
        return not (self._keep or group.pins > 1 or group.uses - {key})

    def unread(self, group: ResidentRowGroup) -> None:
        """As if it had never been read, with its needs."""
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
            return  # decided when it is here, or unpinned
        if self._keep and isinstance(group.content, dict):
            self._unneeded[group.number] = None
        else:
            self._drop(group)

    def _drop(self, group: ResidentRowGroup) -> None:
        if group.content is not None:
            self.budget.held -= group.nbytes
            group.content, self._freed = None, True  # somebody may still know the group
        self._unneeded.pop(group.number, None)
        del self._groups[group.number]

    # ------------------------------------------------------------------------------------ reading

    def next_to_read(self) -> ResidentRowGroup | None:
        """The row group that is needed first of those not here, if there is memory for it."""
        while self._queue:
            key, number = heapq.heappop(self._queue)
            group = self._groups.get(number)
            if group is None or group.reading or group.content is not None:
                continue
            if key not in group.uses:
                heapq.heappush(self._queue, (min(group.uses), number))
            elif self._make_room(size := self._reading_bytes(group), key):
                group.queued_at, group.reading = None, True
                self._in_flight += 1
                self.budget.take(size)
                return group
            else:
                heapq.heappush(self._queue, (key, number))
                return None
        return None

    def landed(self, group: ResidentRowGroup, content: Columns | Exception, nbytes: int) -> None:
        """It was read: `content` of `nbytes`, or why it could not be."""
        self._in_flight -= 1
        self.budget.take(nbytes - self._reading_bytes(group))
        if group.uses:
            self.budget.needed += nbytes - group.nbytes
        group.reading, group.content, group.nbytes = False, content, nbytes
        if not group.uses:
            self._let_go(group)

    def _reading_bytes(self, group: ResidentRowGroup) -> int:
        return int(self._row_groups.reading_bytes[group.number])

    def _make_room(self, nbytes: int, key: Key) -> bool:
        """Whether there is memory to read something of `nbytes` that `key` needs, after letting go
        of as much as is right."""
        while self.budget.held + nbytes > self.budget.limit:
            victim = self._victim(key)
            if victim is None:
                return self._never_fits(key)
            if victim.uses:
                self.evicted += 1
                self.unread(victim)
            else:
                self._drop(victim)
        return True

    def _victim(self, key: Key) -> ResidentRowGroup | None:
        """What to let go of next for `key`: what nobody needs; then, where `key` is waited for,
        what is needed last; and where `key` is the first of all and no memory is on its way,
        whatever is not its own."""
        if self._unneeded:
            return self._groups[next(iter(self._unneeded))]
        if not self.waiting or key > max(self.waiting):
            return None  # nobody waits for it yet
        here = list(self._evictable())
        latest = max(here, key=lambda g: min(g.uses), default=None)
        if latest is not None and min(latest.uses) > key:
            return latest
        if not self._is_stuck(key):
            return None
        return next((group for group in here if key not in group.uses), None)

    def _is_stuck(self, key: Key) -> bool:
        """`key` is waited for before all others, and no memory is on its way to it."""
        return (
            bool(self.waiting)
            and key == min(self.waiting)
            and not (self._in_flight or self._pinned)
        )

    def _never_fits(self, key: Key) -> bool:
        """Nothing is here that could be let go of, and nothing of its own that is about to be
        taken: it is read all the same."""
        waited_for = bool(self.waiting) and key <= max(self.waiting)
        return waited_for and self._is_stuck(key) and not any(True for _ in self._evictable())

    def _evictable(self) -> Iterator[ResidentRowGroup]:
        return (g for g in self._groups.values() if isinstance(g.content, dict) and not g.pins)
