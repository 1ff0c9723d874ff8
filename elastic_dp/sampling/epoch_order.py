"""One epoch's line: all row groups in a permuted order, end to end, rotated by a random offset.

A *position* is a number from 0 to the number of rows - 1; each row has exactly one. The rotation is
for data sets of few row groups: without it, the same rows would be the dropped tail of every epoch.
It is addition modulo the number of rows, so no row group is cut for it.

A line holds 16 bytes per row group, and takes little more while it is built.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastic_dp.sampling.keyed_permutation import derive, mix64_words, permute

Ints = npt.NDArray[np.int64]

_GROUPS, _OFFSET, _BLOCK = 1, 2, 3  # the purposes of keys
_AT_ONCE = 1 << 14  # row groups that are permuted at once, so that the arrays stay in the cache


class EpochOrder:
    """The line of `epoch` for row groups with `group_rows` rows, in an order with this `seed`."""

    def __init__(self, group_rows: Ints, *, seed: int, epoch: int) -> None:
        self._group = _permuted(len(group_rows), derive(_GROUPS, seed, epoch))
        self._bounds = bounds_of(group_rows, self._group)
        self._num_rows = int(self._bounds[-1])
        self._offset = derive(_OFFSET, seed, epoch) % self._num_rows
        self._key = np.uint64(derive(_BLOCK, seed, epoch))

    @classmethod
    def in_file_order(cls, group_rows: Ints) -> EpochOrder:
        """The line of every epoch without shuffling."""
        line = cls.__new__(cls)
        line._group = np.arange(len(group_rows))
        line._bounds = bounds_of(group_rows)
        line._num_rows, line._offset, line._key = int(line._bounds[-1]), 0, np.uint64(0)
        return line

    def spans(self, first: Ints, count: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return where the positions `first` ≤ i < `first` + `count` are, for each pair: (number of
        the pair, row group, first row in it, number of rows), one for each row group that it
        touches, in order. Rows are not permuted within row groups.
        """
        pair, left = np.flatnonzero(count), count[count > 0]
        at = (first[pair] + self._offset) % self._num_rows
        found = [(pair[:0],) * 4]
        while len(pair):
            number = np.searchsorted(self._bounds, at, side="right") - 1
            here = np.minimum(left, self._bounds[number + 1] - at)
            found.append((pair, self._group[number], at - self._bounds[number], here))
            at, left = (at + here) % self._num_rows, left - here
            pair, at, left = pair[left > 0], at[left > 0], left[left > 0]
        pairs, groups, rows, counts = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(pairs, kind="stable")
        return pairs[order], groups[order], rows[order], counts[order]

    def locate(self, position: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return (row group, row in it) at each `position` of a stream with the positions
        `low`…`high` - 1.

        The part of a row group that lies in one stream is a *block*; the rows of a block are
        permuted.
        """
        turned = position + self._offset
        around = turned // self._num_rows * self._num_rows  # after the end, the line starts again
        number = np.searchsorted(self._bounds, turned - around, side="right") - 1
        first, behind = self._bounds[number] + around, self._bounds[number + 1] + around
        low = np.maximum(first, low + self._offset)
        high = np.minimum(behind, high + self._offset)

        key = self._key ^ mix64_words(low.astype(np.uint64))
        moved = permute(turned - low, (high - low).astype(np.uint64), key)
        return self._group[number], low + moved - first


def bounds_of(group_rows: Ints, order: Ints | None = None) -> Ints:
    """Return the bounds of row groups laid end to end: number i has bounds[i]…bounds[i + 1] - 1."""
    bounds = np.zeros(len(group_rows) + 1, dtype=np.int64)
    bounds[1:] = group_rows
    if order is not None:
        np.take(group_rows, order, out=bounds[1:], mode="clip")  # "raise" makes a copy
    np.cumsum(bounds, out=bounds)
    return bounds


def _permuted(count: int, key: int) -> Ints:
    order = np.empty(count, dtype=np.int64)
    for first in range(0, count, _AT_ONCE):
        index = np.arange(first, min(first + _AT_ONCE, count), dtype=np.int64)
        order[first : first + len(index)] = permute(index, np.uint64(count), np.uint64(key))
    return order
