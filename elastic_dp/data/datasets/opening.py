"""Opening a data set: by the driver, which reads the index, and by the workers, which are given
it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.data.datasets.dataset_interface import Dataset, EvaluationData
from elastic_dp.data.datasets.map_style import MapStyleDataset, MapStyleEvaluation
from elastic_dp.data.datasets.sharded import StreamingDataset, StreamingEvaluation, largest_bytes
from elastic_dp.data.discovery.index import Index, read_index
from elastic_dp.data.pipeline.row_group_reader import READ_THREADS
from elastic_dp.data.pipeline.row_groups import RowGroups, ShardRowGroups
from elastic_dp.errors import DataError
from elastic_dp.sampling import Mixture, MixtureSource, Order
from elastic_dp.sampling.mixture import row_groups_at_least
from elastic_dp.storage import Store, redact_url


def open_data(
    config: DataConfig | MapStyleData,
    *,
    virtual_workers: int,
    index: Index | None = None,
    pin: bool = False,
    timeout_s: float = 60.0,
    on_wait: Callable[[str], None] | None = None,
) -> Dataset:
    """Training data. Without an `index` it is read, for which a store may be away for `timeout_s`.

    `pin`: tensors lie in memory from which a GPU copies without a stop. `on_wait`: told when the
    store is away for longer than `timeout_s` later, and when it is back; without it, that is a
    StorageError. Raises DataError where the data set cannot be used.
    """
    if isinstance(config, MapStyleData):
        return MapStyleDataset(config, virtual_workers=virtual_workers, pin=pin)
    index = index or read_index(config, timeout_s=timeout_s)
    order = _order(config, index, virtual_workers)
    row_groups, options = _row_groups(config, index, timeout_s, on_wait)
    check_memory(row_groups, order, config.memory_bytes)
    return StreamingDataset(config, row_groups, order, pin=pin, **options)


def open_evaluation(
    config: DataConfig | MapStyleData,
    *,
    index: Index | None = None,
    pin: bool = False,
    timeout_s: float = 60.0,
    on_wait: Callable[[str], None] | None = None,
) -> EvaluationData:
    """All rows once, in file order. Without an `index` it is read. The rest as in `open_data`."""
    if isinstance(config, MapStyleData):
        return MapStyleEvaluation(config, pin=pin)
    index = index or read_index(config, timeout_s=timeout_s)
    row_groups, options = _row_groups(config, index, timeout_s, on_wait)
    check_memory(row_groups, None, config.memory_bytes)
    return StreamingEvaluation(config, row_groups, pin=pin, **options)


def check_memory(row_groups: RowGroups, order: Order | Mixture | None, memory_bytes: int) -> None:
    """One worker may have to run the whole job; what it has open then must fit. Raises
    DataError."""
    largest = int(np.argmax(row_groups.reading_bytes))
    shard, number, _ = row_groups.name(largest)
    size = int(row_groups.reading_bytes[largest])
    what = f"row group {number} of {shard} takes {_mib(size)} in memory while it is read"
    way_out = (
        "or write the shards with smaller row groups (`elastic-dp data convert --rows-per-group`)"
    )
    if size > memory_bytes:
        raise DataError(
            f"{what}, more than DataConfig.memory_bytes, which is {_mib(memory_bytes)}; "
            "raise that to at least "
            f"{_mib(size + int(row_groups.nbytes[largest]))}, {way_out}"
        )
    if order is None:
        return
    count = min(row_groups_at_least(order), len(row_groups.rows))
    needed = largest_bytes(row_groups, count)
    if needed > memory_bytes:
        raise DataError(
            f"a worker that runs all {order.virtual_workers} virtual workers has up to "
            f"{count} row groups open, "
            f"{_mib(needed)} (the largest: {what}), more than DataConfig.memory_bytes, which is "
            f"{_mib(memory_bytes)}; raise that to at least {_mib(needed)}, {way_out}"
        )


def _order(config: DataConfig, index: Index, virtual_workers: int) -> Order | Mixture:
    if index.weights is None:
        return Order(
            group_rows=index.rows,
            group_bytes=index.nbytes,
            virtual_workers=virtual_workers,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            tail=config.tail,
        )
    sources = [
        MixtureSource(
            name=redact_url(url),
            weight=weight,
            group_rows=index.rows[source.first_group : source.end_group],
            group_bytes=index.nbytes[source.first_group : source.end_group],
        )
        for url, weight, source in zip(config.urls, index.weights, index.sources, strict=True)
    ]
    return Mixture(
        sources,
        virtual_workers=virtual_workers,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
    )


def _row_groups(
    config: DataConfig, index: Index, timeout_s: float, on_wait: Callable[[str], None] | None
) -> tuple[ShardRowGroups, dict[str, Any]]:
    """With what both kinds of data set are told of them."""
    stores = [
        Store(url, config.storage_options, timeout_s=timeout_s, on_wait=on_wait)
        for url in config.urls
    ]
    options = {
        "index": index,
        "digest": index.digest,
        "threads": _threads(stores),
        "stores": stores,
    }
    return ShardRowGroups(config, index, stores), options


def _threads(stores: list[Store]) -> int:
    """Requests to a store wait most of the time; with files, reading is decoding, and more threads
    than cores are in each other's way."""
    if all(store.local_path(store.path) is not None for store in stores):
        return min(READ_THREADS, max(2, (os.cpu_count() or 1) // 2))
    return READ_THREADS


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
