"""Parquet: the footer says where everything is, and a row group is read by one range request for
the wanted columns.

The footer comes from the index, if that has kept it, and is otherwise read once per process. It is
cached, and must be the footer that the index was made of. Arrow's readers are cached as well, one
for each thread that reads the shard at the same time. Nothing is memory mapped, since
truncating a mapped file ends the process.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from elastic_dp.data.columns.column_types import plain_schema
from elastic_dp.data.columns.nulls import may_be_null
from elastic_dp.data.columns.row_filter import equalities
from elastic_dp.data.columns.schema import is_text, leaves
from elastic_dp.data.formats.decode_errors import long_nested_text
from elastic_dp.data.formats.encryption import (
    refuse_encrypted_footer,
    refuse_unreadable,
    unreadable_chunks,
)
from elastic_dp.data.formats.file_format import (
    RowGroupLocation,
    Scan,
    ShardAt,
    ShardKey,
    stamp_of,
)
from elastic_dp.data.formats.footer_layouts import FooterLayout, FooterLayouts
from elastic_dp.data.formats.parquet_footer import refuse_what_ends_the_process
from elastic_dp.data.formats.parquet_memory import decoded_bytes, widths_of
from elastic_dp.errors import DataError
from elastic_dp.storage import ObjectRewritten

TAIL_GUESS = 64 << 10  # read first from a shard's end; most footers are shorter
GAP_BYTES = 1 << 20  # a shorter gap between two wanted ranges is read too, to save a request
TOGETHER_BYTES = 8 << 20  # a row group up to this size is read together with a footer close to it
FOOTER_BYTES_KEPT = 64 << 20  # of cached footers, encoded
SHARDS_OPEN = 64
_MAGIC = b"PAR1"
_NESTED_BYTES = 1 << 31  # of texts in lists that Arrow reads of one row group
_ARROW_READS = 64 << 10  # bytes that Arrow reads at the end of a file


class Parquet:
    name = "parquet"
    endings: tuple[str, ...] = (".parquet", ".pq", ".parq")
    scans_content = False
    # Arrow's buffers for lists and text grow by doubling, and the old ones stay until the allocator
    # returns them: up to 2.2 times as measured with pyarrow 26, for lengths just above a power of
    # two.
    growth = 2.25

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._footers: OrderedDict[ShardKey, _Footer] = OrderedDict()  # least recently used first
        self._footer_bytes = 0
        self._gates: dict[ShardKey, threading.Lock] = {}  # held while a thread reads the footer
        self._counted: tuple[pa.Schema, list[tuple[str, int]]] | None = None
        self._layouts = FooterLayouts()

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        tail = bytes(_read_tail(shard))
        footer = _parse(tail)
        layout = self._layouts.find(tail, columns) or self._checked(shard, tail, footer, columns)
        wanted, schema = layout.chunks, layout.schema
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        ranges = [[_chunk_range(group.column(c)) for c in wanted] for group in groups]
        starts = [min((start for start, _ in r), default=0) for r in ranges]
        ends = [max((end for _, end in r), default=0) for r in ranges]
        for number in wanted:
            _refuse_long_nested_text(shard.name, footer, number, groups)
        widths = widths_of(footer, wanted)
        nbytes = [decoded_bytes(group, widths) for group in groups]
        stored = [sum(g.column(c).total_uncompressed_size for c in wanted) for g in groups]
        return Scan(
            schema=schema,
            rows=np.array([group.num_rows for group in groups], dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
            ends=np.array(ends, dtype=np.int64),
            nbytes=np.array(nbytes, dtype=np.int64),
            stored=np.array(stored, dtype=np.int64),
            check=zlib.crc32(tail),
            tail=len(tail),
            nulls=null_counts(footer, groups, self._countable(footer, schema, columns)),
            # The index may keep the footer only if each read asks for the same version of the
            # shard.
            footer=tail if shard.local is None and shard.version else b"",
        )

    def _checked(
        self, shard: ShardAt, tail: bytes, footer: pq.FileMetaData, columns: Sequence[str] | None
    ) -> FooterLayout:
        """The layout of a footer. Raises OSError or DataError if it cannot be read."""
        refuse_what_ends_the_process(tail, footer)
        wanted = chunk_numbers(footer, columns)
        refuse_unreadable(shard.name, footer, unreadable_chunks(footer, wanted), wanted)
        return self._layouts.add(tail, columns, footer, wanted)

    def _countable(
        self, footer: pq.FileMetaData, schema: pa.Schema, columns: Sequence[str] | None
    ) -> list[tuple[str, int]]:
        """`countable`, cached for shards with the schema of the last one."""
        before = self._counted
        if before is None or not before[0].equals(schema):
            before = self._counted = schema, countable(footer, schema, columns)
        return before[1]

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        if shard.local is not None:
            return self._read_local(shard, shard.local, location, leaves)
        held = _FetchedRanges(shard)
        kept = self._footer(shard, location, held, None)
        file, held = self._idle(kept) or (_open(pa.PythonFile(held, mode="r"), kept), held)
        group = kept.metadata.row_group(location.group)

        def fetch(columns: list[str]) -> None:
            numbers = chunk_numbers(kept.metadata, columns)
            held.fetch([_chunk_range(group.column(c)) for c in numbers])

        fetch(leaves)
        table = checked(_read_group(file, location.group, leaves, fetch))
        refuse_wrapped(file, pa.PythonFile(held, mode="r"), kept.metadata, location.group, leaves)
        held.clear()
        self._put_back(shard.key, kept, (file, held))
        return table

    def may_match(
        self, shard: ShardAt, expression: pa.compute.Expression, fields: Sequence[pa.Field]
    ) -> frozenset[int] | None:
        """The row groups that may have a row for which `expression` is true, by the statistics in
        the footer and the name of the folder. `fields`: the columns that it uses. None: unknown,
        also where the shard has another type than the data set, and for floats, of which statistics
        do not count NaN."""
        # Here, since it imports pandas, where that is installed: 50 MB in each worker.
        from pyarrow import dataset

        held = _FetchedRanges(shard)
        schema, in_name = pa.schema(fields), equalities(shard.partition, fields)
        chosen = dataset.ParquetFileFormat()
        fragment = chosen.make_fragment(pa.PythonFile(held, mode="r"), partition_expression=in_name)
        if not any(dataset.FileSystemDataset([fragment], schema, chosen).get_fragments(expression)):
            return frozenset()  # by the name alone
        held.fetch([(max(0, shard.size - max(shard.tail, _ARROW_READS)), shard.size)])
        there = fragment.physical_schema
        for used in fields:
            number = there.get_field_index(used.name)
            if used.name not in shard.partition and (
                number < 0 or there.field(number).type != used.type or _has_floats(used.type)
            ):
                return None
        return frozenset(g.id for g in fragment.subset(expression, schema=schema).row_groups)

    def list_values(self, shard: ShardAt, column: str) -> npt.NDArray[np.int64] | None:
        """The number of values in all lists of a column of lists, by row group. None: the footer
        does not say; only Arrow's writer is known to count an empty list as a null."""
        footer = _parse(_read_tail(shard))
        numbers = chunk_numbers(footer, [column])
        if not (footer.created_by or "").startswith("parquet-cpp-arrow") or len(numbers) != 1:
            return None
        found = []
        for number in range(footer.num_row_groups):
            chunk = footer.row_group(number).column(numbers[0])
            known = chunk.statistics
            if known is None or not known.has_null_count:
                return None
            found.append(chunk.num_values - known.null_count)
        return np.array(found, dtype=np.int64)

    def close(self) -> None:
        with self._lock:
            self._footers.clear()
            self._footer_bytes = 0

    def _read_local(
        self, shard: ShardAt, path: str, location: RowGroupLocation, leaves: list[str]
    ) -> pa.Table:
        stamp = stamp_of(path)
        held = _FetchedRanges(shard)
        kept = self._footer(shard, location, held, stamp)
        file, held = self._idle(kept) or (_open(path, kept), held)
        try:
            table = checked(_read_group(file, location.group, leaves))
            refuse_wrapped(file, path, kept.metadata, location.group, leaves)
            return table
        finally:
            if stamp_of(path) != stamp:
                raise ObjectRewritten(shard.name)
            held.clear()
            self._put_back(shard.key, kept, (file, held))

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
            if (kept := self._footers.get(shard.key)) and kept.stamp == stamp:
                return kept
            gate = self._gates.setdefault(shard.key, threading.Lock())
        with gate:
            with self._lock:
                if (kept := self._footers.get(shard.key)) and kept.stamp == stamp:
                    return kept
            try:
                return self._read_footer(shard, location, held, stamp)
            finally:
                with self._lock:
                    self._gates.pop(shard.key, None)

    def _read_footer(
        self,
        shard: ShardAt,
        location: RowGroupLocation,
        held: _FetchedRanges,
        stamp: tuple[int, ...] | None,
    ) -> _Footer:
        if shard.footer is not None:
            return self._keep(shard.key, _Footer(_parse(shard.footer), shard.tail, stamp))
        start = shard.size - shard.tail
        is_near = (
            start - location.end <= GAP_BYTES and location.end - location.start <= TOGETHER_BYTES
        )
        held.fetch([(location.start if is_near and stamp is None else start, shard.size)])
        tail = held.slice(start, shard.size)
        if zlib.crc32(tail) != shard.check:
            raise ObjectRewritten(shard.name)
        return self._keep(shard.key, _Footer(_parse(tail), shard.tail, stamp))

    def _keep(self, key: ShardKey, footer: _Footer) -> _Footer:
        with self._lock:
            self._forget(key)
            self._footers[key] = footer
            self._footer_bytes += footer.nbytes
            while self._footer_bytes > FOOTER_BYTES_KEPT and len(self._footers) > 1:
                self._forget(next(iter(self._footers)))
        return footer

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
    metadata: pq.FileMetaData
    nbytes: int
    stamp: tuple[int, ...] | None  # of the file, before the footer was read
    idle: list[_OpenShard] = field(default_factory=list)


