"""JSON Lines: one object a line. A newline is never inside a value, since JSON escapes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.json

from elastic_dp.data.formats.format import Place, Scan, ShardAt
from elastic_dp.data.formats.text import decompress, is_compressed, scan_rows, with_codecs
from elastic_dp.data.schema import widest

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK_LIMIT = (1 << 31) - 1
# A row that is null, or such text in a string.
_MAY_BE_NULL = re.compile(rb"(?:\A|[\n\r}\xbf])[ \t\n\r]*null")


class JsonLines:
    name = "jsonl"
    endings: tuple[str, ...] = with_codecs(".jsonl", ".ndjson")
    scans_content = True
    growth = 1.0
    merge = staticmethod(widest)

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        mark = bytes(shard.read(0, min(3, shard.size))) == _BYTE_ORDER_MARK
        return scan_rows(shard, columns, 3 * mark, _last_row_end, _parse, _merge)

    def read(self, shard: ShardAt, place: Place, schema: pa.Schema, leaves: list[str]) -> pa.Table:
        content = shard.read(place.start, place.end)
        if is_compressed(shard):
            content = decompress(shard, content)
        options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        return _parse(content, options)

    def close(self) -> None:
        pass


def _parse(content: bytes, options: pa.json.ParseOptions | None = None) -> pa.Table:
    """In this thread, as one block, so that a line may be of any length."""
    refuse_null_rows(content)
    block_size = min(len(content) + 1, _BLOCK_LIMIT)
    reading = pa.json.ReadOptions(use_threads=False, block_size=block_size)
    table = pa.json.read_json(pa.BufferReader(content), reading, options)
    table.validate(full=True)  # Arrow's reader takes text that is not UTF-8
    return table


def _merge(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    return pa.unify_schemas([one, other], promote_options="permissive")


def _last_row_end(content: bytes) -> int:
    return content.rfind(b"\n") + 1


def refuse_null_rows(content: bytes) -> None:
    """Raises ValueError where a line is, or holds, a `null` that is no object's. Arrow's reader dies of it."""
    for found in _MAY_BE_NULL.finditer(content) if b"null" in content else ():
        start = content.rfind(b"\n", 0, found.end()) + 1
        end = content.find(b"\n", start)
        line = content[start : len(content) if end < 0 else end]
        if not _is_of_objects(line.removeprefix(_BYTE_ORDER_MARK).decode(errors="replace")):
            raise ValueError(f"a line holds a null where a row must be: {line[:80]!r}")


def _is_of_objects(line: str) -> bool:
    at, decoder = 0, json.JSONDecoder(strict=False)
    while rest := line[at:].lstrip():
        try:
            value, length = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        at = len(line) - len(rest) + length
    return True
