"""Writes record batches of any size as Parquet or Arrow shards with row groups of equal size.

Every row group has exactly `rows_per_group` rows, except the last one of the data set. A shard ends
with the row group that takes it to `shard_bytes`. The same rows give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.dataprep.destination import Destination
from elastic_dp.errors import DataError

GROUP_BYTES = 2 << 20  # of the widest column, where rows_per_group is not given
GROUP_LIMIT_BYTES = 2 << 30  # Arrow's strings count bytes in 31 bits

OutputFormat = Literal["parquet", "arrow"]
Compression = Literal["none", "snappy", "lz4", "zstd"]


class ShardWriter:
    """Use it in a `with` block, and call `write` with batches. `rows`, `row_groups`, `shards` and
    `nbytes` count what is written so far."""

    def __init__(
        self,
        destination: Destination,
        schema: pa.Schema,
        *,
        rows_per_group: int | None,
        shard_bytes: int,
        format: OutputFormat,
        compression: Compression,
    ) -> None:
        self.rows_per_group = rows_per_group
        self.rows = self.row_groups = self.shards = self.nbytes = 0
        self._destination, self._schema = destination, schema
        self._shard_bytes, self._format, self._compression = shard_bytes, format, compression
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._file: Any = None
        self._sink: Any = None
        self._open_shard = ExitStack()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            with suppress(Exception):  # `error` is raised anyway; an open file would write later
                self._file.close()
            self._open_shard.__exit__(kind, error, traceback)

    def write(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        if self.rows_per_group is None:
            self.rows_per_group = self._enough_rows()
        while self.rows_per_group is not None and self._pending_rows >= self.rows_per_group:
            self._write_group(self._take(self.rows_per_group))

    def _enough_rows(self) -> int | None:
        """The rows that take GROUP_BYTES in the widest column; None while there are fewer bytes."""
        widest = max(
            sum(batch.column(i).nbytes for batch in self._pending) for i in range(len(self._schema))
        )
        return max(1, self._pending_rows * GROUP_BYTES // widest) if widest >= GROUP_BYTES else None

    def _finish(self) -> None:
        if self._pending_rows:
            self.rows_per_group = self.rows_per_group or self._pending_rows
            self._write_group(self._take(self._pending_rows))
        self._end_shard()

    def _take(self, rows: int) -> pa.RecordBatch:
        taken, need = [], rows
        while need:
            batch = self._pending[0]
            taken.append(batch.slice(0, need))
            if batch.num_rows > need:
                self._pending[0] = batch.slice(need)
            else:
                self._pending.pop(0)
            need -= taken[-1].num_rows
        self._pending_rows -= rows
        if (nbytes := sum(batch.nbytes for batch in taken)) >= GROUP_LIMIT_BYTES:
            raise DataError(
                f"a row group of {rows} rows would take {nbytes >> 20} MiB; lower rows_per_group"
            )
        return pa.concat_batches(taken)

    def _write_group(self, group: pa.RecordBatch) -> None:
        with _named_errors(self._format):
            self._write(group)
        self.rows += group.num_rows
        self.row_groups += 1
        if self._sink.tell() >= self._shard_bytes:
            self._end_shard()

    def _write(self, group: pa.RecordBatch) -> None:
        if self._file is None:
            self._begin_shard()
        if self._format == "parquet":
            self._file.write_batch(group, row_group_size=group.num_rows)
        else:
            self._file.write_batch(group)

    def _begin_shard(self) -> None:
        name = f"part-{self.shards:05d}.{self._format}"
        self._sink = self._open_shard.enter_context(self._destination.shard(name))
        if self._format == "parquet":
            self._file = pq.ParquetWriter(self._sink, self._schema, **self._parquet_options())
        else:
            codec = None if self._compression == "none" else self._compression
            options = pa.ipc.IpcWriteOptions(compression=codec)
            self._file = pa.ipc.new_file(self._sink, self._schema, options=options)
        self.shards += 1

    def _end_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self.nbytes += self._sink.tell()
            self._open_shard.close()
            self._file = None

    def _parquet_options(self) -> dict[str, Any]:
        """Dictionaries only for strings, statistics only for numbers: for other columns they cost
        space and time without use."""
        words = [f.name for f in self._schema if pa.types.is_string(f.type)]
        numbers = [f.name for f in self._schema if pa.types.is_primitive(f.type)]
        return {
            "compression": self._compression,
            "use_dictionary": words or False,
            "write_statistics": numbers or False,
        }


def refuse_columns_parquet_cannot_give_back(schema: pa.Schema) -> None:
    """Raises DataError for columns that Parquet can store but its readers cannot read, such as
    columns that nest too deep."""
    sink = io.BytesIO()
    with _named_errors("parquet"):
        try:
            pq.write_table(pa.Table.from_batches([], schema), sink)  # `empty_table` imports pandas
            pq.read_schema(sink)
        except OSError as error:
            raise DataError(
                f"these columns could not be read again as parquet: {error}; leave some out "
                "by columns=, or write "
                "format='arrow'"
            ) from error


@contextmanager
def _named_errors(format: OutputFormat) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise DataError(
            f"these columns cannot be written as {format}: {error}; leave some out by columns="
        ) from error
