"""What a file format must do to be a data set: say once where its rows are, and read some of them
later.

`scan` runs when the index is made, `read` in reader threads, in any process, with what the index
kept. Neither decides what an error means: whatever a decoder raises is turned into words where the
shard is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.storage import Store

Ints = npt.NDArray[np.int64]


ShardKey = tuple[int, str]


@dataclass(frozen=True)
class ShardAt:
    """One shard in a store. `name` is for people. The last four are what the index kept of its
    scan."""

    store: Store
    path: str
    size: int
    version: str
    name: str
    check: int = 0
    tail: int = 0
    head: int = 0  # where its first row group starts
    footer: pa.Buffer | None = None  # None: not kept

    @property
    def key(self) -> ShardKey:
        """Two buckets may hold objects of one path."""
        return id(self.store), self.path

    @property
    def local(self) -> str | None:
        """Its path, where it is a file of this machine."""
        return self.store.local_path(self.path)

    def read(self, start: int, end: int) -> Any:
        """A bytes-like object of end - start bytes, of the version that the index knows."""
        return self.store.read(self.path, start, end, self.version)


@dataclass(frozen=True, slots=True)  # of a million shards, some thousands are kept at a time
class Scan:
    """What one shard holds. Arrays are [row group]; `starts` and `ends` are the bytes that `read`
    asks for.

    `schema`: all columns. `nbytes`: estimate of what a row group takes in memory, encoded and
    decoded. `check`: a number that content of another making would not have. `tail`: bytes at the
    shard's end that say where everything is, 0 if there are none. `footer`: these, where asking for
    them again would take a request. `nulls`: of each leaf column ("a.b" in a struct) that may hold
    some, as far as the shard tells; `null_lists`: lists of no fixed size that are null themselves.
    `remarks`: what the user should know of it: how many of what, and the first one's name.
    `rounded`, `leading_zeros`: see exact_numbers.py.
    """

    schema: pa.Schema
    rows: Ints
    starts: Ints
    ends: Ints
    nbytes: Ints
    check: int
    tail: int = 0
    footer: bytes = b""
    nulls: Mapping[str, int] = field(default_factory=dict)
    null_lists: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    rounded: Mapping[str, str] = field(default_factory=dict)
    leading_zeros: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowGroupLocation:
    """One row group, as the index knows it: its number in its shard, and its bytes there."""

    group: int
    start: int
    end: int


class Format(Protocol):
    """Stateless but for what it keeps open; `read` is called by several threads."""

    name: str
    endings: tuple[str, ...]
    scans_content: bool  # `scan` reads all of a shard, not only its footer
    growth: float  # how often `nbytes` is taken at once while a row group is read

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        """`columns`: those that the job reads, None for all; `nbytes`, `starts` and `ends` are of
        these."""

    def first_columns(self, shard: ShardAt, columns: Sequence[str] | None) -> pa.Schema | None:
        """Of a shard whose content `scan` reads: the columns of its first rows. None: not known."""

    def merge(self, one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
        """The type in which a column is read that has these two plain types (column_types.py) in
        two shards. None: the two are different data."""

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        """Those of the columns of `schema` that the shard has, or of each struct in it at least the
        `leaves` ("a.b").

        Raises ObjectRewritten where the shard is not the one that the index was made of.
        """

    def close(self) -> None: ...
