"""The columns that are read of single sources (`DataConfig.source_options`), while the shards of a
data set are added to its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.config.source_options import name_of
from elastic_dp.data.columns.schema import leaves, names_missing
from elastic_dp.data.formats.file_format import Scan
from elastic_dp.errors import DataError

_NAMES_SHOWN = 20


class SourceColumns:
    """Does nothing if no source has columns of its own."""

    def __init__(self, config: DataConfig) -> None:
        self._urls, self._each = config.urls, config.columns_by_source
        self._added = () if config.source_column is None else (config.source_column,)
        self._missing: dict[int, tuple[list[str], list[str]]] = {}  # and the columns that are there

    def among(self, source: int) -> tuple[str, ...] | None:
        """The columns that are read of the source's shards; None: all that the job reads."""
        if self._each is None:
            return None
        return (*(self._each[source] or ()), *self._added)

    def add(self, source: int, schema: pa.Schema) -> None:
        """Adds a shard of the source."""
        among = self.among(source)
        if among is not None:
            missing, names = self._missing.get(source, ([*among], schema.names))
            self._missing[source] = names_missing(missing, schema), names

    def read(self, source: int, scan: Scan) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The `nulls` and `null_lists` of the columns that are read."""
        among = self.among(source)
        if among is None:
            return scan.nulls, scan.null_lists
        names = {leaf.name for leaf in leaves(scan.schema, among)}
        nulls, lists = (
            {name: n for name, n in counts.items() if name in names}
            for counts in (scan.nulls, scan.null_lists)
        )
        return nulls, lists

    def check(self) -> None:
        """Raises DataError if no shard of a source has one of its columns."""
        for source, (missing, names) in self._missing.items():
            if missing:
                raise DataError(
                    f"{name_of(self._urls[source])}: no column "
                    f"{', '.join(map(repr, missing))} in its shards, which have "
                    f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}"
                )

    def check_filter(self, names: Sequence[str]) -> None:
        """Raises DataError if the filter uses a column that is not read of all sources."""
        for url, columns in zip(self._urls, self._each or (), strict=False):
            left_out = [name for name in names if name not in (*(columns or ()), *self._added)]
            if left_out:
                raise DataError(
                    f"DataConfig.filter uses {left_out[0]!r}, which is not among the columns of "
                    f"{name_of(url)}; name it there"
                )
