"""Applies a filter to an index: counts the rows of each row group that it keeps."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.nulls import refuse_nulls_for_filter
from elastic_dp.data.columns.row_filter import RowFilter, Selection
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.discovery.sources import SCANS_IN_FLIGHT, OpenedSource
from elastic_dp.data.formats.decode_errors import decoding, reading_footer, refuse_other_count
from elastic_dp.data.formats.file_format import Ints, RowGroupLocation, read_table
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.errors import BadShard, DataError

_log = logging.getLogger(__name__)


def filtered(index: Index, config: DataConfig, sources: list[OpenedSource]) -> Index:
    """The index with the numbers of rows that the filter keeps. Reads the columns of the filter,
    of the row groups that may have such rows by their statistics and their folder's name. Reads
    nothing of a shard where the filter uses only what the folder's name says.

    Raises BadShard if they cannot be decoded. With `max_bad_fraction` all rows of such a row
    group are kept, since nobody knows which fit: training then skips them as bad ones, and counts
    them.
    """
    rows_of = RowFilter(config.filter, index.schema)
    allowed = {name for name, _ in index.columns}.union(config.fill_nulls or {})
    alone = [name for name in rows_of.leaves if name not in allowed]
    selection = Selection()

    def applied(table: pa.Table, where: str) -> Ints:
        try:
            return rows_of.rows(table)
        except pa.ArrowException as error:
            raise DataError(
                f"DataConfig.filter: {config.filter} cannot be applied to {where}: {error}"
            ) from error

    def kept(number: int) -> list[Ints]:
        source = sources[index.shards["source"][number].as_py()]
        shard = source.shard(index, number)
        first, end = index.group_bounds[number : number + 2].tolist()
        here = frozenset(range(end - first))
        found = [np.empty(0, np.int64)] * (end - first)
        if rows_of.names and all(name in shard.partition for name in rows_of.names):
            row = pa.table([[shard.partition[f.name]] for f in rows_of.fields], rows_of.schema)
            fits = len(applied(row, shard.name))
            return [np.arange(n * fits) for n in index.rows[first:end].tolist()]
        if isinstance(source.format, Parquet):
            with reading_footer(shard):
                may_match = source.format.may_match(shard, config.filter, rows_of.fields)
            here = here if may_match is None else may_match
        for group in sorted(here):
            at = RowGroupLocation(
                group, int(index.starts[first + group]), int(index.ends[first + group])
            )
            rows = int(index.rows[first + group])
            try:
                with decoding(shard, at):
                    table = read_table(source.format, shard, at, index.schema, rows_of.leaves)
                    refuse_other_count(table.num_rows, rows)
            except BadShard as error:
                if not config.max_bad_fraction:
                    raise
                _log.warning("DataConfig.filter: %s", _kept_whole(error))
                found[group] = np.arange(rows)
                continue
            where = f"row group {group} of {shard.name}"
            refuse_nulls_for_filter(table, alone, where)  # which no footer may have counted
            found[group] = applied(table, where)
        return found

    with ThreadPoolExecutor(SCANS_IN_FLIGHT, thread_name_prefix="elastic-dp-index") as pool:
        for of_shard in pool.map(kept, range(index.num_shards)):
            for rows in of_shard:
                selection.add(rows)
    if not sum(selection.counts):
        raise DataError(f"DataConfig.filter: no row of {index.num_rows:,} fits {config.filter}")
    at = index.groups.schema.get_field_index("rows")
    counts = pa.array(selection.counts, pa.int64())
    groups = index.groups.set_column(at, index.groups.schema.field("rows"), counts)
    return replace(index, groups=groups, selection=selection.digest)


def _kept_whole(bad: BadShard) -> str:
    return (
        f"row group {bad.row_group} of {bad.shard} cannot be decoded ({bad.reason}), so nobody "
        "knows which of its rows fit; all of them count as rows that are skipped"
    )
