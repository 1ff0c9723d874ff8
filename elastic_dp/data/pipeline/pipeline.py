"""Makes micro-batches ahead of the step that takes them.

One thread owns the plan and the memory. It asks reading threads for row groups, gives those that
arrive to assembling threads, and puts out what these make:

    Planner → [requests] read → BlockMemory → [tasks] assemble → Outbox → take

Reading and assembling threads have no state. They answer by a call that the owner makes. A changed
plan has a new epoch, and new chunks: answers for others are dropped. What is handed out does not
depend on what was planned, read or taken before.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from elastic_dp.data.pipeline.block_memory import BlockMemory, Columns, Key
from elastic_dp.data.pipeline.planner import Chunk, Located, MicroBatch, Planner, Slot
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard, UserCodeError
from elastic_dp.threads import background

READS_PER_PLAN = 8  # reads between two portions of the plan, so that it does not delay first reads
_READS_QUEUED = 2  # beyond those in flight, so that no reading thread waits for the owner

Assembled = tuple[Sequence[Any], int, Sequence[int]]  # micro-batches, their bytes, and bad rows


class Assembly(Protocol):
    """Makes the micro-batches of a chunk. One thread at a time calls it."""

    def copy(self, contents: dict[int, Any], may_keep: Mapping[int, int]) -> None:
        """Copies rows out of row groups. Sets those that it keeps to None, and replaces what it
        changed. `may_keep`: bytes of those that nothing else needs."""

    def finish(self, left_out: set[int], failed: dict[int, Exception], producer: int) -> Assembled:
        """`left_out`: row groups whose rows are left out. `failed`: those of them for which a
        micro-batch is the exception. `producer`: the number of the calling thread."""


class MicroBatchSource(Located, Protocol):
    def row_groups(self, works: Sequence[Any]) -> Sequence[int]:
        """Those that a chunk needs."""

    def changes(self, works: Sequence[Any], content: Any) -> bool:
        """Whether `Assembly.copy` will replace this content of a row group."""

    def assembly(self, wanted: Sequence[MicroBatch]) -> Assembly: ...


class Outbox:
    """Made micro-batches, until they are taken. All threads may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[Slot, tuple[Key, Any]] = {}
        self._left: dict[Key, int] = {}  # by chunk
        self._taken: dict[int, list[Slot]] = {0: []}  # by epoch
        self._waiting: set[Slot] = set()
        self._step = self._epoch = 0
        self._failure: Exception | None = None
        self._closed = False
        self.waited_s = 0.0  # in `take`

    def take(self, slot: Slot, wake: Callable[[], object]) -> Any:
        """Waits until it is made. `wake` makes the owner call `sync`."""
        with self._changed:
            self._step = max(self._step, slot[0])
            if (found := self._ready.pop(slot, None)) is None:
                begun_at = time.perf_counter()
                self._waiting.add(slot)
                wake()
                self._changed.wait_for(lambda: slot in self._ready or self._is_over)
                self._waiting.discard(slot)
                self.waited_s += time.perf_counter() - begun_at
                self._raise_if_over()
                found = self._ready.pop(slot)
            key, item = found
            self._taken[self._epoch].append(slot)
            if self._is_last(key):
                wake()
        if isinstance(item, Exception):
            raise item
        return item

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._is_over)
            self._raise_if_over()

    def move(self, step: int) -> int:
        """The plan is changed to begin with `step`. Returns its epoch."""
        with self._changed:
            self._step, self._epoch = step, self._epoch + 1
            self._taken[self._epoch] = []
            return self._epoch

    def sync(self, epoch: int) -> tuple[int, list[Slot], set[Slot]]:
        """(the current step, what was taken since the last call, what is waited for), as the plan
        of this epoch has them. What is of a later epoch waits until that is planned."""
        with self._changed:
            taken = []
            for each in [each for each in self._taken if each <= epoch]:
                taken += self._taken.pop(each)
            if epoch < self._epoch:
                return 0, taken, set()
            self._taken[epoch] = []
            return self._step, taken, set(self._waiting)

    def put(self, key: Key, items: dict[Slot, Any]) -> None:
        with self._changed:
            self._ready |= {slot: (key, item) for slot, item in items.items()}
            self._left[key] = len(items)
            self._changed.notify_all()

    def drop(self, micro_batches: Iterable[MicroBatch]) -> None:
        with self._changed:
            for micro_batch in micro_batches:
                found = self._ready.pop(micro_batch.slot, None)
                if found is not None:
                    self._is_last(found[0])

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, failure: Exception | None = None) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._closed = failure is None
            self._changed.notify_all()

    def clear(self) -> None:
        self._ready.clear()

    def _is_last(self, key: Key) -> bool:
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            return True
        return False

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert not self._closed, "the data set was closed"


