"""`BlockSource`: rows in blocks, from any format or service. Order, exactly-once delivery, resume,
packing and filters need nothing else of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.schema import top_level
from elastic_dp.data.formats.file_format import Ints, RowGroupLocation, Scan, ShardAt
from elastic_dp.errors import DataError


@runtime_checkable
class BlockSource(Protocol):
    """Rows that are read block by block, for `DataConfig(source, …)`.

    It is pickled and sent to every worker, so open files and connections in `read`. A run that is
    started again must find the same rows in each block.

    - `identity`: a string that changes when the rows change, such as a path with a version. A run
      refuses another one.
    - `rows`: the number of rows of each block, in order.
    - `stored_bytes`: the size of each block, about. It decides how many blocks are read at a time,
      and with that the order of rows: state what is stored, not what a library estimates.
    - `schema`: the columns that `read` returns.
    """

    identity: str
    rows: Sequence[int]
    stored_bytes: Sequence[int]
    schema: pa.Schema

    def read(self, block: int, columns: Sequence[str]) -> pa.Table:
        """All rows of a block, with these columns of `schema`. Threads call it at the same time.
        A ConnectionError, a TimeoutError, and an OSError with an errno, are the store's. Any other
        exception is a block that cannot be decoded; see `DataConfig.max_bad_fraction`."""


class Blocks:
    """The `FileFormat` of a block source, which is one shard with its identity as the name."""

    name = "blocks"
    scans_content = False
    growth = 2.0

    def __init__(self, source: BlockSource) -> None:
        self._source = source

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        source, schema = self._source, self._source.schema
        if not isinstance(schema, pa.Schema):
            raise DataError(
                f"DataConfig.url: {shard.name}: the schema of a block source is a "
                f"{type(schema).__name__}, must be a pyarrow.Schema"
            )
        rows, stored = self.numbers("rows"), self.numbers("stored_bytes")
        if rows.shape != stored.shape:
            raise DataError(
                f"DataConfig.url: {shard.name}: a block source has {len(rows)} rows and "
                f"{len(stored)} stored_bytes, must have one of each for each block"
            )
        ends = np.cumsum(stored)
        return Scan(
            schema=schema,
            rows=rows,
            starts=ends - stored,
            ends=ends,
            nbytes=2 * stored,  # encoded and decoded
            stored=stored,
            check=zlib.crc32(source.identity.encode()),
        )

    def numbers(self, field: str) -> Ints:
        """`rows` or `stored_bytes` of the source. Raises DataError if they are no numbers."""
        given = getattr(self._source, field)
        numbers = np.asarray(given)
        whole = numbers.dtype.kind in "iu" or not numbers.size
        if numbers.ndim != 1 or not whole or (numbers < 0).any():
            raise DataError(
                f"DataConfig.url: {self._source.identity}: {field} of a block source must be a "
                f"list of whole numbers, one for each block, and is {given!s:.80}"
            )
        return numbers.astype(np.int64)

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        names = [name for name in top_level(schema, leaves) if name in self._source.schema.names]
        table: Any = self._source.read(location.group, names)
        if not isinstance(table, pa.Table):
            raise DataError(f"{shard.name}: read() returned a {type(table).__name__}, not a Table")
        if missing := [name for name in names if name not in table.column_names]:
            raise DataError(f"{shard.name}: read() returned no column {missing[0]!r}")
        for name in names:
            there, said = table.schema.field(name).type, self._source.schema.field(name).type
            if there != said:
                raise DataError(
                    f"{shard.name}: read() returned column {name!r} as {there}, and the schema of "
                    f"the source says {said}"
                )
        return table.select(names)

    def close(self) -> None: ...
