"""Data sets of shards: training data and evaluation data.

The order (`sampling/`) says which rows a micro-batch has. `pipeline` reads row groups in the order
in which they are needed, and assembles micro-batches a few steps ahead. `batch` returns one, and
runs the part of the user's code that must run in the caller's thread. With `workers`, that part
runs ahead too, in other processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream, RowStream
from elastic_dp.data.datasets.packed_micro_batches import PackedStream
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.batch_assembler import Ints
from elastic_dp.data.pipeline.pipeline import READ_THREADS
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import DataError
from elastic_dp.sampling import AnyOrder, GrowingOrder, Order, PackedOrder
from elastic_dp.sampling.growing_order import row_groups_at_once
from elastic_dp.storage import DiskCache, Store, redact_url


class _DelegatesToStream:
    """Methods that training data and evaluation data delegate to their stream."""

    _stream: MicroBatchStream

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
        order: AnyOrder,
        *,
        index: Index | None = None,
        digest: str = "",
        pin: bool = False,
        threads: int = READ_THREADS,
        stores: Sequence[Store] = (),
        cache: DiskCache | None = None,
    ) -> None:
        self.index, self._order = index, order
        self._limit = BadRowLimit(config, row_groups, index)
        self.num_rows, self.steps_per_epoch = order.num_rows, order.steps_per_epoch
        identity = f"{digest} {order.identity}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._stream = _stream_of(
            config,
            row_groups,
            order,
            open_row_groups=row_groups_at_once(order),
            workers=config.workers,
            keep=config.shuffle == "full",
            pin=pin,
            threads=threads,
            stores=stores,
            cache=cache,
        )
        if config.epochs is not None:
            self._stream.end_after(order.steps_of(config.epochs))

    def steps_of(self, epochs: int) -> int:
        return self._order.steps_of(epochs)

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
        order: Order | PackedOrder | None = None,
        *,
        index: Index | None = None,
        digest: str = "",
        pin: bool = False,
        threads: int = READ_THREADS,
        stores: Sequence[Store] = (),
        cache: DiskCache | None = None,
    ) -> None:
        self.index = index
        order = order or rows_in_file_order(row_groups.rows, config.micro_batch_size)
        self._limit = BadRowLimit(config, row_groups, index)
        self.num_rows, self.num_batches = order.num_rows, order.steps_per_epoch
        identity = f"evaluation {digest} {order.identity}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._order = order
        # Row groups stay in memory while there is room: `batch` may be called without `read_ahead`,
        # and evaluations are repeated.
        self._stream = _stream_of(
            config,
            row_groups,
            order,
            open_row_groups=1,
            workers=0,
            keep=True,
            pin=pin,
            threads=threads,
            stores=stores,
            cache=cache,
        )
        self._stream.end_after(0)

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
            self._stream.end_after(max(indices) + 1)
            self._stream.read_ahead(min(indices) + 1, [0])


def rows_in_file_order(group_rows: Ints, micro_batch_size: int) -> Order:
    """The order of an evaluation."""
    return Order(
        group_rows=group_rows,
        virtual_workers=1,
        micro_batch_size=micro_batch_size,
        shuffle="none",
        tail="short",
    )


def _stream_of(
    config: DataConfig,
    row_groups: RowGroups,
    order: AnyOrder,
    **options: Any,
) -> MicroBatchStream:
    if isinstance(order.base if isinstance(order, GrowingOrder) else order, PackedOrder):
        assert isinstance(order, PackedOrder | GrowingOrder)
        return PackedStream(config, row_groups, order, **options)
    assert not isinstance(order, PackedOrder)
    return RowStream(config, row_groups, order, **options)


_NAMED = 3  # in an error message


class BadRowLimit:
    """The limit of rows that `on_bad_shard="skip"` may leave out, of a data set or of each source
    that has a weight. It is applied to the rows on which all workers have agreed, so a run fails at
    the same step whatever the number of workers."""

    def __init__(self, config: DataConfig, row_groups: RowGroups, index: Index | None) -> None:
        self._fraction, self._row_groups = config.max_bad_fraction, row_groups
        self._parts = [(0, len(row_groups.rows), "the data set")]
        if index is not None and index.weights is not None:
            self._parts = [
                (source.first_group, source.end_group, f"the source {redact_url(url)!r}")
                for url, source in zip(config.urls, index.sources, strict=True)
            ]

    def check(self, bad: Sequence[int]) -> None:
        """Raises DataError if too many rows are bad. `bad`: the numbers of row groups, and of rows
        (see pipeline.py), sorted."""
        rows = self._row_groups.rows
        single = np.array([number - len(rows) for number in bad if number >= len(rows)], np.int64)
        groups = np.searchsorted(np.cumsum(rows), single, side="right")
        groups = groups[~np.isin(groups, bad)]  # the other rows count with their row group
        for first, end, what in self._parts:
            of_part = [number for number in bad if first <= number < end]
            named = [self._row_groups.name(number) for number in of_part[:_NAMED]]
            some = ", ".join(f"row group {number} of {shard}" for shard, number, _ in named)
            more = ", …" if len(of_part) > len(named) else ""
            left_out = int(rows[of_part].sum() + ((first <= groups) & (groups < end)).sum())
            names = f": {some}{more}" if some else ""
            self.check_rows(left_out, int(rows[first:end].sum()), what, names)

    def check_rows(self, left_out: int, rows: int, what: str, names: str) -> None:
        if not left_out:
            return
        if left_out == rows:
            raise DataError(
                f"DataConfig.url: no row of {what} can be decoded{names}. Nothing is left to "
                "read; repair the shards"
            )
        if left_out > self._fraction * rows:
            raise DataError(
                f"DataConfig.max_bad_fraction is {self._fraction:g}, but {left_out:,} of the "
                f"{rows:,} rows of {what}, "
                f"{left_out / rows:.2g} of them, cannot be decoded{names}. Repair or remove the "
                "shards; or raise max_bad_fraction, if these rows are not needed"
            )
