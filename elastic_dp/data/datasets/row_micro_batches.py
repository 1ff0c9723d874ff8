"""Micro-batches of rows, as the order says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream
from elastic_dp.data.formats.decode_errors import copying
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints
from elastic_dp.data.pipeline.collation import nbytes_of
from elastic_dp.data.pipeline.micro_batch_plan import MicroBatch
from elastic_dp.data.pipeline.row_group_reader import Columns, Key
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard
from elastic_dp.sampling import GrowingOrder, Mixture, Order

_ROWS_NAMED = 8  # in an error message, of one shard
_SHARDS_NAMED = 3
_NONE: Ints = np.empty(0, np.int64)

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
        if not self.bad:
            return 0
        groups, rows = self._order.locate(step, virtual_worker)
        bad = [*self.bad]
        return int((np.isin(groups, bad) | np.isin(self._numbers(groups, rows), bad)).sum())

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        if not self.bad:
            return frozenset()
        groups, rows = self._order.locate(step, virtual_worker)
        numbers = self._numbers(groups, rows)
        return frozenset(self.bad.intersection([*groups.tolist(), *numbers.tolist()]))

    def _numbers(self, groups: Ints, rows: Ints) -> Ints:
        """The numbers of rows, as `bad` has them."""
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
                numbers = _NONE
                if self._collator.decodes:
                    kept = start + np.flatnonzero(~np.isin(groups[start:stop], assembler.left_out))
                    numbers = self._numbers(groups[kept], rows[kept])
                made.append(self._finish(assembler.cut(start, stop), m, producer, numbers))
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
                with copying():
                    assembler.copy(row_group, content, own)
                continue
            assembler.leave_out(row_group)
            if self._config.on_bad_shard == "fail":
                failed[row_group] = content
            else:
                self.bad.add(row_group)
        return failed


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
