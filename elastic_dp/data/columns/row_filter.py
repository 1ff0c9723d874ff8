"""Row filters: which rows of a row group a `pyarrow` expression keeps.

Filters are applied when a data set is opened, to count the rows of each row group, and once more
whenever a row group is read. Both give the same rows, so the order of rows is arithmetic on these
counts, and needs no state. As in SQL, a row for which the expression is null is left out.

A filter may use columns that the job does not deliver. These are read for the filter alone.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.columns.column_types import cast, plain, type_name
from elastic_dp.data.columns.schema import leaves, top_level
from elastic_dp.errors import DataError

Ints = npt.NDArray[np.int64]
_NUMBER = "elastic_dp row number"
_KEY = "(?:call|end|field_ref|literal|nested_field_ref|options)"
_ENTRY = re.compile(rf"^({_KEY}): '(.*?)'(?=\n{_KEY}: '|\Z)", re.MULTILINE | re.DOTALL)


def columns_of(expression: Any) -> list[str]:
    """The columns that a pyarrow expression names, each once; a field of a struct is "a.b"."""
    found, nested, left = list[str](), list[str](), 0
    for key, value in _serialized(expression):
        if key == "nested_field_ref":
            nested, left = [], int(value)
        elif key == "field_ref" and left:
            nested.append(value)
            left -= 1
            if not left:
                found.append(".".join(nested))
        elif key == "field_ref":
            found.append(value)
    return list(dict.fromkeys(found))


class RowFilter:
    """`schema`: the columns that are read of the shards. Raises DataError if `expression` names
    others, or does not fit their types.

    `fields`: the top-level columns that it uses. `leaves`: the names of those that it needs to be
    read; "a.b" in a struct.
    """

    def __init__(self, expression: Any, schema: pa.Schema) -> None:
        self._expression = expression
        used = columns_of(expression)
        fields = (schema.field(name) for name in top_level(schema, used))
        self.fields = [pa.field(field.name, plain(field.type)) for field in fields]
        self.leaves = [leaf.name for leaf in leaves(self.fields, used)]
        try:
            self.schema.empty_table().filter(expression)
        except (pa.ArrowException, TypeError, ValueError) as error:
            types = ", ".join(f"{f.name!r} is {type_name(f.type)}" for f in self.fields)
            raise DataError(
                f"DataConfig.filter: {expression} cannot be applied: {error}"
                + (f"; column {types}" if types else "")
            ) from error

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self.fields)

    @property
    def names(self) -> list[str]:
        """The top-level columns that the expression uses."""
        return [field.name for field in self.fields]

    def rows(self, table: pa.Table) -> Ints:
        """The numbers of the rows that are kept, in order."""
        columns = {field.name: _column(table, field) for field in self.fields}
        numbered = pa.table(columns | {_NUMBER: np.arange(table.num_rows)})
        kept: Ints = numbered.filter(self._expression).column(_NUMBER).to_numpy()
        return np.sort(kept)  # Arrow does not promise the order


def _serialized(expression: Any) -> list[tuple[str, str]]:
    """The calls, literals and columns of an expression, in their order: Arrow writes them as
    metadata of a schema, with keys that repeat, which only the schema's text has all of."""
    _, (content,) = expression.__reduce__()
    schema = pa.ipc.open_file(content).schema
    for _ in schema.names:  # those of literals
        schema = schema.remove(0)
    text = schema.to_string(show_schema_metadata=True, truncate_metadata=False)
    return [(one[1], one[2]) for one in _ENTRY.finditer(text)]


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    # Of a struct, only some fields may be here.
    return column if pa.types.is_struct(field.type) else cast(column, field.type)
