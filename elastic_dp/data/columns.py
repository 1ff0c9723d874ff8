"""Arrow columns to arrays, and rows out of them, without Python per row where a row is numbers.

- whole numbers, floats, bools: arrays [rows]
- fixed-size lists of those (nested too): arrays [rows, size, …]
- lists: where all of a micro-batch have one length, an array [rows, length]; else a list of arrays
- strings, binary: lists of str or bytes, where a null is None; nulls anywhere else are a DataError
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.errors import DataError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Lists:
    """Row i is values[offsets[i]:offsets[i+1]]."""

    values: Array
    offsets: npt.NDArray[np.int64]


Column = Any  # Array, Lists, or a pa.Array of text


def decode_column(column: pa.ChunkedArray, where: str) -> Column:
    """`where` names the column in errors. Numbers stay views of Arrow's memory: not to be written to."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if _is_text(array.type):
        return array
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        _refuse_nulls(array, where)
        offsets = array.offsets.to_numpy().astype(np.int64)
        return Lists(_numbers(array.flatten(), where), offsets - offsets[0])
    return _numbers(array, where)


def gather(
    parts: list[tuple[Column, npt.NDArray[np.int64], npt.NDArray[np.int64]]], count: int
) -> Array | list[Any]:
    """Each part is (column, rows in it, their places in the result); together the places are 0…count-1."""
    first = parts[0][0]
    if isinstance(first, np.ndarray):
        out = np.empty((count, *first.shape[1:]), dtype=first.dtype)
        for column, rows, places in parts:
            out[places] = column[rows]
        return out
    objects: list[Any] = [None] * count
    for column, rows, places in parts:
        for place, item in zip(places.tolist(), _objects(column, rows), strict=True):
            objects[place] = item
    if isinstance(first, Lists) and len({len(item) for item in objects}) == 1:
        return np.stack(objects)
    return objects


def _objects(column: Column, rows: npt.NDArray[np.int64]) -> list[Any]:
    if isinstance(column, Lists):
        starts, ends = column.offsets[rows].tolist(), column.offsets[rows + 1].tolist()
        return [column.values[start:end].copy() for start, end in zip(starts, ends, strict=True)]
    picked: list[Any] = column.take(pa.array(rows)).to_pylist()
    return picked


def _numbers(array: pa.Array, where: str) -> Array:
    """[rows, …] of a column of numbers or of fixed-size lists of them."""
    _refuse_nulls(array, where)
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        inner = _numbers(array.flatten(), where)
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers: Array = array.to_numpy(zero_copy_only=False)
        return numbers
    raise DataError(
        f"{where} is {kind}, which has no tensor; use numbers, lists of numbers, strings or binary, or "
        "leave it out by DataConfig.columns"
    )


def _refuse_nulls(array: pa.Array, where: str) -> None:
    if array.null_count:
        raise DataError(
            f"{where} holds {array.null_count} null(s), which a tensor cannot; fill them in the shards, or "
            "leave the column out by DataConfig.columns"
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
