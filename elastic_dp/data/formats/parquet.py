"""Parquet: the footer says where everything is, and a row group is read by one range request for
the wanted columns.

The footer comes from the index, if that has kept it, and is otherwise read once per process. It is
cached, and must be the footer that the index was made of. Arrow's readers are cached as well, one
for each thread that reads the shard at the same time. Nothing is memory mapped, since
truncating a mapped file ends the process.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.columns.column_types import node_types
from elastic_dp.data.columns.schema import is_text
from elastic_dp.data.formats.decode_errors import long_nested_text
from elastic_dp.data.formats.file_format import (
    Ints,
    RowGroupLocation,
    Scan,
    ShardAt,
    ShardFile,
    ShardKey,
    stamp_of,
)
from elastic_dp.data.formats.parquet_footer import (
    CHUNK_NUMBERS,
    FOOTERS,
    chunk_numbers,
    refuse_encrypted,
)
from elastic_dp.errors import DataError
from elastic_dp.storage import ObjectRewritten

TAIL_GUESS = 64 << 10  # read first from a shard's end; most footers are shorter
GAP_BYTES = 1 << 20  # a shorter gap between two wanted ranges is read too, to save a request
TOGETHER_BYTES = 8 << 20  # a row group up to this size is read together with a footer close to it
FOOTER_BYTES_KEPT = 64 << 20  # of cached footers, encoded
SHARDS_OPEN = 64
_MAGIC = b"PAR1"
_NESTED_BYTES = 1 << 31  # of texts in lists that Arrow reads of one row group
_SCHEMAS_KEPT = 16
_MOST = (1 << 63) - 1
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
# Types that take more bytes in memory: dates and times of day are read as int32, then become int64.
_WIDTHS_IN_MEMORY = {"DATE": 12, "TIME": 12, "DECIMAL": 32}
_DICTIONARY_FACTOR = 4  # assumed number of times that a text of a dictionary occurs


class Parquet:
    name = "parquet"
    scans_content = False
    # Arrow's buffers for lists and text grow by doubling, and the old ones stay until the allocator
    # returns them: up to 2.2 times as measured with pyarrow 26, for lengths just above a power of
    # two.
    growth = 2.25

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._footers: OrderedDict[ShardKey, _Footer] = OrderedDict()  # least recently used first
        self._footer_bytes = 0
        self._decoded = lru_cache(_SCHEMAS_KEPT)(_ScannedFooter.of)

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        FOOTERS.start()  # while the footer is on its way
        tail = bytes(_read_tail(shard))
        head, rows, chunks = FOOTERS.read(shard.name, tail, columns)
        footer = self._decoded(head)
        groups = np.frombuffer(rows, np.int64)
        shape = len(groups), len(footer.leaves), len(CHUNK_NUMBERS)
        numbers = np.frombuffer(chunks, np.int64).reshape(shape)
        of = {name: numbers[:, :, n] for n, name in enumerate(CHUNK_NUMBERS)}
        for leaf, decompressed in zip(footer.leaves, of["decompressed"].T, strict=True):
            if leaf.physical == "INT96":
                raise DataError(
                    f"column {leaf.path!r} of {shard.name} holds times of the old type INT96, "
                    "which nanoseconds hold in part; write it as INT64 timestamps in microseconds "
                    "(Spark: spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS), or leave it "
                    "out by DataConfig.columns"
                )
            if leaf.physical == "BYTE_ARRAY" and leaf.is_repeated:
                for group in np.flatnonzero(decompressed >= _NESTED_BYTES)[:1].tolist():
                    where = long_nested_text(f"column {leaf.path!r}", group, shard.name)
                    raise DataError(where)
        # In lists, statistics count empty ones as nulls.
        counts = zip(footer.leaves, np.maximum(of["nulls"], 0).sum(0).tolist(), strict=True)
        nulls = {leaf.path: count for leaf, count in counts if count and not leaf.is_repeated}
        return Scan(
            schema=footer.schema,
            rows=groups,
            starts=of["start"].min(1, initial=_MOST) * bool(footer.leaves),
            ends=of["end"].max(1, initial=0),
            nbytes=decoded_bytes(footer.leaves, groups, of),
            stored=of["decompressed"].sum(1),
            check=zlib.crc32(tail),
            tail=len(tail),
            nulls=nulls,
            # The index may keep the footer only if each read asks for the same version of the
            # shard.
            footer=tail if shard.local is None and shard.version else b"",
        )

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        path, held = shard.local, _FetchedRanges(shard)
        stamp = None if path is None else stamp_of(path)
        kept = self._footer(shard, location, held, stamp)
        file, held = self._idle(kept) or (_open(path or pa.PythonFile(held, mode="r"), kept), held)
        group = kept.metadata.row_group(location.group)

        def fetch(columns: list[str]) -> None:
            if path is None:
                numbers = chunk_numbers(_paths(kept.metadata), columns)
                held.fetch([_chunk_range(group.column(c)) for c in numbers])

        try:
            return checked(_read_group(file, location.group, leaves, fetch))
        finally:
            if path is not None and stamp_of(path) != stamp:
                raise ObjectRewritten(shard.name)
            held.clear()
            self._put_back(shard.key, kept, (file, held))

    def list_values(self, shard: ShardAt, column: str) -> npt.NDArray[np.int64] | None:
        """The number of values in all lists of a column of lists, by row group. None: the footer
        does not say; only Arrow's writer is known to count an empty list as a null."""
        tail = bytes(_read_tail(shard))
        _refuse_other(shard, tail)
        head, rows, chunks = FOOTERS.read(shard.name, tail, [column])
        footer = self._decoded(head)
        if not footer.writer.startswith("parquet-cpp-arrow") or len(footer.leaves) != 1:
            return None
        numbers = np.frombuffer(chunks, np.int64).reshape(len(rows), len(CHUNK_NUMBERS))
        values, nulls = (numbers[:, CHUNK_NUMBERS.index(name)] for name in ("values", "nulls"))
        return None if (nulls < 0).any() else values - nulls

    def close(self) -> None:
        with self._lock:
            self._footers.clear()
            self._footer_bytes = 0

    def _footer(
        self,
        shard: ShardAt,
        location: RowGroupLocation,
        held: _FetchedRanges,
        stamp: tuple[int, ...] | None,
    ) -> _Footer:
        """The cached footer, or else the shard's own. One thread reads it, and others that want it
        wait."""
        with self._lock:
            kept = self._footers.get(shard.key)
            if kept is None or kept.stamp != stamp:
                self._forget(shard.key)
                kept = self._footers[shard.key] = _Footer(shard.tail, stamp)
                self._footer_bytes += shard.tail
                while self._footer_bytes > FOOTER_BYTES_KEPT and len(self._footers) > 1:
                    self._forget(next(iter(self._footers)))
        with kept.reading:
            if kept.metadata is None:
                kept.metadata = self._read_footer(shard, location, held, stamp)
        return kept

    def _read_footer(
        self,
        shard: ShardAt,
        location: RowGroupLocation,
        held: _FetchedRanges,
        stamp: tuple[int, ...] | None,
    ) -> pq.FileMetaData:
        if shard.footer is not None:
            return _parse(shard.footer)
        start = shard.size - shard.tail
        is_near = (
            start - location.end <= GAP_BYTES and location.end - location.start <= TOGETHER_BYTES
        )
        held.fetch([(location.start if is_near and stamp is None else start, shard.size)])
        tail = held.slice(start, shard.size)
        _refuse_other(shard, tail)
        return _parse(tail)

    def _idle(self, kept: _Footer) -> _OpenShard | None:
        with self._lock:
            return kept.idle.pop() if kept.idle else None

    def _put_back(self, key: ShardKey, kept: _Footer, opened: _OpenShard) -> None:
        with self._lock:
            kept.idle.append(opened)
            if key in self._footers:
                self._footers.move_to_end(key)
            for number, footer in enumerate(reversed(self._footers.values())):
                if number >= SHARDS_OPEN:
                    if not footer.idle:
                        break
                    footer.idle.clear()

    def _forget(self, key: ShardKey) -> None:
        if (old := self._footers.pop(key, None)) is not None:
            self._footer_bytes -= old.nbytes


