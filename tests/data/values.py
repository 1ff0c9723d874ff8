"""Rows as plain values of Python, from shards as they are read in place, and from tables of
Arrow."""

import math
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import RowGroups

Columns = dict[str, list[Any]]


def in_place(config):
    """All rows, in file order."""
    index = read_index(config)
    groups = RowGroups(config, index)
    found = {name: [] for name, _ in index.columns}
    try:
        for number in range(len(index.rows)):
            for name, column in groups.read(number)[0].items():
                found[name] += plain(column)
    finally:
        groups.close()
    return found


def plain(column):
    """Return the plain values of one decoded column."""
    if isinstance(column, pa.Array):
        return column.to_pylist()
    if isinstance(column, np.ndarray):
        return column.tolist()
    values = plain(column.values)
    bounds = zip(column.offsets[:-1].tolist(), column.offsets[1:].tolist(), strict=True)
    return [values[start:end] for start, end in bounds]


def columns_of(table):
    """Structs as their leaves; times as the whole numbers that are stored; extension types as their
    storage."""
    table.validate(full=True)
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.cast(column.type.storage_type)
        if pa.types.is_struct(column.type) and not column.null_count:
            inner = pa.Table.from_struct_array(column)
            found |= {f"{name}.{leaf}": values for leaf, values in columns_of(inner).items()}
            continue
        if pa.types.is_date32(column.type) or pa.types.is_time32(column.type):
            column = column.cast(pa.int32())
        elif pa.types.is_temporal(column.type):
            column = column.cast(pa.int64())
        found[name] = column.to_pylist()
    return found


def same(one, other):
    """`one` as training gives it, `other` as a reader of tables does: a null number is NaN, bytes
    of one length numbers."""
    if isinstance(other, bytes) and isinstance(one, list):
        return list(other) == one
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):  # what a row lacks is null
        return all(same(one.get(name), other.get(name)) for name in one.keys() | other.keys())
    if isinstance(one, float):
        if other is None or (isinstance(other, float) and math.isnan(other)):
            return math.isnan(one)
        if isinstance(other, int) and not isinstance(other, bool):
            return one == float(other)
    if isinstance(other, bool) != isinstance(one, bool):
        return False
    return bool(one == other)
