"""Makes the index of a data set (shard_index.py): lists the shards, and reads their footers, or
scans them."""

from __future__ import annotations

import hashlib
import json
import pickle
from array import array
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.arrow_arrays import arrow_ints
from elastic_dp.data.columns.column_types import type_name
from elastic_dp.data.columns.schema import Columns
from elastic_dp.data.discovery.partitions import FolderColumns
from elastic_dp.data.discovery.shard_index import CHUNK, Index, IndexedSource
from elastic_dp.data.discovery.sources import OpenedSource, open_sources, scan_all, some
from elastic_dp.data.formats.file_format import Ints, Scan
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

# Limit of all footers that the index keeps, those of the first shards. A worker that begins such a
# shard needs no request for its footer.
FOOTER_BYTES_KEPT = 8 << 20
_INT16_SOURCES = 1 << 15

__all__ = ["Builder", "Index", "IndexedSource", "read_index"]


def read_index(
    config: DataConfig,
    *,
    timeout_s: float = 60.0,
    known: Index | None = None,
) -> Index:
    """Lists the shards, and reads their footers; formats without footers are scanned.

    `known`: an index of an earlier start, which is returned if the options, and the names, sizes
    and versions of all shards are the same. Shards without rows are left out. Raises DataError if
    there is nothing to train on, or if a shard cannot be read (`max_bad_fraction` is for row groups
    that fail later). Raises StorageError if the store refuses, or cannot be reached for
    `timeout_s`.
    """
    weights = None if config.weights_by_step is None else config.weights_by_step[0]
    urls, sources = config.urls, open_sources(config, timeout_s)
    asked = _asked(config, sources)
    if known is not None and asked and known.asked == asked:
        return known
    used = list[str]()
    if config.filter is not None:
        from elastic_dp.data.columns.row_filter import columns_of

        used = columns_of(config.filter)
    wanted = config.columns
    read = None if wanted is None else list(dict.fromkeys([*wanted, *used]))
    in_folders = FolderColumns(((s.root, (e.path for e in s.entries)) for s in sources), read)
    columns, build, begun = Columns(wanted, used), Builder(), 0
    empty = list[str]()
    for number, shard, scan in scan_all(sources, read):
        while begun <= number:
            weight = None if weights is None else weights.get(urls[begun], 0.0)
            build.begin(sources[begun].format.name, weight, sources[begun].is_file)
            begun += 1
        name, entry = sources[number].names[shard], sources[number].entries[shard]
        shown = sources[number].prefix + name
        rows = int(scan.rows.sum())
        if not rows:  # as Spark writes a partition without a row
            empty.append(shown)
            continue
        folder = entry.path.rpartition("/")[0]
        partition = in_folders.of_shard(shown, folder, scan.schema.names)
        if partition:
            scan = _with_partition(scan, partition, in_folders.types)
        columns.add(shown, scan.schema, scan.nulls, rows)
        build.add(name, entry.size, entry.version, scan, partition)
    if len(empty) == sum(len(source.entries) for source in sources):
        shown = redact_url(urls[0])
        raise DataError(f"DataConfig.url: no shard at {shown!r} holds a row: {some(empty)}")
    in_folders.check()
    columns.refuse_nulls()
    index = replace(build.finish(columns), asked=asked)
    if config.filter is None and config.pack is None:
        return index
    from elastic_dp.data.discovery.row_counts import with_counts

    return with_counts(index, config, timeout_s)


