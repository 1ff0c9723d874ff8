"""Which micro-batches will be taken, in which chunks they are made, and how many may wait.

Micro-batches are planned and made in *chunks* of consecutive ones, because most of the cost of both
is per call. No threads, and no reading: `new` and `stale` say what changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from operator import attrgetter
from typing import Any, Protocol

from elastic_dp.data.pipeline.block_memory import Key

STEPS_AHEAD = 4  # limit of steps, or of chunks, that are made or being made
ROWS_PLANNED, MICRO_BATCHES_PLANNED = 1 << 20, 1 << 13  # limits; a planned row takes 16 bytes
ROWS_AT_ONCE = 4096  # rows of a virtual worker that are planned together
# Of epochs that are planned together, and at all: the order of each costs as much as many rows.
EPOCHS_AT_ONCE, EPOCHS_PLANNED = 2, 8

Slot = tuple[int, int]  # step, virtual worker


class Located(Protocol):
    """Where rows are. `work`: of a micro-batch."""

    last_step: int | None
    steps_per_epoch: int
    num_rows: int  # of an epoch

    def locate(self, steps: range, virtual_worker: int) -> Sequence[tuple[Any, int]]:
        """(work, number of rows) for each step."""

    def parts(self, before: Any, after: Any) -> bool:
        """Whether two consecutive works should be in different chunks."""


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A micro-batch that will be taken. `work`: where its rows are."""

    slot: Slot
    work: Any
    rows: int
    chunk: Any = None  # a Chunk; None: not planned yet
    is_gone: bool = False  # it was taken, or is not needed any more

    @property
    def step(self) -> int:
        return self.slot[0]


@dataclass(slots=True, eq=False)
class Chunk:
    """Micro-batches that are made together. The pipeline owns the fields from `todo` on."""

    key: Key
    micro_batches: Sequence[MicroBatch]
    left: int = 0  # micro-batches that are planned and not taken yet
    awaited: bool = False  # somebody waits for it
    begun: bool = False
    made: bool = False
    nbytes: int = 0
    todo: set[int] = field(default_factory=set)  # row groups that are not copied yet
    here: set[int] = field(default_factory=set)  # those of them that are in memory
    left_out: set[int] = field(default_factory=set)  # row groups that cannot be decoded
    failed: dict[int, Exception] = field(default_factory=dict)  # those that fail micro-batches
    assembly: Any = None  # what assembles it; None: nothing is copied yet
    working: bool = False  # in an assembling thread

    @property
    def is_wanted(self) -> bool:
        return not self.begun and self.left > 0


