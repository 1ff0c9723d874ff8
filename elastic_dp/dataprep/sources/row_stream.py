"""What every format becomes, and the types that a column may have on the way to a tensor.

Dictionaries and extension types are written as what they stand for, views as large strings (kinds.py), dates stay the
text they were, and the image columns of Hugging Face, structs of bytes and path, become the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from elastic_dp.data.columns.column_types import cast, plain
from elastic_dp.data.columns.schema import refuse_names_that_are_no_text
from elastic_dp.errors import DataError

Documents = Iterator[tuple[str, bool]]  # pieces of text in order; True: it ends the document


@dataclass(frozen=True)
class Rows:
    """`batches()` reads from the start, each batch of `schema`; batches may be of any size, also empty."""

    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]]


def choose(schema: pa.Schema, columns: list[str] | None, where: str) -> pa.Schema:
    """Those columns of it, in the order they were named. Raises DataError where one is missing."""
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
    """`batch` with the columns and types of `schema`, which came out of `plain_schema`."""
    columns = [_plain_column(batch.column(field.name), field, where) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return pa.binary() if _is_image(kind) else plain(kind)


def _plain_column(column: pa.Array, field: pa.Field, where: str) -> pa.Array:
    if not _is_image(column.type):
        if column.type.equals(field.type):
            return column
        return cast(pa.chunked_array([column]), field.type).combine_chunks()
    content = column.flatten()[column.type.get_field_index("bytes")]
    if content.null_count > column.null_count:
        raise DataError(
            f"column {field.name!r} of {where} names image files instead of holding them; embed them "
            "first (in `datasets`: `dataset.map(…)` with `Image(decode=False)`), or convert the folder"
        )
    return content


def _is_image(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or {f.name for f in kind} != {"bytes", "path"}:
        return False
    return bool(pa.types.is_binary(kind.field("bytes").type))
