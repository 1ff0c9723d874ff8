"""JSON Lines and CSV: read twice, first for the types of all rows, then for the rows.

One pass would have to trust its first block, and fail hours later at the first "1.5" in a column of whole
numbers. Each pass cuts the file into blocks at line ends and lets pyarrow parse them. Dates stay text. A CSV
column that is numbers in one block and words in another is text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from elastic_dp.data.formats.jsonl import refuse_null_rows
from elastic_dp.data.intake.files import Files, reading
from elastic_dp.data.intake.rows import Rows, choose
from elastic_dp.errors import DataError

BLOCK_BYTES = 4 << 20
LINE_BYTES = 256 << 20

_Parse = Callable[[bytes, pa.Schema | None], pa.Table]


def open_jsonl(files: Files, columns: list[str] | None) -> Rows:
    def tables(name: str, schema: pa.Schema | None) -> Iterator[pa.Table]:
        for block in _blocks(files, name, quoted=False):
            yield _parse_json(block, schema)

    return _rows(files, tables, columns, mixed_is_text=False)


def open_csv(files: Files, columns: list[str] | None) -> Rows:
    def tables(name: str, schema: pa.Schema | None) -> Iterator[pa.Table]:
        names = None
        for block in _blocks(files, name, quoted=True):
            table = _parse_csv(block, names, schema)
            names = names or _parse_csv(block, None, None).column_names
            yield table

    return _rows(files, tables, columns, mixed_is_text=True)


def _rows(
    files: Files,
    tables: Callable[[str, pa.Schema | None], Iterator[pa.Table]],
    columns: list[str] | None,
    *,
    mixed_is_text: bool,
) -> Rows:
    schema = pa.schema([])
    for name in files.names:
        with reading(name):
            for table in tables(name, None):
                schema = _unify(schema, table.schema, name, mixed_is_text)
    schema = choose(
        pa.schema([(f.name, _settled(f.type)) for f in schema]), columns, files.names[0]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for name in files.names:
            for table in tables(name, schema):
                with reading(name):
                    table = table.select(schema.names).cast(schema).combine_chunks()
                yield from table.to_batches()

    return Rows(schema, batches)


def _blocks(files: Files, name: str, *, quoted: bool) -> Iterator[bytes]:
    """Whole lines; where `quoted`, a line end between quotation marks is none."""
    rest = b""
    with files.open(name) as raw:
        while chunk := raw.read(BLOCK_BYTES):
            rest += chunk
            if cut := _last_line_end(rest, quoted):
                yield rest[:cut]
                rest = rest[cut:]
            elif len(rest) > LINE_BYTES:
                raise DataError(
                    f"{name} has a line of more than {LINE_BYTES >> 20} MiB, or an open quote"
                )
    if rest.strip():
        yield rest


def _last_line_end(block: bytes, quoted: bool) -> int:
    cut = block.rfind(b"\n") + 1
    while quoted and cut and block.count(b'"', 0, cut) % 2:
        cut = block.rfind(b"\n", 0, cut - 1) + 1
    return cut


def _parse_json(block: bytes, schema: pa.Schema | None) -> pa.Table:
    options = pa.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="ignore" if schema else "infer"
    )
    size = pa.json.ReadOptions(block_size=len(block) + 1, use_threads=False)
    refuse_null_rows(block)
    table = pa.json.read_json(pa.BufferReader(block), size, options)
    table.validate(full=True)  # Arrow's reader takes text that is not UTF-8
    return table


def _parse_csv(block: bytes, names: list[str] | None, schema: pa.Schema | None) -> pa.Table:
    types: dict[str, Any] = {}
    if schema is not None:
        types = {
            "column_types": schema,
            "include_columns": schema.names,
            "include_missing_columns": True,
        }
    return pa.csv.read_csv(
        pa.BufferReader(block),
        pa.csv.ReadOptions(block_size=len(block) + 1, use_threads=False, column_names=names),
        pa.csv.ParseOptions(newlines_in_values=True),
        pa.csv.ConvertOptions(**types),
    )


def _unify(known: pa.Schema, new: pa.Schema, name: str, mixed_is_text: bool) -> pa.Schema:
    fields = {field.name: field for field in known}
    for field in pa.schema([(f.name, _without_dates(f.type)) for f in new]):
        before = fields.get(field.name, field)
        try:
            pair = [pa.schema([before]), pa.schema([field])]
            fields[field.name] = pa.unify_schemas(pair, promote_options="permissive").field(0)
        except pa.ArrowException as error:
            if not mixed_is_text:
                raise DataError(
                    f"column {field.name!r} is {field.type} in {name} and {before.type} before; make it "
                    "one type, or leave it out by naming the columns"
                ) from error
            fields[field.name] = pa.field(field.name, pa.string())
    return pa.schema(list(fields.values()))


def _settled(kind: pa.DataType) -> pa.DataType:
    """A column of which no value was ever seen is text."""
    return pa.string() if pa.types.is_null(kind) else kind


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _without_dates(f.type)) for f in kind])
    return kind
