"""Optimized data sets of litdata: chunks of samples in binary, which `index.json` beside them
describes.

The leaves of a sample become columns: of a dict by their keys, of a list or tuple by their places
("0", "1"), as structs where they are nested. litdata_index.py, litdata_chunk.py and
litdata_leaves.py say what is in the index, in a chunk, and in a leaf. Row groups are ranges of
about 4 MiB of a chunk. A chunk that is compressed as a whole is one row group.

What `index.json` says of the samples is kept with the index of the data set as the chunk's footer,
or read again where there are too many.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.column_types import lossless
from elastic_dp.data.formats.arrow import Arrow
from elastic_dp.data.formats.file_format import Ints, RowGroupLocation, Scan, ShardAt
from elastic_dp.data.formats.litdata_arrow import ArrowInside, read_inside, scan_inside
from elastic_dp.data.formats.litdata_chunk import ARROW, FRAMED, ChunkHeader, read_head, unpack
from elastic_dp.data.formats.litdata_index import (
    INDEX,
    ChunkFacts,
    LitDataIndex,
    SampleLayout,
    is_packed,
)
from elastic_dp.data.formats.litdata_samples import Samples
from elastic_dp.data.formats.row_group_headers import RowGroupHeaders
from elastic_dp.data.formats.text import UNPACKED_BYTES
from elastic_dp.errors import DataError
from elastic_dp.storage import ObjectRewritten, Store

GROUP_BYTES = 4 << 20
_ITEM_FACTOR = 4  # assumed compression ratio of an item
_END_BYTES = 4 + len(ARROW)


class LitData:
    name = "litdata"
    endings: tuple[str, ...] = (".bin",)
    scans_content = False
    growth = 1.0
    merge = staticmethod(lossless)

    def __init__(self) -> None:
        self._headers = RowGroupHeaders()
        self._layouts = RowGroupHeaders()
        self._arrow = Arrow()
        self._lock = threading.Lock()
        self._indexes: dict[tuple[Store, str], LitDataIndex] = {}

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        index, facts = self._look_up(shard)
        stored = _Stored.of(shard, index.layout)
        if stored.how == "arrow":
            inside = ArrowInside.of(shard, stored.start, stored.size)
            scan = scan_inside(self._arrow, inside, columns, GROUP_BYTES)
            if shard.size not in facts.sizes():
                raise ValueError(f"it has {shard.size:,} bytes, and {INDEX} says {facts.nbytes:,}")
        else:
            scan = self._scan_items(shard, stored, columns, facts)
        if int(scan.rows.sum()) != facts.items:
            raise ValueError(f"it has {scan.rows.sum():,} items, and {INDEX} says {facts.items:,}")
        footer = stored.to_bytes()
        # A worker that reads the index of litdata again must find what was found here.
        check = (zlib.crc32(footer) & 0x7FFF_FFFF) << 32 | scan.check
        return replace(scan, check=check, footer=footer)

    def first_columns(self, shard: ShardAt, columns: Sequence[str] | None) -> None:
        return None

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        stored = _stored(self._footer(shard))
        if stored.how == "arrow":
            inside = ArrowInside.of(shard, stored.start, stored.size)
            return read_inside(self._arrow, inside, location, schema, leaves)
        content = bytes(shard.read(location.start, location.end))
        if stored.how == "packed":
            content = unpack(content, shard.name)
            header = ChunkHeader.of(content)
            header.check(len(content))
            offsets = header.offsets
        else:
            header = ChunkHeader.of(self._headers.read(shard, shard.head))
            offsets = header.offsets[_with_end(header.items_at(location.start, location.end))]
            offsets = offsets - offsets[0]
        if stored.how == "framed":
            content = b"".join(header.unpack_frames(content, location.start, shard.name))
        elif stored.how == "items_packed":
            content, offsets = _unpack_items(content, offsets, shard.name)
        return stored.samples.decode(content, offsets, schema, leaves)

    def close(self) -> None:
        self._headers.clear()
        self._layouts.clear()
        self._arrow.close()
        with self._lock:
            self._indexes.clear()

    def _look_up(self, shard: ShardAt) -> tuple[LitDataIndex, ChunkFacts]:
        """The index beside a chunk, and what it says of the chunk."""
        folder, _, name = shard.path.rpartition("/")
        path = f"{folder}/{INDEX}" if folder else INDEX
        with self._lock:
            index = self._indexes.get((shard.store, path))
            if index is None:
                index = _read_index(shard, path)
                self._indexes[shard.store, path] = index
        if name not in index.chunks:
            raise DataError(f"{shard.name} is not named by the {INDEX} beside it")
        return index, index.chunks[name]

    def _footer(self, shard: ShardAt) -> bytes:
        if shard.footer is not None:
            return shard.footer.to_pybytes()
        footer = self._layouts.read(
            shard, 0, lambda at: _Stored.of(at, self._look_up(at)[0].layout).to_bytes()
        )
        if shard.check >> 32 != zlib.crc32(footer) & 0x7FFF_FFFF:
            raise ObjectRewritten(f"the {INDEX} of {shard.name}")
        return footer

    def _scan_items(
        self,
        shard: ShardAt,
        stored: _Stored,
        columns: Sequence[str] | None,
        facts: ChunkFacts,
    ) -> Scan:
        samples, is_packed = stored.samples, stored.how == "packed"
        content = unpack(bytes(shard.read(0, shard.size)), shard.name) if is_packed else b""
        size = len(content) if is_packed else shard.size
        if size not in facts.sizes():
            raise ValueError(f"it has {size:,} bytes, and {INDEX} says {facts.nbytes:,}")
        head = content if is_packed else read_head(shard)
        header = ChunkHeader.of(head)
        header.check(size)
        items, starts, ends = header.groups(size if is_packed else GROUP_BYTES)
        sample = b""
        if header.items and any(leaf.needs_sample for leaf in samples.leaves):
            sample = self._first_item(shard, stored, header, content)
        schema = samples.schema(sample)
        samples.refuse(shard.name, schema, columns)
        if stored.layout.is_tokens:
            samples.check_tokens(int(header.offsets[-1] - header.offsets[0]), facts)
        rows = np.diff(items)
        nbytes = 2 * header.unpacked_bytes(items) + rows * samples.row_bytes
        if stored.how == "items_packed":
            nbytes += 2 * (_ITEM_FACTOR - 1) * (ends - starts)
        if stored.how == "framed":
            nbytes += ends - starts
        check = zlib.crc32(head[: header.nbytes])
        if is_packed:
            starts, ends = np.zeros_like(starts), np.full_like(ends, shard.size)
            nbytes += shard.size + size
        return Scan(schema, rows, starts, ends, nbytes, check)

    def _first_item(
        self, shard: ShardAt, stored: _Stored, header: ChunkHeader, content: bytes
    ) -> bytes:
        first = slice(int(header.offsets[0]), int(header.offsets[1]))
        if stored.how == "packed":
            return content[first]
        if header.frames is not None:
            start, end = header.nbytes, header.nbytes + int(header.frames["packed"][0])
            frame = bytes(shard.read(start, end))
            return next(header.unpack_frames(frame, start, shard.name))[first]
        item = bytes(shard.read(first.start, first.stop))
        return unpack(item, shard.name) if stored.how == "items_packed" else item


@dataclass(frozen=True)
class _Stored:
    """How a chunk is stored. `how`: "items", "packed" (compressed as a whole), "items_packed",
    "framed" or "arrow". `start`, `size`: of its Arrow file."""

    how: str
    layout: SampleLayout
    start: int = 0
    size: int = 0

    @classmethod
    def of(cls, shard: ShardAt, layout: SampleLayout) -> _Stored:
        if is_packed(shard.path):
            if layout.zstd != "chunk":
                raise ValueError(f"{INDEX} does not say that chunks are compressed")
            return cls("packed", layout)
        if layout.may_be_arrow and shard.size > _END_BYTES:
            end = bytes(shard.read(shard.size - _END_BYTES, shard.size))
            size = int.from_bytes(end[:4], "little")
            start = shard.size - _END_BYTES - size
            if end[4:] == ARROW and start > 0 and size:
                return cls("arrow", layout, start, size)
        if layout.zstd == "batch":
            if bytes(shard.read(0, min(len(FRAMED), shard.size))) != FRAMED:
                raise ValueError(f"{INDEX} says that it has frames of zstd, and it has none")
            return cls("framed", layout)
        return cls("items_packed" if layout.zstd == "sample" else "items", layout)

    @cached_property
    def samples(self) -> Samples:
        return Samples.of(self.layout)

    def to_bytes(self) -> bytes:
        facts = {"how": self.how, "start": self.start, "size": self.size}
        return json.dumps(facts).encode() + b"\n" + self.layout.to_bytes()


@lru_cache(maxsize=256)
def _stored(footer: bytes) -> _Stored:
    facts, _, layout = footer.partition(b"\n")
    return _Stored(layout=SampleLayout.from_bytes(layout), **json.loads(facts))


def _read_index(shard: ShardAt, path: str) -> LitDataIndex:
    if shard.store.look_up(path) is None:
        raise DataError(
            f"{shard.name} is a chunk of litdata, and there is no {INDEX} beside it, which says "
            "what is in it; copy the whole folder"
        )
    return LitDataIndex.of(bytes(shard.store.read_all(path)), path.rpartition("/")[2])


def _with_end(items: slice) -> slice:
    return slice(items.start, items.stop + 1)


def _unpack_items(content: bytes, offsets: Ints, name: str) -> tuple[bytes, Ints]:
    """Items that are compressed one by one, decompressed, and where they are then."""
    bounds, room, items = offsets.tolist(), UNPACKED_BYTES, []
    for start, end in pairwise(bounds):
        items.append(unpack(content[start:end], name, limit=room))
        room -= len(items[-1])
    return b"".join(items), np.cumsum([0, *map(len, items)])
