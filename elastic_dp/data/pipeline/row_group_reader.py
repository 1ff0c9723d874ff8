"""Reads row groups into memory with many threads, in the order in which they are needed, within a
memory budget.

`plan` announces which row groups will be needed; threads read them, those needed first before the
others. `take` returns those that are in memory, and waits if there are none. `release` gives them
back. `own` takes one over, if nothing else needs it. `row_group_residency` decides what is read
next and what is dropped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from elastic_dp.data.pipeline.row_group_residency import (
    Columns,
    Key,
    MemoryBudget,
    ResidentRowGroup,
    RowGroupResidency,
)
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard
from elastic_dp.threads import background

READ_THREADS = 32  # and so requests in flight
READS_PER_PLAN = 8  # reads between two calls of `more`, so that planning does not delay first reads


def decoding_threads() -> int:
    """How many threads may decode at the same time without slowing each other down."""
    return min(READ_THREADS, max(2, (os.cpu_count() or 1) // 2))


class PlanChanged(Exception):
    """The plan changed, or the reader was closed, while `take` waited."""


class RowGroupReader:
    """The reader of a data set in a process. Several threads may call it. Its own threads start
    with the first `plan` or `take`.

    `memory_bytes`: the budget. `threads`: number of reading threads. `at_once`: how many of them
    may read at present. `keep`: row groups stay in memory after use while there is room. `more`:
    called in a reading thread while the planned row groups take less than the budget; it may plan
    more, and returns whether it did. So row groups that are needed again soon are known, and stay
    in memory.
    """

    def __init__(
        self,
        row_groups: RowGroups,
        memory_bytes: int,
        *,
        threads: int = READ_THREADS,
        at_once: Callable[[], int] | None = None,
        keep: bool = False,
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        self._row_groups, self._more, self._num_threads = row_groups, more, threads
        self._at_once, self._limit = at_once or (lambda: threads), threads
        self._resident = RowGroupResidency(row_groups, memory_bytes, keep)
        self.groups_read = 0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there may be something to read
        # Threads beyond the limit wait here: always the same ones, since each thread that decodes
        # has memory of its own.
        self._spare = threading.Condition(self._lock)
        self._arrived = threading.Condition(self._lock)  # something is here, or the plan changed
        self._moves = 0
        self._dry = False  # `more` returned False
        self._asking = False
        self._failure: Exception | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def budget(self) -> MemoryBudget:
        return self._resident.budget

    @property
    def groups_evicted(self) -> int:
        return self._resident.evicted

    def plan(self, needs: Iterable[tuple[Key, Sequence[int]]]) -> None:
        """Announces (key, row groups it will need). Does nothing after `close`."""
        with self._lock:
            if self._closed:
                return
            self._start()
            for key, groups in needs:
                self._resident.add(key, groups)
            self._dry = False
            self._work.notify()

    def forget(self, keys: Iterable[Key]) -> None:
        """These keys need nothing any more. Calls of `take` that wait raise PlanChanged, since
        another key may be first now."""
        with self._lock:
            for key in keys:
                self._resident.forget(key)
            self._moves += 1
            self._dry = False
            self._arrived.notify_all()
            self._work.notify()

    def take(self, key: Key, groups: Sequence[int]) -> dict[int, Columns | BadShard]:
        """The row groups among `groups` that are in memory, at least one of them, by number.

        They stay in memory until `release`. A row group that cannot be decoded is given as its
        BadShard. Raises what reading raised, and PlanChanged after `forget`. Two threads must not
        wait for one key.
        """
        with self._lock:
            self._start()
            self._resident.add(key, groups)
            needed = [self._resident[number] for number in groups]
            try:
                here = self._wait_for(key, needed)
            except PlanChanged:
                raise
            except Exception:
                self._resident.forget(key)
                raise
            self._resident.pin(here)
            return {group.number: group.content for group in here}  # type: ignore[misc]

    def release(self, key: Key, groups: Iterable[int]) -> None:
        """Call this after `take`, when the rows are copied: `key` does not need `groups` any
        more."""
        with self._lock:
            if self._closed:
                return
            for number in groups:
                self._resident.unpin(key, number)
            self._look_for_work()

    def replace(self, number: int, content: Columns) -> None:
        """Call this between `take` and `release`: `content` takes the place of what was read. It
        needs no more memory."""
        with self._lock:
            if not self._closed:
                self._resident.replace(number, content)

    def own(self, key: Key, number: int) -> int | None:
        """Call this after `take`, instead of `release`: the caller takes a row group over, if
        nothing else needs it.

        Returns its bytes, which do not count in this reader's budget any more; None if something
        else needs the row group.
        """
        with self._lock:
            if self._closed:
                return None
            group = self._resident[number]
            if not self._resident.is_sole_user(key, number):
                return None
            self._resident.unpin(key, number)
            self._look_for_work()
            return group.nbytes

    def close(self) -> None:
        """Ends the threads after the reads in progress, and drops all row groups."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._spare.notify_all()
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join()
        self._row_groups.close()
        self._resident.clear()

    # --------------------------------------------------------------------- taking; under the lock

    def _look_for_work(self) -> None:
        if self._resident.look():
            self._dry = False
            self._work.notify()

    def _wait_for(self, key: Key, needed: list[ResidentRowGroup]) -> list[ResidentRowGroup]:
        """Return those of `needed` that are in memory, at least one."""
        moves = self._moves
        self._resident.begin_waiting(key)
        try:
            while True:
                if self._closed or moves != self._moves:
                    raise PlanChanged
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
            self._resident.end_waiting(key)

    def _raise_unless_bad(self, group: ResidentRowGroup) -> None:
        """Raises the error of a failed read, and forgets it: the next read may succeed. A BadShard
        is kept, since a row group that cannot be decoded stays so."""
        error = group.content
        if isinstance(error, Exception) and not isinstance(error, BadShard):
            self._resident.unread(group)
            raise error

    # ---------------------------------------------------------------------------- reading threads

    def _start(self) -> None:
        if self._threads or self._closed:
            return
        self._limit = self._at_once()
        for number in range(self._num_threads):
            thread = background(f"elastic-dp-read-{number}", partial(self._run, number), self._fail)
            self._threads.append(thread)
            thread.start()

    def _run(self, number: int) -> None:
        while (group := self._next(number)) is not None:
            content: Any
            try:
                content, nbytes = self._row_groups.read(group.number)
            except Exception as error:  # of a store or a decoder: raised where the rows are needed
                content, nbytes = error, 0
            with self._lock:
                self._resident.landed(group, content, nbytes)
                self.groups_read += 1
                if self._resident.is_waited_for(group):
                    self._arrived.notify_all()
                self._change_limit()
                content = None  # no reference must remain when the memory is reused
                ask = self.groups_read % READS_PER_PLAN == 1 and self._may_ask()
                self._asking |= ask
                if ask:
                    self._work.notify()  # another thread goes on; otherwise this one does
            if ask:
                self._ask_for_more()

    def _next(self, number: int) -> ResidentRowGroup | None:
        """The next row group to read by this thread; waits for one. None after `close`."""
        while True:
            with self._lock:
                while not self._closed:
                    if number >= self._limit:
                        self._work.notify()  # another thread goes on instead of this one
                        self._spare.wait()
                    elif (group := self._resident.next_to_read()) is None and not self._may_ask():
                        self._work.wait()
                    else:
                        break
                if self._closed:
                    return None
                if group is not None:
                    self._work.notify()  # the next thread looks for more
                    return group
                self._asking = True
            self._ask_for_more()

    def _change_limit(self) -> None:
        """Under the lock. No thread waits where only others are woken."""
        limit = self._at_once()
        if limit != self._limit:
            self._limit = limit
            self._spare.notify_all()
            self._work.notify_all()

    def _ask_for_more(self) -> None:
        found, failure = False, None
        try:
            found = self._more()
        except Exception as error:  # a bug; raised in `take`
            failure = error
        with self._lock:
            self._asking, self._dry = False, not found
        if failure is not None:
            self._fail(failure)

    def _fail(self, error: Exception) -> None:
        """Makes calls of `take` raise `error`."""
        with self._lock:
            self._failure = error
            self._arrived.notify_all()

    def _may_ask(self) -> bool:
        return not (self._asking or self._dry or self.budget.needed >= self.budget.limit)
