"""The order of rows: (step, virtual worker) -> which rows, a pure function of (seed, epoch, row groups).

The rows of an epoch are laid out in one *line*, each exactly once. Two things hold by construction: every
micro-batch is a set of places on the line, and no two micro-batches of an epoch share a place (I10).

shuffle="none": the line is file order. Micro-batch (step t of the epoch, virtual worker v) has the places
    (t·V + v)·b …, so a global batch is V·b rows in a row.

shuffle="full" (random access is cheap: map-style data): the same places, sent through one keyed permutation
    of all rows.

shuffle="rows" (Parquet): reads must stay large, so rows move only near their row group.
    1. The row groups are permuted by (seed, epoch) and laid end to end; the line is turned by a random
       offset, so that with few row groups the dropped tail is not always the same rows.
    2. The line is cut into V *shares*, and each share into 8 *streams* of equal length (±1 row). Virtual
       worker v reads share v only: the j-th row of its epoch is row j // 8 of its stream j % 8. Lengths
       follow from the total alone, so ragged row groups need no special case: a cut may fall inside one.
    3. Within a stream, rows are permuted within blocks of one row group. A virtual worker so has 8 row groups
       open, and a global batch mixes 8·V of them; more streams mix better than deeper blocks (measured).

The rows that do not fill the last global batch: tail="drop" leaves them out of every share; tail="short" has
one more step, whose virtual workers are filled in order, so that the last ones may have no row at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from elastic_dp.errors import DataError
from elastic_dp.sampling.generator import Words, derive, mix64_words, permute

Ints = npt.NDArray[np.int64]

STREAMS = 8  # per virtual worker
BLOCK_ROW_GROUPS = 1
_GROUPS, _OFFSET, _BLOCK, _ROWS = 1, 2, 3, 4  # what a key is for
_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class _Line:
    """One epoch's line: pieces of row groups, end to end. Piece i has places bounds[i]…bounds[i+1]-1."""

    group: Ints
    first_row: Ints  # of the piece, in its row group
    bounds: Ints


