"""`Rows`: a stream of record batches, which every source format becomes.

Columns get the types that training reads (column_types.py): dictionaries become their values,
extension types their storage, views large strings. Dates in text files stay text. An image column
of Hugging Face, which is a struct of bytes and path, becomes the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from elastic_dp.data.columns.column_types import cast, plain
from elastic_dp.data.columns.schema import refuse_names_that_are_no_text
from elastic_dp.data.discovery.partitions import Partitions
from elastic_dp.errors import DataError

Documents = Iterator[tuple[str, bool]]  # pieces of text in order; True: it ends the document


@dataclass(frozen=True)
class Rows:
    """The rows of a source. `batches()` reads from the start; each batch has `schema` and any
    number of rows. `empty`: the files in which it found no row."""

    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]]
    empty: list[str] = field(default_factory=list)


def rows_of_files(
    names: Sequence[str],
    schema: pa.Schema,
    batches_of: Callable[[str, pa.Schema], Iterator[pa.RecordBatch]],
    columns: list[str] | None,
    partitions: Partitions,
) -> Rows:
    """The rows of one file after the other. `schema`: of the columns in the files. `columns`: all
    wanted columns in their order, some of which may be in `partitions`; None: all."""
    added = partitions.fields(schema, columns)
    order = columns or [*schema.names, *(f.name for f in added)]
    every = pa.schema([*schema, *added], metadata=schema.metadata)
    every = pa.schema([every.field(name) for name in order], metadata=schema.metadata)
    empty: list[str] = []

    def batches() -> Iterator[pa.RecordBatch]:
        empty.clear()
        for name in names:
            count = 0
            for batch in batches_of(name, schema):
                count += batch.num_rows
                for f in added:
                    batch = batch.append_column(f, partitions.column(f, name, batch.num_rows))
                yield batch.select(order)
                del batch  # otherwise it takes memory while the next one is read
            if not count:
                empty.append(name)

    return Rows(every, batches, empty)


def choose(schema: pa.Schema, columns: list[str] | None, where: str) -> pa.Schema:
    """The columns of `schema` in the order of `columns`. Raises DataError if one is missing."""
    refuse_names_that_are_no_text(where, schema)
    if columns is None:
        return schema
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise DataError(
            f"no column {', '.join(map(repr, missing))} in {where}, which has "
            f"{', '.join(map(repr, schema.names))}"
        )
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    fields = [field.with_type(_plain_type(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def plain_batch(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """`batch` with the columns and types of `schema`, which is plain. A column that it lacks is
    null."""
    there = set(batch.schema.names)
    columns = [
        _plain_column(batch.column(field.name), field, where)
        if field.name in there
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return pa.binary() if _is_image(kind) else plain(kind)


def _plain_column(column: pa.Array, field: pa.Field, where: str) -> pa.Array:
    if not _is_image(column.type):
        if column.type.equals(field.type):
            return column
        found = cast(pa.chunked_array([column]), field.type).combine_chunks()
        return found if found.type.equals(field.type) else found.cast(field.type)
    content = column.flatten()[column.type.get_field_index("bytes")]
    if content.null_count > column.null_count:
        raise DataError(
            f"column {field.name!r} of {where} names image files instead of holding them; "
            "embed them "
            "first (in `datasets`: `dataset.map(…)` with `Image(decode=False)`), or convert "
            "the folder"
        )
    return content


def _is_image(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or {f.name for f in kind} != {"bytes", "path"}:
        return False
    return bool(pa.types.is_binary(kind.field("bytes").type))
