"""Numbers in CSV and JSON Lines that the type of their column would change.

These formats declare no types. A column is float64 if one of its values has a fraction, or is a
whole number that does not fit into int64. float64 holds every whole number up to 2**53, and only
some beyond. Numbers that float64 would round are found while a file is scanned, by leaf column
("a.b", also within lists). They are refused once the type of the column in all shards is known: in
a column of int64 or text they keep their value.

Leading zeros ("01234") are lost in a column of numbers. Such a column is named in a warning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from elastic_dp.data.columns.column_types import is_list, type_name
from elastic_dp.errors import DataError

Rounded = dict[str, str]  # by leaf: the first number that float64 would round, and its row
LeadingZeros = dict[str, str]  # by column of CSV: the first text such as 01234, and its row

_EXACT = 1 << 53
_SPACE = re.compile(r"\s*")
_Row = Callable[[int], int]  # from an index into the flat values to the row of the table


def refuse_rounded(rounded: Mapping[str, str], leaves: Iterable[pa.Field]) -> None:
    """Raises DataError if one of the `leaves` is float64 and has a number in `rounded`."""
    for leaf in leaves:
        for name, kind in _leaves(leaf.name, leaf.type):
            if name in rounded and pa.types.is_floating(kind):
                raise DataError(
                    f"column {name!r} is {type_name(kind)}, which does not hold "
                    f"{rounded[name]}: whole numbers must "
                    "fit into int64, and beside numbers with a fraction lie within 2**53. "
                    "Write them as text (in JSON "
                    "in quotes), or the file as Parquet, which has uint64 and text, or leave "
                    "the column out by "
                    "naming the others (columns)"
                )


def leading_zero_warnings(found: Mapping[str, str], leaves: Iterable[pa.Field]) -> Iterator[str]:
    """A message for each column that is read as numbers although some were written with leading
    zeros, as identifiers and postal codes are."""
    for leaf in leaves:
        if leaf.name in found and (
            pa.types.is_integer(leaf.type) or pa.types.is_floating(leaf.type)
        ):
            yield (
                f"column {leaf.name!r} is read as {type_name(leaf.type)}, so the leading zeros of "
                f"{found[leaf.name]} are lost. If it holds identifiers, write the file as Parquet "
                f"with a column of text: pandas.read_csv(…, dtype={{{leaf.name!r}: str}})"
                ".to_parquet(…)"
            )


def add_whole_numbers(table: pa.Table, before: int, name: str, rounded: Rounded) -> None:
    """Adds numbers of int64 columns that float64 would round to `rounded`.

    `before`: the number of rows of the file `name` before this table.
    """
    for leaf, values, row in _numbers(table, pa.types.is_integer):
        if leaf in rounded:
            continue
        if _largest(values) <= _EXACT:
            continue
        whole = values.fill_null(0).to_numpy()
        with np.errstate(invalid="ignore"):  # 2**63 - 1 overflows: it is 2**63 as a float
            changed = np.flatnonzero(whole.astype(np.float64).astype(np.int64) != whole)
        if len(changed):
            at = int(changed[0])
            rounded[leaf] = f"{whole[at]} (row {before + row(at) + 1} of {name}) exactly"


def large_floats(table: pa.Table) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """(leaf, rows) of float64 columns with values of at least 2**53, which may have been
    rounded."""
    for leaf, values, row in _numbers(table, pa.types.is_floating):
        if _largest(values) < _EXACT:
            continue  # `to_numpy` imports pandas, where that is installed, in a fifth of a second
        large = np.flatnonzero(np.abs(values.to_numpy(zero_copy_only=False)) >= _EXACT)
        if len(large):
            yield leaf, np.array([row(int(at)) for at in large], dtype=np.int64)


def add_written(leaf: str, text: str, row: int, name: str, rounded: Rounded) -> None:
    """Adds `text`, a number of a float64 column as the file `name` has it, to `rounded` if float64
    rounds it. Rows are counted from 1."""
    if leaf not in rounded and _is_rounded(text):
        shown = text if len(text) <= 40 else f"{text[:37]}…"
        rounded[leaf] = f"{shown.strip()} (row {row} of {name}) exactly"


def add_json(content: bytes, table: pa.Table, before: int, name: str, rounded: Rounded) -> None:
    """Adds the numbers of `content` that float64 columns of `table`, which was parsed from it,
    would round."""
    leaves = {leaf: rows for leaf, rows in large_floats(table) if leaf not in rounded}
    if not leaves:
        return
    decoder = json.JSONDecoder(parse_int=_Written, parse_float=_Written)
    try:
        text, at = content.decode("utf-8-sig"), 0
        for number in range(before + 1, before + table.num_rows + 1):
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            value, at = decoder.raw_decode(text, at)
            for field in table.schema:
                for leaf, written in _written(field.name, field.type, value.get(field.name)):
                    add_written(leaf, written, number, name, rounded)
    except (ValueError, RecursionError):  # pyarrow can parse it, and Python cannot
        for leaf, rows in leaves.items():
            rounded.setdefault(leaf, f"a number (row {before + rows[0] + 1} of {name}) for sure")


def _largest(values: pa.Array) -> Any:
    """The largest absolute value; 0 if there is none. NaN does not count."""
    bounds = pc.min_max(values)
    return max(-(bounds["min"].as_py() or 0), bounds["max"].as_py() or 0)


class _Written(str):
    """The text of a JSON number."""


def _written(leaf: str, kind: pa.DataType, value: Any) -> Iterator[tuple[str, str]]:
    if pa.types.is_floating(kind) and isinstance(value, _Written):
        yield leaf, value
    elif is_list(kind) and isinstance(value, list):
        for item in value:
            yield from _written(leaf, kind.value_type, item)
    elif pa.types.is_struct(kind) and isinstance(value, dict):
        for field in kind:
            yield from _written(f"{leaf}.{field.name}", field.type, value.get(field.name))


def _is_rounded(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    if math.isinf(number):
        return any(map(str.isdigit, text))
    written = text.strip().lstrip("+-0")  # int() refuses more than some thousands of digits
    return abs(number) >= _EXACT and written.isdecimal() and int(abs(number)) != int(written)


def _leaves(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """(name, type) of the leaves, as schema.leaves, but also within lists."""
    if is_list(kind):
        yield from _leaves(name, kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{name}.{field.name}", field.type)
    else:
        yield name, kind


def _numbers(
    table: pa.Table, wanted: Callable[[pa.DataType], bool]
) -> Iterator[tuple[str, pa.Array, _Row]]:
    for field, column in zip(table.schema, table.columns, strict=True):
        if any(wanted(kind) for _, kind in _leaves("", field.type)):
            array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            if isinstance(array, pa.ChunkedArray):  # of several chunks that are too large for one
                array = pa.concat_arrays(array.chunks) if array.num_chunks else array
            yield from _numbers_in(field.name, array, wanted, lambda at: at)


def _numbers_in(
    leaf: str, array: pa.Array, wanted: Callable[[pa.DataType], bool], row: _Row
) -> Iterator[tuple[str, pa.Array, _Row]]:
    kind = array.type
    if is_list(kind):
        ends = np.cumsum(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))

        def row_of_item(at: int) -> int:
            return row(int(np.searchsorted(ends, at, side="right")))

        yield from _numbers_in(leaf, array.flatten(), wanted, row_of_item)
    elif pa.types.is_struct(kind):
        for field, values in zip(kind, array.flatten(), strict=True):
            yield from _numbers_in(f"{leaf}.{field.name}", values, wanted, row)
    elif wanted(kind):
        yield leaf, array, row
