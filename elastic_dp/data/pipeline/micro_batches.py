"""Makes micro-batches ahead of the step that takes them, with threads, in the order in which they
are taken.

`read_ahead` announces which (step, virtual worker) will be taken. `take` returns one, and waits
until it is made. The result does not depend on what was planned or taken before. The micro-batches
that wait to be taken are limited in number and in bytes. `micro_batch_plan` has the state; this
file has the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from elastic_dp.data.pipeline.micro_batch_plan import (
    Chunk,
    ChunkPacker,
    MicroBatch,
    MicroBatchPlan,
)
from elastic_dp.data.pipeline.row_group_reader import PlanChanged
from elastic_dp.data.pipeline.row_group_residency import Key
from elastic_dp.threads import background

_ROWS_AT_ONCE = 4096  # rows of a virtual worker that are planned together


class MicroBatchSource(Protocol):
    """Makes micro-batches. `work`: where the rows of a micro-batch are."""

    last_step: int | None

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Any, int]]:
        """(work, number of rows) for each step."""

    def parts(self, before: Any, after: Any) -> bool:
        """Whether two consecutive works should be in different chunks."""

    def together(self, step: int) -> int:
        """The first step that need not be made with `step`, in one chunk; `step` itself if all may
        be made alone."""

    def plan(self, needs: Sequence[tuple[Key, Sequence[Any]]]) -> None:
        """Announces chunks of works. Those with smaller keys are made first."""

    def forget(self, keys: Iterable[Key]) -> None:
        """These chunks are not needed. A `make` of one that is running may raise PlanChanged."""

    def make(
        self, key: Key, wanted: Sequence[MicroBatch], producer: int
    ) -> tuple[Sequence[Any], int]:
        """The micro-batches of a chunk, and their bytes. An exception stands for a micro-batch that
        cannot be made. `producer`: the number of the calling thread."""


class MicroBatches:
    """`producers`: number of threads, which start with the first plan. `rows_at_once`: limit of a
    chunk with several micro-batches. `ahead_bytes`: limit of those that wait to be taken."""

    def __init__(
        self,
        source: MicroBatchSource,
        *,
        micro_batch_size: int,
        ahead_bytes: int,
        producers: int,
        rows_at_once: int = 0,
    ) -> None:
        self._source, self._num_producers = source, producers
        self._steps_at_once = max(1, _ROWS_AT_ONCE // micro_batch_size)
        self._packer = ChunkPacker(rows_at_once, source.parts, source.together)
        self._planned = MicroBatchPlan(
            micro_batch_size, ahead_bytes, lambda: source.last_step, source.together
        )
        self.waited_s = 0.0  # in `take`
        self._planning = threading.Lock()  # always acquired before `_lock`
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._failure: Exception | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        with self._planning:
            with self._lock:
                if self._closed:
                    return
                self._start()
                again, torn, stale = self._planned.move(step, set(virtual_workers))
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
        """Plans more steps. Returns False if there are none, or enough are planned."""
        return self._extend(lambda: True)

    def remake(self, affected: Callable[[Any], bool]) -> None:
        """Makes the micro-batches again for whose work `affected(work)` is true."""
        with self._planning:
            with self._lock:
                begun = [m for m in self._planned if m.chunk is not None and m.chunk.begun]
                old = [m for m in begun if affected(m.work)]
                stale = self._planned.discard(old)
            self._plan([MicroBatch(*m.slot, m.work, m.rows) for m in old])
            self._source.forget(stale)

    def close(self) -> None:
        """Tells the threads to end after the chunks that they are making."""
        with self._planning, self._lock:
            self._closed = True
            self._work.notify_all()
            self._done.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._planned.clear()

    # ------------------------------------------------------------------------------------- planning

    def _extend(self, is_needed: Callable[[], bool]) -> bool:
        with self._planning:
            with self._lock:
                self._planned.look_for_room()
                if self._closed or not is_needed() or self._planned.is_complete:
                    return False
                if not self._planned.may_grow:
                    return False
                ranges, behind = self._planned.next_steps(self._steps_at_once)
            found = [m for v, steps in ranges.items() for m in self._located(steps, v)]
            self._plan(found, dict.fromkeys(ranges, behind))
            return True

    def _located(self, steps: range, virtual_worker: int) -> list[MicroBatch]:
        found = zip(steps, self._source.locate(steps, virtual_worker), strict=True)
        return [MicroBatch(step, virtual_worker, *located) for step, located in found if located[1]]

    def _plan(
        self, micro_batches: list[MicroBatch], cursors: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """Called with the planning lock. Those planned before are not to be wanted any more."""
        chunks = list(self._packer.pack(micro_batches))
        self._source.plan([(c.key, [m.work for m in c.micro_batches]) for c in chunks])
        with self._lock:
            stale = self._planned.add(chunks, cursors)
            self._work.notify()
        if stale:
            self._source.forget(stale)

    # --------------------------------------------------------------------------------------- taking

    def _take(self, step: int, virtual_worker: int) -> Any:
        with self._lock:
            if not self._threads:
                self._start()
            stale = self._planned.pass_to(step) if step > self._planned.step else []
            micro_batch = self._planned.take(step, virtual_worker)
            if micro_batch is not None:
                chunk = micro_batch.chunk
                assert chunk is not None
                if stale or not chunk.left or not chunk.made:
                    self._work.notify()
                if chunk.made and not stale:
                    return micro_batch.item
        if micro_batch is None:
            micro_batch = self._unplanned(step, virtual_worker)
            self._source.forget(
                stale
            )  # also if nothing is: producers may wait for what comes later
        elif stale:
            self._source.forget(stale)
        chunk = micro_batch.chunk
        assert chunk is not None
        with self._lock:
            while not chunk.made and not self._closed and self._failure is None:
                self._done.wait()
            if self._failure is not None:
                raise self._failure
        assert chunk.made, "the data set was closed"
        return micro_batch.item

    def _unplanned(self, step: int, virtual_worker: int) -> MicroBatch:
        located = self._located(range(step, step + 1), virtual_worker)
        assert located, "a micro-batch of 0 rows is not to be asked for"
        (micro_batch,) = located
        chunk = self._packer.first_of_all(micro_batch)
        with self._lock:
            self._planned.push(chunk)
            self._work.notify()
        return micro_batch

    # --------------------------------------------------------------------------------------- making

    def _start(self) -> None:
        if self._threads or self._closed:
            return
        for number in range(self._num_producers):
            run = partial(self._run, number)
            thread = background(f"elastic-dp-make-{number}", run, self._fail)
            self._threads.append(thread)
            thread.start()

    def _run(self, producer: int) -> None:
        while True:
            with self._lock:
                chunk = None
                while not self._closed and not self._planned.is_short:
                    if (chunk := self._planned.begin_next()) is not None:
                        break
                    self._work.wait()
                if self._closed:
                    return
            if chunk is not None:
                self._make(chunk, producer)
                continue
            try:
                self._extend(lambda: self._planned.is_short)
            except Exception as error:  # of the plan's other parts
                self._fail(error)
                return

    def _fail(self, error: Exception) -> None:
        """Raised by `take`."""
        with self._lock:
            self._failure = error
            self._done.notify_all()

    def _make(self, chunk: Chunk, producer: int) -> None:
        items: Sequence[Any]
        try:
            items, nbytes = self._source.make(chunk.key, chunk.micro_batches, producer)
        except PlanChanged:
            with self._lock:
                self._planned.put_back(chunk)
                self._work.notify()
            return
        except Exception as error:  # of user code, a store, a decoder: raised by `take`
            items, nbytes = [error] * len(chunk.micro_batches), 0
        with self._lock:
            self._planned.end(chunk, items, nbytes)
            self._done.notify_all()