class Planner:
    """`rows_at_once`: limit of rows of a chunk with several micro-batches. `ahead_bytes`: limit of
    those that wait to be taken; of the current step, a few may wait whatever their bytes.

    `new`: chunks that were planned. `stale`: keys of chunks that are not needed any more. The
    caller empties both.
    """

    def __init__(
        self, source: Located, *, micro_batch_size: int, ahead_bytes: int, rows_at_once: int
    ) -> None:
        self._source, self._rows_at_once = source, rows_at_once
        steps = EPOCHS_AT_ONCE * source.steps_per_epoch
        self._steps_at_once = max(1, min(steps, ROWS_AT_ONCE // micro_batch_size))
        self._rows_planned = min(
            *(ROWS_PLANNED, MICRO_BATCHES_PLANNED * micro_batch_size),
            EPOCHS_PLANNED * source.num_rows,
        )
        # Steps that are planned beyond those that are made, so that a row group which they need too
        # is not dropped in between.
        self._margin = 2 + 64 // micro_batch_size
        self.step = 0  # the current step
        self.cursors: dict[int, int] = {}  # by virtual worker: the first step that is not planned
        self.new: list[Chunk] = []
        self.stale: list[Key] = []
        self._numbers = count(1)
        self._planned: dict[Slot, MicroBatch] = {}
        self._rows = 0
        self._todo: list[tuple[Key, Chunk]] = []  # a heap
        self._full = False  # nothing more is planned until micro-batches are taken
        # Chunks that are made or being made, and not taken completely: number, bytes, and the bytes
        # of the largest one so far, with which a chunk counts while it is made.
        self.waiting, self.waiting_bytes, self._largest = 0, 0, 0
        self._ahead_bytes = ahead_bytes

    # ---------------------------------------------------------------------------- what is planned

    def move(self, step: int, virtual_workers: set[int]) -> list[MicroBatch]:
        """From `step` on, micro-batches of `virtual_workers` will be taken. Plans again those that
        were taken before a step is redone, and the rest of chunks of which a part is gone. Returns
        those that are gone."""
        every = self._planned.values()
        gone = [m for m in every if m.step < step or m.slot[1] not in virtual_workers]
        self._discard(gone)
        self.step = step
        self.cursors = {v: max(step, self.cursors.get(v, step)) for v in virtual_workers}
        again = [
            (at, v)
            for v, cursor in self.cursors.items()
            for at in range(step, cursor)
            if (at, v) not in self._planned
        ]
        torn = {m.chunk: None for m in gone if not m.chunk.begun}
        rest = [m for chunk in torn for m in chunk.micro_batches if not m.is_gone]
        self._discard(rest)
        rest = [MicroBatch(m.slot, m.work, m.rows) for m in rest]
        self._add(rest + [m for at, v in again for m in self._located(range(at, at + 1), v)])
        if self.is_short:
            self.extend()
        return gone

    def extend(self) -> None:
        """Plans more steps."""
        behind = min(self.cursors.values()) + self._steps_at_once
        if (last := self._source.last_step) is not None:
            behind = min(behind, last + 1)
        ranges = {v: range(at, behind) for v, at in self.cursors.items() if at < behind}
        found = [m for v, steps in ranges.items() for m in self._located(steps, v)]
        self._add(m for m in found if m.slot not in self._planned)
        self.cursors |= dict.fromkeys(ranges, behind)

    def remake(self, affected: Callable[[Any], bool]) -> list[MicroBatch]:
        """Plans micro-batches again that are begun and for whose work `affected(work)` is true.
        Returns those."""
        old = [m for m in self._planned.values() if m.chunk.begun and affected(m.work)]
        self._discard(old)
        self._add([MicroBatch(m.slot, m.work, m.rows) for m in old])
        return old

    def want(self, slot: Slot) -> None:
        """Somebody waits for it."""
        micro_batch = self._planned.get(slot)
        if micro_batch is not None and micro_batch.chunk.awaited:
            return
        if micro_batch is None:
            located = self._located(range(slot[0], slot[0] + 1), slot[1])
            assert located, "a micro-batch of 0 rows is not to be asked for"
            self._add_chunk((0, 0), located)
            located[0].chunk.awaited = True
            return
        chunk = micro_batch.chunk
        chunk.awaited = True
        if not chunk.begun:  # first of all: those before it may find no room until it is taken
            heapq.heappush(self._todo, ((0, 0, chunk.key[2]), chunk))

    def taken(self, slots: Iterable[Slot]) -> None:
        self._discard([self._planned[slot] for slot in slots if slot in self._planned])

    def pass_to(self, step: int, but: Container[Slot]) -> list[MicroBatch]:
        """Discards the micro-batches of earlier steps `but` these, and returns them."""
        passed: Iterable[Slot] = product(range(self.step, step), self.cursors)
        if (step - self.step) * len(self.cursors) > len(self._planned) or not self.cursors:
            passed = [slot for slot in self._planned if slot[0] < step]
        gone = [self._planned[s] for s in passed if s in self._planned and s not in but]
        self._discard(gone)
        self.step = step
        if min(self.cursors.values(), default=step) < step:
            self.cursors = {v: max(step, cursor) for v, cursor in self.cursors.items()}
        return gone

    def _located(self, steps: range, virtual_worker: int) -> list[MicroBatch]:
        found = zip(steps, self._source.locate(steps, virtual_worker), strict=True)
        return [
            MicroBatch((step, virtual_worker), work, rows) for step, (work, rows) in found if rows
        ]

    def _add(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Packs micro-batches into chunks of at most `rows_at_once` rows, or of one micro-batch."""
        rows, together = 0, list[MicroBatch]()
        for m in sorted(micro_batches, key=attrgetter("slot")):
            if together and self._is_enough(rows, together[-1], m):
                self._add_chunk(together[0].slot, together)
                rows, together = 0, []
            together.append(m)
            rows += m.rows
        if together:
            self._add_chunk(together[0].slot, together)

    def _is_enough(self, rows: int, last: MicroBatch, following: MicroBatch) -> bool:
        """Whether a chunk of `rows` rows ends between these two micro-batches."""
        if rows + following.rows > self._rows_at_once:
            return True
        return rows * 4 >= self._rows_at_once and self._source.parts(last.work, following.work)

    def _add_chunk(self, slot: Slot, micro_batches: list[MicroBatch]) -> None:
        chunk = Chunk((*slot, next(self._numbers)), micro_batches, left=len(micro_batches))
        for m in micro_batches:
            m.chunk = chunk
            self._planned[m.slot] = m
            self._rows += m.rows
        self.new.append(chunk)
        heapq.heappush(self._todo, (chunk.key, chunk))

    def _discard(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Removes micro-batches that were taken, or are not needed."""
        for m in micro_batches:
            chunk = m.chunk
            del self._planned[m.slot]
            m.is_gone = True
            self._rows -= m.rows
            chunk.left -= 1
            if not chunk.left:
                if chunk.begun:
                    self.waiting -= 1
                    self.waiting_bytes -= chunk.nbytes
                else:
                    chunk.micro_batches = ()  # it may stay in the heap
                self.stale.append(chunk.key)

    # ------------------------------------------------------------------------ whether to plan more

    @property
    def may_grow(self) -> bool:
        """Whether more may be planned: the plan is not full, or steps are needed soon. It stays
        full until a quarter is taken."""
        if self._is_complete:
            return False
        self._full = self._rows >= self._rows_planned * (3 if self._full else 4) // 4
        return not self._full or self.is_short

    @property
    def is_short(self) -> bool:
        """Whether more should be planned now."""
        if self._is_complete:
            return False
        while self._todo and not self._todo[0][1].is_wanted:
            heapq.heappop(self._todo)
        made = self._todo[0][1].micro_batches[-1].step if self._todo else 0
        return min(self.cursors.values()) < max(self.step, made) + 1 + self._margin

    @property
    def _is_complete(self) -> bool:
        """Whether everything is planned up to the last step, or there are no virtual workers."""
        first, last = min(self.cursors.values(), default=None), self._source.last_step
        return first is None or (last is not None and first > last)

    # -------------------------------------------------------------------------------- what is made

    def begin_next(self, awaited_only: bool = False) -> Chunk | None:
        """The first chunk that should be made; None if there is none, or no room for it."""
        while self._todo:
            chunk = self._todo[0][1]
            if chunk.is_wanted and not chunk.awaited:
                steps_ahead = chunk.micro_batches[0].step - self.step
                if awaited_only or not self._has_room(steps_ahead):
                    return None
            heapq.heappop(self._todo)
            if chunk.is_wanted:
                chunk.begun, chunk.nbytes = True, self._largest
                self.waiting += 1
                self.waiting_bytes += chunk.nbytes
                return chunk
        return None

    def _has_room(self, steps_ahead: int) -> bool:
        small = self.waiting_bytes + self._largest <= self._ahead_bytes
        if steps_ahead <= 0:
            return small or self.waiting < STEPS_AHEAD
        return small and (steps_ahead < STEPS_AHEAD or self.waiting < STEPS_AHEAD)

    def end(self, chunk: Chunk, nbytes: int) -> list[MicroBatch | None]:
        """The chunk is made, and has `nbytes`. Returns its micro-batches; None for those that are
        not needed any more."""
        self._largest = max(self._largest, nbytes)
        if chunk.left:
            self.waiting_bytes += nbytes - chunk.nbytes
            chunk.nbytes = nbytes
        wanted = [None if m.is_gone else m for m in chunk.micro_batches]
        chunk.made, chunk.micro_batches = True, ()  # the plan holds those that are needed
        return wanted
