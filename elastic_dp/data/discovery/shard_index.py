"""The index of a data set: its shards, and the byte range and number of rows of each row group.

The driver reads the index once and ships it to the workers, which list nothing. It consists of
arrays: a million shards take about 150 MB, and up to 8 MiB of footers. It does not contain the
location of the data set, so a copy in another bucket has the same index. Its digest covers
everything that decides the order of rows and the tensors, and the size and checksum of each shard
(file_format.py), so other content is another data set.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.arrow_arrays import arrow_ints, view
from elastic_dp.data.columns.schema import top_level
from elastic_dp.data.formats.file_format import Ints, ShardAt
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

VERSION = 4  # of `Index.to_bytes`
_GLOB_MARKS = "*?["
CHUNK = 1 << 14  # shards whose names are converted to Python strings at the same time


@dataclass(frozen=True)
class IndexedSource:
    """A URL of the data set. Its row groups are `first_group` ≤ i < `end_group`. `weight`: its
    share in a mixture; None if the sources are one data set. `is_file`: the URL names a single
    shard."""

    format: str
    weight: float | None
    is_file: bool
    first_group: int
    end_group: int


@dataclass(frozen=True, eq=False)
class Index:
    """Row groups are numbered across all shards, and shards across all sources. Picklable.

    - `shards` [shards]: columns name, version (strings), source, size, check, tail, footer (see
      file_format.py), partition (JSON, see `partition`).
    - `groups` [row groups]: columns rows, starts, ends, nbytes, stored (int64); tokens, to pack.
    - `group_bounds` int64 [shards + 1]: shard i has the row groups bounds[i] ≤ j < bounds[i + 1].
    - `columns`: (name, type and the value that replaces nulls) of the columns that a batch has.
    - `schema`: of the top-level columns that contain these, and of those that the filter uses.
    - `selection`: a digest of the rows that the filter keeps; "" without one. `groups` counts only
      these rows.
    - `asked`: a digest of the options and files that it was made of; see `read_index`.
    """

    sources: tuple[IndexedSource, ...]
    shards: pa.RecordBatch
    groups: pa.RecordBatch
    group_bounds: Ints
    schema: pa.Schema
    columns: tuple[tuple[str, str], ...]
    selection: str = ""
    asked: str = ""

    @cached_property
    def rows(self) -> Ints:
        """Number of rows, int64 [row groups]."""
        return self._group_array("rows")

    @cached_property
    def nbytes(self) -> Ints:
        """Estimated bytes in memory, decoded and while being decoded, int64 [row groups]."""
        return self._group_array("nbytes")

    @cached_property
    def stored_bytes(self) -> Ints:
        """Size of the columns that are read, as the shards have it, int64 [row groups]."""
        return self._group_array("stored")

    @cached_property
    def tokens(self) -> Ints | None:
        """Number of tokens, int64 [row groups]; None if the job does not pack."""
        return self._group_array("tokens") if "tokens" in self.groups.schema.names else None

    @cached_property
    def starts(self) -> Ints:
        return self._group_array("starts")

    @cached_property
    def ends(self) -> Ints:
        return self._group_array("ends")

    @cached_property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weights of the sources; None if they are one data set."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return tuple(weights) or None

    def shard_of(self, row_group: int) -> int:
        assert 0 <= row_group < len(self.rows), "no such row group"
        return int(np.searchsorted(self.group_bounds, row_group, side="right")) - 1

    def first_row(self, row_group: int) -> int:
        """The number of rows before the row group in its shard."""
        first = int(self.group_bounds[self.shard_of(row_group)])
        return int(self.rows[first:row_group].sum())

    def name(self, shard: int) -> str:
        return str(self.shards["name"][shard])

    def footer(self, shard: int) -> pa.Buffer | None:
        """The footer of a shard; None if the index does not keep it: the format has none, reading
        it is cheap, or there are too many."""
        return self.shards["footer"][shard].as_buffer()

    def partition(self, shard: int) -> dict[str, Any]:
        """The columns that only the name of the shard's folder holds, and their value there."""
        values = self.shards["partition"][shard].as_py()
        return {} if values is None else dict(json.loads(values))

    @property
    def delivered(self) -> pa.Schema:
        """The part of `schema` that contains `columns`. The others are read for the filter
        alone."""
        tops = set(top_level(self.schema, [name for name, _ in self.columns]))
        return pa.schema([field for field in self.schema if field.name in tops])

    @cached_property
    def digest(self) -> str:
        """Equal for data sets with the same rows in the same shards, read as the same columns."""
        formats = [(s.format, s.weight) for s in self.sources]
        content = hashlib.sha256(json.dumps(["index 1", formats, self.columns]).encode())
        for column in ("source", "size", "check"):
            content.update(view(self.shards[column]).data)
        for names in chunks_of(self.shards["name"]):
            content.update(json.dumps(names.to_pylist()).encode())
        if self.shards["partition"].null_count < len(self.shards):
            for values in chunks_of(self.shards["partition"]):
                content.update(json.dumps(values.to_pylist()).encode())
        content.update(self.selection.encode())
        for numbers in (self.group_bounds, self.rows, self.starts, self.ends):
            content.update(np.ascontiguousarray(numbers).data)
        if self.tokens is not None:
            content.update(np.ascontiguousarray(self.tokens).data)
        return content.hexdigest()

    def to_bytes(self) -> bytes:
        """Several Arrow IPC streams, one after the other. Reading them runs no code, unlike
        pickle."""
        facts = {
            "sources": [vars(source) for source in self.sources],
            "columns": self.columns,
            "selection": self.selection,
            "asked": self.asked,
            "version": VERSION,
        }
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        bounds = pa.record_batch([arrow_ints(self.group_bounds)], ["bounds"])
        schema = self.schema.with_metadata(
            {**(self.schema.metadata or {}), "index": json.dumps(facts)}
        )
        for batch in (schema.empty_table(), self.shards, self.groups, bounds):
            with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
                for part in chunks_of(batch):
                    stream.write(part)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Index:
        """The inverse of `to_bytes`. Raises DataError for other content."""
        source = pa.BufferReader(content)
        try:
            with pa.ipc.open_stream(source) as stream:
                schema = stream.read_all().schema
            batches = []
            for _ in range(3):
                with pa.ipc.open_stream(source) as stream:
                    batches.append(_one_batch(stream.read_all()))
            metadata = dict(schema.metadata)
            facts = json.loads(metadata.pop(b"index"))
            if facts["version"] != VERSION:
                raise DataError(
                    f"the run's index of its data set has version {facts['version']}, and this "
                    f"elastic_dp reads {VERSION}; go on with the version that wrote it, or begin a "
                    "new run under another name"
                )
            sources = tuple(IndexedSource(**source) for source in facts["sources"])
            columns = tuple((name, kind) for name, kind in facts["columns"])
            shards, groups, bounds = batches
            plain = schema.with_metadata(metadata or None)
            bounds_of = view(bounds["bounds"])
            later = facts["selection"], facts["asked"]
            return cls(sources, shards, groups, bounds_of, plain, columns, *later)
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"the data set's index cannot be read: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Index.from_bytes, (self.to_bytes(),)

    def _group_array(self, column: str) -> Ints:
        return view(self.groups[column])


