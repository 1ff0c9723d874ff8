"""`FileFormat`: the interface of a file format.

`scan` runs once for each shard, when the index is made, and finds the row groups. `read` runs later
in reader threads of any process, with what the index kept of the scan, and decodes one row group.
Both may raise whatever the decoder raises; the caller adds the shard's name and makes it a typed
error.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]


ShardKey = tuple[int, str]


@dataclass(frozen=True, eq=False)
class ShardAt:
    """A shard in a store.

    `path`: in the store. `size`: bytes. `version`: as in `Entry`. `name`: for messages. `check`,
    `tail`, `head` and `footer`: what the index kept of the shard's `Scan`.
    """

    store: Any  # a Store; None for a block source
    path: str
    size: int
    version: str
    name: str
    check: int = 0
    tail: int = 0
    head: int = 0  # where its first row group starts
    footer: pa.Buffer | None = None  # None: the index did not keep it
    # Columns that only the name of its folder holds, and their value
    partition: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> ShardKey:
        """Identifies the shard in this process. A path alone does not: two buckets may have it."""
        return id(self.store), self.path

    @property
    def local(self) -> str | None:
        """The path of a local file; None in any other store."""
        return self.store.local_path(self.path)

    def read(self, start: int, end: int) -> Any:
        """The bytes start ≤ i < end, as a bytes-like object. Raises ObjectRewritten if the shard
        has another version than in the index."""
        return self.store.read(self.path, start, end, self.version)


class ShardFile(io.RawIOBase):
    """A shard as a file object."""

    def __init__(self, shard: ShardAt) -> None:
        self._shard, self._at = shard, 0

    @classmethod
    def buffered(cls, shard: ShardAt, nbytes: int) -> io.BufferedReader:
        """Reads at most `nbytes` at a time. What a longer seek skips is not requested."""
        return io.BufferedReader(cls(shard), nbytes)

    def readinto(self, into: Any) -> int:
        end = min(self._at + len(into), self._shard.size)
        if end <= self._at:
            return 0
        count = end - self._at
        into[:count] = self._shard.read(self._at, end)
        self._at = end
        return count

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._at = position + (0, self._at, self._shard.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)  # of a million shards, some thousands are kept at a time
class Scan:
    """What a shard contains.

    - `schema`: all columns, also those that the job does not read.
    - `rows`, `starts`, `ends`, `nbytes`, `stored`: int64 [row groups]. `starts` and `ends` are the
      byte range that `read` requests. `nbytes` estimates the memory of a row group, encoded and
      decoded. `stored` is the size of its columns as the shard has it, before compression where it
      says that: the order of rows depends on it, so no estimate of a decoder is part of it.
    - `check`: a checksum; other content has another one.
    - `tail`: the length in bytes of the shard's end that says where everything is; 0 if the format
      has none. `footer`: these bytes, where reading them again would take a request.
    - `nulls`: the number of nulls of each leaf column ("a.b" in a struct), as far as the shard
      says.
    """

    schema: pa.Schema
    rows: Ints
    starts: Ints
    ends: Ints
    nbytes: Ints
    stored: Ints
    check: int
    tail: int = 0
    footer: bytes = b""
    nulls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RowGroupLocation:
    """Where a row group is: its number in the shard, and its byte range there."""

    group: int
    start: int
    end: int


def stamp_of(path: str) -> tuple[int, ...]:
    """Another file at this path, or one that was written to, has another one."""
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_table(
    chosen: FileFormat,
    shard: ShardAt,
    location: RowGroupLocation,
    schema: pa.Schema,
    leaves: list[str],
) -> pa.Table:
    """Like `FileFormat.read`, with the columns that only the name of the shard's folder holds."""
    table = chosen.read(shard, location, schema, leaves)
    for name, value in shard.partition.items():
        column = pa.repeat(pa.scalar(value, schema.field(name).type), table.num_rows)
        if name in table.column_names:  # some formats add the columns that a shard lacks
            table = table.drop_columns(name)
        table = table.append_column(name, column)
    return table


class FileFormat(Protocol):
    """A file format. It keeps no state but caches, and several threads call `read`."""

    name: str
    scans_content: bool  # whether `scan` reads a whole shard, not only its footer
    growth: float  # peak memory while a row group is read, as a multiple of `nbytes`

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        """`columns`: those that the job reads; None: all. The result's `nbytes`, `starts` and
        `ends` count only these."""

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        """The columns of `schema` that the shard has, of one row group. Of a struct, at least the
        fields among `leaves` ("a.b").

        Raises ObjectRewritten if the shard is not the one that the index was made of.
        """

    def close(self) -> None: ...
