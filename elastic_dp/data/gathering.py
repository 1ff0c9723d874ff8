"""Rows of many micro-batches, copied out of row groups as these come.

All micro-batches that are made together share one array for each column; each is a piece of it. A row is copied
once, straight from the decoded column, and a row group is let go of as soon as its rows are copied: no two need to
be here at one time. A call of NumPy copies all that is wanted of a row group, so nothing is done row by row but
for strings and for lists of several lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.blocks import Blocks
from elastic_dp.data.columns import Array, Column, Lists

Ints = npt.NDArray[np.int64]
_PIECES = 8  # rows in a row of one row group, on average, from which on they are not sorted


class Gathering:
    """Row `rows[i]` of row group `groups[i]` becomes row i."""

    def __init__(self, groups: Ints, rows: Ints, blocks: Blocks) -> None:
        self._groups, self._count, self._blocks = groups, len(groups), blocks
        self._pieces: dict[int, list[tuple[Ints, Ints]]] = {}  # row group: rows, their places
        for group, of_group, places in _pieces(groups, rows):
            self._pieces.setdefault(group, []).append((of_group, places))
        self._out: dict[str, Array | list[Any]] = {}
        self._left_out: list[int] = []

    @property
    def row_groups(self) -> list[int]:
        return list(self._pieces)

    def copy(self, row_group: int, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            out = self._room(name, column)
            for rows, places in self._pieces[row_group]:
                if isinstance(out, np.ndarray):
                    _copy_rows(column, rows, out, places)
                else:
                    for place, item in zip(places.tolist(), _objects(column, rows), strict=True):
                        out[place] = item

    def leave_out(self, row_group: int) -> None:
        self._left_out.append(row_group)

    @property
    def nbytes(self) -> int:
        """Of arrays."""
        return sum(out.nbytes for out in self._out.values() if isinstance(out, np.ndarray))

    def cut(self, start: int, stop: int) -> dict[str, Any] | None:
        """Rows start…stop - 1: arrays that nobody else uses, or lists. None: all of them were left out."""
        if self._left_out:
            kept = np.flatnonzero(~np.isin(self._groups[start:stop], self._left_out))
            if len(kept) == 0:
                return None
            if len(kept) < stop - start:
                return {name: _pick(out[start:stop], kept) for name, out in self._out.items()}
        return {name: _regular(out[start:stop]) for name, out in self._out.items()}

    def _room(self, name: str, column: Column) -> Array | list[Any]:
        """Where rows of this column go. From the first that has no place in an array on, a list of objects."""
        out = self._out.get(name)
        fixed = isinstance(column, np.ndarray)
        if out is None:
            shape = (self._count, *column.shape[1:]) if fixed else ()
            out = self._blocks.empty(shape, column.dtype) if fixed else [None] * self._count
        elif isinstance(out, np.ndarray) and not (fixed and out.shape[1:] == column.shape[1:]):
            out = list(out)
        self._out[name] = out
        return out


def _pieces(groups: Ints, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """(row group, rows of it, their places), one for each row group, or, where that is as good, several."""
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
    width = column.dtype.itemsize * math.prod(column.shape[1:])
    if width == 0 or not column.flags.c_contiguous:
        out[places] = column[rows]
        return
    row_type = np.dtype((np.void, width))  # a row as one item: half the time of rows of items
    source = column.reshape(len(column), -1).view(row_type)[:, 0]
    out.reshape(len(out), -1).view(row_type)[:, 0][places] = source[rows]


def _is_run(numbers: Ints) -> bool:
    """n, n+1, n+2, …"""
    if numbers[-1] - numbers[0] != len(numbers) - 1:
        return False
    return len(numbers) < 3 or bool((np.diff(numbers) == 1).all())


def _objects(column: Column, rows: Ints) -> list[Any]:
    if isinstance(column, Lists):
        starts, ends = column.offsets[rows].tolist(), column.offsets[rows + 1].tolist()
        return [column.values[start:end].copy() for start, end in zip(starts, ends, strict=True)]
    if isinstance(column, np.ndarray):  # lists of one length, beside a row group of others
        return list(column[rows])
    picked: list[Any] = column.take(pa.array(rows)).to_pylist()
    return picked


def _pick(out: Array | list[Any], kept: Ints) -> Any:
    if isinstance(out, np.ndarray):
        return out[kept]
    return _regular([out[place] for place in kept.tolist()])


def _regular(out: Array | list[Any]) -> Any:
    """Lists that have one length in this micro-batch are an array [rows, length]."""
    if isinstance(out, np.ndarray) or not out or not isinstance(out[0], np.ndarray):
        return out
    return np.stack(out) if len({row.shape for row in out}) == 1 else out