def _has_floats(kind: pa.DataType) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return bool(pa.types.is_floating(kind)) or any(map(_has_floats, inner))


class _FetchedRanges:
    """Byte ranges of a shard, fetched into memory; a file object for Arrow. `clear` forgets
    them."""

    closed = False

    def __init__(self, shard: ShardAt) -> None:
        self._shard = shard
        self._ranges: list[tuple[int, int, memoryview]] = []
        self._at = 0

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

    def read(self, count: int = -1) -> memoryview:
        end = self._shard.size if count < 0 else min(self._at + count, self._shard.size)
        start, self._at = self._at, end
        return self.slice(start, end)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._shard.size}[whence]
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._shard.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


# A reader of a shard, and the ranges that it reads, unless the shard is a local file
_OpenShard = tuple[pq.ParquetFile, _FetchedRanges]


def _open(source: Any, footer: _Footer) -> pq.ParquetFile:
    """A reader. With `pre_buffer` it would have threads of its own, and keep what it has read."""
    return pq.ParquetFile(
        source, metadata=footer.metadata, page_checksum_verification=True, pre_buffer=False
    )


def _read_group(
    file: pq.ParquetFile,
    number: int,
    leaves: list[str],
    fetch: Callable[[list[str]], None] = lambda columns: None,
) -> pa.Table:
    """Reads the columns `leaves` of a row group. Arrow cannot read single fields of a struct that
    is an extension type registered in this process; such a struct is read as a whole."""
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
    refuse_encrypted_footer(shard.name, end)
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


