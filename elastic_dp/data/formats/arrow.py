"""Arrow IPC, the file format and the stream format: a record batch is a row group.

Both formats are a sequence of messages. A file has a footer that says where they are; a stream is
walked from message to message. The messages before the first record batch (schema, dictionaries)
are the head, and `read` decodes a stream that consists of the head and one record batch. A local
file is memory mapped, and uncompressed numbers are views of the mapping. A file that is replaced or
written to is noticed. One that is truncated while it is read ends the process.

The footer of a file has the schema, and says where the dictionaries are. Arrow's own libraries also
write both before the first record batch. Polars writes no schema message there, and puts its
dictionaries at the end; then the head is made from the footer.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.column_types import node_types, plain_schema
from elastic_dp.data.columns.null_views import clear_null_views, has_views
from elastic_dp.data.columns.schema import is_short_time, is_text, leaves, may_be_null, top_level
from elastic_dp.data.formats.arrow_messages import (
    BATCH,
    CONTINUES,
    DICTIONARY,
    END,
    MAGIC,
    Message,
    head_of_footer,
    is_fixed_size,
    listed_messages,
    message_of_footer,
    messages_of_head,
    read_footer,
    refuse_large,
    stream_of_head,
    too_large,
    walked_messages,
)
from elastic_dp.data.formats.file_format import (
    RowGroupLocation,
    Scan,
    ShardAt,
    ShardKey,
    stamp_of,
)
from elastic_dp.storage import ObjectRewritten

FILES_MAPPED = 256
HEAD_BYTES_KEPT = 16 << 20
_TEXT_FACTOR = 4  # assumed compression ratio of text
_DICTIONARY_FACTOR = 4  # assumed number of times that a value of a dictionary occurs


class Arrow:
    name = "arrow"
    scans_content = False
    growth = 1.0

    def __init__(self) -> None:
        self._heads: dict[ShardKey, _Head] = {}
        self._head_bytes = 0
        self._lock = threading.Lock()
        self._mapped = lru_cache(FILES_MAPPED)(_mapped)

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        first = bytes(shard.read(0, min(12, shard.size)))
        is_file, tail = first[:6] == MAGIC, 0
        footer = read_footer(shard) if is_file else b""
        messages = list(listed_messages(shard, footer) if is_file else walked_messages(shard))
        batches = [message for message in messages if message.kind == BATCH]
        if not batches:
            none = np.zeros(0, dtype=np.int64)
            return Scan(pa.schema([]), none, none, none, none, none, check=0)
        dictionaries = [m.start for m in messages if m.kind == DICTIONARY]
        are_late = any(start > batches[0].start for start in dictionaries)
        if is_file and (are_late or first[8:] != CONTINUES):
            tail = len(footer)
            head = head_of_footer(shard, footer)
        elif are_late:
            raise OSError(
                "its dictionaries change between record batches; write it as an Arrow file, "
                "with a footer"
            )
        else:
            head = bytes(shard.read(0, batches[0].start))
        schema = pa.ipc.open_stream(stream_of_head(head)).schema
        for message in messages:
            if message.kind == DICTIONARY:  # `read` decodes all of them with each record batch
                refuse_large(shard, message)
        if is_file and not tail:
            of_footer = pa.ipc.open_stream(stream_of_head(message_of_footer(footer))).schema
            if not schema.equals(of_footer):
                raise OSError(
                    "its first message and its footer have different schemas; it is damaged"
                )
        rows = np.array([message.rows for message in batches], dtype=np.int64)
        starts = np.array([message.start for message in batches], dtype=np.int64)
        ends = np.array([message.end for message in batches], dtype=np.int64)
        nbytes = np.array([_decoded_bytes(schema, m) for m in batches], dtype=np.int64)
        read = top_level(plain_schema(schema), columns)
        if has_views(pa.schema([schema.field(name) for name in read])):
            nbytes *= 2  # they are copied
        check = zlib.crc32(np.stack([rows, starts, ends]).data, zlib.crc32(head))
        for message in batches:
            check = zlib.crc32(message.metadata, check)
        nulls = _null_counts(plain_schema(schema), columns, batches)
        return Scan(
            schema=schema,
            rows=rows,
            starts=starts,
            ends=ends,
            nbytes=nbytes,
            stored=ends - starts,
            check=check,
            tail=tail,
            nulls=nulls,
        )

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        head, path = self._head(shard), shard.local
        if path is None:
            content = shard.read(location.start, location.end)
            return _decode(head, content, schema.names, is_mapped=False)
        stamp = stamp_of(path)
        whole = self._mapped(shard, path, stamp)
        content = whole.slice(location.start, location.end - location.start)
        table = _decode(head, content, schema.names, is_mapped=True)
        if stamp_of(path) != stamp:
            raise ObjectRewritten(shard.name)
        return table

    def close(self) -> None:
        with self._lock:
            self._heads.clear()
            self._mapped.cache_clear()

    def _head(self, shard: ShardAt) -> _Head:
        """Threads that miss one head at the same time may each read it."""
        with self._lock:
            if (found := self._heads.get(shard.key)) is not None:
                return found
        content = head_of_footer(shard) if shard.tail else bytes(shard.read(0, shard.head))
        head = _Head.of(content)
        with self._lock:
            if self._head_bytes + len(content) > HEAD_BYTES_KEPT:
                self._heads.clear()
                self._head_bytes = 0
            self._heads[shard.key] = head
            self._head_bytes += len(content)
        return head


def _mapped(shard: ShardAt, path: str, stamp: tuple[int, ...]) -> pa.Buffer:
    """The content of a file, mapped. It keeps no descriptor: there may be thousands of mappings."""
    with pa.memory_map(path) as file:
        content = file.read_buffer()
    shard.read(0, 1)  # raises if the file has another version than in the index
    return content


@dataclass(frozen=True)
class _Head:
    """What precedes the record batches of a shard."""

    content: bytes
    schema: pa.Schema
    names: list[str]
    has_dictionaries: bool
    has_views: bool

    @classmethod
    def of(cls, content: bytes) -> _Head:
        schema = pa.ipc.open_stream(stream_of_head(content)).schema
        return cls(content, schema, schema.names, _has_dictionaries(schema), has_views(schema))


def _decode(head: _Head, content: Any, names: list[str], *, is_mapped: bool) -> pa.Table:
    """Decodes the columns `names` of a record batch, those that it has. Only values that are
    compressed, bit-packed or in dictionaries are copied.

    `content`: the message of the record batch, with its body.
    """
    body = content if isinstance(content, pa.Buffer) else pa.py_buffer(content)
    schema = head.schema
    length = 8 + int.from_bytes(body.slice(4, 4).to_pybytes(), "little")
    if names != head.names:
        there = set(head.names)
        names = [name for name in names if name in there]
    message = Message(BATCH, 0, body.size, body.slice(0, length).to_pybytes())
    is_compressed = message.is_compressed
    if is_compressed and (
        why := too_large(message, lambda at: body.slice(length + at, 8).to_pybytes())
    ):
        raise OSError(f"it is {why}")
    if is_compressed or head.has_dictionaries:
        wanted = [schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        whole = pa.py_buffer(b"".join([messages_of_head(head.content), memoryview(body), END]))
        table = pa.ipc.open_stream(whole, options=options).read_all().select(names)
    else:
        batch = pa.ipc.read_record_batch(body, schema)
        if names != head.names:
            batch = batch.select(names)
            if len(names) < len(schema) and not is_mapped:  # a view would keep all columns
                batch = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
        table = pa.Table.from_batches([batch])
    table.validate(full=True)  # Arrow itself does not check offsets
    if head.has_views:
        batches = map(clear_null_views, table.to_batches())
        table = pa.Table.from_batches(batches, table.schema)
    return table


def _has_dictionaries(schema: pa.Schema) -> bool:
    kinds = (kind for field in schema for kind in node_types(field.type))
    return any(pa.types.is_dictionary(kind) for kind in kinds)


def _decoded_bytes(schema: pa.Schema, message: Message) -> int:
    """An estimate for all columns: compressed content is in memory twice while it is decoded, and
    dictionaries are replaced by their values."""
    kinds = [kind for field in schema for kind in node_types(field.type)]
    nodes = [(kind, n) for kind, (n, _) in zip(kinds, message.nodes, strict=False)]
    # Dates of 32 bits become int64.
    size = message.end - message.start + sum(8 * n for kind, n in nodes if is_short_time(kind))
    if message.is_compressed:
        size += sum(_node_bytes(kind, n) for kind, n in nodes)
        size += _TEXT_FACTOR * size * any(map(is_text, kinds))
    return size * (_DICTIONARY_FACTOR if _has_dictionaries(schema) else 1)


def _null_counts(
    schema: pa.Schema, columns: Sequence[str] | None, batches: Sequence[Message]
) -> dict[str, int]:
    """The nulls by leaf of `columns`, from the field nodes. Where nodes are nested, the largest
    count is taken."""
    wanted = {leaf.name for leaf in leaves(schema, columns) if not may_be_null(leaf.type)}
    nodes = [(name, numbers) for name, numbers in _leaf_nodes(schema) if name in wanted]
    nulls = Counter[str]()
    for message in batches:
        found = [count for _, count in message.nodes]
        for name, numbers in nodes:
            nulls[name] += max((found[number] for number in numbers), default=0)
    return dict(+nulls)


def _leaf_nodes(
    fields: Iterable[pa.Field], prefix: str = "", above: tuple[int, ...] = (), first: int = 0
) -> Iterator[tuple[str, list[int]]]:
    """(leaf, the numbers of its field nodes, with those of the structs around it)."""
    for field in fields:
        count = len(list(node_types(field.type)))
        if pa.types.is_struct(field.type):
            yield from _leaf_nodes(field.type, f"{prefix}{field.name}.", (*above, first), first + 1)
        else:
            yield prefix + field.name, [*above, *range(first, first + count)]
        first += count


def _node_bytes(kind: pa.DataType, length: int) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if is_fixed_size(kind):
        return length * max(8, kind.bit_width) // 8 + length // 8 + 64
    return 9 * length + 64  # offsets
