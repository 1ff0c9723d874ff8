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
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.discovery.sources import SCANS_IN_FLIGHT, OpenedSource
from elastic_dp.data.formats.decode_errors import decoding, reading_footer, refuse_other_count
from elastic_dp.data.formats.file_format import Ints, RowGroupLocation, read_table
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.errors import DataError

TOKENS = "input_ids"


def with_tokens(
    index: Index, config: DataConfig, sources: list[OpenedSource], every_row: Ints
) -> Index:
    """The index with the number of tokens of each row group, without the rows that the filter
    leaves out. Row groups of which it leaves out all rows are not read, and those of which it keeps
    all rows are read only where footers do not count their tokens. `every_row` int64 [row groups]:
    the number of rows without a filter. Raises DataError if a column has no value for each token,
    and BadShard if a row group cannot be decoded."""
    column = _column_of_tokens(index.delivered, config.pack_columns)
    rows_of = None if config.filter is None else RowFilter(config.filter, index.schema)
    read = list(dict.fromkeys([column, *(() if rows_of is None else rows_of.leaves)]))
    # A footer counts null tokens as it counts empty lists, and those that are filled are tokens.
    is_in_footers = column not in (config.fill_nulls or {})

    def count(number: int) -> Ints:
        source = sources[index.shards["source"][number].as_py()]
        shard = source.shard(index, number)
        first, end = index.group_bounds[number : number + 2].tolist()
        kept = index.rows[first:end]
        whole = kept == every_row[first:end]
        found, todo = np.zeros(end - first, np.int64), kept > 0
        if isinstance(source.format, Parquet) and is_in_footers and (whole & todo).any():
            with reading_footer(shard):
                known = source.format.list_values(shard, column)
            if known is not None:
                found[whole], todo = known[whole], todo & ~whole
        for group in np.flatnonzero(todo).tolist():
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


def is_packable(kind: pa.DataType) -> bool:
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
        if not is_packable(field.type):
            raise DataError(
                f"DataConfig.pack: column {field.name!r} is {type_name(plain(field.type))}, and "
                "must be a list with one number for each token; leave it out by DataConfig.columns"
            )
    if not schema.names:
        raise DataError(
            "DataConfig.pack: the filter uses every column, and none of them is a list with one "
            "number for each token"
        )
    return TOKENS if TOKENS in schema.names else str(schema.names[0])
