"""Shards of text rows (CSV, JSON Lines): the scan cuts them into row groups of about 4 MiB, and
parses all rows to find the columns and their types.

A row group is a byte range that begins and ends between rows. So `read` can parse it alone, with
the types that hold for all shards. A compressed shard cannot be cut and is one row group. `convert`
uses the same code, and so finds the same rows as training.
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
from elastic_dp.data.formats.file_format import Scan, ShardAt
from elastic_dp.errors import DataError

GROUP_BYTES = 4 << 20
# Limit of a compressed shard, decompressed. It is one row group, and pyarrow parses no more at
# once.
UNPACKED_BYTES = 2 << 30
ROW_BYTES = 256 << 20  # limit of a row; most likely a quote of a longer one was never closed
HEAD_BYTES = 64 << 10  # read first to find where the rows begin
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNPACKED_AT_ONCE = 4 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
# As MDSWriter names them, and tar
_ALL_CODECS = _CODECS | {".zstd": "zstd", ".br": "brotli", ".tgz": "gzip"}
_BLOCK_BYTES = 1 << 20  # more than a compressed block of bz2
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class TextRows(Protocol):
    """A parser of one file, whose bytes are given to it from front to back.

    `rounded`, `leading_zeros`, `remarks`: see Scan. Methods raise DataError for what cannot be
    read; it names the file, the row, and what to do.
    """

    rounded: Rounded
    leading_zeros: LeadingZeros
    remarks: dict[str, tuple[int, str]]

    def head(self, content: bytes, is_all: bool) -> int | None:
        """The number of bytes before the first row; None if `content`, the file's first bytes, does
        not tell. `is_all`: `content` is the whole file."""

    def last_row_end(self, content: bytes) -> int:
        """The number of bytes up to the end of the last row that ends in `content`, the next bytes
        of the file; 0 if no row ends there."""

    def takes_rest(self, content: bytes) -> bool:
        """Whether `content`, the last bytes of the file, needs no `last_row_end`. The next `parse`
        gets all of it. Without a schema it finds out whether the file ends within a row."""

    def parse(self, content: bytes, schema: pa.Schema | None = None) -> pa.Table:
        """Parses the next rows. `content` begins and ends between rows. `schema`: the columns to
        parse; None: all, with types inferred from the values."""

    def end(self) -> None:
        """Call this after the last row. Raises DataError if the file ends within a row."""


def with_codecs(*endings: str) -> tuple[str, ...]:
    return tuple(ending + codec for ending in endings for codec in ("", *_CODECS))


def is_compressed(shard: ShardAt) -> bool:
    return _codec(shard) is not None


def decompress(
    shard: ShardAt, content: bytes, how: str = " (elastic-dp data convert does)"
) -> bytes:
    """`how`: what writes such a shard in parts, for the error message."""
    with pa.CompressedInputStream(pa.BufferReader(content), _codec(shard)) as stream:
        pieces, nbytes = [], 0
        while piece := stream.read(_UNPACKED_AT_ONCE):
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes > UNPACKED_BYTES:
                raise DataError(
                    f"{shard.name} unpacks to more than {UNPACKED_BYTES >> 20} MiB, which "
                    f"training reads as one row group; write it in parts{how}"
                )
        return b"".join(pieces)


def first_bytes(shard: ShardAt, nbytes: int) -> bytes:
    """The first bytes of the decompressed content, at most `nbytes`; fewer if the shard's own first
    bytes decompress to fewer."""
    if not is_compressed(shard):
        return bytes(shard.read(0, min(shard.size, nbytes)))
    packed = bytes(shard.read(0, min(shard.size, nbytes + _BLOCK_BYTES)))
    with pa.CompressedInputStream(pa.BufferReader(packed), _codec(shard)) as stream:
        return bytes(stream.read(nbytes))


def scan_rows(
    shard: ShardAt,
    columns: Sequence[str] | None,
    rows: TextRows,
    merge: Callable[[pa.Schema, pa.Schema], pa.Schema],
    unpack: Callable[[ShardAt, bytes], bytes] | None = None,
) -> Scan:
    """Parses every row group, and merges its types with those of the row groups before it.

    `unpack`: makes text rows of a whole shard, which then is one row group. None: `decompress`, if
    the shard is compressed.
    """
    unpack = decompress if unpack is None and is_compressed(shard) else unpack
    packed = bytes(shard.read(0, shard.size)) if unpack else None
    check = 0 if packed is None else zlib.crc32(packed)
    if unpack is None or packed is None:
        pieces = _pieces(shard, rows)
    else:
        pieces = _one_piece(shard, rows, unpack(shard, packed))
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
        del content, table  # the next piece takes their memory
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


def cut(
    chunks: Iterable[bytes], rows: TextRows, name: str, nbytes: int | None = None
) -> Iterator[bytes]:
    """Joins and cuts `chunks` into pieces that begin and end between rows. `nbytes`: of all chunks;
    None: unknown.

    A piece ends with the last row that ends in its chunk; a row longer than a chunk makes a longer
    piece. Each byte is looked at once, however long the rows are. A chunk is forgotten before the
    next one is read, which then takes its memory: fresh memory costs as much as reading.
    """
    kept: list[bytes | memoryview] = []
    kept_bytes = seen = 0
    for chunk in chunks:
        seen += len(chunk)
        is_rest = seen == nbytes and rows.takes_rest(chunk)
        end = len(chunk) if is_rest else rows.last_row_end(chunk)
        if end and end == len(chunk) and not kept_bytes:
            yield chunk
            del chunk
            continue
        if end:
            piece = b"".join([*kept, memoryview(chunk)[:end]])
            kept, kept_bytes = [chunk[end:]], len(chunk) - end
            del chunk
            yield piece
            del piece
        else:
            kept.append(chunk)
            kept_bytes += len(chunk)
        if kept_bytes > ROW_BYTES:
            raise DataError(
                f"{name} has a row of more than {ROW_BYTES >> 20} MiB, or a quote that is "
                "never closed; look at what follows its last short row"
            )
    if rest := b"".join(kept):
        yield rest


def refuse_utf_16(name: str, content: bytes) -> None:
    if content.startswith(_UTF_16_MARKS):
        raise DataError(f"{name} is UTF-16; write it as UTF-8: {iconv('UTF-16', name)}")


def iconv(encoding: str, name: str) -> str:
    """The command that converts the file to UTF-8."""
    return (
        f"iconv -f {encoding} -t UTF-8 {quote(name)} > {quote('utf8-' + name.rpartition('/')[2])}"
    )


def flat_columns(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """(name, column) with structs replaced by their leaves. A null struct is a null in each
    leaf."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return zip(table.schema.names, table.columns, strict=True)


