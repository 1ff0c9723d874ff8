"""Counts the tokens of each row group, for packing.

Footers of Parquet by Arrow say them. Otherwise the column is read once, when the data set is
opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.column_types import is_list, plain, type_name
from elastic_dp.data.columns.row_filter import RowFilter
from elastic_dp.data.columns.schema import leaves
from elastic_dp.data.discovery.listing import path_of
from elastic_dp.data.discovery.opened_source import OpenedSource
from elastic_dp.data.discovery.shard_index import Index, shard_at
from elastic_dp.data.discovery.shard_scans import SCANS_IN_FLIGHT
from elastic_dp.data.formats.decode_errors import decoding, reading_footer, refuse_other_count
from elastic_dp.data.formats.file_format import Ints, RowGroupLocation, read_table
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.errors import DataError

TOKENS = "input_ids"


def with_tokens(index: Index, config: DataConfig, sources: list[OpenedSource]) -> Index:
    """The index with the number of tokens of each row group, without the rows that the filter
    leaves out. Raises DataError if a column has no value for each token, and BadShard if a row
    group cannot be decoded."""
    column = _column_of_tokens(index.schema, config.pack_columns)
    rows_of = None if config.filter is None else RowFilter(config.filter, index.schema)
    used = [] if rows_of is None else rows_of.fields
    read = list(dict.fromkeys([column, *(leaf.name for leaf in leaves(used))]))
    # A footer counts null tokens as it counts empty lists, and those that are filled are tokens.
    is_in_footers = rows_of is None and column not in (config.fill_nulls or {})

    def count(number: int) -> Ints:
        source = sources[index.shards["source"][number].as_py()]
        path = path_of(source.store.path, index.name(number), source.listed.is_file)
        shard = shard_at(index, number, path, source.store, source.prefix + index.name(number))
        first, end = index.group_bounds[number : number + 2].tolist()
        if isinstance(source.format, Parquet) and is_in_footers:
            with reading_footer(shard):
                known = source.format.list_values(shard, column)
            if known is not None:
                return known
        found = np.zeros(end - first, np.int64)
        for group in range(end - first):
            at = RowGroupLocation(
                group, int(index.starts[first + group]), int(index.ends[first + group])
            )
            with decoding(shard, at):
                table = read_table(source.format, shard, at, index.schema, read)
                if rows_of is not None:
                    table = table.take(rows_of.rows(table))
                refuse_other_count(table.num_rows, int(index.rows[first + group]))
                if column in table.column_names:  # a shard without it is refused when it is read
                    lengths = pc.list_value_length(table.column(column))
                    found[group] = pc.sum(lengths).as_py() or 0
        return found

    with ThreadPoolExecutor(SCANS_IN_FLIGHT, thread_name_prefix="elastic-dp-index") as pool:
        counts = np.concatenate(list(pool.map(count, range(index.num_shards))))
    field = pa.field("tokens", pa.int64())
    return replace(index, groups=index.groups.append_column(field, pa.array(counts)))


def _column_of_tokens(schema: pa.Schema, made: Sequence[str]) -> str:
    if twice := [name for name in made if name in schema.names]:
        raise DataError(
            f"DataConfig.pack makes the column {twice[0]!r}, and the data set has one of that "
            "name; leave it out by DataConfig.columns, or out of DataConfig.pack_columns, which "
            "says what is made"
        )
    for field in schema:
        kind = plain(field.type)
        inner = kind.value_type if is_list(kind) else None
        if inner is None or not (
            pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
        ):
            raise DataError(
                f"DataConfig.pack: column {field.name!r} is {type_name(kind)}, and must be a list "
                "with one number for each token; leave it out by DataConfig.columns"
            )
    return TOKENS if TOKENS in schema.names else str(schema.names[0])
