"""Row filters: which rows of a row group a `pyarrow` expression keeps.

Filters are applied when a data set is opened, to count the rows of each row group, and once more
whenever a row group is read. Both give the same rows, so the order of rows is arithmetic on these
counts, and needs no state. As in SQL, a row for which the expression is null is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.columns.column_types import cast, plain
from elastic_dp.errors import DataError

Ints = npt.NDArray[np.int64]
_NUMBER = "elastic_dp row number"


class RowFilter:
    """`schema`: the columns that the job reads. Raises DataError if `expression` names others, or
    does not fit their types."""

    def __init__(self, expression: Any, schema: pa.Schema) -> None:
        self._expression = expression
        fields = [pa.field(field.name, plain(field.type)) for field in schema]
        try:
            pa.schema(fields).empty_table().filter(expression)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"DataConfig.filter: {expression} cannot be applied: {error}; it may use the "
                f"columns that the job reads ({', '.join(map(repr, schema.names))}; see "
                "DataConfig.columns)"
            ) from error
        self.fields = [field for field in fields if self._needs(field, fields)]

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

    def _needs(self, field: pa.Field, fields: Iterable[pa.Field]) -> bool:
        others = pa.schema([other for other in fields if other.name != field.name])
        try:
            others.empty_table().filter(self._expression)
        except pa.ArrowException:
            return True
        return False


class Selection:
    """Counts the rows that are kept, row group by row group."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._content = hashlib.sha256()

    def add(self, kept: Ints) -> None:
        self.counts.append(len(kept))
        self._content.update(np.int64(len(kept)).tobytes() + kept.astype(np.int64).tobytes())

    @property
    def digest(self) -> str:
        """Equal if the same rows of each row group are kept, however the filter is written."""
        return self._content.hexdigest()


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    # Of a struct, only some fields may be here.
    return column if pa.types.is_struct(field.type) else cast(column, field.type)