def shard_at(index: Index, number: int, path: str, store: Any, shown: str) -> ShardAt:
    """What the index knows of a shard. `path`: in the store. `shown`: its name for messages."""
    facts = ("size", "version", "check", "tail")
    size, version, check, tail = (index.shards[name][number].as_py() for name in facts)
    return ShardAt(
        store=store,
        path=path,
        size=size,
        version=version,
        name=shown,
        check=check,
        tail=tail,
        head=int(index.starts[index.group_bounds[number]]),
        footer=index.footer(number),
        partition=index.partition(number),
    )


def path_of(store_path: str, name: str, is_file: bool) -> str:
    """The path of a file in its store."""
    return store_path if is_file else root_of(store_path) + name


def prefix_of(url: str, is_file: bool) -> str:
    """What precedes the names of files in messages if there are several sources."""
    shown = redact_url(url)
    return shown[: shown.rfind("/") + 1] if is_file else root_of(shown)


def root_of(path: str) -> str:
    """The path that the names of files are relative to, for a folder or a glob."""
    mark = glob_mark(path)
    if mark is not None:
        return path[: path.rfind("/", 0, mark) + 1]
    return path.rstrip("/") + "/" if path.strip("/") else ""


def glob_mark(path: str) -> int | None:
    return min((path.index(mark) for mark in _GLOB_MARKS if mark in path), default=None)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def chunks_of(array: Any) -> Iterator[Any]:
    """Slices of an Arrow array or record batch."""
    return (array.slice(start, CHUNK) for start in range(0, len(array), CHUNK))
