"""The messages of Arrow IPC: where they are in a file or stream, and what their metadata says.

pyarrow does not tell where messages are, so the few numbers that are needed are read from their
flatbuffers here (format/Message.fbs and format/File.fbs of Apache Arrow).

A few KiB of a compressed record batch can decompress to many GiB. So the lengths that its buffers
declare are added up before it is decoded; more than `DECOMPRESSED_BYTES` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from struct import pack, unpack_from

import pyarrow as pa

from elastic_dp.data.formats.file_format import ShardAt
from elastic_dp.errors import DataError

# Limit of a compressed record batch or dictionary, decompressed. Compressed text has the same one.
DECOMPRESSED_BYTES = 2 << 30
MAGIC = b"ARROW1"
CONTINUES = b"\xff\xff\xff\xff"
END = CONTINUES + bytes(4)
SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # MessageHeader
_PROBE_BYTES = 4096  # read first of a message; most metadata is shorter
_PROBES_IN_FLIGHT = 8
_HEADER_BYTES = 32  # of the message that a footer becomes


@dataclass(frozen=True)
class Message:
    """A message: bytes `start` ≤ i < `end` of the shard, metadata and body. `kind`: SCHEMA,
    DICTIONARY or BATCH."""

    kind: int
    start: int
    end: int
    metadata: bytes  # with the 8 bytes before it

    @property
    def rows(self) -> int:
        return self._batch.number(0, "<q")

    @property
    def is_compressed(self) -> bool:
        return self._batch.has(3)

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """(values, nulls) of each field node."""
        return self._batch.pairs(1)

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """(offset in the body, length) of each buffer, as stored."""
        return self._batch.pairs(2)

    @property
    def _batch(self) -> _Table:
        """The record batch. A dictionary message wraps one that has a single column."""
        header = _Table.root(self.metadata, 8).table(2)
        return header.table(1) if self.kind == DICTIONARY else header


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer. `slot`: the index of a field in the flatbuffer's schema."""

    content: bytes
    at: int

    @classmethod
    def root(cls, content: bytes, at: int) -> _Table:
        return cls(content, at + unpack_from("<I", content, at)[0])

    def has(self, slot: int) -> bool:
        return self._field(slot) is not None

    def number(self, slot: int, kind: str) -> int:
        at = self._field(slot)
        return 0 if at is None else int(unpack_from(kind, self.content, at)[0])

    def table(self, slot: int) -> _Table:
        return _Table(self.content, self._pointed(slot))

    def pairs(self, slot: int) -> list[tuple[int, int]]:
        at = self._pointed(slot)
        count = unpack_from("<I", self.content, at)[0]
        return [unpack_from("<qq", self.content, at + 4 + 16 * n) for n in range(count)]

    def blocks(self, slot: int) -> Iterator[tuple[int, int, int]]:
        """(offset, bytes of metadata, bytes of body)"""
        if not self.has(slot):
            return
        at = self._pointed(slot)
        for number in range(unpack_from("<I", self.content, at)[0]):
            yield unpack_from("<qi4xq", self.content, at + 4 + 24 * number)

    def _pointed(self, slot: int) -> int:
        at = self._field(slot)
        if at is None:
            raise OSError("its metadata is not as Arrow writes it")
        return int(at + unpack_from("<I", self.content, at)[0])

    def _field(self, slot: int) -> int | None:
        names = self.at - unpack_from("<i", self.content, self.at)[0]
        if 4 + 2 * slot >= unpack_from("<H", self.content, names)[0]:
            return None
        offset = unpack_from("<H", self.content, names + 4 + 2 * slot)[0]
        return self.at + offset if offset else None


def listed_messages(shard: ShardAt, content: bytes) -> list[Message]:
    """The dictionaries and record batches of a file. `content`: its footer."""
    footer = _Table.root(content, 0)
    places = [(DICTIONARY, *block) for block in footer.blocks(2)]
    places += [(BATCH, *block) for block in footer.blocks(3)]

    def message(place: tuple[int, int, int, int]) -> Message:
        kind, start, metadata, body = place
        return Message(
            kind, start, start + metadata + body, bytes(shard.read(start, start + metadata))
        )

    with ThreadPoolExecutor(_PROBES_IN_FLIGHT) as pool:
        return list(pool.map(message, places))


def read_footer(shard: ShardAt) -> bytes:
    """The footer of a file, which is a flatbuffer."""
    end = bytes(shard.read(max(0, shard.size - 10), shard.size))
    if end[4:] != MAGIC:
        raise OSError("it does not end as an Arrow file does; it was cut off")
    length = int.from_bytes(end[:4], "little")
    if length > shard.size - 10:
        raise OSError(f"its footer would be {length} bytes long, longer than itself")
    return bytes(shard.read(shard.size - 10 - length, shard.size - 10))


