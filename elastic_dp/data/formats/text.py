"""Shards of text rows: cut once into row groups of about 4 MiB, parsed once to learn what the
columns are.

A row group is a range of bytes that begins and ends between rows, so it is parsed alone later, with
the types pinned that hold for all shards. A compressed shard cannot be cut: it is one row group.
`convert` cuts and parses with the same code, so that it reads the rows that training reads.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from shlex import quote
from typing import Protocol

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.nulls import count_null_lists, count_nulls
from elastic_dp.data.columns.schema import has_lengths, leaves, top_level
from elastic_dp.data.formats.exact_numbers import LeadingZeros, Rounded
from elastic_dp.data.formats.format import Scan, ShardAt
from elastic_dp.errors import DataError

GROUP_BYTES = 4 << 20
UNPACKED_BYTES = (
    2 << 30
)  # of a compressed shard, which is one row group; pyarrow parses no more at once
ROW_BYTES = 256 << 20  # of one row; beyond it, a quote was most likely never closed
HEAD_BYTES = 64 << 10  # that are read first to find where the rows begin
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNPACKED_AT_ONCE = 4 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_BLOCK_BYTES = 1 << 20  # more than a block of bz2 takes
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class TextRows(Protocol):
    """The rows of one file, which is given to it from front to back. `rounded`,
    `leading_zeros`, `remarks`: see Scan.

    What is wrong with the file is a DataError that names the file, the row or line, and what to do.
    """

    rounded: Rounded
    leading_zeros: LeadingZeros
    remarks: dict[str, tuple[int, str]]

    def head(self, content: bytes, is_all: bool) -> int | None:
        """How many bytes come before the first row. `content`: the file's first bytes; None: more
        are needed."""

    def last_row_end(self, content: bytes) -> int:
        """How many bytes of `content`, the next ones, come before the end of the last row that ends
        there; 0 if none does."""

    def parse(self, content: bytes, schema: pa.Schema | None = None) -> pa.Table:
        """The next rows, whole ones. `schema`: of the columns that are wanted; None: all, with
        types by their values."""

    def end(self) -> None:
        """After the last row is parsed: raises DataError if the file ends within a row."""


def with_codecs(*endings: str) -> tuple[str, ...]:
    return tuple(ending + codec for ending in endings for codec in ("", *_CODECS))


def is_compressed(shard: ShardAt) -> bool:
    return _codec(shard) is not None


def decompress(shard: ShardAt, content: bytes) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(content), _codec(shard)) as stream:
        pieces, nbytes = [], 0
        while piece := stream.read(_UNPACKED_AT_ONCE):
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes > UNPACKED_BYTES:
                raise DataError(
                    f"{shard.name} unpacks to more than {UNPACKED_BYTES >> 20} MiB, which "
                    "training reads as one row group; "
                    "write it in parts (elastic-dp data convert does)"
                )
        return b"".join(pieces)


def first_bytes(shard: ShardAt, nbytes: int) -> bytes:
    """Of what is in it; of a compressed shard those that its own first bytes hold."""
    packed = bytes(shard.read(0, min(shard.size, nbytes + _BLOCK_BYTES)))
    if not is_compressed(shard):
        return packed[:nbytes]
    with pa.CompressedInputStream(pa.BufferReader(packed), _codec(shard)) as stream:
        return bytes(stream.read(nbytes))


def scan_rows(
    shard: ShardAt,
    columns: Sequence[str] | None,
    rows: TextRows,
    merge: Callable[[pa.Schema, pa.Schema], pa.Schema],
) -> Scan:
    """Every row group is parsed, and its types merged with those before it."""
    packed = bytes(shard.read(0, shard.size)) if is_compressed(shard) else None
    check = 0 if packed is None else zlib.crc32(packed)
    pieces = _pieces(shard, rows) if packed is None else _whole(shard, rows, packed)
    if not shard.size:
        pieces = iter(())
    schema: pa.Schema | None = None
    found: list[tuple[int, int, int, int]] = []
    nulls, null_lists, given = Counter[str](), Counter[str](), Counter[str]()  # by column
    for first, end, content in pieces:
        if packed is None:
            check = zlib.crc32(content, check)
        table = rows.parse(content)
        if table.num_rows == 0:
            continue
        here = pa.schema([pa.field(f.name, without_times(f.type)) for f in table.schema])
        schema = here if schema is None else merge(schema, here)
        wanted = top_level(table.schema, columns)
        decoded = sum(table.column(name).nbytes for name in wanted)
        found.append((table.num_rows, first, end, 2 * len(content) + decoded))
        for name, column in flat_columns(table.select(wanted)):
            nulls[name] += count_nulls(column)
            null_lists[name] += count_null_lists(column)
            given[name] += table.num_rows
    rows.end()
    counts, starts, ends, nbytes = np.array(found, dtype=np.int64).reshape(-1, 4).T.copy()
    schema = schema or pa.schema([])
    for leaf in leaves(schema, columns):
        missing = int(counts.sum()) - given[leaf.name]
        (null_lists if has_lengths(leaf.type) else nulls)[leaf.name] += missing
    return Scan(
        schema,
        counts,
        starts,
        ends,
        nbytes,
        check,
        nulls=+nulls,
        null_lists=+null_lists,
        remarks=rows.remarks,
        rounded=rows.rounded,
        leading_zeros=rows.leading_zeros,
    )


def cut(chunks: Iterable[bytes], rows: TextRows, name: str) -> Iterator[bytes]:
    """Whole rows, end to end: of each chunk up to its last row end, with what was left of those
    before it.

    A row longer than a chunk makes a longer piece. Every byte is looked at once, however long the
    rows are.
    """
    kept: list[bytes | memoryview] = []
    kept_bytes = 0
    for chunk in chunks:
        end = rows.last_row_end(chunk)
        if end:
            yield b"".join([*kept, memoryview(chunk)[:end]])
            kept, kept_bytes = [], 0
        kept.append(chunk[end:])
        kept_bytes += len(chunk) - end
        if kept_bytes > ROW_BYTES:
            raise DataError(
                f"{name} has a row of more than {ROW_BYTES >> 20} MiB, or a quote that is "
                "never closed; look at what "
                "follows its last short row"
            )
    if rest := b"".join(kept):
        yield rest


def refuse_utf_16(name: str, content: bytes) -> None:
    if content.startswith(_UTF_16_MARKS):
        raise DataError(f"{name} is UTF-16; write it as UTF-8: {iconv('UTF-16', name)}")


def iconv(encoding: str, name: str) -> str:
    """The command that mends it."""
    return (
        f"iconv -f {encoding} -t UTF-8 {quote(name)} > {quote('utf8-' + name.rpartition('/')[2])}"
    )


def flat_columns(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Structs as their leaves; a null of a struct is one of each leaf."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return zip(table.schema.names, table.columns, strict=True)


def without_times(kind: pa.DataType) -> pa.DataType:
    """Which texts are dates is a guess for each row group; as text they are what the shard says, in
    every one."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, without_times(field.type)) for field in kind])
    return kind


def _pieces(shard: ShardAt, rows: TextRows) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, bytes) of every row group."""
    upto, head = 0, None
    while head is None:
        upto = min(max(2 * upto, HEAD_BYTES), shard.size)
        head = rows.head(bytes(shard.read(0, upto)), upto == shard.size)
    starts = range(head, shard.size, GROUP_BYTES)
    chunks = (bytes(shard.read(at, min(at + GROUP_BYTES, shard.size))) for at in starts)
    first = head
    for content in cut(chunks, rows, shard.name):
        yield first, first + len(content), content
        first += len(content)


def _whole(shard: ShardAt, rows: TextRows, packed: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Of a compressed shard."""
    content = decompress(shard, packed)
    content = content[rows.head(content, True) :]
    for at in range(0, len(content), GROUP_BYTES):
        rows.last_row_end(content[at : at + GROUP_BYTES])
    yield 0, shard.size, content


def _codec(shard: ShardAt) -> str | None:
    lower = shard.name.lower()  # which has no query
    return next((codec for ending, codec in _CODECS.items() if lower.endswith(ending)), None)
