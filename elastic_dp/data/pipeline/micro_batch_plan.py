"""The state of `MicroBatches`, without its threads: which micro-batches will be taken, in which
chunks they are made, and how many may wait.

Micro-batches are planned and made in *chunks* of consecutive ones, because most of the cost of both
is per call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

from elastic_dp.data.pipeline.row_group_residency import Key

STEPS_AHEAD = 4  # limit of steps, or of chunks, that are made or being made
ROWS_PLANNED, MICRO_BATCHES_PLANNED = 1 << 20, 1 << 13  # limits; a planned row takes 16 bytes


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A micro-batch that will be taken. `work`: where its rows are. `item`: the result."""

    step: int
    virtual_worker: int
    work: Any
    rows: int
    chunk: Chunk | None = None  # None: not planned yet
    item: Any = None

    @property
    def slot(self) -> tuple[int, int]:
        return self.step, self.virtual_worker


@dataclass(slots=True, eq=False)
class Chunk:
    key: Key
    micro_batches: Sequence[MicroBatch]
    left: int = 0  # micro-batches that are planned and not taken yet
    awaited: bool = False  # `take` waits for it
    begun: bool = False
    made: bool = False
    nbytes: int = 0

    @property
    def is_wanted(self) -> bool:
        return not self.begun and (self.awaited or self.left > 0)


class ChunkPacker:
    """Packs micro-batches into chunks of at most `rows_at_once` rows, or of one micro-batch.
    `parts(work, next_work)`: whether the two should be in different chunks. `together(step)`: the
    first step that need not be in one chunk with `step`, whatever their rows."""

    def __init__(
        self,
        rows_at_once: int,
        parts: Callable[[Any, Any], bool],
        together: Callable[[int], int],
    ) -> None:
        self._rows_at_once, self._parts, self._together = rows_at_once, parts, together
        self._numbers = count(1)

    def pack(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Chunk]:
        rows, together = 0, list[MicroBatch]()
        for m in sorted(micro_batches, key=attrgetter("step", "virtual_worker")):
            if together and self._is_enough(rows, together[-1], m):
                yield self._chunk(together[0].slot, together)
                rows, together = 0, []
            together.append(m)
            rows += m.rows
        if together:
            yield self._chunk(together[0].slot, together)

    def first_of_all(self, micro_batch: MicroBatch) -> Chunk:
        """The chunk of a micro-batch that was not planned and is waited for: it comes first."""
        chunk = self._chunk((0, 0), [micro_batch])
        chunk.awaited = True
        return chunk

    def _is_enough(self, rows: int, last: MicroBatch, following: MicroBatch) -> bool:
        """Whether a chunk of `rows` rows ends between these two micro-batches."""
        if rows + following.rows <= self._rows_at_once and (
            rows * 4 < self._rows_at_once or not self._parts(last.work, following.work)
        ):
            return False
        return following.step >= self._together(last.step)

    def _chunk(self, slot: tuple[int, int], micro_batches: list[MicroBatch]) -> Chunk:
        chunk = Chunk((*slot, next(self._numbers)), micro_batches)
        for micro_batch in micro_batches:
            micro_batch.chunk = chunk
        return chunk


@dataclass(slots=True)
class WaitingChunks:
    """Counts chunks that are made or being made, and not taken completely. Limited in number and in
    bytes; of the current step, a few may wait whatever their bytes."""

    limit_bytes: int
    count: int = 0
    nbytes: int = 0
    _largest: int = 0  # bytes of the largest chunk so far; a chunk counts as this while it is made

    def has_room(self, steps_ahead: int) -> bool:
        small = self.nbytes + self._largest <= self.limit_bytes
        if steps_ahead <= 0:
            return small or self.count < STEPS_AHEAD
        return small and (steps_ahead < STEPS_AHEAD or self.count < STEPS_AHEAD)

    def begin(self, chunk: Chunk) -> None:
        self.count += 1
        chunk.nbytes = self._largest
        self.nbytes += chunk.nbytes

    def end(self, chunk: Chunk, nbytes: int) -> None:
        """The chunk is made, and has `nbytes`."""
        self._largest = max(self._largest, nbytes)
        if chunk.left:
            self.nbytes += nbytes - chunk.nbytes
            chunk.nbytes = nbytes

    def remove(self, chunk: Chunk) -> None:
        self.count -= 1
        self.nbytes -= chunk.nbytes


