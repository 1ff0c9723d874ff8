"""Micro-batches of rows, as the order says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream
from elastic_dp.data.formats.decode_errors import copying
from elastic_dp.data.pipeline.array_memory import BlockPool
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints
from elastic_dp.data.pipeline.block_memory import Columns
from elastic_dp.data.pipeline.collation import nbytes_of
from elastic_dp.data.pipeline.planner import MicroBatch
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.sampling import GrowingOrder, Mixture, Order

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
