"""Assembles micro-batches by copying their rows out of row groups, in the order in which these
arrive.

Micro-batches that are made together share one array per column; each is a slice of it. A row is
copied once, straight from the decoded column. A row group is released as soon as its rows are
copied, so that one in memory at a time is enough. One call of NumPy copies all wanted rows of a row
group; only strings, other Python objects, and lists of different lengths are copied row by row.

A micro-batch that consists of consecutive rows of one row group needs no copy if it may keep the
row group.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.columns.arrow_arrays import Array, Column, Lists, arrow_ints
from elastic_dp.data.pipeline.array_memory import (
    ALIGNED_TO,
    BlockPool,
    aligned,
    aligned_copy,
    aligned_part,
    is_aligned,
)

Ints = npt.NDArray[np.int64]
Pieces = list[tuple[Ints, Ints]]  # of a row group: rows in it, and their indices in the output
_USED = 2  # a row group is kept if that saves the copy of at least 1 / _USED of its rows
_OBJECT_BYTES, _ARRAY_BYTES = 64, 256  # overhead of a Python object, of an array
_PIECES = 8  # from this mean length of consecutive rows of a row group on, rows are not sorted


class _Slice(NamedTuple):
    """A micro-batch that needs no copy: rows `start` ≤ i < `stop` of the output are consecutive
    rows of a row group, from `row` on."""

    start: int
    stop: int
    row: int


class BatchAssembler:
    """Row `rows[i]` of row group `groups[i]` becomes row i of the output. Micro-batch j has the
    rows bounds[j] ≤ i < bounds[j + 1].

    `groups`, `rows`: int64 [rows]. `bounds` [micro-batches + 1]: empty if no micro-batch may be a
    slice of a row group.
    """

    def __init__(
        self, groups: Ints, rows: Ints, blocks: BlockPool, bounds: Sequence[int] = ()
    ) -> None:
        self._groups, self._count, self._blocks = groups, len(groups), blocks
        self._bounds = bounds
        self._pieces: dict[int, Pieces] = {}
        for group, of_group, places in _pieces(groups, rows):
            self._pieces.setdefault(group, []).append((of_group, places))
        self._out: dict[str, Array | list[Any]] = {}
        self.left_out: list[int] = []  # row groups
        self._kept: dict[int, dict[str, Array]] = {}  # slices of row groups, by their first row
        self._kept_bytes = self._object_bytes = 0

    @property
    def row_groups(self) -> list[int]:
        return list(self._pieces)

    def copy(self, row_group: int, columns: Mapping[str, Column], nbytes: int = 0) -> bool:
        """Copies the wanted rows of a row group. Returns whether it keeps the row group, as it may
        if nothing else needs that: with `nbytes`, if these are not 0."""
        pieces = self._pieces[row_group]
        slices, keeps = list[_Slice](), False
        if nbytes and self._bounds and _can_be_kept(columns):
            slices = self._slices(pieces, _aligned_rows(columns))
            keeps = bool(slices) and _are_enough(slices, columns)
        if keeps:
            pieces = self._keep(columns, slices, pieces)
            self._kept_bytes += nbytes
        for name, column in columns.items():
            for rows, places in pieces:
                self._copy(name, column, rows, places)
        return keeps

    def _slices(self, pieces: Pieces, aligned_rows: int) -> list[_Slice]:
        """The micro-batches that are consecutive rows of the row group. No two share a row, even if
        several epochs of a small data set are made at the same time. The first row of each is a
        multiple of `aligned_rows`."""
        found, end = list[_Slice](), 0
        for rows, places in pieces:
            if not _is_run(places):
                continue
            first, row, are_consecutive = int(places[0]), int(rows[0]), _is_run(rows)
            low = bisect_left(self._bounds, first)
            high = bisect_right(self._bounds, first + len(places))
            for start, stop in itertools.pairwise(self._bounds[low:high]):
                begin, is_run = row + start - first, are_consecutive
                if not is_run:
                    part = rows[start - first : stop - first]
                    begin, is_run = int(part[0]), _is_run(part)
                if is_run and begin >= end and begin % aligned_rows == 0:
                    found.append(_Slice(start, stop, begin))
                    end = begin + stop - start
        return found

    def _keep(self, columns: Mapping[str, Array], slices: list[_Slice], pieces: Pieces) -> Pieces:
        """Keeps slices of `columns`. Returns the pieces that are left to copy."""
        left = np.ones(self._count, dtype=bool)
        for start, stop, row in slices:
            here = slice(row, row + stop - start)
            self._kept[start] = {name: column[here] for name, column in columns.items()}
            left[start:stop] = False
        parts = [(rows[left[places]], places[left[places]]) for rows, places in pieces]
        return [part for part in parts if len(part[0])]

    def _copy(self, name: str, column: Column, rows: Ints, places: Ints) -> None:
        out = self._room(name, column)
        if isinstance(out, np.ndarray):
            _copy_rows(column, rows, out, places)
            return
        items, nbytes = _objects(column, rows)
        self._object_bytes += nbytes
        for place, item in zip(places.tolist(), items, strict=True):
            out[place] = item

    @property
    def nbytes(self) -> int:
        """An estimate of the bytes of arrays, kept row groups, and objects."""
        arrays = (out.nbytes for out in self._out.values() if isinstance(out, np.ndarray))
        return self._kept_bytes + self._object_bytes + sum(arrays)

    def cut(self, start: int, stop: int) -> dict[str, Any] | None:
        """The rows `start` ≤ i < `stop` of each column: an array that nothing else uses, or a list.
        None if all of them were left out."""
        if start in self._kept:
            return self._kept[start]
        if self.left_out:
            kept = np.flatnonzero(~np.isin(self._groups[start:stop], self.left_out))
            if len(kept) == 0:
                return None
            if len(kept) < stop - start:
                return {name: pick(out[start:stop], kept) for name, out in self._out.items()}
        return {
            name: aligned_part(out, start, stop)
            if isinstance(out, np.ndarray)
            else regular(out[start:stop])
            for name, out in self._out.items()
        }

    def _room(self, name: str, column: Column) -> Array | list[Any]:
        """The output of a column: an array, until a row does not fit into it, then a list."""
        out = self._out.get(name)
        fixed = isinstance(column, np.ndarray)
        if out is None:
            shape = (self._count, *column.shape[1:]) if fixed else ()
            out = self._blocks.empty(shape, column.dtype) if fixed else [None] * self._count
        elif isinstance(out, np.ndarray) and not (fixed and out.shape[1:] == column.shape[1:]):
            out = [aligned(row) for row in out]
        self._out[name] = out
        return out


def distinct(numbers: Ints) -> Ints:
    """Like `np.unique`, which hashes: of numbers that are mostly in order, in 1/25 of its time."""
    ordered = np.sort(numbers, kind="stable")
    return np.concatenate([ordered[:1], ordered[1:][ordered[1:] != ordered[:-1]]])


def _pieces(groups: Ints, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """(row group, rows in it, their indices in the output). A row group comes once, or several
    times if its rows are consecutive anyway."""
    places = np.arange(len(groups))
    cuts = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    if len(cuts) * _PIECES > len(groups):
        places = np.argsort(groups, kind="stable")
        groups, rows = groups[places], rows[places]
        cuts = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    for start, stop in itertools.pairwise([0, *cuts.tolist(), len(groups)]):
        yield int(groups[start]), rows[start:stop], places[start:stop]


def _copy_rows(column: Array, rows: Ints, out: Array, places: Ints) -> None:
    """out[places] = column[rows], in one pass over the bytes where NumPy can."""
    if _is_run(places):
        there = out[places[0] : places[0] + len(places)]
        if _is_run(rows):
            there[...] = column[rows[0] : rows[0] + len(rows)]
            return
        np.take(column, rows, axis=0, out=there, mode="clip")  # "raise" would copy through a buffer
        return
    if column.nbytes == 0 or not column.flags.c_contiguous:
        out[places] = column[rows]
        return
    row_type = f"V{column.nbytes // len(column)}"  # rows as single items take half the time
    out.reshape(-1).view(row_type)[places] = column.reshape(-1).view(row_type)[rows]


def _can_be_kept(columns: Mapping[str, Column]) -> bool:
    """Whether all columns are arrays in writable, aligned memory, in the order of their rows."""
    return all(
        isinstance(c, np.ndarray) and c.flags.carray and is_aligned(c) for c in columns.values()
    )


def _aligned_rows(columns: Mapping[str, Array]) -> int:
    """The number n such that every n-th row begins at an aligned address in each column."""
    widths = (c.dtype.itemsize * math.prod(c.shape[1:]) for c in columns.values())
    return math.lcm(*(ALIGNED_TO // math.gcd(ALIGNED_TO, width) for width in widths))


def _are_enough(slices: list[_Slice], columns: Mapping[str, Array]) -> bool:
    used = sum(each.stop - each.start for each in slices)
    return used * _USED >= len(next(iter(columns.values())))


def _is_run(numbers: Ints) -> bool:
    """Whether the numbers are n, n + 1, n + 2, …"""
    if numbers[-1] - numbers[0] != len(numbers) - 1:
        return False
    return len(numbers) < 3 or bool((numbers[1:] - numbers[:-1] == 1).all())


def _objects(column: Column, rows: Ints) -> tuple[list[Any], int]:
    """An object for each row, and an estimate of their bytes."""
    if isinstance(column, pa.Array):
        picked = column.take(arrow_ints(rows))
        return picked.to_pylist(), picked.nbytes + _OBJECT_BYTES * _num_values(picked)
    if isinstance(column, Lists) and isinstance(values := column.values, np.ndarray):
        starts, ends = column.offsets[rows], column.offsets[rows + 1]
        each = zip(starts.tolist(), ends.tolist(), strict=True)
        width = values.dtype.itemsize * math.prod(values.shape[1:])
        nbytes = int((ends - starts).sum()) * width + _ARRAY_BYTES * len(rows)
        return [aligned_copy(values[start:end]) for start, end in each], nbytes
    arrays = [_row(column, row) for row in rows.tolist()]
    return arrays, sum(_nbytes(array) for array in arrays)


def _row(column: Array | Lists, row: int) -> Any:
    """The row as an array; for lists of several lengths, as a list of arrays."""
    if isinstance(column, np.ndarray):  # lists of one length, beside a row group of others
        return aligned_copy(column[row])
    start, end, values = int(column.offsets[row]), int(column.offsets[row + 1]), column.values
    if isinstance(values, np.ndarray):
        return aligned_copy(values[start:end])
    if start == end:
        return _empty(values)
    return _joined([_row(values, item) for item in range(start, end)])


def _empty(lists: Lists) -> Array:
    """A row without lists."""
    depth, values = 2, lists.values
    while isinstance(values, Lists):
        depth, values = depth + 1, values.values
    return np.empty((0,) * depth + values.shape[1:], values.dtype)


def _joined(items: list[Any]) -> Any:
    """Arrays of one shape, stacked to one array; any other list as it is."""
    shapes = {item.shape if isinstance(item, np.ndarray) else None for item in items}
    return aligned(np.stack(items)) if len(shapes) == 1 and None not in shapes else items


def _nbytes(item: Any) -> int:
    if isinstance(item, list):
        return sum(map(_nbytes, item))
    return int(item.nbytes) + _ARRAY_BYTES


def _num_values(array: pa.Array) -> int:
    """The number of Python objects that it becomes, with those inside of others."""
    kind = array.type
    if pa.types.is_struct(kind):
        return len(array) + sum(_num_values(array.field(n)) for n in range(kind.num_fields))
    if pa.types.is_map(kind):
        return 2 * len(array) + _num_values(array.keys) + _num_values(array.items)
    return len(array) + (_num_values(array.flatten()) if kind.num_fields else 0)


def pick(out: Array | list[Any], kept: Ints) -> Any:
    if isinstance(out, np.ndarray):
        return aligned(out[kept])
    return regular([out[place] for place in kept.tolist()])


def regular(out: Array | list[Any]) -> Any:
    """The column of a micro-batch. Lists that all have one length become an array [rows,
    length]."""
    if isinstance(out, np.ndarray):
        return aligned(out)
    return _joined(out) if out and isinstance(out[0], np.ndarray) else out