class Pipeline:
    """Its threads start with the first `read_ahead` or `take`.

    - `memory_bytes`: for row groups. `ahead_bytes`: for micro-batches that wait to be taken.
    - `rows_at_once`: limit of a chunk with several micro-batches.
    - `assemblers`: number of assembling threads.
    - `keep`: row groups stay in memory after use while there is room.
    - `skip_bad`: rows of row groups that cannot be decoded are left out.

    `bad` has the numbers of row groups, and of single rows: row i of the data set has the number
    i + the number of row groups.
    """

    def __init__(
        self,
        source: MicroBatchSource,
        row_groups: RowGroups | None = None,
        *,
        micro_batch_size: int,
        ahead_bytes: int,
        assemblers: int,
        rows_at_once: int = 0,
        memory_bytes: int = 0,
        keep: bool = False,
        skip_bad: bool = False,
    ) -> None:
        self._source, self._row_groups = source, row_groups
        self._num_assemblers, self._skip_bad = assemblers, skip_bad
        self._planner = Planner(
            source,
            micro_batch_size=micro_batch_size,
            ahead_bytes=ahead_bytes,
            rows_at_once=rows_at_once,
        )
        self.memory = BlockMemory(row_groups, memory_bytes, keep)
        self.bad: frozenset[int] = frozenset()
        self.groups_read = 0
        self.outbox = Outbox()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # for the owner
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._begun: dict[Key, Chunk] = {}
        self._epoch = self._reading = self._readers = self._read_since = 0
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    # ------------------------------------------------------------------------------- in any thread

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """From `step` on, micro-batches of `virtual_workers` will be taken."""
        self._start()
        epoch = self.outbox.move(step)
        self._calls.put(partial(self._move, epoch, step, set(virtual_workers)))

    def take(self, step: int, virtual_worker: int) -> Any:
        self._start()
        return self.outbox.take((step, virtual_worker), self._wake)

    def mark_bad(self, found: set[int]) -> None:
        """Returns when no micro-batch with rows of these row groups can be taken any more."""
        if not found <= self.bad:
            self._start()
            self._calls.put(partial(self._mark_bad, found))
            self.outbox.wait_until(lambda: found <= self.bad)

    def close(self) -> None:
        """Ends the threads after what they are doing. `join` waits for them."""
        with self._starting:
            self._closed = True
        self._wake()
        self.outbox.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._row_groups is not None:
            self._row_groups.close()
        self.outbox.clear()
        for chunk in self._begun.values():  # the plan still has it
            chunk.assembly = None
        self._begun.clear()
        self._calls = queue.SimpleQueue()  # answers that nobody needs
        self._tasks = queue.SimpleQueue()
        self.memory = BlockMemory(None, 0, keep=False)

    def _wake(self) -> None:
        self._calls.put(_nothing)

    def _start(self) -> None:
        if self._threads:
            return
        with self._starting:
            if not self._threads and not self._closed:
                self._run("elastic-dp-data", self._run_owner)

    def _run(self, name: str, run: Callable[[], object]) -> None:
        thread = background(name, run, self.outbox.close)
        self._threads.append(thread)
        thread.start()

    # ---------------------------------------------------------------------------- the owner's calls

    def _run_owner(self) -> None:
        for number in range(self._num_assemblers):
            self._run(f"elastic-dp-make-{number}", partial(self._assemble, number))
        planned = False
        try:
            while not self._closed:
                for _ in range(self._calls.qsize() or not planned):
                    self._calls.get()()
                self._follow()
                self._advance()
                planned = self._plan_more(self._read())
        finally:
            self._stop()

    def _note_taken(self) -> tuple[int, set[Slot]]:
        step, taken, waiting = self.outbox.sync(self._epoch)
        self._planner.taken(taken)
        return step, waiting

    def _follow(self) -> None:
        """Plans what waiting threads need."""
        step, waiting = self._note_taken()
        if step > self._planner.step:
            self.outbox.drop(self._planner.pass_to(step, waiting))
            if self._planner.is_short:
                self._planner.extend()
        for slot in waiting:
            self._planner.want(slot)

    def _move(self, epoch: int, step: int, virtual_workers: set[int]) -> None:
        self._note_taken()
        self._epoch = epoch
        self.outbox.drop(self._planner.move(step, virtual_workers))

    def _mark_bad(self, found: set[int]) -> None:
        self._note_taken()
        new = found - self.bad
        works = self._planner.remake(
            lambda work: not new.isdisjoint(self._source.row_groups([work]))
        )
        self.outbox.drop(works)
        self._add_bad(new)
        self.outbox.notify()

    def _add_bad(self, found: Iterable[int]) -> None:
        self.bad = self.bad.union(found)

    def _stop(self) -> None:
        while not self._requests.empty():
            self._requests.get()
        for _ in range(self._readers):
            self._requests.put(None)
        for _ in range(self._num_assemblers):
            self._tasks.put(None)

    def _advance(self) -> None:
        """Begins what can be begun."""
        planner, memory = self._planner, self.memory
        # Before others are forgotten, so that what both need stays.
        for chunk in (each for each in planner.new if each.left):
            groups = self._source.row_groups([m.work for m in chunk.micro_batches])
            memory.add(chunk.key, [number for number in groups if number not in self.bad])
            chunk.todo = set(groups)
        planner.new.clear()
        for key in planner.stale:
            memory.forget(key)
            if key in self._begun and not self._begun[key].working:
                del self._begun[key]
        planner.stale.clear()
        while begun := planner.begin_next(len(self._begun) >= self._num_assemblers):
            self._begun[begun.key] = begun
            begun.left_out = begun.todo & self.bad
            begun.todo -= begun.left_out
            begun.here = {n for n in begun.todo if memory.content(n) is not None}
        for chunk in list(self._begun.values()):
            if not chunk.working:
                self._feed(chunk)

    def _plan_more(self, reads_are_idle: bool) -> bool:
        """Plans another portion, unless enough is planned. So row groups that are needed again soon
        are known, and stay in memory."""
        there_is_room = self.memory.needed < self.memory.limit and self._planner.may_grow
        is_time = reads_are_idle or self._read_since >= READS_PER_PLAN
        if not (self._planner.is_short or (there_is_room and is_time)):
            return False
        self._read_since = 0
        self._planner.extend()
        return True

    def _feed(self, chunk: Chunk) -> None:
        """Gives the row groups that are here to an assembling thread."""
        contents: dict[int, Any] = {}
        may_keep: dict[int, int] = {}
        works = [m.work for m in chunk.micro_batches]
        for number in list(chunk.here):
            content = self.memory.content(number)
            if content is None:  # evicted, or lent
                chunk.here.discard(number)
            elif isinstance(content, BadShard):
                self._leave_out(chunk, number, content)
            elif isinstance(content, Exception):
                self.memory.unread(number)  # the next read may succeed
                self._end(chunk, contents, ([content] * len(chunk.micro_batches), 0, ()))
                return
            else:
                alone = self._source.changes(works, content)
                del content
                lent = self.memory.lend(chunk.key, number, alone)
                if lent is not None:
                    chunk.here.discard(number)
                    chunk.todo.discard(number)
                    contents[number] = lent[0]
                    if lent[1]:
                        may_keep[number] = lent[1]
                del lent
        if contents or not chunk.todo:
            chunk.working = True
            self.memory.waiting.discard(chunk.key)
            self._tasks.put((chunk, contents, may_keep, not chunk.todo))
        else:
            self.memory.waiting.add(chunk.key)

    def _leave_out(self, chunk: Chunk, number: int, content: BadShard) -> None:
        chunk.here.discard(number)
        chunk.todo.discard(number)
        chunk.left_out.add(number)
        if self._skip_bad:
            self._add_bad([number])
        else:
            chunk.failed[number] = content
        self.memory.release(chunk.key, number)

    def _read(self) -> bool:
        """Requests row groups. Returns whether nothing is left to request: no more is needed, or
        there is no memory for more."""
        limit = 0 if self._row_groups is None else self._row_groups.threads()
        while self._readers < limit:
            self._run(f"elastic-dp-read-{self._readers}", self._read_blocks)
            self._readers += 1
        while self._readers > limit:  # each thread that decodes has memory of its own
            self._requests.put(None)
            self._readers -= 1
        while self._reading < limit + _READS_QUEUED:
            number = self.memory.next_to_read()
            if number is None:
                return True
            self._reading += 1
            self._requests.put(number)
        return False

    def _read_finished(self, number: int, content: Columns | Exception, nbytes: int) -> None:
        self._reading -= 1
        self._read_since += 1
        self.groups_read += 1
        self.memory.landed(number, content, nbytes)
        self._is_here(number)

    def _is_here(self, number: int) -> None:
        for chunk in self._begun.values():
            if number in chunk.todo:
                chunk.here.add(number)

    def _copied(self, chunk: Chunk, contents: dict[int, Any]) -> None:
        self._give_back(chunk, contents)
        chunk.working = False
        if not chunk.left:
            self._begun.pop(chunk.key, None)

    def _give_back(self, chunk: Chunk, contents: dict[int, Any]) -> None:
        for number, content in contents.items():
            self.memory.give_back(chunk.key, number, content)
            if content is not None:
                self._is_here(number)
        contents.clear()

    def _end(self, chunk: Chunk, contents: dict[int, Any], made: Assembled) -> None:
        self._give_back(chunk, contents)
        items, nbytes, bad = made
        if bad:
            self._add_bad(bad)
        self._begun.pop(chunk.key, None)
        self.memory.forget(chunk.key)
        chunk.assembly = None
        wanted = self._planner.end(chunk, nbytes)
        found = {m.slot: item for m, item in zip(wanted, items, strict=True) if m is not None}
        if found:
            self.outbox.put(chunk.key, found)

    # ------------------------------------------------------------- in reading, assembling threads

    def _read_blocks(self) -> None:
        assert self._row_groups is not None
        while (number := self._requests.get()) is not None:
            content: Any
            try:
                content, nbytes = self._row_groups.read(number)
            except BaseException as error:  # of a store, a decoder: raised where rows are needed
                content, nbytes = _raised(error), 0
            self._calls.put(partial(self._read_finished, number, content, nbytes))
            content = None  # no reference must remain when the memory is reused

    def _assemble(self, producer: int) -> None:
        while (task := self._tasks.get()) is not None:
            chunk, contents, may_keep, is_last = task
            made: Assembled | None = None
            try:
                if chunk.assembly is None:
                    chunk.assembly = self._source.assembly(chunk.micro_batches)
                chunk.assembly.copy(contents, may_keep)
                if is_last:
                    made = chunk.assembly.finish(chunk.left_out, chunk.failed, producer)
            except BaseException as error:  # of user code, a store, a decoder: raised by `take`
                made = [_raised(error)] * len(chunk.micro_batches), 0, ()
            if made is None:
                self._calls.put(partial(self._copied, chunk, contents))
            else:
                self._calls.put(partial(self._end, chunk, contents, made))
            del task, chunk, contents, made  # no reference must remain when memory is reused


def _raised(error: BaseException) -> Exception:
    """The error, or one that stands for SystemExit, a panic of Rust and the like. These would end
    the thread, and others would wait for it."""
    if isinstance(error, Exception):
        return error
    said = traceback.format_exception_only(error)[-1].strip()
    lines = "".join(traceback.format_exception(error))
    return UserCodeError("", f"code that reads or changes the data raised {said}", lines)


def _nothing() -> None:
    pass
