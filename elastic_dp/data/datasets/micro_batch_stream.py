"""Micro-batches of shards by (step, virtual worker): what rows and packed rows have in common, and
micro-batches of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.formats.decode_errors import copying
from elastic_dp.data.pipeline.array_memory import BlockPool
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints, distinct
from elastic_dp.data.pipeline.block_memory import Columns
from elastic_dp.data.pipeline.collation import Collator, located, nbytes_of, pinned
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.data.pipeline.pipeline import Assembly, Pipeline, decoding_threads
from elastic_dp.data.pipeline.planner import STEPS_AHEAD, MicroBatch
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.data.pipeline.user_code_process import UserCodeProcess
from elastic_dp.errors import UserCodeError
from elastic_dp.module_pickling import pickle_with_modules
from elastic_dp.sampling import GrowingOrder, Mixture, Order, batch_seed
from elastic_dp.storage import DiskCache, Store

ASSEMBLERS = 2  # threads that make micro-batches, unless user code runs in processes
AHEAD_PART = 8  # 1 / AHEAD_PART of the memory is for micro-batches that are made ahead
# 1 / SLACK_PART of the memory is for what Arrow's allocator keeps in addition to row groups: 50 MiB
# for 220 MiB in row groups of 1 to 5 MiB.
SLACK_PART = 6
ROWS_AT_ONCE, BYTES_AT_ONCE = 2048, 16 << 20  # limits of a chunk of micro-batches


@dataclass(frozen=True, slots=True)
class _StreamCall:
    """The callable that a data process runs: user code with the generators of one micro-batch."""

    collator: Collator
    seed: int

    def __call__(self, arrays: Any, step: int, virtual_worker: int) -> tuple[Any, list[int]]:
        """(the micro-batch, the indices of its rows that are left out: see `Collator.decode`)."""
        arrays, bad = self.collator.decode(arrays)
        if arrays is None:
            return None, bad
        seed_everything(batch_seed(self.seed, step, virtual_worker))
        return self.collator.late(self.collator.early(arrays, step, virtual_worker)), bad


class MicroBatchStream(ABC):
    """A `MicroBatchSource` (see pipeline.py). `row_bytes`: of a row of a micro-batch, about.
    `open_row_groups`: for which there must be memory. `copy_bytes`: of what is made of a row group
    before that is dropped.
    """

    last_step: int | None = None

    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        row_bytes: int,
        open_row_groups: int,
        workers: int,
        keep: bool,
        pin: bool,
        threads: int,
        stores: Sequence[Store],
        cache: DiskCache | None,
        copy_bytes: int = 0,
    ) -> None:
        self._config, self._row_groups, self._pin = config, row_groups, pin
        self._seed, self._stores, self._cache = config.seed, stores, cache
        self._collator = Collator(config, pin=pin and not workers)
        self._row_ends = np.cumsum(row_groups.rows)  # by row group
        self._blocks = BlockPool(STEPS_AHEAD)
        workers = workers if self._collator.has_user_code or self._collator.decodes else 0
        self._processes = [
            UserCodeProcess(f"data process {number + 1} of {workers}") for number in range(workers)
        ]
        self._in_processes = workers > 0
        one_more = int(row_groups.reading_bytes.max() + row_groups.nbytes.max())
        floor = max(largest_bytes(row_groups, open_row_groups), one_more)
        spare = max(0, config.memory_bytes - floor)
        copy_bytes = min(copy_bytes, spare)
        spare -= copy_bytes
        ahead = min(config.memory_bytes // AHEAD_PART, spare)
        slack = min(config.memory_bytes // SLACK_PART, spare - ahead)
        self._pipeline = Pipeline(
            self,
            row_groups,
            micro_batch_size=config.micro_batch_size,
            ahead_bytes=ahead,
            rows_at_once=0 if workers or self._collator.makes_alone else _rows_in(row_bytes, ahead),
            assemblers=workers or ASSEMBLERS,
            memory_bytes=config.memory_bytes - ahead - slack - copy_bytes,
            at_once=lambda: _at_once(threads, cache),
            keep=keep,
            skip_bad=config.on_bad_shard == "skip",
        )

    @property
    def counts(self) -> dict[str, float]:
        stores = [store.counts for store in self._stores]
        return {
            "waited_s": self._pipeline.waited_s,
            "row_groups_read": self._pipeline.groups_read,
            "row_groups_read_again": self._pipeline.memory.evicted,
            "bytes_from_cache": 0 if self._cache is None else self._cache.bytes_read,
            **{
                name: sum(getattr(counts, name) for counts in stores)
                for name in ("requests", "retries", "bytes_read")
            },
        }

    def end_after(self, step: int) -> None:
        """Nothing is read ahead for steps after `step`. Otherwise the stream has no end."""
        self.last_step = step

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._start_processes()
        self._pipeline.read_ahead(step, virtual_workers)

    def batch(self, step: int, virtual_worker: int) -> Any:
        """None if none of its rows can be decoded."""
        self._start_processes()
        try:
            made = self._pipeline.take(step, virtual_worker)
            if made is None or self._in_processes:
                return made
            return self._collator.late(made)
        except UserCodeError as error:
            where = self.describe(step, virtual_worker)
            raise located(error, step, virtual_worker, where) from error.__cause__

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        self._pipeline.mark_bad(set(row_groups))

    def describe_row_group(self, row_group: int) -> str:
        if (row := row_group - len(self._row_ends)) >= 0:
            group = int(np.searchsorted(self._row_ends, row, side="right"))
            shard, _, first = self._row_groups.name(group)
            in_group = row - int(self._row_ends[group] - self._row_groups.rows[group])
            return f"row {first + in_group} of {shard}"
        shard, number, _ = self._row_groups.name(row_group)
        return f"row group {number} of {shard}"

    def close(self) -> None:
        self._pipeline.close()
        for process in self._processes:
            process.close()
        self._pipeline.join()
        if self._cache is not None:
            self._cache.close()

    def finished(
        self, arrays: dict[str, Any] | None, wanted: MicroBatch, producer: int
    ) -> tuple[Any, list[int]]:
        """(the micro-batch, the indices of rows that are left out)."""
        if arrays is None:
            return None, []
        if self._in_processes:
            made, bad = self._processes[producer].run(arrays, *wanted.slot)
            return (pinned(made) if self._pin else made), bad
        arrays, bad = self._collator.decode(arrays)
        return None if arrays is None else self._collator.early(arrays, *wanted.slot), bad

    def _start_processes(self) -> None:
        if self._processes and self._processes[0].pid is None:
            pickled = pickle_with_modules(_StreamCall(self._collator, self._seed))
            for process in self._processes:
                process.start(pickled)

    @abstractmethod
    def masked(self, step: int, virtual_worker: int) -> int: ...

    @abstractmethod
    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]: ...

    @abstractmethod
    def describe(self, step: int, virtual_worker: int) -> str:
        """What the micro-batch consists of, for error messages."""

    # ------------------------------------------------- what micro-batches are made of

    @abstractmethod
    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Any, int]]: ...

    def parts(self, before: Any, after: Any) -> bool:
        return False

    def row_groups(self, works: Sequence[Any]) -> list[int]:
        """The row groups of a work are its first element."""
        found: list[int] = distinct(np.concatenate([groups for groups, *_ in works])).tolist()
        return found

    def changes(self, works: Sequence[Any], content: Any) -> bool:
        return False

    @abstractmethod
    def assembly(self, wanted: Sequence[MicroBatch]) -> Assembly: ...


def _at_once(threads: int, cache: DiskCache | None) -> int:
    """How many threads may read at present. Reading what a cache has is decoding."""
    return threads if cache is None or cache.misses else min(threads, decoding_threads())


def _rows_in(row_bytes: int, ahead_bytes: int) -> int:
    """The limit of rows of a chunk."""
    return min(ROWS_AT_ONCE, min(BYTES_AT_ONCE, ahead_bytes // STEPS_AHEAD) // row_bytes)


def largest_bytes(row_groups: RowGroups, count: int) -> int:
    """The bytes of the `count` largest row groups."""
    count = min(count, len(row_groups.nbytes))
    return int(np.partition(row_groups.nbytes, -count)[-count:].sum()) if count else 0


_ROWS_NAMED = 8  # in an error message, of one shard
_SHARDS_NAMED = 3

Located = tuple[Ints, Ints]  # row groups, rows in them


class RowStream(MicroBatchStream):
    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: Order | Mixture | GrowingOrder,
        **options: Any,
    ) -> None:
        row_bytes = int(row_groups.nbytes.sum()) // max(1, int(row_groups.rows.sum()))
        super().__init__(config, row_groups, max(1, row_bytes), **options)
        self._order, self._in_file_order = order, config.shuffle == "none"

    def masked(self, step: int, virtual_worker: int) -> int:
        if not (bad := [*self._pipeline.bad]):
            return 0
        groups, rows = self._order.locate(step, virtual_worker)
        return int((np.isin(groups, bad) | np.isin(self.numbers(groups, rows), bad)).sum())

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        if not (bad := self._pipeline.bad):
            return frozenset()
        groups, rows = self._order.locate(step, virtual_worker)
        numbers = self.numbers(groups, rows)
        return bad.intersection([*groups.tolist(), *numbers.tolist()])

    def numbers(self, groups: Ints, rows: Ints) -> Ints:
        """The numbers of rows, as `Pipeline.bad` has them."""
        first: Ints = self._row_ends[groups] - self._row_groups.rows[groups]
        return len(self._row_ends) + first + rows

    def describe(self, step: int, virtual_worker: int) -> str:
        """Example: "rows 17, 93 of part-0.parquet; rows 5, 6, … of part-1.parquet". Rows are
        counted in the shard, from 0."""
        groups, rows = self._order.locate(step, virtual_worker)
        return rows_named(self._row_groups, groups, rows, self._config)

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Any, int]]:
        each = located_in_order(self._order, steps, virtual_worker)
        return [((groups, rows), len(rows)) for groups, rows in each]

    def parts(self, before: Located, after: Located) -> bool:
        """Whether a row group ends between the two: a row group in one chunk need not be copied."""
        return self._in_file_order and before[0][0] != after[0][0]

    def assembly(self, wanted: Sequence[MicroBatch]) -> RowAssembly:
        return RowAssembly(self, wanted, self._blocks)


class RowAssembly:
    def __init__(self, stream: RowStream, wanted: Sequence[MicroBatch], blocks: BlockPool) -> None:
        self._stream, self._wanted = stream, wanted
        self._groups = np.concatenate([m.work[0] for m in wanted])
        self._rows = np.concatenate([m.work[1] for m in wanted])
        self._bounds = [0, *np.cumsum([m.rows for m in wanted]).tolist()]
        # A single micro-batch may go through user code, and counts with the bytes of its result.
        bounds = self._bounds if len(wanted) > 1 else []
        self._assembler = BatchAssembler(self._groups, self._rows, blocks, bounds)

    def copy(self, contents: dict[int, Columns | None], may_keep: Mapping[int, int]) -> None:
        for row_group, columns in contents.items():
            assert columns is not None
            with copying():
                if self._assembler.copy(row_group, columns, may_keep.get(row_group, 0)):
                    contents[row_group] = None

    def finish(
        self, left_out: set[int], failed: Mapping[int, Exception], producer: int
    ) -> tuple[list[Any], int, list[int]]:
        self._assembler.left_out = list(left_out)
        made, bad = list[Any](), list[int]()
        for m, (start, stop) in zip(self._wanted, pairwise(self._bounds), strict=True):
            groups = self._groups[start:stop]
            needed = failed and set(groups.tolist()) & failed.keys()
            if needed:
                made.append(failed[min(needed)])
                continue
            one, at = self._stream.finished(self._assembler.cut(start, stop), m, producer)
            made.append(one)
            if at:
                kept = start + np.flatnonzero(~np.isin(groups, self._assembler.left_out))
                numbers = self._stream.numbers(self._groups[kept], self._rows[kept])
                bad += numbers[at].tolist()
        several = len(self._wanted) > 1
        return made, self._assembler.nbytes if several else nbytes_of(made[0]), bad


def rows_named(row_groups: RowGroups, groups: Ints, rows: Ints, config: DataConfig) -> str:
    by_shard: dict[str, list[int]] = {}
    for group, row in zip(groups.tolist(), rows.tolist(), strict=True):
        shard, _, first = row_groups.name(group)
        by_shard.setdefault(shard, []).append(first + row)
    parts = []
    for name, numbers in list(by_shard.items())[:_SHARDS_NAMED]:
        more = ", …" if len(numbers) > _ROWS_NAMED else ""
        parts.append(f"rows {', '.join(map(str, numbers[:_ROWS_NAMED]))}{more} of {name}")
    if len(by_shard) > _SHARDS_NAMED:
        parts.append(f"and of {len(by_shard) - _SHARDS_NAMED} more shards")
    counted = " (counting those that the filter keeps)" if config.filter is not None else ""
    return f"{'; '.join(parts)}{counted}" if parts else "no rows"


def located_in_order(
    order: Order | Mixture | GrowingOrder, steps: range, virtual_worker: int
) -> Iterable[tuple[Any, Any]]:
    """`order.locate` for each step. Locates several steps of an epoch together, which costs as much
    as one."""
    if isinstance(order, GrowingOrder):
        yield from (order.locate(step, virtual_worker) for step in steps)
        return
    b = order.micro_batch_size
    if isinstance(order, Mixture):
        groups, rows = order.locate_steps(steps, virtual_worker)
        for start in range(0, len(groups), b):
            yield groups[start : start + b], rows[start : start + b]
        return
    per_epoch, share = order.steps_per_epoch, order.share(virtual_worker)
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
