"""`write_shards`: writes rows as shards that train well, with row groups of some MiB and checksums.

Nothing reads the destination as a data set before it is complete. The object `_incomplete` is there
from before the first shard until after the last one; it is only ever created, and holds the id of
the attempt that owns the destination. So of two writers to one destination the second is refused.
Shards are only ever created, too. An exception removes everything that was written. After a kill
`_incomplete` remains, and the destination is refused until it is removed.
"""

from __future__ import annotations

import io
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.columns.column_types import cast, node_types, plain
from elastic_dp.data.discovery.listing import INCOMPLETE
from elastic_dp.errors import DataError
from elastic_dp.storage import ObjectMissing, Store
from elastic_dp.storage.json_files import path_in

SHARD_BYTES = 128 << 20
ROW_GROUP_BYTES = 2 << 20
_GROUP_LIMIT_BYTES = 2 << 30  # Arrow's strings count bytes in 31 bits

OutputFormat = Literal["parquet", "arrow"]
GONE = {
    "rows_per_group": "set row_group_bytes",
    "fill_nulls": 'set query="SELECT * REPLACE (coalesce(x, 0) AS x) FROM rows"',
    "csv_options": "give the rows of a reader of CSV to write_shards, such as "
    "duckdb.sql(\"FROM read_csv('rows.csv', columns={'id': 'BIGINT', 'text': 'VARCHAR'})\")",
    "text_glob": "name the files by a glob in the source, such as 'code/**/*.py'",
    "compression": "leave it out: snappy is used where it makes shards smaller",
    "format": "leave it out: rows become Parquet, and tokens Arrow; write_shards has a format",
}


@dataclass(frozen=True)
class WrittenShards:
    """What has been written so far. `rows`: as the files' own footers count them."""

    rows: int = 0
    row_groups: int = 0
    shards: int = 0
    nbytes: int = 0


class NoRows(DataError):
    """There is no row to write."""


def write_shards(
    rows: Any,
    destination: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    row_group_bytes: int = ROW_GROUP_BYTES,
    format: OutputFormat = "parquet",
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[WrittenShards], None] | None = None,
    **gone: Any,
) -> WrittenShards:
    """Writes `rows` to `destination`, in their order.

    - `rows`: anything with an Arrow stream (`__arrow_c_stream__`: a table or reader of pyarrow, a
      relation of DuckDB, a frame of Polars), or an iterable of pyarrow's record batches or tables.
    - `destination`: an empty or absent folder, as a path or URL.
    - `shard_bytes`: a shard ends with the row group that takes it to this size. The shard that is
      being written is in memory.
    - `row_group_bytes`: the size of a row group's widest column, before it is encoded.
    - `storage_options`: as in `DataConfig`.
    - `on_progress`: called after each row group.

    Lists, images and Arrow are not compressed, other columns are by Snappy. Dictionaries become
    their values, extension types their storage, views large strings, and images
    of Hugging Face their bytes. Parquet pages have checksums. Raises DataError where `rows` cannot
    be written, or the destination is not empty, and StorageError where the store refuses.
    """
    refuse_gone("write_shards", gone)
    for name, value in (("shard_bytes", shard_bytes), ("row_group_bytes", row_group_bytes)):
        if value < 1:
            raise DataError(f"{name} is {value}, must be at least 1")
    if format not in get_args(OutputFormat):
        raise DataError(f"format is {format!r}, must be 'parquet' or 'arrow'")
    schema, batches = _stream(rows)
    plain_schema = _written_schema(schema, format)
    writer = _ShardWriter(
        _Destination(Store(os.fspath(destination), storage_options)),
        plain_schema,
        shard_bytes=shard_bytes,
        row_group_bytes=row_group_bytes,
        format=format,
        on_progress=on_progress,
    )
    with writer.destination.writing():
        for batch in batches:
            if not batch.schema.equals(schema):
                raise DataError(
                    f"a batch has the columns {_types(batch.schema)}, unlike the first, which has "
                    f"{_types(schema)}; cast them to one schema"
                )
            with _named_errors(format):
                plain_batch = as_written(batch, plain_schema)
            writer.write(plain_batch)
        writer.finish()
    return writer.done


def refuse_gone(function: str, gone: Mapping[str, Any]) -> None:
    """Raises DataError for an argument of an earlier version, and TypeError for any other."""
    for name in gone:
        if name not in GONE:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        raise DataError(f"{function} has no {name} any more; {GONE[name]}")


