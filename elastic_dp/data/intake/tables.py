"""Parquet, Arrow IPC files and streams, and the folders that `datasets.save_to_disk` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.formats.arrow import refuse_old_feather
from elastic_dp.data.formats.parquet import open_footer
from elastic_dp.data.intake.files import Files, reading
from elastic_dp.data.intake.rows import Rows, choose, plain_batch, plain_schema
from elastic_dp.errors import DataError

BATCH_BYTES = 4 << 20

_Batches = Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]


def open_parquet(files: Files, columns: list[str] | None) -> Rows:
    def schema_of(name: str) -> pa.Schema:
        with files.open(name) as raw:
            return open_footer(raw, name, columns)[0].schema.to_arrow_schema()

    def batches_of(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with files.open(name) as raw:
            # buffer_size and no pre_buffer: a row group of a million rows is not read whole
            file = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
            yield from file.iter_batches(_batch_rows(file.metadata), columns=schema.names)

    return _rows(files, files.names, schema_of, batches_of, columns)


def open_arrow(files: Files, columns: list[str] | None) -> Rows:
    return _open_arrow(files, files.names, columns)


def open_saved_dataset(files: Files, columns: list[str] | None) -> Rows:
    """The Arrow files in the order of state.json, which need not be that of their names."""
    with files.open("state.json") as raw:
        content = raw.read()
    try:
        names = tuple(file["filename"] for file in json.loads(content)["_data_files"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"state.json is not what datasets.save_to_disk writes: {error!r}") from None
    for name in names:
        if name not in files.names:  # also one that leads out of the folder
            raise DataError(f"state.json names {name!r}, which is no file of this folder")
    return _open_arrow(files, names, columns)


def _open_arrow(files: Files, names: tuple[str, ...], columns: list[str] | None) -> Rows:
    def schema_of(name: str) -> pa.Schema:
        with files.open_mapped(name) as raw:
            return _open_ipc(raw, name).schema

    def batches_of(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with files.open_mapped(name) as raw:
            reader = _open_ipc(raw, name)
            if isinstance(reader, pa.RecordBatchStreamReader):
                yield from reader
            else:
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))

    return _rows(files, names, schema_of, batches_of, columns)


def _rows(
    files: Files,
    names: tuple[str, ...],
    schema_of: Callable[[str], pa.Schema],
    batches_of: _Batches,
    columns: list[str] | None,
) -> Rows:
    with reading(names[0], files.options):
        first = choose(schema_of(names[0]), columns, names[0])
        schema = plain_schema(first).remove_metadata().with_metadata(_lasting(first.metadata))

    def batches() -> Iterator[pa.RecordBatch]:
        for name in names:
            _check_same(
                names[0], schema, name, plain_schema(choose(schema_of(name), columns, name))
            )
            for batch in batches_of(name, schema):
                with reading(name, files.options):
                    batch.validate(full=True)  # Arrow follows offsets without asking
                    plain = plain_batch(batch, schema, name)
                yield plain

    return Rows(schema, batches)


def _check_same(first: str, schema: pa.Schema, name: str, other: pa.Schema) -> None:
    if not schema.equals(other, check_metadata=False):
        ours, theirs = ({f"{f.name}: {f.type}" for f in s} for s in (schema, other))
        raise DataError(
            f"the schemas differ: {first} has {', '.join(sorted(ours - theirs)) or 'no more columns'}, "
            f"{name} has {', '.join(sorted(theirs - ours)) or 'no more columns'}; convert them apart, or "
            "choose columns that agree"
        )


def _open_ipc(raw: Any, name: str) -> Any:
    magic = raw.read(6)
    refuse_old_feather(name, magic)
    raw.seek(0)
    return pa.ipc.open_file(raw) if magic == b"ARROW1" else pa.ipc.open_stream(raw)


def _batch_rows(footer: pq.FileMetaData) -> int:
    decoded = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    return max(1, BATCH_BYTES * footer.num_rows // max(decoded, 1))


def _lasting(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """Without what described the old file's layout."""
    return {
        k: v for k, v in (metadata or {}).items() if k not in (b"pandas", b"ARROW:schema")
    } or None