def open_footer(
    raw: Any, name: str, columns: Sequence[str] | None
) -> tuple[pq.FileMetaData, frozenset[int]]:
    """The footer of the open file `raw`, and the numbers of its encrypted leaf columns. Raises
    DataError if one of `columns` is encrypted."""
    raw.seek(-8, os.SEEK_END)
    end = raw.read(8)
    refuse_encrypted_footer(name, end)
    footer = pq.read_metadata(raw)
    size = 8 + int.from_bytes(end[:4], "little")
    raw.seek(-size, os.SEEK_END)
    refuse_what_ends_the_process(raw.read(size), footer)
    unreadable = unreadable_chunks(footer, range(footer.num_columns))
    refuse_unreadable(name, footer, unreadable, chunk_numbers(footer, columns))
    return footer, frozenset(unreadable)


def checked(table: pa.Table) -> pa.Table:
    """Returns `table`. Raises ArrowInvalid if text is not UTF-8, which Arrow does not check when it
    reads Parquet."""
    for column in table.columns:
        if _has_text(column.type):
            column.validate(full=True)
    return table


def refuse_wrapped(
    file: pq.ParquetFile, source: Any, footer: pq.FileMetaData, group: int, leaves: list[str]
) -> None:
    """Raises DataError if a time of the old type INT96 does not fit into nanoseconds since 1970, in
    which Arrow reads it: it would wrap to another century."""
    numbers = chunk_numbers(footer, leaves)
    columns = [footer.schema.column(number) for number in numbers]
    for path in (column.path for column in columns if column.physical_type == "INT96"):
        kind = file.read_row_group(group, columns=[path], use_threads=False).schema
        coarse = pq.ParquetFile(
            source, metadata=footer, pre_buffer=False, coerce_int96_timestamp_unit="ms"
        )
        try:
            coarse.read_row_group(group, columns=[path], use_threads=False).cast(kind)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"column {path!r} (INT96) holds times outside of the years 1678 to 2261, which "
                "nanoseconds do not hold; write it as INT64 timestamps in microseconds "
                "(Spark: spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS), or leave it out "
                "by DataConfig.columns"
            ) from error