@dataclass(frozen=True, kw_only=True)
class Order:
    """Steps count from 1 and run over epochs, which count from 0.

    `group_rows`: rows of each row group, in file order. Raises DataError if an epoch has not one step.
    """

    group_rows: tuple[int, ...]
    virtual_workers: int
    micro_batch_size: int
    seed: int = 0
    shuffle: Literal["none", "rows", "full"] = "rows"
    tail: Literal["drop", "short"] = "drop"
    num_rows: int = field(init=False)
    _file_bounds: Ints = field(init=False, repr=False, compare=False)
    _lines: dict[int, _Line] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        bounds = np.concatenate([[0], np.cumsum(np.asarray(self.group_rows, dtype=np.int64))])
        object.__setattr__(self, "_file_bounds", bounds.astype(np.int64))
        object.__setattr__(self, "num_rows", int(bounds[-1]))
        if self.steps_per_epoch == 0:
            need = self.virtual_workers * self.micro_batch_size
            way_out = "" if self.num_rows == 0 else ', or set tail="short" for a smaller last batch'
            raise DataError(
                f"the data set has {self.num_rows} rows, fewer than one global batch of {need} "
                f"({self.virtual_workers} virtual workers × micro_batch_size {self.micro_batch_size}); "
                f"add rows, lower micro_batch_size or virtual_workers{way_out}"
            )

    @property
    def identity(self) -> str:
        """Everything beside the row groups that sets the order; goes into the fingerprint."""
        shape = f"streams={STREAMS} block={BLOCK_ROW_GROUPS}" if self.shuffle == "rows" else ""
        return (
            f"order 1 seed={self.seed} b={self.micro_batch_size} V={self.virtual_workers} "
            f"shuffle={self.shuffle} tail={self.tail} {shape}"
        )

    @property
    def steps_per_epoch(self) -> int:
        whole = self.virtual_workers * self.micro_batch_size
        return self.num_rows // whole if self.tail == "drop" else -(-self.num_rows // whole)

    def epoch_of(self, step: int) -> int:
        assert step >= 1, "steps count from 1"
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def rows(self, step: int, virtual_worker: int) -> int:
        """How many rows the micro-batch has; micro_batch_size except in a short last step."""
        first = self._first_place((step - 1) % self.steps_per_epoch, virtual_worker)
        return min(max(self.num_rows - first, 0), self.micro_batch_size)

    def locate(self, step: int, virtual_worker: int) -> tuple[Ints, Ints]:
        """The row groups and the rows in them, one pair per row of the micro-batch, in its order."""
        assert 0 <= virtual_worker < self.virtual_workers, "no such virtual worker"
        epoch, in_epoch = self.epoch_of(step), (step - 1) % self.steps_per_epoch
        count = self.rows(step, virtual_worker)
        first = self._first_place(in_epoch, virtual_worker)
        if self.shuffle == "rows":
            index = in_epoch * self.micro_batch_size + np.arange(count, dtype=np.int64)
            return self._locate_in_streams(epoch, virtual_worker, index)
        places = first + np.arange(count, dtype=np.int64)
        if self.shuffle == "full":
            key = np.full(count, derive(_ROWS, self.seed, epoch), dtype=np.uint64)
            places = permute(places, np.full(count, self.num_rows, dtype=np.uint64), key)
        group = np.searchsorted(self._file_bounds, places, side="right") - 1
        return group.astype(np.int64), places - self._file_bounds[group]

    def _first_place(self, in_epoch: int, virtual_worker: int) -> int:
        return (in_epoch * self.virtual_workers + virtual_worker) * self.micro_batch_size

    def _locate_in_streams(self, epoch: int, virtual_worker: int, index: Ints) -> tuple[Ints, Ints]:
        """`index`: of rows in the virtual worker's share, in the order in which it consumes them."""
        line = self._line(epoch)
        start, length = self._share(virtual_worker)
        stream, depth = index % STREAMS, index // STREAMS
        short, longer = divmod(length, STREAMS)  # the first `longer` streams have one row more
        low = start + stream * short + np.minimum(stream, longer)
        high = low + short + (stream < longer)
        place = low + depth

        piece = np.searchsorted(line.bounds, place, side="right") - 1
        origin = np.searchsorted(line.bounds, low, side="right") - 1
        block = origin + (piece - origin) // BLOCK_ROW_GROUPS * BLOCK_ROW_GROUPS
        last = np.minimum(block + BLOCK_ROW_GROUPS, len(line.bounds) - 1)
        low, high = np.maximum(low, line.bounds[block]), np.minimum(high, line.bounds[last])

        key = np.uint64(derive(_BLOCK, self.seed, epoch)) ^ mix64_words(low.astype(np.uint64))
        place = low + permute(place - low, (high - low).astype(np.uint64), key)
        piece = np.searchsorted(line.bounds, place, side="right") - 1
        return line.group[piece], line.first_row[piece] + place - line.bounds[piece]

    def _share(self, virtual_worker: int) -> tuple[int, int]:
        """(first place, length) of a virtual worker's share of the line."""
        whole = self.virtual_workers * self.micro_batch_size
        steps, rest = divmod(self.num_rows, whole)
        if self.tail == "drop":
            rest = 0
        before = min(virtual_worker * self.micro_batch_size, rest)
        own = min(rest - before, self.micro_batch_size)
        full = steps * self.micro_batch_size
        return virtual_worker * full + before, full + own

    def _line(self, epoch: int) -> _Line:
        line = self._lines.get(epoch)
        if line is None:
            line = self._lay_out(epoch)
            self._lines[epoch] = line
            kept = sorted(
                list(self._lines), key=lambda other: abs(other - epoch)
            )  # threads share it
            for old in kept[_EPOCHS_KEPT:]:
                self._lines.pop(old, None)
        return line

    def _lay_out(self, epoch: int) -> _Line:
        rows = np.asarray(self.group_rows, dtype=np.int64)
        count: Words = np.full(len(rows), len(rows), dtype=np.uint64)
        key = np.full(len(rows), derive(_GROUPS, self.seed, epoch), dtype=np.uint64)
        group = permute(np.arange(len(rows), dtype=np.int64), count, key)
        offset = derive(_OFFSET, self.seed, epoch) % self.num_rows

        # Turn the line: the piece that holds place `offset` is cut in two, its head goes to the end.
        bounds = np.concatenate([[0], np.cumsum(rows[group])])
        cut = int(np.searchsorted(bounds, offset, side="right")) - 1
        head = offset - int(bounds[cut])
        turned = np.concatenate([group[cut:], group[:cut], group[cut : cut + 1]])
        first_row = np.zeros(len(turned), dtype=np.int64)
        first_row[0] = head
        length = rows[turned]
        length[0] -= head
        length[-1] = head
        kept = length > 0
        bounds = np.concatenate([[0], np.cumsum(length[kept])]).astype(np.int64)
        return _Line(turned[kept], first_row[kept], bounds)
