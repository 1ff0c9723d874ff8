"""Items of an iterable as record batches of one schema.

The first rows decide the columns and their types. A later row must fit them exactly: an integer
becomes a float where that loses nothing, and nothing else is converted. What does not fit is
refused with its row and its key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from elastic_dp.dataprep.readers import merged
from elastic_dp.errors import DataError

ROWS, BYTES = 1024, 8 << 20  # of a batch; the first batch decides the types
_NUMBER_BYTES = 8
_KINDS = "biuf"  # of NumPy: bool, integers, floats
_ALLOWED = "tensors, NumPy arrays, numbers, texts, bytes, None, and lists of these"

Row = dict[str, Any]


class ItemColumns:
    """`batches` gives record batches. `schema`: None until the first one."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None
        self._names: list[str] = []
        self._done = 0  # rows in earlier batches

    def batches(self, items: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Raises DataError for an item that cannot be a row."""
        rows, nbytes = list[Row](), 0
        for item in items:
            rows.append(self._row(item, self._done + len(rows)))
            nbytes += sum(map(_nbytes, rows[-1].values()))
            if len(rows) >= ROWS or nbytes >= BYTES:
                yield self._batch(rows)
                rows, nbytes = [], 0
        if rows:
            yield self._batch(rows)

    def _row(self, item: Any, number: int) -> Row:
        if not isinstance(item, Mapping):
            raise DataError(
                f"IterableData.dataset: row {number} is a {type(item).__name__}, must be a dict of "
                f"{_ALLOWED}"
            )
        if not self._names:
            if not item or not all(isinstance(key, str) for key in item):
                raise DataError(
                    f"IterableData.dataset: row {number} has the keys {list(item)!r:.200}, must "
                    "have one or more, all texts"
                )
            self._names = list(item)
        if item.keys() != {*self._names}:
            odd = min(map(repr, item.keys() ^ {*self._names}))
            has = "lacks" if odd in map(repr, self._names) else "has"
            raise DataError(
                f"IterableData.dataset: row {number} {has} the key {odd}, unlike the first row; "
                "give all rows the same keys, with None where there is no value"
            )
        return {name: _plain(item[name], name, number) for name in self._names}

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        arrays = []
        for at, name in enumerate(self._names):
            values = [row[name] for row in rows]
            known = pa.null() if self.schema is None else self.schema.field(at).type
            kind = self._type(name, values, known)
            try:
                arrays.append(_array(values, kind))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                last = self._done + len(rows) - 1
                raise DataError(
                    f"IterableData.dataset: {name!r} of rows {self._done} to {last} cannot be "
                    f"stored as {kind}: {error}"
                ) from error
        if self.schema is None:
            each = zip(self._names, arrays, strict=True)
            self.schema = pa.schema([pa.field(name, array.type) for name, array in each])
        self._done += len(rows)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _type(self, name: str, values: list[Any], known: pa.DataType) -> pa.DataType:
        """The type of a column. `known`: the type of earlier rows; null: there are none."""
        kind = known
        for at, value in enumerate(values):
            here = _type_of(value, name, self._done + at)
            both = _merged(kind, here)
            if both is None or (self.schema is not None and both != known):
                raise DataError(
                    f"IterableData.dataset: {name!r} is {here} in row {self._done + at}, and "
                    f"{kind} in earlier rows; give all rows one type"
                )
            kind = both
        if _lacks_values(kind):
            raise DataError(
                f"IterableData.dataset: {name!r} has no value in the first {len(values)} rows, so "
                "its type is not known; give a value in one of them, or leave the key out"
            )
        return kind


def _plain(value: Any, name: str, number: int) -> Any:
    """A tensor as an array, and an array or scalar of NumPy as an array of its own memory, since
    an iterable may use its buffers again."""
    if isinstance(value, list):
        return [_plain(each, name, number) for each in value] if _nests(value) else list(value)
    if isinstance(value, torch.Tensor):
        try:
            return value.detach().cpu().numpy().copy()
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"IterableData.dataset: {name!r} of row {number} is a tensor of {value.dtype}, "
                f"which no array holds ({error}); convert it, for example to float32"
            ) from error
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"IterableData.dataset: {name!r} of row {number} is a masked array, whose mask would "
            "be lost; fill it, as by value.filled(0)"
        )
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
        return np.array(value)
    return value


def _nests(value: list[Any]) -> bool:
    return not {*map(type, value)} <= {bool, int, float, str, bytes, type(None)}


def _type_of(value: Any, name: str, number: int) -> pa.DataType:
    if value is None:
        return pa.null()
    for python, kind in _PLAIN_TYPES:
        if isinstance(value, python):
            return kind
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        found = pa.from_numpy_dtype(value.dtype.newbyteorder("="))
        return reduce(lambda inner, _: pa.list_(inner), range(value.ndim), found)
    if isinstance(value, list):
        if _nests(value):
            each = [_type_of(item, name, number) for item in value]
        else:  # one of each type is enough
            each = [
                _type_of(item, name, number)
                for item in {type(item): item for item in value}.values()
            ]
        items = pa.null()
        for kind in each:
            both = _merged(items, kind)
            if both is None:
                raise DataError(
                    f"IterableData.dataset: the list {name!r} of row {number} has {items} and "
                    f"{kind}; give all its items one type"
                )
            items = both
        return pa.list_(items)
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise DataError(
        f"IterableData.dataset: {name!r} of row {number} is {what}, must be one of {_ALLOWED}; "
        "give an image as the bytes of its file (with `decode`), and each entry of a dict a key of "
        "its own"
    )


# A bool is an int, too.
_PLAIN_TYPES: tuple[tuple[type, pa.DataType], ...] = (
    (bool, pa.bool_()),
    (int, pa.int64()),
    (float, pa.float64()),
    (str, pa.string()),
    (bytes, pa.binary()),
)


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds both; None if there is none."""
    try:
        return merged(one, other, "")
    except DataError:
        return None


def _lacks_values(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_null(kind))


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The column [rows]. Arrays are not taken apart into Python objects."""
    if not all(isinstance(value, np.ndarray) and value.ndim for value in values):
        return pa.array([_python(value) for value in values], kind)
    inner = kind
    while pa.types.is_list(inner):
        inner = inner.value_type
    found = pa.concat_arrays([_flat(same, inner) for _, same in groupby(values, _dtype_of)])
    for axis in reversed(range(values[0].ndim)):
        lengths = [
            np.full(math.prod(value.shape[:axis]), value.shape[axis], np.int64) for value in values
        ]
        found = pa.ListArray.from_arrays(_offsets(lengths), found)
    return found


def _dtype_of(value: npt.NDArray[Any]) -> np.dtype[Any]:
    return value.dtype


def _flat(values: Iterable[npt.NDArray[Any]], kind: pa.DataType) -> pa.Array:
    """The items of arrays of one type. NumPy would round integers beside floats; Arrow raises."""
    flat = np.concatenate([value.ravel() for value in values])
    found = pa.array(flat.astype(flat.dtype.newbyteorder("=")))
    return found if found.type == kind else found.cast(kind)


def _offsets(lengths: list[npt.NDArray[np.int64]]) -> pa.Array:
    """Raises ArrowInvalid beyond 2^31 values."""
    ends = np.cumsum(np.concatenate(lengths))
    return pa.array(np.concatenate([[0], ends])).cast(pa.int32())


def _python(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_python(each) for each in value] if isinstance(value, list) else value


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_nbytes, value)) if _nests(value) else _NUMBER_BYTES * len(value)
    return _NUMBER_BYTES
