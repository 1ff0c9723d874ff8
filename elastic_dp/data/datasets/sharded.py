"""Data sets of shards: training data and evaluation data.

The order (`sampling/`) says which rows a micro-batch has. Three stages follow, each of which works
ahead of the next one:

1. `row_group_reader` reads and decodes row groups in the order in which they are needed.
2. `micro_batches` assembles micro-batches from them, a few steps ahead.
3. `batch` returns a micro-batch, and runs the part of the user's code that must run in the caller's
   thread. With `workers`, that part runs ahead too, in other processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.array_memory import BlockPool
from elastic_dp.data.pipeline.bad_row_limit import BadRowLimit
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints
from elastic_dp.data.pipeline.collation import Collator, located, nbytes_of, pinned
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.data.pipeline.micro_batch_plan import STEPS_AHEAD, MicroBatch
from elastic_dp.data.pipeline.micro_batches import MicroBatches
from elastic_dp.data.pipeline.row_group_reader import READ_THREADS, Columns, Key, RowGroupReader
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.data.pipeline.user_code_process import UserCodeProcess
from elastic_dp.errors import BadShard, UserCodeError
from elastic_dp.module_pickling import pickle_with_modules
from elastic_dp.sampling import Mixture, Order, batch_seed
from elastic_dp.sampling.mixture import row_groups_at_once
from elastic_dp.storage import Store

PRODUCERS = 2  # threads that make micro-batches, unless user code runs in processes
AHEAD_PART = 8  # 1 / AHEAD_PART of the memory is for micro-batches that are made ahead
# 1 / SLACK_PART of the memory is for what Arrow's allocator keeps in addition to row groups: 50 MiB
# for 220 MiB in row groups of 1 to 5 MiB.
SLACK_PART = 6
ROWS_AT_ONCE, BYTES_AT_ONCE = 2048, 16 << 20  # limits of a chunk of micro-batches
_ROWS_NAMED = 8  # in an error message, of one shard
_SHARDS_NAMED = 3

Located = tuple[Ints, Ints]  # row groups, rows in them


class _DelegatesToStream:
    """Methods that training data and evaluation data delegate to their stream."""

    _stream: _Stream

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        self._stream.mark_bad(row_groups)

    def describe_row_group(self, row_group: int) -> str:
        return self._stream.describe_row_group(row_group)

    @property
    def counts(self) -> dict[str, float]:
        return self._stream.counts

    def close(self) -> None:
        self._stream.close()


class StreamingDataset(_DelegatesToStream):
    """A `Dataset` (see dataset_interface.py)."""

    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: Order | Mixture,
        *,
        index: Index | None = None,
        digest: str = "",
        pin: bool = False,
        threads: int = READ_THREADS,
        stores: Sequence[Store] = (),
    ) -> None:
        self.index, self._order = index, order
        self._limit = BadRowLimit(config, row_groups, index)
        self.num_rows, self.steps_per_epoch = order.num_rows, order.steps_per_epoch
        self.fingerprint = hashlib.sha256(f"{digest} {order.identity}".encode()).hexdigest()
        keep, floor = config.shuffle == "full", row_groups_at_once(order)
        self._stream = _Stream(
            config, row_groups, order, floor, config.workers, keep, pin, threads, stores
        )
        if config.epochs is not None:
            self._stream.last_step = config.epochs * order.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._order.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._order.rows(step, virtual_worker)

    def masked(self, step: int, virtual_worker: int) -> int:
        return self._stream.masked(step, virtual_worker)

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        return self._stream.bad_row_groups(step, virtual_worker)

    def check_bad(self, row_groups: Iterable[int]) -> None:
        self._limit.check(sorted(row_groups))

    def batch(self, step: int, virtual_worker: int) -> Any:
        return self._stream.batch(step, virtual_worker)

    def describe(self, step: int, virtual_worker: int) -> str:
        return self._stream.describe(step, virtual_worker)

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._stream.read_ahead(step, virtual_workers)


class StreamingEvaluation(_DelegatesToStream):
    """An `EvaluationData` (see dataset_interface.py). User code never runs in other processes."""

    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        *,
        index: Index | None = None,
        digest: str = "",
        pin: bool = False,
        threads: int = READ_THREADS,
        stores: Sequence[Store] = (),
    ) -> None:
        self.index = index
        self._limit = BadRowLimit(config, row_groups, index)
        order = Order(
            group_rows=row_groups.rows,
            virtual_workers=1,
            micro_batch_size=config.micro_batch_size,
            shuffle="none",
            tail="short",
        )
        self.num_rows, self.num_batches = order.num_rows, order.steps_per_epoch
        identity = f"evaluation {digest} {order.identity}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._order = order
        # Row groups stay in memory while there is room: `batch` may be called without `read_ahead`,
        # and evaluations are repeated.
        self._stream = _Stream(config, row_groups, order, 1, 0, True, pin, threads, stores)
        self._stream.last_step = 0

    def rows(self, index: int) -> int:
        return self._order.rows(index + 1, 0)

    def masked(self, index: int) -> int:
        return self._stream.masked(index + 1, 0)

    def check_left_out(self, rows: int) -> None:
        self._limit.check_rows(rows, self.num_rows, "the evaluation", "")

    def batch(self, index: int) -> Any:
        assert 0 <= index < self.num_batches, "no such batch"
        return self._stream.batch(index + 1, 0)

    def describe(self, index: int) -> str:
        return self._stream.describe(index + 1, 0)

    def read_ahead(self, indices: Sequence[int]) -> None:
        if indices:
            self._stream.last_step = max(indices) + 1
            self._stream.read_ahead(min(indices) + 1, [0])


@dataclass(frozen=True, slots=True)
class _StreamCall:
    """The callable that a data process runs: user code with the generators of one micro-batch."""

    collator: Collator
    seed: int

    def __call__(self, arrays: Any, step: int, virtual_worker: int) -> Any:
        seed_everything(batch_seed(self.seed, step, virtual_worker))
        return self.collator.late(self.collator.early(arrays, step, virtual_worker))


class _Stream:
    """Micro-batches by (step, virtual worker) of an order; a `MicroBatchSource` (see
    micro_batches.py)."""

    last_step: int | None = None

    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: Order | Mixture,
        open_row_groups: int,
        workers: int,
        keep: bool,
        pin: bool,
        threads: int,
        stores: Sequence[Store],
    ) -> None:
        self._config, self._row_groups, self._order, self._pin = config, row_groups, order, pin
        self._seed, self._stores = config.seed, stores
        self._in_file_order = config.shuffle == "none"
        self._collator = Collator(config, pin=pin and not workers)
        self.bad: set[int] = set()
        self._blocks = BlockPool(STEPS_AHEAD)
        workers = workers if self._collator.has_user_code else 0
        self._processes = [
            UserCodeProcess(f"data process {number + 1} of {workers}") for number in range(workers)
        ]
        self._in_processes = workers > 0
        one_more = int(row_groups.reading_bytes.max() + row_groups.nbytes.max())
        floor = max(largest_bytes(row_groups, open_row_groups), one_more)
        spare = max(0, config.memory_bytes - floor)
        ahead = min(config.memory_bytes // AHEAD_PART, spare)
        slack = min(config.memory_bytes // SLACK_PART, spare - ahead)
        self._micro_batches = MicroBatches(
            self,
            micro_batch_size=order.micro_batch_size,
            ahead_bytes=ahead,
            producers=workers or PRODUCERS,
            rows_at_once=0 if workers or self._collator.runs_early else _rows_in(row_groups, ahead),
        )
        self.reader = RowGroupReader(
            row_groups,
            config.memory_bytes - ahead - slack,
            threads=threads,
            keep=keep,
            more=self._micro_batches.extend,
        )

    @property
    def counts(self) -> dict[str, float]:
        stores = [store.counts for store in self._stores]
        return {
            "waited_s": self._micro_batches.waited_s,
            "row_groups_read": self.reader.groups_read,
            "row_groups_read_again": self.reader.groups_evicted,
            **{
                name: sum(getattr(counts, name) for counts in stores)
                for name in ("requests", "retries", "bytes_read")
            },
        }

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._start_processes()
        self._micro_batches.read_ahead(step, virtual_workers)

    def batch(self, step: int, virtual_worker: int) -> Any:
        """None if none of its rows can be decoded."""
        self._start_processes()
        try:
            made = self._micro_batches.take(step, virtual_worker)
            if made is None or self._in_processes:
                return made
            return self._collator.late(made)
        except UserCodeError as error:
            where = self.describe(step, virtual_worker)
            raise located(error, step, virtual_worker, where) from error.__cause__

    def masked(self, step: int, virtual_worker: int) -> int:
        if not self.bad:
            return 0
        groups, _ = self._order.locate(step, virtual_worker)
        return int(np.isin(groups, list(self.bad)).sum())

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        if not self.bad:
            return frozenset()
        groups, _ = self._order.locate(step, virtual_worker)
        return frozenset(self.bad.intersection(groups.tolist()))

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        found = set(row_groups) - self.bad
        if found:
            self.bad |= found
            self._micro_batches.remake(lambda located: not found.isdisjoint(located[0].tolist()))

    def describe(self, step: int, virtual_worker: int) -> str:
        """Example: "rows 17, 93 of part-0.parquet; rows 5, 6, … of part-1.parquet". Rows are
        counted in the shard, from 0."""
        by_shard: dict[str, list[int]] = {}
        groups, rows = self._order.locate(step, virtual_worker)
        for group, row in zip(groups.tolist(), rows.tolist(), strict=True):
            shard, _, first = self._row_groups.name(group)
            by_shard.setdefault(shard, []).append(first + row)
        parts = []
        for name, numbers in list(by_shard.items())[:_SHARDS_NAMED]:
            more = ", …" if len(numbers) > _ROWS_NAMED else ""
            parts.append(f"rows {', '.join(map(str, numbers[:_ROWS_NAMED]))}{more} of {name}")
        if len(by_shard) > _SHARDS_NAMED:
            parts.append(f"and of {len(by_shard) - _SHARDS_NAMED} more shards")
        counted = (
            " (counting those that the filter keeps)" if self._config.filter is not None else ""
        )
        return f"{'; '.join(parts)}{counted}" if parts else "no rows"

    def describe_row_group(self, row_group: int) -> str:
        shard, number, _ = self._row_groups.name(row_group)
        return f"row group {number} of {shard}"

    def close(self) -> None:
        self._micro_batches.close()
        for process in self._processes:
            process.close()
        self.reader.close()
        self._micro_batches.join()

    # ------------------------------------------------------------- what micro-batches are made of

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Located, int]]:
        each = _locate_each(self._order, steps, virtual_worker)
        return [((groups, rows), len(rows)) for groups, rows in each]

    def parts(self, before: Located, after: Located) -> bool:
        """Whether a row group ends between the two: a row group in one chunk need not be copied."""
        return self._in_file_order and before[0][0] != after[0][0]

    def plan(self, needs: Sequence[tuple[Key, Sequence[Located]]]) -> None:
        self.reader.plan((key, self._readable(_groups_of(works))) for key, works in needs)

    def forget(self, keys: Iterable[Key]) -> None:
        self.reader.forget(keys)

    def make(self, key: Key, wanted: Sequence[MicroBatch], producer: int) -> tuple[list[Any], int]:
        groups = np.concatenate([m.work[0] for m in wanted])
        rows = np.concatenate([m.work[1] for m in wanted])
        # A single micro-batch may go through user code, and counts with the bytes of its result.
        bounds = [0, *np.cumsum([m.rows for m in wanted]).tolist()] if len(wanted) > 1 else []
        assembler = BatchAssembler(groups, rows, self._blocks, bounds)
        failed = self._fill(assembler, key)
        made: list[Any] = []
        stop = 0
        for m in wanted:
            start, stop = stop, stop + m.rows
            needed = failed and set(groups[start:stop].tolist()) & failed.keys()
            if needed:
                made.append(failed[min(needed)])
            else:
                made.append(self._finish(assembler.cut(start, stop), m, producer))
        return made, assembler.nbytes if len(wanted) > 1 else nbytes_of(made[0])

    def _fill(self, assembler: BatchAssembler, key: Key) -> dict[int, BadShard]:
        """Copies rows from row groups as these arrive. Returns the row groups that cannot be
        decoded, unless the job skips them."""
        todo, failed = self._readable(assembler.row_groups), dict[int, BadShard]()
        for row_group in self.bad.intersection(assembler.row_groups):
            assembler.leave_out(row_group)
        while todo:
            here = self.reader.take(key, todo)
            todo = [row_group for row_group in todo if row_group not in here]
            taken = set(here)
            try:
                failed |= self._copy(assembler, here, partial(self._own, key, taken))
            finally:
                here.clear()  # drops the references before the reader counts the memory as free
                self.reader.release(key, taken)
        return failed

    def _own(self, key: Key, taken: set[int], row_group: int) -> int | None:
        nbytes = self.reader.own(key, row_group)
        if nbytes is not None:
            taken.remove(row_group)
        return nbytes

    def _copy(
        self,
        assembler: BatchAssembler,
        here: Mapping[int, Columns | BadShard],
        own: Callable[[int], int | None],
    ) -> dict[int, BadShard]:
        failed = {}
        for row_group, content in here.items():
            if not isinstance(content, BadShard):
                assembler.copy(row_group, content, own)
                continue
            assembler.leave_out(row_group)
            if self._config.on_bad_shard == "fail":
                failed[row_group] = content
            else:
                self.bad.add(row_group)
        return failed

    def _finish(self, arrays: dict[str, Any] | None, wanted: MicroBatch, producer: int) -> Any:
        if arrays is None:
            return None
        if not self._in_processes:
            return self._collator.early(arrays, *wanted.slot)
        made = self._processes[producer].run(arrays, *wanted.slot)
        return pinned(made) if self._pin else made

    def _readable(self, row_groups: list[int]) -> list[int]:
        return [row_group for row_group in row_groups if row_group not in self.bad]

    def _start_processes(self) -> None:
        if self._processes and self._processes[0].pid is None:
            pickled = pickle_with_modules(_StreamCall(self._collator, self._seed))
            for process in self._processes:
                process.start(pickled)


def _groups_of(works: Sequence[Located]) -> list[int]:
    found: list[int] = np.unique(np.concatenate([groups for groups, _ in works])).tolist()
    return found


def _rows_in(row_groups: RowGroups, ahead_bytes: int) -> int:
    """The limit of rows of a chunk."""
    row_bytes = max(1, int(row_groups.nbytes.sum()) // max(1, int(row_groups.rows.sum())))
    return min(ROWS_AT_ONCE, min(BYTES_AT_ONCE, ahead_bytes // STEPS_AHEAD) // row_bytes)


def largest_bytes(row_groups: RowGroups, count: int) -> int:
    """The bytes of the `count` largest row groups."""
    count = min(count, len(row_groups.nbytes))
    return int(np.partition(row_groups.nbytes, -count)[-count:].sum()) if count else 0


def _locate_each(
    order: Order | Mixture, steps: range, virtual_worker: int
) -> Iterable[tuple[Any, Any]]:
    """`order.locate` for each step. Locates several steps of an epoch together, which costs as much
    as one."""
    if isinstance(order, Mixture):
        yield from (order.locate(step, virtual_worker) for step in steps)
        return
    b, per_epoch, share = order.micro_batch_size, order.steps_per_epoch, order.share(virtual_worker)
    step = steps.start
    while step < steps.stop:
        epoch, first = divmod(step - 1, per_epoch)
        count = min(steps.stop - step, per_epoch - first)
        stop = min((first + count) * b, share)
        index = np.arange(min(first * b, stop), stop, dtype=np.int64)
        groups, rows = order.locate_in_share(epoch, virtual_worker, index)
        for start in range(0, count * b, b):
            yield groups[start : start + b], rows[start : start + b]
        step += count