def _stream(rows: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if hasattr(rows, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(rows)
        return reader.schema, _read(reader)
    if not isinstance(rows, Iterable):
        raise DataError(
            f"rows is a {type(rows).__name__}, must have an Arrow stream or be an iterable of "
            "pyarrow.RecordBatch"
        )
    batches = _batches(rows)
    first = next(batches, None)
    if first is None:
        raise NoRows("there is no row to write")
    return first.schema, itertools.chain([first], batches)


def _read(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except (pa.ArrowException, OSError) as error:  # what the stream's own library raised
        raise DataError(f"cannot read the rows: {error}") from error


def _batches(rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for some in rows:
        if isinstance(some, pa.RecordBatch):
            yield some
        elif isinstance(some, pa.Table):
            # An empty table gives no batch, and still has the schema.
            yield from some.to_batches() or [pa.RecordBatch.from_pylist([], some.schema)]
        else:
            raise DataError(
                f"rows gives a {type(some).__name__}, must give pyarrow.RecordBatch; for dicts use "
                "pyarrow.RecordBatch.from_pylist"
            )


class _ShardWriter:
    """Cuts batches of any size into row groups, and these into shards."""

    def __init__(
        self,
        destination: _Destination,
        schema: pa.Schema,
        *,
        shard_bytes: int,
        row_group_bytes: int,
        format: OutputFormat,
        on_progress: Callable[[WrittenShards], None] | None,
    ) -> None:
        self.destination, self.done = destination, WrittenShards()
        self._schema, self._format = schema, format
        self._shard_bytes, self._row_group_bytes = shard_bytes, row_group_bytes
        self._on_progress = on_progress or (lambda done: None)
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows, self._pending_bytes = 0, [0] * len(schema)  # bytes of each column
        self._rows = self._groups = 0
        self._sink: Any = None
        self._file: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        self._append(batch)
        while (widest := max(self._pending_bytes)) >= self._row_group_bytes and self._pending_rows:
            rows = max(1, self._pending_rows * self._row_group_bytes // widest)
            self._write_group(self._take(rows))

    def finish(self) -> None:
        if self._pending_rows:
            self._write_group(self._take(self._pending_rows))
        self._end_shard()
        if not self._rows:
            raise NoRows("there is no row to write")
        if self.done.rows != self._rows:
            raise DataError(
                f"{self._rows:,} rows came, and the files have {self.done.rows:,}; upgrade pyarrow"
            )

    def _append(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._pending.append(batch)
            self._pending_rows += batch.num_rows
            for i, column in enumerate(batch.columns):
                self._pending_bytes[i] += column.nbytes

    def _take(self, rows: int) -> pa.RecordBatch:
        taken, rest, need = [], self._pending, rows
        self._pending, self._pending_rows, self._pending_bytes = [], 0, [0] * len(self._schema)
        for batch in rest:
            if need:
                taken.append(batch.slice(0, need))
            self._append(batch.slice(need))
            need -= min(need, batch.num_rows)
        if (nbytes := sum(batch.nbytes for batch in taken)) >= _GROUP_LIMIT_BYTES:
            raise DataError(
                f"a row group of {rows} rows would take {nbytes >> 20} MiB; lower row_group_bytes"
            )
        return pa.concat_batches(taken)

    def _write_group(self, group: pa.RecordBatch) -> None:
        with _named_errors(self._format):
            if self._file is None:
                self._sink = pa.BufferOutputStream()
                self._file = self._open()
            if self._format == "parquet":
                self._file.write_batch(group, row_group_size=group.num_rows)
            else:
                self._file.write_batch(group)
        self._rows += group.num_rows
        self._groups += 1
        if self._sink.tell() >= self._shard_bytes:
            self._end_shard()
        self._on_progress(self.done)

    def _open(self) -> Any:
        if self._format == "arrow":
            return pa.ipc.new_file(self._sink, self._schema)
        # Dictionaries only for strings, statistics only for numbers: for other columns they cost
        # space and time without use.
        words = [f.name for f in self._schema if pa.types.is_string(f.type)]
        numbers = [f.name for f in self._schema if pa.types.is_primitive(f.type)]
        # Images are compressed already, and numbers in lists hardly get smaller.
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        is_dense = any(is_one(f.type) for f in self._schema for is_one in lists)
        return pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="none" if is_dense or "image" in self._schema.names else "snappy",
            use_dictionary=words or False,
            write_statistics=numbers or False,
            write_page_checksum=True,
        )

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file, content = None, self._sink.getvalue()
        self.destination.add(f"part-{self.done.shards:05d}.{self._format}", content)
        self.done = WrittenShards(
            self.done.rows + _rows_in(content, self._format),
            self._groups,
            self.done.shards + 1,
            self.done.nbytes + content.size,
        )


class _Destination:
    """The folder of a store, which this attempt claims."""

    def __init__(self, store: Store) -> None:
        self._store, self._attempt = store, secrets.token_hex(8).encode()
        self._claim = path_in(store, INCOMPLETE)
        self._own: list[str] = []  # the paths that this attempt has written

    @contextmanager
    def writing(self) -> Iterator[None]:
        """All shards are a data set at the end of the `with` block, or none is there."""
        self._refuse_others()
        try:
            self._store.write(self._claim, self._attempt, create_only=True)
        except FileExistsError:
            raise self._refused("another attempt has just begun to write there") from None
        self._own.append(self._claim)
        try:
            self._refuse_others()  # which ended between the look and the claim
            yield
            self._refuse_others()
            if not self._is_claimed():
                raise self._refused("another attempt has claimed it")
            self._store.delete(self._claim)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._discard()
            raise

    def add(self, name: str, content: pa.Buffer) -> None:
        path = path_in(self._store, name)
        try:
            self._store.write(path, content, create_only=True)
        except FileExistsError:
            raise self._refused(f"another attempt has written {name}") from None
        self._own.append(path)

    def _refuse_others(self) -> None:
        """Raises DataError if there are files that this attempt has not written."""
        beginning = f"/.{INCOMPLETE}."  # the claim of another attempt, which will fail
        there = [entry.path for entry in self._store.find(f"{self._store.path.rstrip('/')}/")]
        others = [path for path in there if path not in self._own and beginning not in path]
        if others:
            unfinished = any(path.endswith(f"/{INCOMPLETE}") for path in others)
            whose = ", of an attempt that still runs or was killed" if unfinished else ""
            raise self._refused(f"it is not empty: {len(others)} files, such as {others[0]}{whose}")

    def _is_claimed(self) -> bool:
        try:
            return bytes(self._store.read_all(self._claim)) == self._attempt
        except ObjectMissing:
            return False

    def _refused(self, why: str) -> DataError:
        return DataError(
            f"cannot write to {self._store.url!r}: {why}; name another destination, or remove "
            "it first"
        )

    def _discard(self) -> None:
        """Removes the claim last: until then nothing reads the shards. Without the claim, the
        files there may be those of another attempt."""
        if not self._is_claimed():
            return
        for path in reversed(self._own):
            self._store.delete(path)
        if (folder := self._store.local_path(self._store.path)) is not None:
            os.rmdir(folder)


def _written_schema(schema: pa.Schema, format: OutputFormat) -> pa.Schema:
    """The types that training reads. Raises DataError if files of `format` cannot give back every
    column."""
    try:
        names = [field.name for field in schema]
    except UnicodeDecodeError as error:
        raise DataError(f"the name of a column is not UTF-8: {error.object!r}") from None
    if not names:
        raise DataError("there is no column to write")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"two columns have the name {twice!r}; rename one")
    fields = [f.with_type(pa.binary() if _is_image(f.type) else plain(f.type)) for f in schema]
    metadata = {
        k: v
        for k, v in (schema.metadata or {}).items()
        if k not in (b"pandas", b"ARROW:schema", b"huggingface")  # the layout of the old file
    }
    found = pa.schema(fields, metadata=metadata or None)
    if format == "parquet":
        if empty := next((f.name for f in fields if _has_lists_of_no_items(f.type)), None):
            raise DataError(
                f"column {empty!r} holds lists of the fixed size 0, which Parquet cannot give "
                "back; leave it out by columns="
            )
        sink = io.BytesIO()
        with _named_errors(format):
            try:
                pq.write_table(pa.Table.from_batches([], found), sink)
                pq.read_schema(sink)
            except OSError as error:
                raise DataError(
                    f"these columns could not be read again as parquet: {error}; leave some out "
                    "by columns=, or write format='arrow'"
                ) from error
    return found


def as_written(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch` with the columns and types of `schema`. A column that it lacks is null. Raises
    ArrowInvalid rather than change a value."""
    there = {*batch.schema.names}
    columns = [
        _column(batch.column(field.name), field)
        if field.name in there
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _column(column: pa.Array, field: pa.Field) -> pa.Array:
    if _is_image(column.type):
        content = column.flatten()[column.type.get_field_index("bytes")]
        if content.null_count > column.null_count:
            raise DataError(
                f"column {field.name!r} names image files instead of holding them; embed them "
                "first (in `datasets`: `dataset.map(…)` with `Image(decode=False)`), or convert "
                "the folder"
            )
        return content
    if column.type.equals(field.type):
        return column
    found = cast(pa.chunked_array([column]), field.type).combine_chunks()
    return found if found.type.equals(field.type) else found.cast(field.type)


def _is_image(kind: pa.DataType) -> bool:
    """Whether it is an image column of Hugging Face `datasets`."""
    if not pa.types.is_struct(kind) or {f.name for f in kind} != {"bytes", "path"}:
        return False
    return bool(pa.types.is_binary(kind.field("bytes").type))


def _has_lists_of_no_items(kind: pa.DataType) -> bool:
    return any(pa.types.is_fixed_size_list(k) and k.list_size == 0 for k in node_types(kind))


def _rows_in(content: pa.Buffer, format: OutputFormat) -> int:
    if format == "parquet":
        return int(pq.read_metadata(pa.BufferReader(content)).num_rows)
    with pa.ipc.open_file(content) as file:
        return sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))


@contextmanager
def _named_errors(format: OutputFormat) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(
            f"these columns cannot be written as {format}: {error}; leave some out by columns="
        ) from error