def head_of_footer(shard: ShardAt, content: bytes = b"") -> bytes:
    """The messages with which a stream of the same content would begin: schema and dictionaries."""
    content = content or read_footer(shard)
    places = [(at, at + meta + body) for at, meta, body in _Table.root(content, 0).blocks(2)]
    dictionaries = [bytes(shard.read(start, end)) for start, end in places]
    return b"".join([message_of_footer(content), *dictionaries])


def message_of_footer(content: bytes) -> bytes:
    """A schema message with the schema of the footer."""
    footer = _Table.root(content, 0)
    schema = _HEADER_BYTES + footer.table(1).at
    # A Message: the offset of its table; the offsets of version, type and header in it; the table;
    # then the footer, into which the header points.
    message = pack("<I5H2x", 16, 10, 12, 8, 10, 4)
    message += pack("<iIhB5x", 16 - 4, schema - 20, footer.number(0, "<h"), SCHEMA)
    message += content + bytes(-len(content) % 8)
    return b"".join([CONTINUES, pack("<I", len(message)), message])


def walked_messages(shard: ShardAt) -> Iterator[Message]:
    """The messages of a stream, in order."""
    at = 0
    while at + 8 <= shard.size:
        probe = bytes(shard.read(at, min(at + _PROBE_BYTES, shard.size)))
        if probe[:8] == END:
            return
        length = 8 + int.from_bytes(probe[4:8], "little")
        if probe[:4] != CONTINUES or at + length > shard.size:
            raise OSError(
                f"no Arrow message begins at byte {at}; it is not Arrow IPC, or was cut off"
            )
        if length > len(probe):
            probe = bytes(shard.read(at, at + length))
        found = _Table.root(probe, 8)
        end = at + length + found.number(3, "<q")
        if end > shard.size:
            raise OSError(f"the message at byte {at} ends at {end}, past the end; it was cut off")
        yield Message(found.number(1, "<B"), at, end, probe[:length])
        at = end


def messages_of_head(head: bytes) -> bytes:
    return head[8:] if head[:6] == MAGIC else head


def stream_of_head(head: bytes) -> pa.Buffer:
    return pa.py_buffer(messages_of_head(head) + END)


def refuse_large_batches(shard: ShardAt) -> None:
    """Raises DataError where a record batch or a dictionary decompresses to more than
    `DECOMPRESSED_BYTES`, since decoding it takes that much memory at once.

    Only metadata and the lengths that precede compressed buffers are read.
    """
    first = bytes(shard.read(0, min(8, shard.size)))
    if first[:6] == MAGIC:
        messages: Iterable[Message] = listed_messages(shard, read_footer(shard))
    else:  # messages of Arrow before 0.15 begin otherwise, and are never compressed
        messages = walked_messages(shard) if first[:4] == CONTINUES else ()
    for message in messages:
        if message.kind != SCHEMA and message.metadata[:4] == CONTINUES:
            refuse_large(shard, message)


def refuse_large(shard: ShardAt, message: Message) -> None:
    body = message.start + len(message.metadata)
    if why := too_large(message, lambda at: bytes(shard.read(body + at, body + at + 8))):
        raise DataError(f"{shard.name} has {why}")


def too_large(message: Message, read: Callable[[int], bytes]) -> str:
    """Why it is not decompressed, "" if it can be. `read(offset)`: 8 bytes of its body."""
    if not message.is_compressed:
        return ""
    total = 0
    for offset, length in message.buffers:
        # A compressed buffer begins with the length of its content, or with -1 if it is stored as
        # it is. Arrow allocates that many bytes, and refuses a buffer that has more or fewer.
        content = int.from_bytes(read(offset), "little", signed=True) if length >= 8 else 0
        total += length if content < 0 else content
    if total <= DECOMPRESSED_BYTES:
        return ""
    is_batch = message.kind == BATCH
    what = f"a record batch of {message.rows:,} rows" if is_batch else "a dictionary"
    return (
        f"{what} that decompresses to {total >> 20:,} MiB, more than the "
        f"{DECOMPRESSED_BYTES >> 20:,} MiB that may be decompressed at once; write it with fewer "
        "rows in a record batch, or without compression"
    )


def is_fixed_size(kind: pa.DataType) -> bool:
    """Whether each of its values has the same size."""
    fixed = (pa.types.is_primitive, pa.types.is_fixed_size_binary, pa.types.is_decimal)
    return any(is_one(kind) for is_one in fixed)
