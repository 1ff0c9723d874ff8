"""Counts, when a data set is opened, the rows of each row group that the filter keeps, and their
tokens, for packing.

A filter of partition columns alone reads nothing. The tokens of a row group that is kept whole are
in footers of Parquet by Arrow. Otherwise its column of tokens is read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.column_types import is_list, plain, type_name
from elastic_dp.data.columns.row_filter import RowFilter
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.discovery.sources import SCANS_IN_FLIGHT
from elastic_dp.data.formats.decode_errors import decoding
from elastic_dp.data.formats.file_format import Ints
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard, DataError

TOKENS = "input_ids"

_log = logging.getLogger(__name__)


def with_counts(index: Index, config: DataConfig, timeout_s: float) -> Index:
    """The index with the numbers of rows that the filter keeps, and of their tokens.

    Raises BadShard if a row group cannot be decoded. With `max_bad_fraction` all rows of such a row
    group are kept, since nobody knows which fit: training then skips them as bad ones, and counts
    them. Raises DataError if no row is kept, or a column has no value for each token.
    """
    counter = _Counter(index, config, timeout_s)
    counts, tokens, selection = list[int](), list[int](), hashlib.sha256()
    with ThreadPoolExecutor(SCANS_IN_FLIGHT, thread_name_prefix="elastic-dp-index") as pool:
        for of_shard in pool.map(counter.shard, range(index.num_shards)):
            for rows, count in of_shard:
                counts.append(len(rows))
                tokens.append(count)
                selection.update(np.int64(len(rows)).tobytes() + rows.tobytes())
    counter.row_groups.close()
    groups = index.groups
    if config.filter is not None:
        if not sum(counts):
            raise DataError(f"DataConfig.filter: no row of {index.num_rows:,} fits {config.filter}")
        at = groups.schema.get_field_index("rows")
        groups = groups.set_column(at, groups.schema.field("rows"), pa.array(counts, pa.int64()))
        index = replace(index, selection=selection.hexdigest())
    if config.pack is not None:
        groups = groups.append_column(pa.field("tokens", pa.int64()), pa.array(tokens, pa.int64()))
    return replace(index, groups=groups)


class _Counter:
    def __init__(self, index: Index, config: DataConfig, timeout_s: float) -> None:
        self._index, self._config = index, config
        whole = replace(config, filter=None, cache_dir=None, cache_bytes=None)
        self.row_groups = RowGroups(whole, index, timeout_s=timeout_s)
        self._filter = None if config.filter is None else RowFilter(config.filter, index.schema)
        self._tokens = ""
        if config.pack is not None:
            self._tokens = _column_of_tokens(index.delivered, config.pack_columns)

    def shard(self, number: int) -> list[tuple[Ints, int]]:
        """(the rows that are kept, their tokens) by row group."""
        first, end = self._index.group_bounds[number : number + 2].tolist()
        chosen, shard, location = self.row_groups.place(first)
        is_here, known, rows_of = True, None, self._filter
        if rows_of is not None and rows_of.names and {*rows_of.names} <= {*shard.partition}:
            row = pa.table([[shard.partition[f.name]] for f in rows_of.fields], rows_of.schema)
            is_here = bool(len(self._applied(rows_of, row, shard.name)))
            rows_of = None
        if self._tokens and is_here and isinstance(chosen, Parquet):
            with decoding(shard, location):
                known = chosen.list_values(shard, self._tokens)

        def count(group: int) -> tuple[Ints, int]:
            kept = every = np.arange(int(self._index.rows[first + group]))
            if not is_here:
                return every[:0], 0
            if rows_of is not None:
                try:
                    table = self.row_groups.table(first + group, rows_of.leaves)
                except BadShard as error:
                    if not self._config.max_bad_fraction:
                        raise
                    _log.warning("DataConfig.filter: %s", _kept_whole(error))
                    return every, 0
                kept = self._applied(rows_of, table, f"row group {group} of {shard.name}")
            if not self._tokens or not len(kept):
                return kept, 0
            if known is not None and len(kept) == len(every):
                return kept, int(known[group])
            return kept, self._tokens_of(first + group, kept)

        return [count(group) for group in range(end - first)]

    def _tokens_of(self, row_group: int, kept: Ints) -> int:
        table = self.row_groups.table(row_group, [self._tokens])
        if self._tokens not in table.column_names:  # it is refused when it is read
            return 0
        _, shard, location = self.row_groups.place(row_group)
        with decoding(shard, location):
            lengths = pc.list_value_length(table.column(self._tokens).take(kept))
            return pc.sum(lengths).as_py() or 0

    def _applied(self, rows_of: RowFilter, table: pa.Table, where: str) -> Ints:
        try:
            return rows_of.rows(table)
        except pa.ArrowException as error:
            raise DataError(
                f"DataConfig.filter: {self._config.filter} cannot be applied to {where}: {error}"
            ) from error


def _kept_whole(bad: BadShard) -> str:
    return (
        f"row group {bad.row_group} of {bad.shard} cannot be decoded ({bad.reason}), so nobody "
        "knows which of its rows fit; all of them count as rows that are skipped"
    )


def _is_packable(kind: pa.DataType) -> bool:
    """Whether a column of this type may have one number for each token."""
    kind = plain(kind)
    inner = kind.value_type if is_list(kind) else None
    return inner is not None and bool(
        pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
    )


def _column_of_tokens(schema: pa.Schema, made: Sequence[str]) -> str:
    if twice := [name for name in made if name in schema.names]:
        raise DataError(
            f"DataConfig.pack makes the column {twice[0]!r}, and the data set has one of that "
            "name; leave it out by DataConfig.columns, or out of DataConfig.pack_columns, which "
            "says what is made"
        )
    for field in schema:
        if not _is_packable(field.type):
            raise DataError(
                f"DataConfig.pack: column {field.name!r} is {type_name(plain(field.type))}, and "
                "must be a list with one number for each token; leave it out by DataConfig.columns"
            )
    return TOKENS if TOKENS in schema.names else str(schema.names[0])
