"""Micro-batches made ahead of the step that takes them, by threads, in the order in which they are taken.

`read_ahead` says which (step, virtual worker) will be taken; `take` gives one, and waits while it is made. What is
given does not depend on what was planned or taken before. How many wait to be taken is bounded, in number and in
bytes.

They are planned and made in *portions* of some micro-batches that follow each other, because both cost by the call: a
small micro-batch costs little more than its bytes do.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from elastic_dp.data.pipeline.row_group_reader import Key, Moved
from elastic_dp.threads import background

STEPS_AHEAD = 4  # or as many portions: made, or in making
ROWS_PLANNED, MICRO_BATCHES_PLANNED = 1 << 20, 1 << 13  # a row is 16 bytes
_ROWS_AT_ONCE = 4096  # of a virtual worker, planned in one go


class Source(Protocol):
    """What micro-batches are made of. `work` says where the rows of one are."""

    last_step: int | None

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Any, int]]:
        """For each step (work, number of rows)."""

    def parts(self, before: Any, after: Any) -> bool:
        """Whether two such works, which follow each other, better lie in different portions."""

    def plan(self, needs: Sequence[tuple[Key, Sequence[Any]]]) -> None:
        """Portions of such works will be made, the smaller keys first."""

    def forget(self, keys: Iterable[Key]) -> None:
        """These will not; whoever is making one raises Moved."""

    def make(self, key: Key, wanted: Sequence[MicroBatch], maker: int) -> tuple[Sequence[Any], int]:
        """The micro-batches of a portion, and their bytes. One that cannot be made is an exception.

        `maker`: the thread's number."""


@dataclass(slots=True, eq=False)
class MicroBatch:
    step: int
    virtual_worker: int
    work: Any
    rows: int
    portion: _Portion | None = None  # None: not planned yet
    item: Any = None

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.virtual_worker


@dataclass(slots=True, eq=False)
class _Portion:
    key: Key
    micro_batches: Sequence[MicroBatch]
    left: int = 0  # of them: planned, and not taken
    awaited: bool = False  # by `take`
    begun: bool = False
    made: bool = False
    nbytes: int = 0

    @property
    def is_wanted(self) -> bool:
        return not self.begun and (self.awaited or self.left > 0)


