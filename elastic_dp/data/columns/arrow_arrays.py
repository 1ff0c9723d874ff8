"""Decodes Arrow columns to NumPy arrays, without Python code per row, and without a copy where
Arrow stores an array.

- integers, floats, bools: arrays [rows]
- timestamps, dates, times of day, durations: int64 [rows] in the stored unit
- fixed-size lists of these (also nested), fixed-shape tensors: arrays [rows, size, …]
- fixed-size binary: uint8 [rows, size]
- lists of these: arrays [rows, length] if all lists have one length; otherwise `Lists`
- structs: their leaves, as columns "a.b"; dictionaries: their values; extension types: their
  storage
- strings, binary, and objects (see schema.py): Arrow arrays, in which a null is None

Nulls of the other types are refused with a DataError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.columns.column_types import cast, storage_of, type_name
from elastic_dp.data.columns.schema import (
    NULLS_WAYS_OUT,
    has_lengths,
    is_object,
    is_text,
    is_time,
    plain_type,
)
from elastic_dp.errors import DataError

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lists:
    """Row i is values[offsets[i]:offsets[i+1]]."""

    values: Array | Lists
    offsets: Ints

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)


Column = Any  # Array, Lists, or a pa.Array of text or objects


def decode_table(
    table: pa.Table, leaves: Iterable[tuple[str, pa.DataType]], where: str
) -> dict[str, Column]:
    """The columns `leaves` as arrays [rows, …], see the top of this file.

    `leaves`: (name, plain type; see column_types.py). A struct is given as its leaves. A column
    that `table` lacks is null in every row. `where`: what `table` is, for error messages. Raises
    DataError for a column that has no tensor.
    """
    rows = table.num_rows
    while any(pa.types.is_struct(storage_of(kind)) for kind in table.schema.types):
        for number, field in enumerate(table.schema):
            if pa.types.is_struct(storage := storage_of(field.type)) and storage is not field.type:
                table = table.set_column(number, field.name, table.column(number).cast(storage))
        table = table.flatten()
    there = {name: number for number, name in enumerate(table.column_names)}
    decoded = {}
    for name, kind in leaves:
        column = pa.chunked_array([pa.nulls(rows, kind)])
        if name in there:
            column = cast(table.column(there[name]), kind)
        decoded[name] = decode_column(column, f"column {name!r} of {where}")
    return decoded


def decode_column(column: pa.ChunkedArray, where: str) -> Column:
    """Arrays of numbers are views of Arrow's memory, and writable if that memory is writable."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if is_text(array.type):
        return array
    if is_object(array.type):
        plain = plain_type(array.type)
        return array if plain.equals(array.type) else array.cast(plain)
    return _values(array, where)


def _values(array: pa.Array, where: str) -> Array | Lists:
    kind = array.type
    if pa.types.is_fixed_size_list(kind) and has_lengths(kind):
        _refuse_nulls(array, where)
        array = array.cast(pa.list_(kind.value_field))
    return _lists(array, where) if _is_list(array.type) else _numbers(array, where)


def _lists(array: pa.Array, where: str) -> Array | Lists:
    """An array [rows, length, …] if all rows have one length, otherwise `Lists`."""
    _refuse_nulls(array, where)
    offsets = view(array.offsets)
    first, end = int(offsets[0]), int(offsets[-1])
    # What `flatten` gives where no list is null, in half of its time
    values = _values(array.values.slice(first, end - first), where)
    lengths = offsets[1:] - offsets[:-1]
    same = len(lengths) > 0 and bool((lengths == lengths[0]).all())
    if same and not isinstance(values, Lists):
        return values.reshape(len(lengths), int(lengths[0]), *values.shape[1:])
    return Lists(values, (offsets - first).astype(np.int64))


def _numbers(array: pa.Array, where: str) -> Array:
    """[rows, …] of a column of numbers or of fixed-size lists of them."""
    _refuse_nulls(array, where)
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: Array = array.to_numpy_ndarray()
        return tensors
    if isinstance(kind, pa.BaseExtensionType):
        return _numbers(array.storage, where)
    if pa.types.is_fixed_size_list(kind):
        inner = _numbers(array.flatten(), where)
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if is_time(kind):
        return _numbers(array.view(plain_type(kind)), where).astype(np.int64, copy=False)
    if pa.types.is_fixed_size_binary(kind):
        content = np.frombuffer(array.buffers()[1], dtype=np.uint8)
        rows = content[array.offset * kind.byte_width :][: len(array) * kind.byte_width]
        return rows.reshape(len(array), kind.byte_width)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return view(array)
    if pa.types.is_boolean(kind):
        return view(array.cast(pa.uint8())).view(np.bool_)
    raise DataError(
        f"{where} is {type_name(kind)}, which has no tensor; use numbers, dates, text, or "
        "lists, structs and maps of "
        "them, or leave it out by DataConfig.columns"
    )


def view(array: pa.Array) -> Array:
    """Like `to_numpy`, but writable where Arrow's memory is, and without importing pandas, which
    takes a second."""
    dtype, (_, values) = np.dtype(array.type.to_pandas_dtype()), array.buffers()
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(values, dtype, len(array), array.offset * dtype.itemsize)


def arrow_ints(numbers: Ints) -> pa.Array:
    """Like `pa.array`, without importing pandas."""
    content = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, content])


def _refuse_nulls(array: pa.Array, where: str) -> None:
    if array.null_count:
        nulls = f"null{'s' * (array.null_count != 1)}"
        raise DataError(f"{where} holds {array.null_count} {nulls}; {NULLS_WAYS_OUT}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
