"""Row groups on their way into memory: many in flight, in the order in which they are needed,
within a budget.

`plan` says that somebody will need some row groups; threads read those meanwhile, the ones needed
first before the others. `take` gives those that are here, and waits for one if none is; `release`
lets go of them, and `own` keeps one for good, if nobody else needs it. What is read next and what
is dropped is decided in `row_group_residency`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
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

READ_THREADS = 32  # as many requests are in flight
READS_PER_PLAN = 8  # so that planning, which needs the interpreter, delays no first read


class PlanChanged(Exception):
    """The plan changed, or all was closed, while `take` waited: look at it again."""


class RowGroupReader:
    """Of one data set in one process; called by several threads. Threads start with the first plan
    or take.

    `more` is called, in a reading thread, while what is planned and not met takes less than the
    memory: it may plan more, and returns whether it did. So what is needed again within that is
    known, and stays.
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
        self._row_groups, self._more, self._num_threads = row_groups, more, threads
        self._resident = RowGroupResidency(row_groups, memory_bytes, keep)
        self.groups_read = 0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there may be something to read
        self._arrived = threading.Condition(self._lock)  # something is here, or the plan changed
        self._moves = 0
        self._dry = False  # `more` had nothing more
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
        """Who will need which row groups. A hint: nothing once closed."""
        with self._lock:
            if self._closed:
                return
            self._start()
            for key, groups in needs:
                self._resident.add(key, groups)
            self._dry = False
            self._work.notify()

    def forget(self, keys: Iterable[Key]) -> None:
        """These need nothing any more. Whoever waits looks at the plan again: it may have become
        another's turn."""
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
        BadShard. Raises what reading raised, and PlanChanged after `forget`.
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
        """After `take`: the rows are copied, and the need is met."""
        with self._lock:
            if self._closed:
                return
            for number in groups:
                self._resident.unpin(key, number)
            self._look_for_work()

    def own(self, key: Key, number: int) -> int | None:
        """After `take`: a row group that nobody else needs is the caller's from now on, who does
        not release it.

        Given back: its bytes, which do not count here any more; None if it is not the caller's.
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
        """Ends the threads, when what they are reading is here, and lets go of everything."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
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
        """Those that are here."""
        moves = self._moves
        self._resident.waiting.add(key)
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
            self._resident.waiting.discard(key)

    def _raise_unless_bad(self, group: ResidentRowGroup) -> None:
        """A row group that cannot be decoded stays so; anything else may go better the next
        time."""
        error = group.content
        if isinstance(error, Exception) and not isinstance(error, BadShard):
            self._resident.unread(group)
            raise error

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
                self._resident.landed(group, content, nbytes)
                self.groups_read += 1
                self._arrived.notify_all()
                self._work.notify()
                content = None  # before anything else gets its memory
                ask = self.groups_read % READS_PER_PLAN == 1 and self._may_ask()
                self._asking |= ask
            if ask:
                self._ask_for_more()

    def _next(self) -> ResidentRowGroup | None:
        """What to read now; waits for it. None: closed."""
        while True:
            with self._lock:
                while (
                    not self._closed
                    and (group := self._resident.next_to_read()) is None
                    and not self._may_ask()
                ):
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
        return not (self._asking or self._dry or self.budget.needed >= self.budget.limit)
