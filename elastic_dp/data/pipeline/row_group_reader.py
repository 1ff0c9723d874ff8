"""Row groups on their way into memory: many in flight, in the order in which they are needed, within a budget.

`plan` says that somebody will need some row groups; threads read those meanwhile, the ones needed first before the
others. `take` gives those that are here, and waits for one if none is; `release` lets go of them, and `own` keeps
one for good, if nobody else needs it. Three things always hold:

- The bytes of decoded row groups plus the estimates of those being read stay within the budget, unless an
  estimate was too low.
- A row group that nobody needs any more is dropped. (`keep`: it stays for as long as nothing else wants
  its memory, which is for orders that come back to it.)
- Whoever needs something first gets memory for it: from what is needed later, which is then read again. Row groups
  are let go of one by one, so nothing waits for ever, however small the budget, as long as each one fits.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.data.columns.arrow_arrays import Column
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard
from elastic_dp.threads import background

Key = tuple[int, ...]  # whose need it is; the smaller, the sooner
Columns = Mapping[str, Column]

READ_THREADS = 32  # as many requests are in flight
READS_PER_PLAN = 8  # so that planning, which needs the interpreter, delays no first read


class Moved(Exception):
    """The plan changed, or all was closed, while `take` waited: look at it again."""


@dataclass(slots=True, eq=False)
class _RowGroup:
    """One that is planned, being read or here."""

    number: int
    nbytes: int  # an estimate until it is here
    uses: set[Key] = field(default_factory=set)
    queued_at: Key | None = None
    reading: bool = False
    content: Columns | Exception | None = None
    pins: int = 0  # how many are copying rows from it


class RowGroupReader:
    """Of one data set in one process; called by several threads. Threads start with the first plan or take.

    `more` is called, in a reading thread, while what is planned and not met takes less than the memory: it may plan
    more, and returns whether it did. So what is needed again within that is known, and stays.
    """

    def __init__(
        self,
        row_groups: RowGroups,
        memory_bytes: int,
        *,
        threads: int = READ_THREADS,
        keep: bool = False,
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        self._row_groups, self._keep, self._more = row_groups, keep, more
        self.memory_bytes, self._num_threads = memory_bytes, threads
        self.bytes_held = self.bytes_peak = 0  # decoded or being read
        self.groups_read = self.groups_evicted = 0  # evicted: dropped although still needed
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there may be something to read
        self._arrived = threading.Condition(self._lock)  # something is here, or the plan changed
        self._groups: dict[int, _RowGroup] = {}
        self._needs: dict[Key, set[int]] = {}
        self._queue: list[tuple[Key, int]] = []  # unread ones, by the first need; a heap
        self._spare: dict[int, None] = {}  # here, but not needed; oldest first
        self._waiting: set[Key] = set()
        self._in_flight = self._pinned = self._moves = 0
        self._needed_bytes = 0  # of all that somebody needs, here or not
        self._dry = False  # `more` had nothing more
        self._freed = False  # memory, since somebody looked
        self._failure: Exception | None = None
        self._asking = False
        self._closed = False
        self._threads: list[threading.Thread] = []

    def plan(self, needs: Iterable[tuple[Key, Sequence[int]]]) -> None:
        """Who will need which row groups. A hint: nothing once closed."""
        with self._lock:
            if self._closed:
                return
            self._start()
            for key, groups in needs:
                self._add(key, groups)
            self._dry = False
            self._work.notify()

    def forget(self, keys: Iterable[Key]) -> None:
        """These need nothing any more. Whoever waits looks at the plan again: it may have become another's turn."""
        with self._lock:
            for key in keys:
                self._forget(key)
            self._moves += 1
            self._dry = False
            self._arrived.notify_all()
            self._work.notify()

    def take(self, key: Key, groups: Sequence[int]) -> dict[int, Columns | BadShard]:
        """Those of the row groups that are here, at least one; they stay until `release`. One that cannot be
        decoded is its BadShard. Raises what reading raised, and Moved after `forget`."""
        with self._lock:
            self._start()
            self._add(key, groups)
            needed = [self._groups[number] for number in groups]
            try:
                here = self._wait_for(key, needed)
            except Moved:
                raise
            except Exception:
                self._forget(key)
                raise
            for group in here:
                group.pins += 1
            self._pinned += len(here)
            return {group.number: group.content for group in here}  # type: ignore[misc]

    def release(self, key: Key, groups: Iterable[int]) -> None:
        """After `take`: the rows are copied, and the need is met."""
        with self._lock:
            if self._closed:
                return
            for number in groups:
                self._unpin(key, number)
            self._look_for_work()

    def own(self, key: Key, number: int) -> int | None:
        """After `take`: a row group that nobody else needs is the caller's from now on, who does not release it.

        Given back: its bytes, which do not count here any more; None if it is not the caller's.
        """
        with self._lock:
            if self._closed:
                return None
            group = self._groups[number]
            if self._keep or group.pins > 1 or group.uses - {key}:
                return None
            self._unpin(key, number)
            self._look_for_work()
            return group.nbytes

    def close(self) -> None:
        """Ends the threads, when what they are reading is here, and lets go of everything."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join()
        self._row_groups.close()
        self._groups.clear()
        self._needs.clear()
        self._spare.clear()

    # ------------------------------------------------------------------- needs; all under the lock

    def _add(self, key: Key, groups: Sequence[int]) -> None:
        needs = self._needs.setdefault(key, set())
        for number in groups:
            if number in needs:
                continue
            needs.add(number)
            group = self._groups.get(number)
            if group is None:
                size = int(self._row_groups.nbytes[number])
                group = self._groups[number] = _RowGroup(number, size)
            if not group.uses:
                self._needed_bytes += group.nbytes
            group.uses.add(key)
            self._spare.pop(number, None)
            if group.content is None and not group.reading:
                self._enqueue(group, key)

    def _enqueue(self, group: _RowGroup, key: Key) -> None:
        if group.queued_at is None or key < group.queued_at:
            group.queued_at = key
            heapq.heappush(self._queue, (key, group.number))

    def _forget(self, key: Key) -> None:
        for number in list(self._needs.get(key, ())):
            self._remove(key, number)

    def _remove(self, key: Key, number: int) -> None:
        group, needs = self._groups[number], self._needs.get(key, set())
        needs.discard(number)
        if not needs:
            self._needs.pop(key, None)
        if key in group.uses:
            group.uses.discard(key)
            if not group.uses:
                self._needed_bytes -= group.nbytes
        if not group.uses:
            self._unneeded(group)

    def _unpin(self, key: Key, number: int) -> None:
        self._groups[number].pins -= 1
        self._pinned -= 1
        self._remove(key, number)

    def _look_for_work(self) -> None:
        if self._queue or self._freed:
            self._freed = self._dry = False
            self._work.notify()

    def _unneeded(self, group: _RowGroup) -> None:
        if group.reading or group.pins:
            return  # decided when it is here, or let go of
        if self._keep and isinstance(group.content, dict):
            self._spare[group.number] = None
        else:
            self._drop(group)

    def _drop(self, group: _RowGroup) -> None:
        if group.content is not None:
            self.bytes_held -= group.nbytes
            group.content, self._freed = None, True  # somebody may still know the group
        self._spare.pop(group.number, None)
        del self._groups[group.number]

    def _wait_for(self, key: Key, needed: list[_RowGroup]) -> list[_RowGroup]:
        """Those that are here."""
        moves = self._moves
        self._waiting.add(key)
        try:
            while True:
                if self._closed or moves != self._moves:
                    raise Moved
                if self._failure is not None:
                    raise self._failure
                here = [group for group in needed if group.content is not None]
                for group in here:
                    self._raise_unless_bad(group)
                if here:
                    return here
                self._work.notify()
                self._arrived.wait()
        finally:
            self._waiting.discard(key)

    def _raise_unless_bad(self, group: _RowGroup) -> None:
        """A row group that cannot be decoded stays so; anything else may go better the next time."""
        error = group.content
        if isinstance(error, Exception) and not isinstance(error, BadShard):
            self._unread(group)
            raise error

    def _unread(self, group: _RowGroup) -> None:
        """As if it had never been read, with its needs."""
        self.bytes_held -= group.nbytes
        group.content, nbytes = None, int(self._row_groups.nbytes[group.number])
        self._needed_bytes += nbytes - group.nbytes
        group.nbytes = nbytes
        group.queued_at = None
        self._enqueue(group, min(group.uses))

    # ---------------------------------------------------------------------------- reading threads

    def _start(self) -> None:
        if self._threads or self._closed:
            return
        for number in range(self._num_threads):
            thread = background(f"elastic-dp-read-{number}", self._run, self._fail)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while (group := self._next()) is not None:
            content: Any
            try:
                content, nbytes = self._row_groups.read(group.number)
            except Exception as error:  # of a store or a decoder: raised where the rows are needed
                content, nbytes = error, 0
            with self._lock:
                self._land(group, content, nbytes)
                content = None  # before anything else gets its memory
                ask = self.groups_read % READS_PER_PLAN == 1 and self._may_ask()
                self._asking |= ask
            if ask:
                self._ask_for_more()

    def _next(self) -> _RowGroup | None:
        """What to read now; waits for it. None: closed."""
        while True:
            with self._lock:
                while not self._closed and (group := self._admit()) is None and not self._may_ask():
                    self._work.wait()
                if self._closed:
                    return None
                if group is not None:
                    self._work.notify()  # the next thread looks for more
                    return group
                self._asking = True
            self._ask_for_more()

    def _ask_for_more(self) -> None:
        found, failure = False, None
        try:
            found = self._more()
        except Exception as error:  # ours; raised where somebody waits
            failure = error
        with self._lock:
            self._asking, self._dry = False, not found
        if failure is not None:
            self._fail(failure)

    def _fail(self, error: Exception) -> None:
        """Raised where somebody waits."""
        with self._lock:
            self._failure = error
            self._arrived.notify_all()

    def _may_ask(self) -> bool:
        return not (self._asking or self._dry or self._needed_bytes >= self.memory_bytes)

    def _admit(self) -> _RowGroup | None:
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
                self.bytes_held += size
                self.bytes_peak = max(self.bytes_peak, self.bytes_held)
                return group
            else:
                heapq.heappush(self._queue, (key, number))
                return None
        return None

    def _reading_bytes(self, group: _RowGroup) -> int:
        return int(self._row_groups.reading_bytes[group.number])

    def _make_room(self, nbytes: int, key: Key) -> bool:
        while self.bytes_held + nbytes > self.memory_bytes:
            if self._spare:
                self._drop(self._groups[next(iter(self._spare))])
                continue
            if not self._waiting or key > max(self._waiting):
                return False  # nobody waits for it yet
            latest = max(self._evictable(), key=lambda g: min(g.uses), default=None)
            if latest is not None and min(latest.uses) > key:
                self._evict(latest)
                continue
            if key != min(self._waiting) or self._in_flight or self._pinned:
                return False  # memory is on its way, or somebody earlier has what it needs
            here = list(self._evictable())
            other = next((group for group in here if key not in group.uses), None)
            if other is None:
                # What is here is its own, and about to be taken. If nothing is, it never fits.
                return not here
            self._evict(other)
        return True

    def _evictable(self) -> Iterator[_RowGroup]:
        return (g for g in self._groups.values() if isinstance(g.content, dict) and not g.pins)

    def _evict(self, group: _RowGroup) -> None:
        self.groups_evicted += 1
        self._unread(group)

    def _land(self, group: _RowGroup, content: Columns | Exception, nbytes: int) -> None:
        self._in_flight -= 1
        self.groups_read += 1
        self.bytes_held += nbytes - self._reading_bytes(group)
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)
        if group.uses:
            self._needed_bytes += nbytes - group.nbytes
        group.reading, group.content, group.nbytes = False, content, nbytes
        if not group.uses:
            self._unneeded(group)
        self._arrived.notify_all()
        self._work.notify()