class MicroBatches:
    """`makers` threads, which start with the first plan. `rows_at_once`: of a portion of several micro-batches."""

    def __init__(
        self,
        source: Source,
        *,
        micro_batch_size: int,
        ahead_bytes: int,
        makers: int,
        rows_at_once: int = 0,
    ) -> None:
        self._source, self._ahead_bytes, self._num_makers = source, ahead_bytes, makers
        self._rows_at_once = rows_at_once
        self._steps_at_once = max(1, _ROWS_AT_ONCE // micro_batch_size)
        self._rows_planned = min(ROWS_PLANNED, MICRO_BATCHES_PLANNED * micro_batch_size)
        # Beyond what is made, so that a row group that is read through is not dropped in between.
        self._margin = 2 + 64 // micro_batch_size
        self.waited_s = 0.0  # in `take`
        self._planning = threading.Lock()  # taken before the other
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._steps: dict[int, dict[int, MicroBatch]] = {}  # planned, and not taken
        self._cursors: dict[int, int] = {}  # by virtual worker: its first step that is not planned
        self._todo: list[tuple[Key, _Portion]] = []  # a heap
        self._portions = 0  # so far
        self._step = 0  # the present one
        self._rows = 0  # planned, and not taken
        self._ahead = self._bytes = self._largest = 0  # portions made or in making; their bytes
        self._full = False  # no more is planned until some is taken
        self._failure: Exception | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        with self._planning:
            with self._lock:
                if self._closed:
                    return
                self._start()
                ours = set(virtual_workers)
                gone = [m for m in self._planned() if m.step < step or m.virtual_worker not in ours]
                stale = self._discard(gone)
                self._step = step
                self._cursors = {v: max(step, self._cursors.get(v, step)) for v in ours}
                again = self._taken_from(step)
                torn = self._rest_of({m.portion for m in gone})
                stale += self._discard(torn)
            found = [m for at, v in again for m in self._located(range(at, at + 1), v)]
            self._plan(torn + found)
            self._source.forget(stale)
        with self._lock:
            self._work.notify_all()

    def take(self, step: int, virtual_worker: int) -> Any:
        begun_at = time.perf_counter()
        try:
            item = self._take(step, virtual_worker)
        finally:
            self.waited_s += time.perf_counter() - begun_at
        if isinstance(item, Exception):
            raise item
        return item

    def extend(self) -> bool:
        """Plans some more steps. False: there are none, or enough are planned."""
        return self._extend(lambda: True)

    def remake(self, affected: Callable[[Any], bool]) -> None:
        """What was made of `work` for which `affected(work)` holds is made again."""
        with self._planning:
            with self._lock:
                old = [m for m in self._planned() if m.portion is not None and m.portion.begun]
                old = [m for m in old if affected(m.work)]
                stale = self._discard(old)
            self._plan([MicroBatch(*m.place, m.work, m.rows) for m in old])
            self._source.forget(stale)

    def close(self) -> None:
        """Ends the threads, when what they are making is made."""
        with self._planning, self._lock:
            self._closed = True
            self._work.notify_all()
            self._done.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._steps.clear()
        self._todo.clear()

    # ------------------------------------------------------------------------------------- planning

    def _planned(self) -> Iterator[MicroBatch]:
        return (m for by_worker in self._steps.values() for m in by_worker.values())

    def _rest_of(self, portions: set[_Portion | None]) -> list[MicroBatch]:
        """What is planned of those that are not begun."""
        rest = [m for p in portions if p is not None and not p.begun for m in p.micro_batches]
        return [m for m in rest if self._steps.get(m.step, {}).get(m.virtual_worker) is m]

    def _taken_from(self, step: int) -> list[tuple[int, int]]:
        """What was taken from `step` on, by those who keep on running it: the step is redone."""
        return [
            (at, v)
            for v, cursor in self._cursors.items()
            for at in range(step, cursor)
            if v not in self._steps.get(at, {})
        ]

    def _extend(self, is_needed: Callable[[], bool]) -> bool:
        with self._planning:
            with self._lock:
                self._full = self._rows >= self._rows_planned
                if self._closed or not is_needed() or self._is_planned_out():
                    return False
                if self._full and min(self._cursors.values()) >= self._wanted():
                    return False
                behind = min(self._cursors.values()) + self._steps_at_once
                if self._source.last_step is not None:
                    behind = min(behind, self._source.last_step + 1)
                ranges = {v: range(at, behind) for v, at in self._cursors.items() if at < behind}
            found = [m for v, steps in ranges.items() for m in self._located(steps, v)]
            self._plan(found, dict.fromkeys(ranges, behind))
            return True

    def _is_planned_out(self) -> bool:
        first, last = min(self._cursors.values(), default=None), self._source.last_step
        return first is None or (last is not None and first > last)

    def _is_short(self) -> bool:
        """Whether something may be made of which the steps behind it are not planned."""
        if self._is_planned_out():
            return False
        room_again = self._full and self._rows < self._rows_planned * 3 // 4
        return room_again or min(self._cursors.values()) < self._wanted()

    def _wanted(self) -> int:
        """The first step that need not be planned yet."""
        while self._todo and not self._todo[0][1].is_wanted:
            heapq.heappop(self._todo)
        made = self._todo[0][1].micro_batches[-1].step if self._todo else 0
        return max(self._step, made) + 1 + self._margin

    def _located(self, steps: range, virtual_worker: int) -> list[MicroBatch]:
        found = zip(steps, self._source.locate(steps, virtual_worker), strict=True)
        return [MicroBatch(step, virtual_worker, *located) for step, located in found if located[1]]

    def _plan(
        self, micro_batches: list[MicroBatch], cursors: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """Called with the planning lock. Those planned before are not to be wanted any more."""
        portions = list(self._packed(sorted(micro_batches, key=lambda m: m.place)))
        self._source.plan([(p.key, [m.work for m in p.micro_batches]) for p in portions])
        with self._lock:
            self._cursors |= {v: max(self._cursors[v], stop) for v, stop in cursors.items()}
            for portion in portions:
                for micro_batch in portion.micro_batches:
                    if micro_batch.step >= self._step:
                        self._add(micro_batch)
                heapq.heappush(self._todo, (portion.key, portion))
            stale = [portion.key for portion in portions if not portion.left]
            self._work.notify()
        if stale:
            self._source.forget(stale)

    def _packed(self, micro_batches: list[MicroBatch]) -> Iterator[_Portion]:
        rows, together = 0, list[MicroBatch]()
        for m in micro_batches:
            if together and self._is_enough(rows, together[-1], m):
                yield self._portion(together)
                rows, together = 0, []
            together.append(m)
            rows += m.rows
        if together:
            yield self._portion(together)

    def _is_enough(self, rows: int, last: MicroBatch, following: MicroBatch) -> bool:
        """Whether a portion of so many rows ends between these two."""
        if rows + following.rows > self._rows_at_once:
            return True
        return rows * 2 >= self._rows_at_once and self._source.parts(last.work, following.work)

    def _portion(self, micro_batches: list[MicroBatch]) -> _Portion:
        self._portions += 1
        portion = _Portion((*micro_batches[0].place, self._portions), micro_batches)
        for micro_batch in micro_batches:
            micro_batch.portion = portion
        return portion

    def _add(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.portion is not None
        self._steps.setdefault(micro_batch.step, {})[micro_batch.virtual_worker] = micro_batch
        self._rows += micro_batch.rows
        micro_batch.portion.left += 1

    def _discard(self, micro_batches: Iterable[MicroBatch]) -> list[Key]:
        """Those of portions that nobody wants any more."""
        stale = []
        for micro_batch in micro_batches:
            portion, by_worker = micro_batch.portion, self._steps[micro_batch.step]
            assert portion is not None
            del by_worker[micro_batch.virtual_worker]
            if not by_worker:
                del self._steps[micro_batch.step]
            self._rows -= micro_batch.rows
            portion.left -= 1
            if not portion.left:
                if portion.begun:
                    self._ahead -= 1
                    self._bytes -= portion.nbytes
                if not portion.awaited:
                    stale.append(portion.key)
                self._let_go(portion)
        return stale

    def _let_go(self, portion: _Portion) -> None:
        """One that will not be made holds nothing: its micro-batches may be made in another."""
        if not portion.begun and not portion.is_wanted:
            portion.micro_batches = ()

    # --------------------------------------------------------------------------------------- taking

    def _take(self, step: int, virtual_worker: int) -> Any:
        with self._lock:
            self._start()
            stale = self._pass(step) if step > self._step else []
            micro_batch = self._steps.get(step, {}).get(virtual_worker)
            if micro_batch is not None:
                portion = micro_batch.portion
                assert portion is not None
                portion.awaited = True
                self._discard([micro_batch])
                if stale or not portion.left or not portion.made:
                    self._work.notify()
                if portion.made and not stale:
                    return micro_batch.item
        if micro_batch is None:
            micro_batch = self._unplanned(step, virtual_worker)
            self._source.forget(stale)  # also if nothing is: makers may wait for what comes later
        elif stale:
            self._source.forget(stale)
        portion = micro_batch.portion
        assert portion is not None
        with self._lock:
            while not portion.made and not self._closed and self._failure is None:
                self._done.wait()
            if self._failure is not None:
                raise self._failure
        assert portion.made, "the data set was closed"
        return micro_batch.item

    def _unplanned(self, step: int, virtual_worker: int) -> MicroBatch:
        located = self._located(range(step, step + 1), virtual_worker)
        assert located, "a micro-batch of 0 rows is not to be asked for"
        (micro_batch,) = located
        with self._lock:
            self._portions += 1
            portion = _Portion((0, 0, self._portions), [micro_batch], awaited=True)
            micro_batch.portion = portion
            heapq.heappush(self._todo, (portion.key, portion))
            self._work.notify()
        return micro_batch

    def _pass(self, step: int) -> list[Key]:
        """What earlier steps still had is not wanted any more."""
        passed = range(self._step, step)
        if len(passed) > len(self._steps):
            steps = [at for at in self._steps if at < step]
        else:
            steps = [at for at in passed if at in self._steps]
        stale = self._discard([m for at in steps for m in self._steps[at].values()])
        self._step = step
        self._cursors = {v: max(step, cursor) for v, cursor in self._cursors.items()}
        return stale

    # --------------------------------------------------------------------------------------- making

    def _start(self) -> None:
        if self._threads or self._closed:
            return
        for number in range(self._num_makers):
            run = partial(self._run, number)
            thread = background(f"elastic-dp-make-{number}", run, self._fail)
            self._threads.append(thread)
            thread.start()

    def _run(self, maker: int) -> None:
        while True:
            with self._lock:
                portion = None
                while not self._closed and not self._is_short():
                    if (portion := self._next()) is not None:
                        break
                    self._work.wait()
                if self._closed:
                    return
            if portion is not None:
                self._make(portion, maker)
                continue
            try:
                self._extend(self._is_short)
            except Exception as error:  # of the plan's other parts
                self._fail(error)
                return

    def _fail(self, error: Exception) -> None:
        """Raised by `take`."""
        with self._lock:
            self._failure = error
            self._done.notify_all()

    def _next(self) -> _Portion | None:
        """The first that is to be made, if there is room for it."""
        while self._todo:
            portion = self._todo[0][1]
            if portion.is_wanted and not portion.awaited and not self._has_room(portion):
                return None
            heapq.heappop(self._todo)
            if portion.is_wanted:
                portion.begun = True
                if portion.left:
                    self._ahead += 1
                    portion.nbytes = self._largest
                    self._bytes += self._largest
                return portion
        return None

    def _has_room(self, portion: _Portion) -> bool:
        steps = portion.micro_batches[0].step - self._step
        few = steps < STEPS_AHEAD or self._ahead < STEPS_AHEAD
        return steps <= 0 or (few and self._bytes + self._largest <= self._ahead_bytes)

    def _make(self, portion: _Portion, maker: int) -> None:
        items: Sequence[Any]
        try:
            items, nbytes = self._source.make(portion.key, portion.micro_batches, maker)
        except Moved:
            self._put_back(portion)
            return
        except Exception as error:  # of user code, a store, a decoder: raised by `take`
            items, nbytes = [error] * len(portion.micro_batches), 0
        with self._lock:
            self._largest = max(self._largest, nbytes)
            if portion.left:
                self._bytes += nbytes - portion.nbytes
                portion.nbytes = nbytes
            for micro_batch, item in zip(portion.micro_batches, items, strict=True):
                micro_batch.item = item
            portion.made, portion.micro_batches = True, ()  # each lives as long as it is wanted
            self._done.notify_all()

    def _put_back(self, portion: _Portion) -> None:
        with self._lock:
            portion.begun = False
            if portion.left:
                self._ahead -= 1
                self._bytes -= portion.nbytes
            portion.nbytes = 0
            self._let_go(portion)
            heapq.heappush(self._todo, (portion.key, portion))
            self._work.notify()