class Builder:
    """Builds an index from shards that are added one by one."""

    def __init__(self) -> None:
        self._sources: list[IndexedSource] = []
        self._shards: list[tuple[Any, ...]] = []  # not converted to arrays yet
        self._batches: list[pa.RecordBatch] = []
        self._source_of = array("q")  # by shard
        self._ends = array("q", [0])  # row groups up to a shard
        self._groups = {field.name: array("q") for field in _GROUPS}
        self._footer_bytes = 0

    def begin(self, chosen: str, weight: float | None, is_file: bool) -> None:
        """Begins a source. The shards that are added next belong to it."""
        self._end()
        first = self._ends[-1]
        self._sources.append(IndexedSource(chosen, weight, is_file, first, first))

    def add(
        self,
        name: str,
        size: int,
        version: str,
        scan: Scan,
        partition: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        values, footer = json.dumps(dict(partition)) if partition else None, None
        if scan.footer and self._footer_bytes + len(scan.footer) <= FOOTER_BYTES_KEPT:
            footer = scan.footer
            self._footer_bytes += len(footer)
        self._shards.append((name, version, size, scan.check, scan.tail, footer, values))
        self._source_of.append(len(self._sources) - 1)
        self._ends.append(self._ends[-1] + len(scan.rows))
        for column, numbers in self._groups.items():
            numbers.frombytes(getattr(scan, column).tobytes())
        if len(self._shards) >= CHUNK:
            self._flush()

    def finish(self, columns: Columns) -> Index:
        self._flush()
        self._end()
        shards = _joined(self._batches)
        kind = pa.int16() if len(self._sources) <= _INT16_SOURCES else pa.int32()
        shards = shards.append_column("source", arrow_ints(_ints(self._source_of)).cast(kind))
        numbers = {name: _ints(values) for name, values in self._groups.items()}
        numbers["nbytes"] = numbers["nbytes"] + columns.null_bytes() * numbers["rows"]
        groups = [arrow_ints(numbers[field.name]) for field in _GROUPS]
        return Index(
            sources=tuple(self._sources),
            shards=shards,
            groups=pa.record_batch(groups, _GROUPS),
            group_bounds=_ints(self._ends),
            schema=columns.schema(),
            columns=tuple((f.name, type_name(f.type)) for f in columns.leaves()),
        )

    def _end(self) -> None:
        if self._sources:
            self._sources[-1] = replace(self._sources[-1], end_group=self._ends[-1])

    def _flush(self) -> None:
        if self._shards:
            columns = zip(zip(*self._shards, strict=True), _SHARDS, strict=True)
            arrays = [pa.array(values, field.type) for values, field in columns]
            self._batches.append(pa.record_batch(arrays, _SHARDS))
            self._shards = []


_SHARDS = pa.schema(
    {
        "name": pa.large_string(),
        "version": pa.large_string(),
        "size": pa.int64(),
        "check": pa.int64(),
        "tail": pa.int64(),
        "footer": pa.large_binary(),
        "partition": pa.large_string(),
    }
)
_GROUPS = pa.schema([(name, pa.int64()) for name in ("rows", "starts", "ends", "nbytes", "stored")])


def _asked(config: DataConfig, sources: list[OpenedSource]) -> str:
    """A digest of the options and files on which an index depends; "" if a file has no version."""
    expression = pickle.dumps(config.filter)  # its text leaves out some of a long list of values
    options = (
        *(config.columns, expression, config.pack, config.pack_columns),
        *(config.weights_by_step, config.max_bad_fraction > 0, len(config.urls)),
    )
    content = hashlib.sha256(repr(options).encode())
    for source in sources:
        content.update(f"{source.format.name} {len(source.names)}\n".encode())
        for name, entry in zip(source.names, source.entries, strict=True):
            if not entry.version:
                return ""
            content.update(f"{name} {entry.size} {entry.version}\n".encode())
    return content.hexdigest()


def _with_partition(
    scan: Scan, partition: Mapping[str, Any], types: Mapping[str, pa.DataType]
) -> Scan:
    """The scan with the columns that only the name of the shard's folder holds."""
    schema, rows = scan.schema, int(scan.rows.sum())
    for name in partition:
        schema = schema.append(pa.field(name, types[name]))
    row_bytes = sum(8 + len(str(value).encode()) for value in partition.values())
    nulls = {**scan.nulls, **{n: rows for n, value in partition.items() if value is None}}
    nbytes = scan.nbytes + scan.rows * row_bytes
    return replace(scan, schema=schema, nbytes=nbytes, nulls=nulls)


def _ints(numbers: array[int]) -> Ints:
    return np.frombuffer(numbers, np.int64)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenates column by column and empties `batches`, so that a large index is never in memory
    twice."""
    schema = batches[0].schema
    columns = [batch.columns for batch in batches]
    batches.clear()
    joined = []
    for number in range(len(schema)):
        joined.append(pa.concat_arrays([parts[number] for parts in columns]))
        for parts in columns:
            parts[number] = None
    return pa.record_batch(joined, schema)