@dataclass(eq=False)
class _Footer:
    nbytes: int
    stamp: tuple[int, ...] | None  # of the file, before the footer was read
    metadata: Any = None  # a pq.FileMetaData
    reading: threading.Lock = field(default_factory=threading.Lock)  # while a thread reads it
    idle: list[_OpenShard] = field(default_factory=list)


class _FetchedRanges(ShardFile):
    """Byte ranges of a shard, fetched into memory; a file object for Arrow, which reads no others.
    `clear` forgets them."""

    def __init__(self, shard: ShardAt) -> None:
        super().__init__(shard)
        self._ranges: list[tuple[int, int, memoryview]] = []

    def fetch(self, ranges: list[tuple[int, int]]) -> None:
        """Reads the ranges that are not in memory yet; ranges close to each other in one
        request."""
        missing = [r for r in sorted(ranges) if self._find(*r) is None]
        joined: list[tuple[int, int]] = []
        for start, end in missing:
            if joined and start - joined[-1][1] <= GAP_BYTES:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        for start, end in joined:
            self._ranges.append((start, end, memoryview(self._shard.read(start, end))))

    def clear(self) -> None:
        self._ranges.clear()

    def slice(self, start: int, end: int) -> memoryview:
        found = self._find(start, end)
        if found is None:
            raise OSError(f"bytes {start}-{end} are not among those that the footer names")
        return found

    def _find(self, start: int, end: int) -> memoryview | None:
        for first, last, content in self._ranges:
            if first <= start and end <= last:
                return content[start - first : end - first]
        return None

    def read(self, count: int = -1) -> memoryview:  # nothing is copied
        end = self._shard.size if count < 0 else min(self._at + count, self._shard.size)
        start, self._at = self._at, end
        return self.slice(start, end)


