"""A chunk of litdata in binary: the number of its items and where each one begins (uint32), then
the items. Each begins with the lengths (uint32) of its leaves.

zstd compresses a whole chunk, each item, or frames of some hundred items (`LDFZ01`), whose table
follows the header. Newer versions of litdata write dicts of plain values as an Arrow file behind a
header without items (`LDARW01` at the end); litdata.py reads these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.formats.file_format import Ints, ShardAt
from elastic_dp.data.formats.text import UNPACKED_BYTES
from elastic_dp.errors import DataError

FRAMED = b"LDFZ01\0\0"
ARROW = b"LDARW01\0"  # the last bytes, after the length (uint32) of an Arrow file
_HEAD_BYTES = 64 << 10  # of the first request for a header
_UINT32 = np.dtype("<u4")
_PREFIX = np.dtype(
    [
        ("mark", "S8"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("items", "<u4"),
        ("each", "<u4"),
        ("frames", "<u4"),
    ]
)
_FRAME = np.dtype(
    [("first", "<u4"), ("items", "<u4"), ("start", "<u8"), ("packed", "<u4"), ("bytes", "<u4")]
)
_UNPACKED_AT_ONCE = 4 << 20


@dataclass(frozen=True)
class ChunkHeader:
    """`offsets` int64 [items + 1]: of the items in the chunk, or in what its frames decompress to.
    `frames`: if there are some. `nbytes`: of the header."""

    offsets: Ints
    nbytes: int
    frames: npt.NDArray[np.void] | None = None

    @property
    def items(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, content: bytes) -> ChunkHeader:
        """`content`: the first bytes of a chunk, at least its header."""
        at, items, frames = _parts(content)
        offsets = np.frombuffer(content, _UINT32, items + 1, offset=at).astype(np.int64)
        at += 4 * (items + 1)
        if not frames:
            return cls(offsets, at)
        table = np.frombuffer(content, _FRAME, frames, offset=at)
        return cls(offsets, at + frames * _FRAME.itemsize, table)

    def check(self, size: int) -> None:
        """`size`: of the chunk, decompressed if it is compressed as a whole. Raises ValueError."""
        if (np.diff(self.offsets) < 0).any():
            raise ValueError("the offsets of its items do not increase")
        if self.frames is None:
            if self.offsets[0] != self.nbytes:
                raise ValueError("its items do not begin where its header ends")
            end = int(self.offsets[-1])
        else:
            starts, ends = self._frame_bounds
            expected = self.offsets[self._first_items]
            unpacked = np.diff(expected)
            if (
                starts[0] != self.nbytes
                or (starts[1:] != ends[:-1]).any()
                or self._first_items[-1] != self.items
                or (self.frames["first"] != self._first_items[:-1]).any()
                or (self.frames["bytes"] != unpacked).any()
                or self.offsets[0]
            ):
                raise ValueError("its frames do not follow one another")
            end = int(ends[-1])
        if end != size:
            raise ValueError(f"it has {size:,} bytes, and its header says {end:,}: it was cut off")

    def groups(self, group_bytes: int) -> tuple[Ints, Ints, Ints]:
        """(bounds in items [groups + 1], first and last bytes [groups]) of row groups. An offset at
        which items without bytes lie never begins a row group between them."""
        if self.frames is None:
            places, count = self.offsets, self.items
        else:
            starts, ends = self._frame_bounds
            places, count = np.concatenate([starts, ends[-1:]]), len(self.frames)
        bounds = [0]
        while bounds[-1] < count:
            end = int(places[bounds[-1]]) + group_bytes
            after = max(int(np.searchsorted(places, end)), bounds[-1] + 1)
            after = int(np.searchsorted(places, places[min(after, count)], side="right")) - 1
            bounds.append(after)
        found = np.array(bounds, dtype=np.int64)
        items = found if self.frames is None else self._first_items[found]
        return items, places[found[:-1]], places[found[1:]]

    def items_at(self, start: int, end: int) -> slice:
        """The items of the row group that lies at these bytes."""
        if self.frames is not None:
            starts, _ = self._frame_bounds
            first, last = np.searchsorted(starts, [start, end])
            return slice(int(self._first_items[first]), int(self._first_items[last]))
        first = 0 if start == self.nbytes else self._item_at(start)
        return slice(first, self._item_at(end))

    def unpack_frames(self, content: bytes, start: int, name: str) -> Iterator[bytes]:
        """What the frames decompress to that lie in `content`, which begins at `start`. `name`: of
        the chunk."""
        starts, ends = self._frame_bounds
        first, last = np.searchsorted(starts, [start, start + len(content)])
        assert self.frames is not None
        for number in range(int(first), int(last)):
            packed = content[int(starts[number]) - start : int(ends[number]) - start]
            yield unpack(packed, name, int(self.frames["bytes"][number]))

    def unpacked_bytes(self, items: Ints) -> Ints:
        """`items`: the bounds of row groups."""
        return np.diff(self.offsets[items])

    def _item_at(self, offset: int) -> int:
        return int(np.searchsorted(self.offsets, offset, side="right")) - 1

    @cached_property
    def _frame_bounds(self) -> tuple[Ints, Ints]:
        assert self.frames is not None
        starts = self.frames["start"].astype(np.int64)
        return starts, starts + self.frames["packed"]

    @cached_property
    def _first_items(self) -> Ints:
        """The first item of each frame, and the number of all items."""
        assert self.frames is not None
        return np.concatenate([[0], np.cumsum(self.frames["items"], dtype=np.int64)])


def read_head(shard: ShardAt) -> bytes:
    """The first bytes of a chunk, at least its header."""
    head = bytes(shard.read(0, min(_HEAD_BYTES, shard.size)))
    at, items, frames = _parts(head)
    end = at + 4 * (items + 1) + frames * _FRAME.itemsize
    if end > shard.size:
        raise ValueError(f"its header has {end:,} bytes, and it {shard.size:,}: it was cut off")
    return head if end <= len(head) else head + bytes(shard.read(len(head), end))


def unpack(content: bytes, name: str, nbytes: int | None = None, limit: int = -1) -> bytes:
    """`content`, decompressed. `name`: of the chunk. `nbytes`: how long it must be. `limit`: how
    long it may be; -1: as long as a row group may be."""
    limit = UNPACKED_BYTES if limit < 0 else limit
    most = limit if nbytes is None else nbytes
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        pieces, total = [], 0
        while piece := stream.read(min(_UNPACKED_AT_ONCE, most - total + 1)):
            pieces.append(piece)
            total += len(piece)
            if total > most:
                break
    if nbytes is not None and total != nbytes:
        raise ValueError(f"a frame of {nbytes:,} bytes unpacks to another length")
    if total > limit:
        raise DataError(
            f"{name} unpacks to more than {UNPACKED_BYTES >> 20} MiB, which training reads as one "
            "row group; write smaller chunks (chunk_bytes)"
        )
    return b"".join(pieces)


def _parts(head: bytes) -> tuple[int, int, int]:
    """(where the offsets begin, number of items, of frames)."""
    if not head.startswith(FRAMED):
        return 4, int(np.frombuffer(head, _UINT32, 1)[0]), 0
    prefix = np.frombuffer(head, _PREFIX, 1)[0]
    if prefix["version"] != 1 or not prefix["frames"]:
        raise ValueError(f"its frames are of version {prefix['version']}")
    return _PREFIX.itemsize, int(prefix["items"]), int(prefix["frames"])
