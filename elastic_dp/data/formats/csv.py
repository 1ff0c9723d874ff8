"""CSV with a header line, commas, and RFC 4180's double quotes, as pyarrow reads it.

A newline inside quotes does not end a row. A quote opens a quoted field only at the field's start; a quoted
field ends at the first quote that is not doubled. That is pyarrow's rule, so shards are cut where it cuts rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.csv

from elastic_dp.data.formats.format import Place, Scan, ShardAt
from elastic_dp.data.formats.heads import Heads
from elastic_dp.data.formats.text import (
    GROUP_BYTES,
    decompress,
    is_compressed,
    scan_rows,
    with_codecs,
)
from elastic_dp.data.schema import widest
from elastic_dp.errors import DataError

_QUOTED = re.compile(rb'"(?<![^,\r\n]")[^"]*(?:""[^"]*)*(?:"|\Z)')
_ROW_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK_LIMIT = (1 << 31) - 1


class Csv:
    name = "csv"
    endings: tuple[str, ...] = with_codecs(".csv")
    scans_content = True
    growth = 1.0
    merge = staticmethod(widest)

    def __init__(self) -> None:
        self._heads = Heads()

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        header = b"" if is_compressed(shard) else _read_header(shard)

        def parse(content: bytes) -> pa.Table:
            return _parse(header + content)

        return scan_rows(shard, columns, len(header), _last_row_end, parse, _merge)

    def read(self, shard: ShardAt, place: Place, schema: pa.Schema, leaves: list[str]) -> pa.Table:
        content = bytes(shard.read(place.start, place.end))
        if is_compressed(shard):
            content = decompress(shard, content)
        elif shard.head:
            content = self._heads.read(shard, shard.head) + content
        return _parse(content, schema)

    def close(self) -> None:
        self._heads.clear()


def _parse(content: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """In this thread, as one block, so that a row may be of any length. The header is part of `content`."""
    types = {} if schema is None else {field.name: field.type for field in schema}
    return pa.csv.read_csv(
        pa.BufferReader(content),
        pa.csv.ReadOptions(use_threads=False, block_size=min(len(content) + 1, _BLOCK_LIMIT)),
        pa.csv.ParseOptions(newlines_in_values=True),
        pa.csv.ConvertOptions(
            column_types=types, include_columns=list(types) or None, include_missing_columns=True
        ),
    )


def _merge(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Within a shard, what is not one kind of number is text, as it would be in one row group."""
    kinds = [widest(a.type, b.type) or pa.string() for a, b in zip(one, other, strict=True)]
    return pa.schema([pa.field(name, kind) for name, kind in zip(one.names, kinds, strict=True)])


def _read_header(shard: ShardAt) -> bytes:
    """Up to the end of the first line that is not blank."""
    upto = 0
    while upto < shard.size:
        upto = min(max(2 * upto, 64 << 10), shard.size)
        content = bytes(shard.read(0, upto))
        end = _header_end(content)
        if end and (end < upto or upto == shard.size):  # else "\n" may follow "\r"
            return content[:end]
        if upto > GROUP_BYTES:
            break
    raise DataError(f"{shard.name} has no header line of column names with rows below it")


def _header_end(content: bytes) -> int:
    mark = len(_BYTE_ORDER_MARK) if content.startswith(_BYTE_ORDER_MARK) else 0
    body = content[mark:]
    spans = list(_quoted(body))
    row = 0
    for end in _ROW_END.finditer(body):
        if any(start <= end.start() < stop for start, stop in spans):
            continue
        if end.start() > row:
            return mark + end.end()
        row = end.end()
    return 0


def _last_row_end(content: bytes) -> int:
    """After the last newline that is in no quoted field."""
    end = len(content)
    for start, stop in reversed(list(_quoted(content))):
        at = content.rfind(b"\n", stop, end)
        if at >= 0:
            return at + 1
        end = start
    return content.rfind(b"\n", 0, end) + 1


def _quoted(content: bytes) -> Iterator[tuple[int, int]]:
    """The quoted fields that hold a newline. The last one may be cut off by the end of `content`."""
    if b'"' in content:
        for match in _QUOTED.finditer(content):
            start, stop = match.span()
            if content.find(b"\n", start, stop) >= 0 or content.find(b"\r", start, stop) >= 0:
                yield start, stop