# A reader of a shard, and the ranges that it reads, unless the shard is a local file
_OpenShard = tuple[pq.ParquetFile, _FetchedRanges]


def _open(source: Any, footer: _Footer) -> pq.ParquetFile:
    """A reader. With `pre_buffer` it would have threads of its own, and keep what it has read."""
    return pq.ParquetFile(
        source, metadata=footer.metadata, page_checksum_verification=True, pre_buffer=False
    )


def _read_group(
    file: pq.ParquetFile, number: int, leaves: list[str], fetch: Callable[[list[str]], None]
) -> pa.Table:
    """Reads the columns `leaves` of a row group, after `fetch` of them. Arrow cannot read single
    fields of a struct that is an extension type registered in this process; such a struct is read
    as a whole."""
    fetch(leaves)
    try:
        return file.read_row_group(number, columns=leaves, use_threads=False)
    except pa.ArrowInvalid:
        whole = list(_extension_structs(file.schema_arrow))
        each = (next((n for n in whole if leaf.startswith(n + ".")), leaf) for leaf in leaves)
        columns = list(dict.fromkeys(each))
        if columns == leaves:
            raise
        fetch(columns)
        return file.read_row_group(number, columns=columns, use_threads=False)


def _extension_structs(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[str]:
    for each in fields:
        if isinstance(each.type, pa.BaseExtensionType):
            yield prefix + each.name
        elif pa.types.is_struct(each.type):
            yield from _extension_structs(each.type, f"{prefix}{each.name}.")


def _read_tail(shard: ShardAt) -> memoryview:
    """The footer, with its length and the magic bytes after it."""
    end = memoryview(shard.read(max(0, shard.size - TAIL_GUESS), shard.size))
    refuse_encrypted(shard.name, end)
    if len(end) < 12 or bytes(end[-4:]) != _MAGIC:
        raise OSError("it does not end as a Parquet file does; it was cut off, or is not one")
    length = int.from_bytes(end[-8:-4], "little") + 8
    if length > shard.size:
        raise OSError(f"its footer would be {length} bytes long, longer than itself")
    if length > len(end):
        end = memoryview(shard.read(shard.size - length, shard.size))
    return end[-length:]


def _parse(tail: memoryview | bytes | pa.Buffer) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(pa.py_buffer(tail)))


def _paths(footer: pq.FileMetaData) -> list[str]:
    return [footer.schema.column(number).path for number in range(footer.num_columns)]


def check_footer(shard: ShardAt, columns: Sequence[str] | None) -> None:
    """Raises DataError or OSError if the metadata of `columns` cannot be read."""
    FOOTERS.read(shard.name, bytes(_read_tail(shard)), columns)


def _refuse_other(shard: ShardAt, tail: memoryview | bytes) -> None:
    """Raises ObjectRewritten if the footer is not the one that the index was made of."""
    if zlib.crc32(tail) != shard.check:
        raise ObjectRewritten(shard.name)


def checked(table: pa.Table) -> pa.Table:
    """Returns `table`. Raises ArrowInvalid if text is not UTF-8, which Arrow does not check when it
    reads Parquet."""
    for column in table.columns:
        if _has_text(column.type):
            column.validate(full=True)
    return table


def _has_text(kind: pa.DataType) -> bool:
    each = (one.value_type if pa.types.is_dictionary(one) else one for one in node_types(kind))
    return any(map(is_text, each))


@dataclass(frozen=True)
class _Leaf:
    """A leaf column that is read. `length`: bytes of a value, if fixed."""

    path: str
    physical: str
    length: int
    is_repeated: bool
    logical: str


@dataclass(frozen=True)
class _ScannedFooter:
    """What footers of a data set mostly have in common."""

    schema: pa.Schema
    leaves: list[_Leaf]
    writer: str

    @classmethod
    def of(cls, head: bytes) -> _ScannedFooter:
        schema, leaves, writer = pickle.loads(head)
        schema = pa.ipc.read_schema(pa.py_buffer(schema))
        return cls(schema, [_Leaf(*leaf) for leaf in leaves], writer or "")


def decoded_bytes(leaves: Sequence[_Leaf], rows: Ints, of: dict[str, Ints]) -> Ints:
    """An estimate of the memory that columns of a row group take while they are read: encoded,
    decoded, and for values in lists two levels of 2 bytes each."""
    total = of["compressed"].sum(1)
    for n, leaf in enumerate(leaves):
        values = of["values"][:, n]
        if leaf.physical == "BYTE_ARRAY":
            factor = 1 + (_DICTIONARY_FACTOR - 1) * of["dictionary"][:, n]
            total = total + of["decompressed"][:, n] * factor + 8 * values
        else:
            width = _WIDTHS.get(leaf.physical) or leaf.length
            total = total + _WIDTHS_IN_MEMORY.get(leaf.logical, width) * values
        if leaf.is_repeated:
            total = total + 4 * values + 8 * rows
    return total


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size
