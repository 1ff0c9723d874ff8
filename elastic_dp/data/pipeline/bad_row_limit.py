"""The limit of rows that `on_bad_shard="skip"` may leave out before a run fails.

It is applied to the bad row groups and rows on which all workers have agreed, so a run fails at the
same step whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

_NAMED = 3  # in an error message


class BadRowLimit:
    """The limit of a data set, or of each source that has a weight."""

    def __init__(self, config: DataConfig, row_groups: RowGroups, index: Index | None) -> None:
        self._fraction, self._row_groups = config.max_bad_fraction, row_groups
        self._parts = [(0, len(row_groups.rows), "the data set")]
        if index is not None and index.weights is not None:
            self._parts = [
                (source.first_group, source.end_group, f"the source {redact_url(url)!r}")
                for url, source in zip(config.urls, index.sources, strict=True)
            ]

    def check(self, bad: Sequence[int]) -> None:
        """Raises DataError if too many rows are bad. `bad`: the numbers of row groups, and of rows
        (see micro_batch_stream.py), sorted."""
        rows = self._row_groups.rows
        single = np.array([number - len(rows) for number in bad if number >= len(rows)], np.int64)
        groups = np.searchsorted(np.cumsum(rows), single, side="right")
        groups = groups[~np.isin(groups, bad)]  # the other rows count with their row group
        for first, end, what in self._parts:
            of_part = [number for number in bad if first <= number < end]
            named = [self._row_groups.name(number) for number in of_part[:_NAMED]]
            some = ", ".join(f"row group {number} of {shard}" for shard, number, _ in named)
            more = ", …" if len(of_part) > len(named) else ""
            left_out = int(rows[of_part].sum() + ((first <= groups) & (groups < end)).sum())
            names = f": {some}{more}" if some else ""
            self.check_rows(left_out, int(rows[first:end].sum()), what, names)

    def check_rows(self, left_out: int, rows: int, what: str, names: str) -> None:
        if not left_out:
            return
        if left_out == rows:
            raise DataError(
                f"DataConfig.url: no row of {what} can be decoded{names}. Nothing is left to "
                "read; repair the shards"
            )
        if left_out > self._fraction * rows:
            raise DataError(
                f"DataConfig.max_bad_fraction is {self._fraction:g}, but {left_out:,} of the "
                f"{rows:,} rows of {what}, "
                f"{left_out / rows:.2g} of them, cannot be decoded{names}. Repair or remove the "
                "shards; or raise max_bad_fraction, if these rows are not needed"
            )
