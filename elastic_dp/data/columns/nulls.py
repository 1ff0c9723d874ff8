"""Nulls, which a tensor cannot hold: counted when a data set is opened, and refused by column, or
filled if the job says with what.

The counts come from the shards: Parquet's statistics, Arrow's messages, the scan of other formats.
Parquet without statistics has no counts, and neither have its lists, since statistics count empty
lists as nulls. There, nulls are found when a row group is read, and refused with the same words.
Text and objects (see schema.py) may be null: a null is None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from elastic_dp.data.columns.column_types import type_name
from elastic_dp.data.columns.schema import (
    has_lengths,
    is_object,
    is_text,
    is_time,
    leaves,
    plain_type,
)
from elastic_dp.errors import DataError

WAYS_OUT = (
    "give a value for them by DataConfig.fill_nulls, fill them in the shards, or leave the "
    "column out by "
    "DataConfig.columns"
)
NULL_LISTS_WAYS_OUT = (
    "write an empty list for each of them in the shards, or leave the column out by "
    "DataConfig.columns"
)
FILTER_WAYS_OUT = (
    "name the column in DataConfig.fill_nulls if DataConfig.filter may see nulls (a row for which "
    "it is null is left out), or fill them in the shards"
)


class Nulls:
    """Counts the nulls of a data set, shard by shard."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}  # by column: how many, and the first shard
        self._lists: dict[str, tuple[int, str]] = {}
        self._lacking: dict[str, str] = {}  # by column: the first shard that has none of its values

    def add(self, shard: str, nulls: Mapping[str, int], null_lists: Mapping[str, int]) -> None:
        for found, counts in (self._found, nulls), (self._lists, null_lists):
            for name, count in counts.items():
                if count:
                    before, first = found.get(name, (0, shard))
                    found[name] = before + count, first

    def add_missing(self, absent: Iterable[tuple[pa.Field, str, int]]) -> None:
        """`absent`: (column, first shard, rows) of columns that some shards lack: each row there is
        a null."""
        for leaf, shard, rows in absent:
            self._lacking.setdefault(leaf.name, shard)
            counts = {leaf.name: rows}
            self.add(shard, *(({}, counts) if has_lengths(leaf.type) else (counts, {})))

    def refused(self, leaf: pa.Field, *, filled: bool = False, for_filter: bool = False) -> str:
        """Why a column is refused; "" if it is not. `filled`: a value replaces its nulls, which is
        possible in all but lists of variable length. `for_filter`: it is read for the filter
        alone."""
        if may_be_null(leaf.type) or pa.types.is_null(leaf.type) or (for_filter and filled):
            return ""
        column = f"column {leaf.name!r} ({type_name(leaf.type)}) holds"
        lacking = self._lacking.get(leaf.name)
        why = f" ({lacking} has none of its values)" if lacking else ""
        if leaf.name in self._lists:
            count, shard = self._lists[leaf.name]
            lists = f"null list{'s' * (count != 1)}"
            ways = FILTER_WAYS_OUT if for_filter else NULL_LISTS_WAYS_OUT
            return f"{column} {count} {lists}, the first in {shard}{why}; {ways}"
        if leaf.name in self._found and not filled:
            count, shard = self._found[leaf.name]
            ways = FILTER_WAYS_OUT if for_filter else WAYS_OUT
            which = "" if for_filter else ", which a tensor cannot"
            nulls = f"null{'s' * (count != 1)}"
            return f"{column} {count} {nulls}, the first in {shard}{why}{which}; {ways}"
        return ""


def check_nulls(
    nulls: Nulls,
    fills: Mapping[str, Any] | None,
    columns: Iterable[pa.Field],
    parameter: str = "DataConfig.fill_nulls",
    for_filter: Collection[str] = (),
) -> dict[str, Any]:
    """The values that replace nulls, in the types of their columns.

    Raises DataError if a value does not fit its column, or if a column has nulls and no value for
    them. `parameter`: the name of `fills` in messages. `for_filter`: the names of those that are
    read for the filter alone.
    """
    kinds = {leaf.name: leaf.type for leaf in columns}
    if missing := [name for name in fills or () if name not in kinds]:
        raise DataError(
            f"{parameter}: no column {', '.join(map(repr, missing))} is read, but "
            f"{', '.join(map(repr, kinds))}"
        )
    values = {}
    for name, value in (fills or {}).items():
        if (fitting := _fitting(value, kinds[name])) is None:
            nones = ", whose nulls are None: replace them in transform or collate_fn"
            why = nones if is_object(kinds[name]) else ""
            raise DataError(
                f"{parameter}: {value!r} does not fit column {name!r}, which is "
                f"{type_name(kinds[name])}{why}"
            )
        values[name] = fitting
    for leaf in columns:
        alone = leaf.name in for_filter
        if message := nulls.refused(leaf, filled=leaf.name in values, for_filter=alone):
            raise DataError(message)
    return values


