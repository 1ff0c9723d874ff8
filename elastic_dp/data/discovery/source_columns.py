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
    """Does nothing if no source has columns of its own. `used`: the columns of the filter, which
    are read of all sources."""

    def __init__(self, config: DataConfig, used: Sequence[str] = ()) -> None:
        self._urls, self._each, self._used = config.urls, config.columns_by_source, used
        self._added = () if config.source_column is None else (config.source_column,)
        self._missing: dict[int, tuple[list[str], list[str]]] = {}  # and the columns that are there

    def among(self, source: int) -> tuple[str, ...] | None:
        """The columns that are read of the source's shards; None: all that the job reads."""
        if self._each is None:
            return None
        return tuple(dict.fromkeys([*self._own(source), *self._used]))

    def add(self, source: int, schema: pa.Schema) -> None:
        """Adds a shard of the source."""
        if (among := self.among(source)) is not None:
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
            used = [name for name in missing if name in self._used]
            if missing:
                what = f"DataConfig.filter uses {used[0]!r}, and " if used else ""
                raise DataError(
                    f"{what}{name_of(self._urls[source])}: no column "
                    f"{', '.join(map(repr, missing))} in its shards, which have "
                    f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}"
                )

    def _own(self, source: int) -> tuple[str, ...]:
        assert self._each is not None
        return (*(self._each[source] or ()), *self._added)
