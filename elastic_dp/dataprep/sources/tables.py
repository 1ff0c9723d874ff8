"""Parquet, Arrow IPC files and streams, and the folders that `datasets.save_to_disk` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.columns.column_types import lossless
from elastic_dp.data.columns.null_views import clear_null_views
from elastic_dp.data.columns.schema import Columns, refuse_names_that_are_no_text
from elastic_dp.data.discovery.partitions import Partitions
from elastic_dp.data.discovery.saved_datasets import STATE, named_files
from elastic_dp.data.formats.arrow import refuse_old_feather
from elastic_dp.data.formats.arrow_messages import refuse_large_batches
from elastic_dp.data.formats.parquet import open_footer
from elastic_dp.dataprep.sources.row_stream import (
    Rows,
    choose,
    plain_batch,
    plain_schema,
    rows_of_files,
)
from elastic_dp.dataprep.sources.source_files import Files, reading
from elastic_dp.errors import DataError

BATCH_BYTES = 4 << 20

SCHEMA_THREADS = 16

_SchemaOf = Callable[[str], tuple[pa.Schema, bool]]  # schema, whether the file surely has no rows
_Batches = Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]


def open_parquet(files: Files, columns: list[str] | None, partitions: Partitions) -> Rows:
    def schema_of(name: str) -> tuple[pa.Schema, bool]:
        with files.open(name) as raw:
            footer = open_footer(raw, name, columns)[0]
            return footer.schema.to_arrow_schema(), not footer.num_rows

    def batches_of(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with files.open(name) as raw:
            # With buffer_size and without pre_buffer, a large row group is not read all at once.
            file = pq.ParquetFile(
                raw, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
            )
            here = [name for name in file.schema_arrow.names if name in schema.names]
            # Each row group is read by itself: surplus values of a damaged page would shift the
            # rows of the next row group.
            for group in range(file.num_row_groups):
                yield from file.iter_batches(_batch_rows(file.metadata), [group], here)

    return _rows(files, files.names, schema_of, batches_of, columns, partitions)


def open_arrow(files: Files, columns: list[str] | None, partitions: Partitions) -> Rows:
    return _open_arrow(files, files.names, columns, partitions)


def open_saved_dataset(files: Files, columns: list[str] | None, partitions: Partitions) -> Rows:
    """The Arrow files in the order of state.json, which may differ from that of their names."""
    with files.open(STATE) as raw:
        content = raw.read()
    names = named_files(content)
    for name in names:
        if name not in files.names:  # or a path that leads out of the folder
            raise DataError(f"state.json names {name!r}, which is no file of this folder")
    return _open_arrow(files, names, columns, partitions)


def _open_arrow(
    files: Files, names: tuple[str, ...], columns: list[str] | None, partitions: Partitions
) -> Rows:
    def schema_of(name: str) -> tuple[pa.Schema, bool]:
        with files.open_mapped(name) as raw:
            reader = _open_ipc(raw, name)
            return reader.schema, getattr(reader, "num_record_batches", 1) == 0

    def batches_of(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with files.open_mapped(name) as raw:
            refuse_large_batches(raw, name)
            reader = _open_ipc(raw, name)
            if isinstance(reader, pa.RecordBatchStreamReader):
                yield from reader
            else:
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))

    return _rows(files, names, schema_of, batches_of, columns, partitions)


def _rows(
    files: Files,
    names: tuple[str, ...],
    schema_of: _SchemaOf,
    batches_of: _Batches,
    columns: list[str] | None,
    partitions: Partitions,
) -> Rows:
    """The rows in one schema, which is merged by the rules of training (schema.py)."""

    def look(name: str) -> tuple[pa.Schema, bool]:
        with reading(name, files.options):
            schema, is_empty = schema_of(name)
            refuse_names_that_are_no_text(name, schema)
            return plain_schema(schema), is_empty

    found = Columns(columns)
    with ThreadPoolExecutor(SCHEMA_THREADS, thread_name_prefix="elastic-dp-schemas") as pool:
        first = None
        rest = map(look, names) if files.is_local else pool.map(look, names)
        for name, (there, is_empty) in zip(names, rest, strict=True):
            if first is None:
                first = there
            if not is_empty:
                found.add(name, there, lossless)
    assert first is not None
    schema = found.schema() if len(found.schema()) else first
    found.refuse_case()
    if columns is not None:
        known = {*schema.names, *(f.name for f in partitions.fields(schema, columns))}
        choose(first, [name for name in columns if name not in known], names[0])
        schema = pa.schema([schema.field(name) for name in columns if name in schema.names])
    schema = schema.with_metadata(_lasting(first.metadata))

    def plain_batches(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in batches_of(name, schema):
            with reading(name, files.options):
                batch.validate(full=True)  # Arrow itself does not check offsets
                plain = plain_batch(clear_null_views(batch), schema, name)
            yield plain

    return rows_of_files(names, schema, plain_batches, columns, partitions)


def _open_ipc(raw: Any, name: str) -> Any:
    magic = raw.read(6)
    refuse_old_feather(name, magic)
    raw.seek(0)
    return pa.ipc.open_file(raw) if magic == b"ARROW1" else pa.ipc.open_stream(raw)


def _batch_rows(footer: pq.FileMetaData) -> int:
    decoded = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    return max(1, BATCH_BYTES * footer.num_rows // max(decoded, 1))


def _lasting(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """The metadata without what describes the layout of the old file."""
    return {
        k: v for k, v in (metadata or {}).items() if k not in (b"pandas", b"ARROW:schema")
    } or None
