"""Shards of text rows: cut once into row groups of about 4 MiB, parsed once to learn what the columns are.

A row group is a range of bytes that begins and ends between rows, so it is parsed alone later, with the types
pinned that hold for all shards. A compressed shard cannot be cut: it is one row group.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from elastic_dp.data.formats.format import Scan, ShardAt
from elastic_dp.data.nulls import count_null_lists, count_nulls
from elastic_dp.data.schema import has_lengths, leaves, top_level

GROUP_BYTES = 4 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}

Parse = Callable[[bytes], pa.Table]
LastRowEnd = Callable[[bytes], int]  # how many bytes are whole rows, 0 if none is


def with_codecs(*endings: str) -> tuple[str, ...]:
    return tuple(ending + codec for ending in endings for codec in ("", *_CODECS))


def is_compressed(shard: ShardAt) -> bool:
    return _codec(shard) is not None


def decompress(shard: ShardAt, content: bytes) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(content), _codec(shard)) as stream:
        return bytes(stream.read())


def scan_rows(
    shard: ShardAt,
    columns: Sequence[str] | None,
    start: int,
    last_row_end: LastRowEnd,
    parse: Parse,
    merge: Callable[[pa.Schema, pa.Schema], pa.Schema],
) -> Scan:
    """`start`: of the first row. Every row group is parsed, and its types merged with those before it."""
    if is_compressed(shard):
        packed = bytes(shard.read(0, shard.size))
        pieces = iter([(0, shard.size, decompress(shard, packed))])
        check = zlib.crc32(packed)
    else:
        pieces, check = cut(shard, start, last_row_end), 0
    schema: pa.Schema | None = None
    found: list[tuple[int, int, int, int]] = []
    nulls, null_lists, given = Counter[str](), Counter[str](), Counter[str]()  # by column
    for first, end, content in pieces:
        if not is_compressed(shard):
            check = zlib.crc32(content, check)
        if not content.strip():
            continue
        table = parse(content)
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
    rows, starts, ends, nbytes = np.array(found, dtype=np.int64).reshape(-1, 4).T.copy()
    schema = schema or pa.schema([])
    for leaf in leaves(schema, columns):
        missing = int(rows.sum()) - given[leaf.name]
        (null_lists if has_lengths(leaf.type) else nulls)[leaf.name] += missing
    return Scan(schema, rows, starts, ends, nbytes, check, nulls=+nulls, null_lists=+null_lists)


def cut(shard: ShardAt, start: int, last_row_end: LastRowEnd) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, bytes) of every row group, end to end. A row longer than a group makes a longer group."""
    kept, first, at = b"", start, start
    while at < shard.size:
        upto = min(at + GROUP_BYTES, shard.size)
        kept, at = kept + bytes(shard.read(at, upto)), upto
        end = len(kept) if at == shard.size else last_row_end(kept)
        if end:
            yield first, first + end, kept[:end]
            kept, first = kept[end:], first + end


def flat_columns(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Structs as their leaves; a null of a struct is one of each leaf."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return zip(table.schema.names, table.columns, strict=True)


def without_times(kind: pa.DataType) -> pa.DataType:
    """Which texts are dates is a guess for each row group; as text they are what the shard says, in every one."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, without_times(field.type)) for field in kind])
    return kind


def _codec(shard: ShardAt) -> str | None:
    lower = shard.name.lower()  # which has no query
    return next((codec for ending, codec in _CODECS.items() if lower.endswith(ending)), None)
