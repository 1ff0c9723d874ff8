"""The row groups of a data set, in any format.

`read` runs in many threads at the same time. Errors of decoders become typed ones (see
decode_errors.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.block_source import Blocks
from elastic_dp.data.columns.arrow_arrays import Column, Lists, decode_table, view
from elastic_dp.data.columns.column_types import plain
from elastic_dp.data.columns.schema import leaves
from elastic_dp.data.discovery.shard_index import Index, path_of, prefix_of, shard_at
from elastic_dp.data.formats import open_format
from elastic_dp.data.formats.decode_errors import decoding, refuse_other_count
from elastic_dp.data.formats.file_format import (
    FileFormat,
    Ints,
    RowGroupLocation,
    ShardAt,
    read_table,
)
from elastic_dp.errors import DataError
from elastic_dp.sampling.order import RowOrder, row_groups_at_least
from elastic_dp.storage import Store

if TYPE_CHECKING:
    from elastic_dp.data.columns.row_filter import RowFilter
    from elastic_dp.storage.disk_cache import DiskCache

_log = logging.getLogger(__name__)

READ_THREADS = 32  # and so requests in flight

# After a row group of this size is decoded, Arrow's free memory is returned at once. Its allocator
# would keep it for a second, while the next row groups arrive: with 64 MiB each, a worker grew by
# up to 1.14 of its budget; it grows by 0.97 now. Smaller row groups fit into the memory of others.
GIVEN_BACK_BYTES = 64 << 20
SHARDS_KNOWN = 1024  # shards whose facts from the index are cached


def decoding_threads() -> int:
    """How many threads may decode at the same time without slowing each other down."""
    return min(READ_THREADS, max(2, (os.cpu_count() or 1) // 2))


class RowGroups:
    """The row groups of an index. Thread safe.

    `rows`, `nbytes`, `reading_bytes` int64 [row groups]: estimated bytes in memory, on which the
    order of rows depends, and at most while it is read.
    """

    def __init__(
        self,
        config: DataConfig,
        index: Index,
        *,
        timeout_s: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """`config`: the one that the index was made of. Other arguments as in `open_data`."""
        source, urls = config.block_source, config.urls
        assert len(urls) == len(index.sources), "an index of another config"
        self._cache: DiskCache | None = None
        if config.cache_dir is not None and config.cache_bytes is not None:
            from elastic_dp.storage.disk_cache import DiskCache

            say = on_wait or _log.warning
            self._cache = DiskCache(config.cache_dir, config.cache_bytes, index.digest, say)
        self._stores = [
            Store(url, config.storage_options, timeout_s=timeout_s, on_wait=on_wait, cache=cache)
            for url, cache in ((url, self._cache) for url in urls)
            if source is None
        ]
        # Requests to a store mostly wait. Reading files is decoding.
        is_local = all(store.local_path(store.path) is not None for store in self._stores)
        self._threads = decoding_threads() if self._stores and is_local else READ_THREADS
        self._formats: dict[str, FileFormat] = {Blocks.name: Blocks(source)}
        if source is None:
            self._formats = {n: open_format(n) for n in {s.format for s in index.sources}}
        self.index, self.rows, self.nbytes = index, index.rows, index.nbytes
        self.reading_bytes = index.nbytes.copy()
        for one in index.sources:
            of_source = slice(one.first_group, one.end_group)
            growth = self._formats[one.format].growth
            self.reading_bytes[of_source] = growth * index.nbytes[of_source]
        self._sources: Ints = view(index.shards["source"])  # by shard
        self._shard = lru_cache(SHARDS_KNOWN)(self._find_shard)
        each = zip(urls, index.sources, strict=True)
        several = len(self._stores) > 1
        self._prefixes = [prefix_of(url, s.is_file) if several else "" for url, s in each]
        types = {leaf.name: plain(leaf.type) for leaf in leaves(index.schema)}
        self._filter: RowFilter | None = None
        used: list[str] = []
        if config.filter is not None:
            from elastic_dp.data.columns.row_filter import RowFilter

            self._filter = RowFilter(config.filter, index.schema)
            used = self._filter.leaves
        delivered = [name for name, _ in index.columns]
        self._leaves = list(dict.fromkeys([*delivered, *used]))
        self._fields = [(name, types[name]) for name in delivered]

    @property
    def counts(self) -> dict[str, float]:
        stores = [store.counts for store in self._stores]
        names = ("requests", "retries", "bytes_read")
        found = {name: sum(getattr(counts, name) for counts in stores) for name in names}
        return found | {"bytes_from_cache": 0 if self._cache is None else self._cache.bytes_read}

    def threads(self) -> int:
        """How many threads may read at present. Reading what a cache has is decoding."""
        if self._cache is None or self._cache.misses:
            return self._threads
        return min(self._threads, decoding_threads())

    def read(self, row_group: int) -> tuple[dict[str, Column], int]:
        """The decoded columns by name, and the bytes of memory that they hold. Raises BadShard,
        DataError, StorageError."""
        opened, shard, location = self.place(row_group)
        table = self.table(row_group, self._leaves)
        with decoding(shard, location):
            where = f"row group {location.group} of {shard.name}"
            columns = decode_table(table, self._fields, where)
            if self.nbytes[row_group] >= GIVEN_BACK_BYTES:
                pa.default_memory_pool().release_unused()
            grew = opened.growth > 1
            return columns, sum(_held_bytes(c) if grew else c.nbytes for c in columns.values())

    def table(self, row_group: int, names: list[str]) -> pa.Table:
        """The columns `names`, as they are stored, of the rows that the filter keeps."""
        opened, shard, location = self.place(row_group)
        with decoding(shard, location):
            table = read_table(opened, shard, location, self.index.schema, names)
            table = table if self._filter is None else table.take(self._filter.rows(table))
            refuse_other_count(table.num_rows, int(self.rows[row_group]))
            return table

    def place(self, row_group: int) -> tuple[FileFormat, ShardAt, RowGroupLocation]:
        index, number = self.index, self.index.shard_of(row_group)
        group = row_group - int(index.group_bounds[number])
        start, end = int(index.starts[row_group]), int(index.ends[row_group])
        opened = self._formats[index.sources[self._source(number)].format]
        return opened, self._shard(number), RowGroupLocation(group, start, end)

    def name(self, row_group: int) -> tuple[str, int, int]:
        """(name of the shard, number of the row group in it, number of its first row)."""
        shard = self.index.shard_of(row_group)
        group = row_group - int(self.index.group_bounds[shard])
        return self._shard_name(shard), group, self.index.first_row(row_group)

    def close(self) -> None:
        for opened in self._formats.values():
            opened.close()
        if self._cache is not None:
            self._cache.close()

    def _find_shard(self, number: int) -> ShardAt:
        index, source = self.index, self._source(number)
        if not self._stores:  # a block source
            return shard_at(index, number, "", None, index.name(number))
        store, is_file = self._stores[source], index.sources[source].is_file
        path = path_of(store.path, index.name(number), is_file)
        return shard_at(index, number, path, store, self._shard_name(number))

    def _source(self, number: int) -> int:
        return int(self._sources[number])

    def _shard_name(self, number: int) -> str:
        return self._prefixes[self._source(number)] + self.index.name(number)


def check_memory(row_groups: RowGroups, order: RowOrder | None, memory_bytes: int) -> None:
    """Raises DataError if `memory_bytes` is not enough for one worker that runs all virtual
    workers, as it may have to."""
    largest = int(np.argmax(row_groups.reading_bytes))
    shard, number, _ = row_groups.name(largest)
    size = int(row_groups.reading_bytes[largest])
    what = f"row group {number} of {shard} takes {mib(size)} in memory while it is read"
    way_out = (
        "or write the shards with smaller row groups (`elastic-dp data convert --row-group-bytes`)"
    )
    if size > memory_bytes:
        raise DataError(
            f"{what}, more than DataConfig.memory_bytes, which is {mib(memory_bytes)}; "
            "raise that to at least "
            f"{mib(size + int(row_groups.nbytes[largest]))}, {way_out}"
        )
    if order is None:
        return
    count = min(row_groups_at_least(order), len(row_groups.rows))
    needed = largest_bytes(row_groups, count)
    if needed > memory_bytes:
        raise DataError(
            f"a worker that runs all {order.virtual_workers} virtual workers has up to "
            f"{count} row groups open, "
            f"{mib(needed)} (the largest: {what}), more than DataConfig.memory_bytes, which is "
            f"{mib(memory_bytes)}; raise that to at least {mib(needed)}, {way_out}"
        )


def largest_bytes(row_groups: RowGroups, count: int) -> int:
    """The bytes of the `count` largest row groups."""
    count = min(count, len(row_groups.nbytes))
    return int(np.partition(row_groups.nbytes, -count)[-count:].sum()) if count else 0


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _held_bytes(column: Column) -> int:
    """The memory of a column whose buffers grew by doubling. A small buffer counts with its full
    capacity; of a large one only the pages that were written are in memory."""
    if isinstance(column, Lists):
        return _held_bytes(column.values) + column.offsets.nbytes
    if isinstance(column, pa.Array):
        return sum(_capacity(buffer.size) for buffer in column.buffers() if buffer is not None)
    return _capacity(column.nbytes)


def _capacity(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if 0 < nbytes < GIVEN_BACK_BYTES else nbytes