def _refuse_long_nested_text(
    name: str, footer: pq.FileMetaData, number: int, groups: list[Any]
) -> None:
    column = footer.schema.column(number)
    if column.physical_type != "BYTE_ARRAY" or not column.max_repetition_level:
        return
    for group, each in enumerate(groups):
        if each.column(number).total_uncompressed_size >= _NESTED_BYTES:
            raise DataError(long_nested_text(f"column {column.path!r}", group, name))


def _has_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return is_text(kind) or any(_has_text(one) for one in inner)


def chunk_numbers(footer: pq.FileMetaData, columns: Sequence[str] | None) -> list[int]:
    """The numbers of the leaf columns that belong to `columns`; None: all."""
    paths = [footer.schema.column(number).path for number in range(footer.num_columns)]
    if columns is None:
        return list(range(len(paths)))
    wanted = tuple(columns)
    inside = tuple(name + "." for name in wanted)
    return [n for n, path in enumerate(paths) if path in wanted or path.startswith(inside)]


def countable(
    footer: pq.FileMetaData, schema: pa.Schema, columns: Sequence[str] | None
) -> list[tuple[str, int]]:
    """(leaf, number of its column chunk) of the leaves of `columns` whose nulls are refused, and
    are counted by statistics. Not lists of variable length: statistics count empty ones as
    nulls."""
    fields = plain_schema(schema)
    wanted, found, number = {leaf.name for leaf in leaves(fields, columns)}, [], 0
    for leaf in leaves(fields):
        if leaf.name in wanted and not (may_be_null(leaf.type) or _may_be_empty(leaf.type)):
            found.append((leaf.name, number))
        number += num_chunks(leaf.type)
    return found if number == footer.num_columns else []


def null_counts(
    footer: pq.FileMetaData, groups: list[Any], countable: list[tuple[str, int]]
) -> dict[str, int]:
    counts = dict[str, int]()
    for name, number in countable:
        stored = footer.schema.column(number).physical_type
        for group in groups:
            chunk = group.column(number)
            if chunk.physical_type != stored:  # reading its statistics would end the process
                raise OSError(f"its footer is damaged: column {name!r} has two physical types")
            if chunk.is_stats_set and (nulls := chunk.statistics.null_count):
                counts[name] = counts.get(name, 0) + nulls
    return counts


def num_chunks(kind: pa.DataType) -> int:
    """The number of Parquet columns that store a column of this Arrow type."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind) or kind.num_fields == 0:
        return 1
    return sum(num_chunks(kind.field(number).type) for number in range(kind.num_fields))


def _may_be_empty(kind: pa.DataType) -> bool:
    """Whether the type has lists that may be empty, which statistics count as nulls."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size == 0 or _may_be_empty(kind.value_type)
    return kind.num_fields > 0


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size