def refuse_nulls_for_filter(table: pa.Table, leaf_names: Collection[str], where: str) -> None:
    """Raises DataError if a column that is read for the filter alone holds nulls. `where`: what
    `table` is."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    for leaf, column in zip(table.schema, table.columns, strict=True):
        if leaf.name in leaf_names and not may_be_null(leaf.type) and (n := count_nulls(column)):
            found = f"column {leaf.name!r} of {where} holds {n} null{'s' * (n != 1)}"
            raise DataError(f"{found}; {FILTER_WAYS_OUT}")


def may_be_null(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(plain) or is_object(plain)


def count_nulls(array: Any) -> int:
    """The number of nulls, with those among the items of lists."""
    kind, count = array.type, int(array.null_count)
    if not (_is_list(kind) or pa.types.is_fixed_size_list(kind)):
        return count
    return count + sum(count_nulls(chunk.flatten()) for chunk in _chunks(array))


def count_null_lists(array: Any) -> int:
    """The number of null lists, for lists of variable length, which no value can replace."""
    if not has_lengths(array.type):
        return 0
    return int(array.null_count) + sum(count_null_lists(c.flatten()) for c in _chunks(array))


def _chunks(array: Any) -> list[pa.Array]:
    return array.chunks if isinstance(array, pa.ChunkedArray) else [array]


def fill(array: pa.Array, value: Any) -> pa.Array:
    """Replaces each null, and each null item of lists, by `value`. A null list of variable length
    stays null."""
    return array if count_nulls(array) == 0 else _filled(array, value, None)


def fill_column(array: pa.Array, name: str, values: Mapping[str, Any]) -> pa.Array:
    """Replaces the nulls of the column `name` by its value in `values`, if it has one; of a struct,
    those of each field "name.field" that has one. A null struct then becomes one of such fields."""
    if not pa.types.is_struct(array.type):
        return fill(array, values[name]) if name in values else array
    if not any(leaf.name in values for leaf in leaves(array.type, prefix=f"{name}.")):
        return array
    fields = list(array.type)
    items = zip(fields, array.flatten(), strict=True)  # where a struct is null, its fields are
    filled = [fill_column(item, f"{name}.{field.name}", values) for field, item in items]
    return pa.StructArray.from_arrays(filled, fields=fields)


def _filled(array: pa.Array, value: Any, rows: npt.NDArray[np.bool_] | None) -> pa.Array:
    """`rows`: a mask of rows inside of a null list; their values do not count."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(_filled(array.storage, value, rows))
    if _is_list(kind):
        if array.null_count:
            return array
        offsets = array.offsets.to_numpy()
        items = _filled(array.flatten(), value, None)
        return type(array).from_arrays(pa.array(offsets - offsets[0]), items, type=kind)
    given = np.asarray(array.is_valid())
    if rows is not None:
        given = given & ~rows
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        items = _filled(items, value, np.repeat(~given, size))
        return pa.FixedSizeListArray.from_arrays(items, type=kind)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        large = pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
        return _filled(array.cast(large), value, rows).cast(kind)
    return pc.if_else(pa.array(given), array, pa.scalar(value, kind))


def _fitting(value: Any, kind: pa.DataType) -> Any:
    """`value` in the type of the column; None if it does not fit. A float is rounded to the
    column's precision; any other value must be held exactly."""
    inner = _item_type(kind)
    if is_object(kind) or isinstance(value, bool) != pa.types.is_boolean(inner):
        return None
    try:
        here = pa.scalar(value, inner).as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    if pa.types.is_floating(inner) and isinstance(value, float):
        return here if math.isinf(here) == math.isinf(value) else None
    return here if here == value else None


def _item_type(kind: pa.DataType) -> pa.DataType:
    """The type of the innermost values."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif _is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return plain_type(kind) if is_time(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