class MicroBatchPlan:
    """The micro-batches that are planned and not taken. The caller holds one lock for all methods.

    `last_step()`: the last step of the run; None if it has no end. `micro_batch_size`: in rows.
    `together`: as in `ChunkPacker`.
    """

    def __init__(
        self,
        micro_batch_size: int,
        ahead_bytes: int,
        last_step: Callable[[], int | None],
        together: Callable[[int], int],
    ) -> None:
        self._last_step, self._together = last_step, together
        self._rows_planned = min(ROWS_PLANNED, MICRO_BATCHES_PLANNED * micro_batch_size)
        # Steps that are planned beyond those that are made, so that a row group which they need too
        # is not dropped in between.
        self._margin = 2 + 64 // micro_batch_size
        self.step = 0  # the current step
        self.cursors: dict[int, int] = {}  # by virtual worker: the first step that is not planned
        self._steps: dict[int, dict[int, MicroBatch]] = {}
        self._rows = 0
        self._todo: list[tuple[Key, Chunk]] = []  # a heap
        self._waiting = WaitingChunks(ahead_bytes)
        self._full = False  # nothing more is planned until micro-batches are taken

    def __iter__(self) -> Iterator[MicroBatch]:
        return (m for by_worker in self._steps.values() for m in by_worker.values())

    def find(self, step: int, virtual_worker: int) -> MicroBatch | None:
        return self._steps.get(step, {}).get(virtual_worker)

    def clear(self) -> None:
        self._steps.clear()
        self._todo.clear()

    # ---------------------------------------------------------------------------- what is planned

    def move(
        self, step: int, virtual_workers: set[int]
    ) -> tuple[list[tuple[int, int]], list[MicroBatch], list[Key]]:
        """From `step` on, micro-batches of `virtual_workers` will be taken.

        Returns what must be planned again, (step, virtual worker) that were taken before a step is
        redone, and micro-batches of chunks that are split; and the keys of chunks that are not
        needed any more.
        """
        gone = [m for m in self if m.step < step or m.virtual_worker not in virtual_workers]
        stale = self.discard(gone)
        self.step = step
        self.cursors = {v: max(step, self.cursors.get(v, step)) for v in virtual_workers}
        again = [
            (at, v)
            for v, cursor in self.cursors.items()
            for at in range(step, cursor)
            if v not in self._steps.get(at, {})
        ]
        torn = self._rest_of({m.chunk for m in gone})
        return again, torn, stale + self.discard(torn)

    def _rest_of(self, chunks: set[Chunk | None]) -> list[MicroBatch]:
        """The planned micro-batches of those chunks that are not begun."""
        rest = [m for c in chunks if c is not None and not c.begun for m in c.micro_batches]
        return [m for m in rest if self.find(*m.slot) is m]

    def add(self, chunks: Iterable[Chunk], cursors: Mapping[int, int]) -> list[Key]:
        """Adds planned chunks. Returns the keys of those that are not needed any more."""
        self.cursors |= {v: max(self.cursors[v], stop) for v, stop in cursors.items()}
        stale = []
        for chunk in chunks:
            for micro_batch in chunk.micro_batches:
                if micro_batch.step >= self.step:
                    self._steps.setdefault(micro_batch.step, {})[micro_batch.virtual_worker] = (
                        micro_batch
                    )
                    self._rows += micro_batch.rows
                    chunk.left += 1
            self.push(chunk)
            if not chunk.left:
                stale.append(chunk.key)
        return stale

    def push(self, chunk: Chunk) -> None:
        step, virtual_worker, number = chunk.key
        if chunk.awaited:  # first of all: those before it may find no room until it is taken
            step, virtual_worker = 0, 0
        heapq.heappush(self._todo, ((step, virtual_worker, number), chunk))

    def discard(self, micro_batches: Iterable[MicroBatch]) -> list[Key]:
        """Removes micro-batches that were taken, or are not needed. Returns the keys of chunks that
        are not needed any more."""
        stale = []
        for micro_batch in micro_batches:
            chunk = self._discard(micro_batch)
            if not (chunk.left or chunk.awaited):
                stale.append(chunk.key)
        return stale

    def _discard(self, micro_batch: MicroBatch) -> Chunk:
        chunk, by_worker = micro_batch.chunk, self._steps[micro_batch.step]
        assert chunk is not None
        del by_worker[micro_batch.virtual_worker]
        if not by_worker:
            del self._steps[micro_batch.step]
        self._rows -= micro_batch.rows
        chunk.left -= 1
        if not chunk.left:
            if chunk.begun:
                self._waiting.remove(chunk)
            self._let_go(chunk)
        return chunk

    def take(self, step: int, virtual_worker: int) -> MicroBatch | None:
        """Removes a micro-batch for which the caller waits; None if it is not planned."""
        by_worker = self._steps.get(step)
        if by_worker is None or (micro_batch := by_worker.get(virtual_worker)) is None:
            return None
        chunk = micro_batch.chunk
        assert chunk is not None
        chunk.awaited = True
        if not chunk.begun:
            self.push(chunk)
        self._discard(micro_batch)
        return micro_batch

    def pass_to(self, step: int) -> list[Key]:
        """Removes the micro-batches of earlier steps. Returns as `discard`."""
        passed = range(self.step, step)
        if len(passed) > len(self._steps):
            steps = [at for at in self._steps if at < step]
        else:
            steps = [at for at in passed if at in self._steps]
        stale = self.discard([m for at in steps for m in self._steps[at].values()])
        self.step = step
        if min(self.cursors.values(), default=step) < step:
            self.cursors = {v: max(step, cursor) for v, cursor in self.cursors.items()}
        return stale

    # ------------------------------------------------------------------------- whether to plan more

    def look_for_room(self) -> None:
        """Decides whether the plan is full. It stays full until a quarter is taken."""
        self._full = self._rows >= self._rows_planned

    @property
    def may_grow(self) -> bool:
        """Whether more may be planned: the plan is not full, or steps are needed soon."""
        return not self._full or min(self.cursors.values()) < self._wanted_until()

    @property
    def is_complete(self) -> bool:
        """Whether everything is planned up to the last step, or there are no virtual workers."""
        first = min(self.cursors.values(), default=None)
        last = self._last_step()
        return first is None or (last is not None and first > last)

    @property
    def is_short(self) -> bool:
        """Whether more should be planned now."""
        if self.is_complete:
            return False
        room_again = self._full and self._rows < self._rows_planned * 3 // 4
        return room_again or min(self.cursors.values()) < self._wanted_until()

    def next_steps(self, steps: int) -> tuple[dict[int, range], int]:
        """The steps to plan next, by virtual worker, and the first step after all of them."""
        behind = min(self.cursors.values()) + steps
        behind = max(behind, self._together(behind - 1))
        if (last := self._last_step()) is not None:
            behind = min(behind, last + 1)
        return {v: range(at, behind) for v, at in self.cursors.items() if at < behind}, behind

    def _wanted_until(self) -> int:
        """The first step that need not be planned yet."""
        while self._todo and not self._todo[0][1].is_wanted:
            heapq.heappop(self._todo)
        made = self._todo[0][1].micro_batches[-1].step if self._todo else 0
        return max(self.step, made) + 1 + self._margin

    # -------------------------------------------------------------------------------- what is made

    def begin_next(self) -> Chunk | None:
        """The first chunk that should be made; None if there is none, or no room for it."""
        while self._todo:
            chunk = self._todo[0][1]
            if chunk.is_wanted and not chunk.awaited:
                steps_ahead = chunk.micro_batches[0].step - self.step
                if not self._waiting.has_room(steps_ahead):
                    return None
            heapq.heappop(self._todo)
            if chunk.is_wanted:
                chunk.begun = True
                if chunk.left:
                    self._waiting.begin(chunk)
                return chunk
        return None

    def end(self, chunk: Chunk, items: Sequence[Any], nbytes: int) -> None:
        self._waiting.end(chunk, nbytes)
        for micro_batch, item in zip(chunk.micro_batches, items, strict=True):
            micro_batch.item = item
        chunk.made, chunk.micro_batches = True, ()  # the plan holds those that are needed

    def put_back(self, chunk: Chunk) -> None:
        """Returns a chunk that could not be made yet."""
        chunk.begun = False
        if chunk.left:
            self._waiting.remove(chunk)
        chunk.nbytes = 0
        self._let_go(chunk)
        self.push(chunk)

    def _let_go(self, chunk: Chunk) -> None:
        """Empties a chunk that will not be made: its micro-batches may be in another one."""
        if not chunk.begun and not chunk.is_wanted:
            chunk.micro_batches = ()
