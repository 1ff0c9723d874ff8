"""Opens a data set: in the driver, which reads the index, and in the workers, which receive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.data.columns.schema import leaves
from elastic_dp.data.datasets.micro_batch_stream import (
    Evaluation,
    MicroBatchStream,
    RowStream,
    ShardStream,
)
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.formats.file_format import Ints
from elastic_dp.data.pipeline.collation import check_decoded
from elastic_dp.data.pipeline.row_groups import RowGroups, check_memory, mib
from elastic_dp.errors import DataError
from elastic_dp.sampling.order import BaseOrder, Order, RowOrder, with_steps
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.storage import redact_url


def open_data(
    config: DataConfig | MapStyleData,
    *,
    virtual_workers: int | Mapping[int, int],
    index: Index | None = None,
    pin: bool = False,
    timeout_s: float = 60.0,
    on_wait: Callable[[str], None] | None = None,
    known: Index | None = None,
    left_out: tuple[tuple[int, int], ...] = (),
) -> MicroBatchStream:
    """Opens training data.

    - `virtual_workers`: their number, or numbers by the step after which they hold.
    - `index`: None: read it, which raises StorageError if the store cannot be reached for
      `timeout_s` seconds.
    - `known`: without `index`, one of an earlier start, which is used if nothing has changed.
    - `left_out`: steps whose rows are left out; see `with_steps`.
    - `pin`: tensors are in pinned memory.
    - `on_wait(message)`: called when the store cannot be reached for longer than `timeout_s` later,
      and when it can be again. Without it, the first is a StorageError.

    Raises DataError if the data set cannot be used.
    """
    schedule = StepSchedule(virtual_workers)
    if isinstance(config, MapStyleData):
        from elastic_dp.data.datasets.map_style import ItemStream

        return ItemStream(config, schedule=schedule, left_out=left_out, pin=pin)
    if index is None:
        from elastic_dp.data.discovery.index import read_index

        index = read_index(config, timeout_s=timeout_s, known=known)
    order = with_steps(_order(config, index, schedule.least), schedule, left_out)
    check_decoded(config.decode, leaves(index.delivered))
    row_groups = RowGroups(config, index, timeout_s=timeout_s, on_wait=on_wait)
    check_memory(row_groups, order, config.memory_bytes)
    return stream_of(config, row_groups, order, pin=pin)


def open_evaluation(
    config: DataConfig | MapStyleData,
    *,
    index: Index | None = None,
    pin: bool = False,
    timeout_s: float = 60.0,
    on_wait: Callable[[str], None] | None = None,
) -> Evaluation:
    """Opens data for an evaluation: all rows once, in file order. Arguments as in `open_data`."""
    if isinstance(config, MapStyleData):
        from elastic_dp.data.datasets.map_style import ItemStream

        return Evaluation(ItemStream(config, evaluation=True, pin=pin))
    if index is None:
        from elastic_dp.data.discovery.index import read_index

        index = read_index(config, timeout_s=timeout_s)
    check_decoded(config.decode, leaves(index.delivered))
    row_groups = RowGroups(config, index, timeout_s=timeout_s, on_wait=on_wait)
    check_memory(row_groups, None, config.memory_bytes)
    if config.pack is not None:
        order: RowOrder = _packed_order(config, index, 1, shuffle="none", tail="short")
    else:
        order = rows_in_file_order(index.rows, config.micro_batch_size)
    return Evaluation(stream_of(config, row_groups, order, evaluation=True, pin=pin))


def stream_of(
    config: DataConfig, row_groups: RowGroups, order: RowOrder, **options: Any
) -> ShardStream:
    """`options`: of the stream."""
    if config.pack is not None:
        from elastic_dp.data.datasets.packed_micro_batches import PackedStream

        return PackedStream(config, row_groups, order, **options)
    return RowStream(config, row_groups, order, **options)


def rows_in_file_order(group_rows: Ints, micro_batch_size: int) -> Order:
    """The order of an evaluation."""
    return Order(
        group_rows=group_rows,
        virtual_workers=1,
        micro_batch_size=micro_batch_size,
        shuffle="none",
        tail="short",
    )


def _order(config: DataConfig, index: Index, virtual_workers: int) -> BaseOrder:
    if config.pack is not None:
        return _packed_order(config, index, virtual_workers, config.shuffle, config.tail)
    if index.weights is None:
        return Order(
            group_rows=index.rows,
            group_bytes=index.stored_bytes,
            virtual_workers=virtual_workers,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            tail=config.tail,
        )
    from elastic_dp.sampling.mixture import Mixture, MixtureSource

    stages, urls = config.weights_by_step, config.urls
    assert stages is not None, "an index of another config"
    changes = {n: [float(w.get(u, 0)) for u in urls] for n, w in stages.items() if n}
    sources = [
        MixtureSource(
            name=redact_url(url),
            weight=weight,
            group_rows=index.rows[source.first_group : source.end_group],
            group_bytes=index.stored_bytes[source.first_group : source.end_group],
        )
        for url, weight, source in zip(urls, index.weights, index.sources, strict=True)
    ]
    return Mixture(
        sources,
        virtual_workers=virtual_workers,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        changes=changes,
    )


def _packed_order(
    config: DataConfig, index: Index, virtual_workers: int, shuffle: Any, tail: Any
) -> BaseOrder:
    from elastic_dp.data.datasets.packed_micro_batches import packed_row_bytes
    from elastic_dp.sampling.packing import PackedOrder

    assert config.pack is not None and index.tokens is not None, "an index of another config"
    order = PackedOrder(
        group_tokens=index.tokens,
        length=config.pack,
        group_bytes=index.stored_bytes,
        virtual_workers=virtual_workers,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        shuffle=shuffle,
        tail=tail,
    )
    row_bytes = packed_row_bytes(config, index.nbytes, order)
    rows = min(config.micro_batch_size, -(-order.num_tokens // config.pack))
    if row_bytes * rows > config.memory_bytes:
        raise DataError(
            f"a micro-batch of {rows} rows of DataConfig.pack={config.pack} takes "
            f"{mib(row_bytes * rows)}, more than DataConfig.memory_bytes, which is "
            f"{mib(config.memory_bytes)}; lower pack or micro_batch_size, or raise memory_bytes"
        )
    return order