def without_times(kind: pa.DataType) -> pa.DataType:
    """The type with text in place of dates and times, which pyarrow guesses for each row group: one
    row group may look like dates, and the next one not."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, without_times(field.type)) for field in kind])
    return kind


def _pieces(shard: ShardAt, rows: TextRows) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, content) of each row group."""
    upto, head = 0, None
    while head is None:
        upto = min(max(2 * upto, HEAD_BYTES), shard.size)
        head = rows.head(bytes(shard.read(0, upto)), upto == shard.size)
    starts = range(head, shard.size, GROUP_BYTES)
    chunks = (bytes(shard.read(at, min(at + GROUP_BYTES, shard.size))) for at in starts)
    first = head
    for content in cut(chunks, rows, shard.name, shard.size - head):
        start, first = first, first + len(content)
        yield start, first, content
        del content


def _one_piece(shard: ShardAt, rows: TextRows, content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The one row group of a shard that cannot be cut, as `_pieces`."""
    content = content[rows.head(content, True) :]
    if not rows.takes_rest(content):
        for at in range(0, len(content), GROUP_BYTES):
            rows.last_row_end(content[at : at + GROUP_BYTES])
    yield 0, shard.size, content


def _codec(shard: ShardAt) -> str | None:
    lower = shard.name.lower()  # a name has no query, unlike a URL
    return next((codec for ending, codec in _ALL_CODECS.items() if lower.endswith(ending)), None)
