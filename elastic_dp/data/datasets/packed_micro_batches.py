"""Micro-batches of packed rows: documents end to end, with the position of each token in its
document, and the number of its document in the row.

`sampling/packing.py` says which tokens of which row groups a packed row has. Here they are copied
as row groups arrive, one at a time, as rows are: a packed row that begins in one row group and ends
in another does not need both in memory.

Where documents have another order than in the file, Arrow's `take` lays them end to end once a row
group has arrived, and what it gives takes the row group's place in memory. So the tokens of a row,
and of rows that follow each other in the line, are one run, which is one copy. Only the places
where documents begin are kept until all is copied; positions and numbers follow from them.

Padding, which only the last row of an epoch with tail="short" has, is 0, and its document is -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.arrow_arrays import Array, Column, Lists, view
from elastic_dp.data.datasets.micro_batch_stream import ShardStream
from elastic_dp.data.pipeline.array_memory import BlockPool, aligned, aligned_part
from elastic_dp.data.pipeline.batch_assembler import Ints, distinct
from elastic_dp.data.pipeline.block_memory import Columns
from elastic_dp.data.pipeline.planner import MicroBatch
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import DataError
from elastic_dp.sampling.order import RowOrder, base_of
from elastic_dp.sampling.packing import PackedOrder, Segments

POSITIONS, DOCUMENTS = "position_ids", "document_ids"
_ID = np.dtype(np.int32)
# Slices of a memoryview take two thirds of the time of an array's, and longer ones should not keep
# other threads from Python.
_LONG = 1 << 16
_NAMED = 3  # segments, in an error message

Work = tuple[Ints, Segments, int]  # row groups, what the rows consist of, epoch
_Move = tuple[int, int, int, int]  # first and last + 1 of the row group's tokens, and of the output


class _Line(dict[str, Array]):
    """The columns of a row group, flat: its documents end to end, in the order of an epoch.

    `begins` int64 [documents + 1]: the first token of each. `numbers` int64 [documents]: which
    document of the file each is; None: they are in the order of the file, of no `epoch`.
    """

    def __init__(
        self,
        columns: Mapping[str, Array],
        begins: Ints,
        numbers: Ints | None,
        epoch: int | None = None,
    ) -> None:
        super().__init__(columns)
        self.begins, self.numbers, self.epoch = begins, numbers, epoch

    def in_order(self, numbers: Ints | None, epoch: int) -> _Line:
        if numbers is None and self.numbers is None:
            return _Line(self, self.begins, None, epoch)
        places = np.arange(len(self.begins) - 1)
        if self.numbers is not None:
            places[self.numbers] = places.copy()
        if numbers is not None:
            places = places[numbers]
        begins = np.concatenate([[0], np.cumsum(np.diff(self.begins)[places])])
        columns = {name: _taken(values, self.begins, places) for name, values in self.items()}
        return _Line(columns, begins, numbers, epoch)


class _Runs(NamedTuple):
    """What packed rows have of a row group in an epoch: run i is `lengths[i]` tokens from token
    `starts[i]` on, in the order of the epoch, and begins at `places[i]` in the output. In the order
    of `starts`."""

    epoch: int
    starts: Ints
    lengths: Ints
    places: Ints


class _Part(NamedTuple):
    """Runs of a row group that is in memory."""

    line: _Line
    runs: _Runs


def packed_row_bytes(config: DataConfig, group_bytes: Ints, order: PackedOrder) -> int:
    """Returns the approximate size of a packed row."""
    ids_bytes = _ID.itemsize * len(config.pack_columns)
    token_bytes = int(group_bytes.sum()) // order.num_tokens + ids_bytes
    return max(1, token_bytes * order.length)


class PackedStream(ShardStream):
    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: RowOrder,
        **options: Any,
    ) -> None:
        packed = base_of(order)
        assert isinstance(packed, PackedOrder)
        row_bytes = packed_row_bytes(config, row_groups.nbytes, packed)
        copy_bytes = int(row_groups.nbytes.max()) if packed.has_order_of_documents else 0
        super().__init__(
            config, row_groups, order, row_bytes=row_bytes, copy_bytes=copy_bytes, **options
        )
        self._packed = packed
        self._laying = Lock()  # one row group at a time, for its memory

    def describe(self, step: int, virtual_worker: int) -> str:
        """Example: "tokens 0 to 2047 of row group 3 of part-0.parquet"."""
        found = self._order.locate(step, virtual_worker)
        parts = []
        for group, start, length in list(zip(*found[:3], strict=True))[:_NAMED]:
            shard, number, _ = self._row_groups.name(int(group))
            parts.append(f"tokens {start} to {start + length - 1} of row group {number} of {shard}")
        more = "; …" if len(found.groups) > _NAMED else ""
        return f"{'; '.join(parts)}{more} (in the order of the epoch)" if parts else "no rows"

    # ------------------------------------------------- what micro-batches are made of

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Work, int]]:
        order, v = self._order, virtual_worker
        found = zip(steps, order.locate_each(steps, v), strict=True)
        return [((s.groups, s, order.epoch_of(step)), order.rows(step, v)) for step, s in found]

    def changes(self, works: Sequence[Work], content: Any) -> bool:
        """Whether the documents have another order."""
        if not isinstance(content, _Line):
            return True
        return any(epoch != content.epoch for _, _, epoch in works)

    def assembly(self, wanted: Sequence[MicroBatch]) -> PackedAssembly:
        ids = self._config.pack_columns
        return PackedAssembly(self, wanted, self._packed.length, ids, self._blocks)

    def in_epoch_order(self, epoch: int, row_group: int, columns: Columns) -> _Line:
        """`columns`: the row group as it was read, or in the order of any epoch."""
        if not isinstance(columns, _Line):
            flat = {name: _flat(column) for name, column in columns.items()}
            columns = _Line(flat, self._bounds(row_group, columns), None)
        if columns.epoch == epoch:
            return columns
        order = self._packed.documents(epoch, row_group, len(columns.begins) - 1)
        with self._laying:
            return columns.in_order(order, epoch)

    def _bounds(self, row_group: int, columns: Columns) -> Ints:
        """The bounds of documents in the row group. Raises DataError if columns differ in them, or
        the number of tokens is not the one that the order counts with."""
        each = {name: _bounds_of(column) for name, column in columns.items()}
        (first, bounds), *others = each.items()
        for name, other in others:
            if not np.array_equal(bounds, other):
                row = int(np.flatnonzero(np.diff(bounds) != np.diff(other))[0])
                shard, _, first_row = self._row_groups.name(row_group)
                raise DataError(
                    f"DataConfig.pack: row {first_row + row} of {shard} has "
                    f"{bounds[row + 1] - bounds[row]} values in column {first!r} and "
                    f"{other[row + 1] - other[row]} in {name!r}; write one for each token, or "
                    "leave the column out by DataConfig.columns"
                )
        if bounds[-1] != (counted := self._packed.tokens_of(row_group)):
            raise DataError(
                f"DataConfig.pack: {self.describe_row_group(row_group)} has {bounds[-1]} tokens, "
                f"and had {counted} when the data set was opened; a data set must not change "
                "under a run"
            )
        return bounds


class PackedAssembly:
    def __init__(
        self,
        stream: PackedStream,
        wanted: Sequence[MicroBatch],
        length: int,
        ids: Sequence[str],
        blocks: BlockPool,
    ) -> None:
        self._stream, self._wanted = stream, wanted
        self._bounds = [0, *np.cumsum([m.rows for m in wanted]).tolist()]
        self._rows = _PackedRows((self._bounds[-1], length), ids, blocks)
        self._runs = _by_row_group(wanted, self._bounds, length)

    def copy(self, contents: dict[int, Any], may_keep: Mapping[int, int]) -> None:
        parts = list[_Part]()
        for row_group in contents:
            for runs in self._runs[row_group]:
                # What was read is not referred to any more while the next one is put in order.
                contents[row_group] = self._stream.in_epoch_order(
                    runs.epoch, row_group, contents[row_group]
                )
                parts.append(_Part(contents[row_group], runs))
        self._rows.copy(parts)

    def finish(
        self, left_out: set[int], failed: Mapping[int, Exception], producer: int
    ) -> tuple[list[Any], int, list[int]]:
        columns = self._rows.finish()
        made: list[Any] = []
        for m, (start, stop) in zip(self._wanted, pairwise(self._bounds), strict=True):
            needed = failed and set(m.work[0].tolist()) & failed.keys()
            if needed:
                made.append(failed[min(needed)])
            else:
                arrays = {n: aligned_part(out, start, stop) for n, out in columns.items()}
                made.append(self._stream.finished(arrays, m, producer)[0])
        return made, sum(out.nbytes for out in columns.values()), []


class _PackedRows:
    """The columns of packed rows that are made together, `shape` = [rows, length]. `ids`: which of
    positions and documents are made."""

    def __init__(self, shape: tuple[int, int], ids: Sequence[str], blocks: BlockPool) -> None:
        self._shape, self._ids, self._blocks = shape, ids, blocks
        self._out: dict[str, Array] = {}
        self._runs: list[tuple[Ints, Ints]] = []  # places, lengths
        self._begins: list[Ints] = []  # places of documents

    def copy(self, parts: Sequence[_Part]) -> None:
        """Copies the tokens of parts of several row groups: those of one alone are a few rows where
        epochs are shuffled, and what NumPy costs is the number of calls."""
        if not parts:
            return
        _, starts, lengths, places = zip(*(part.runs for part in parts), strict=True)
        cuts = [0, *accumulate(map(len, starts))]
        start, length, place = map(np.concatenate, (starts, lengths, places))
        self._runs.append((place, length))
        bounds = start, start + length, place, place + length
        if self._ids:
            self._begins.append(_begins_of(parts, bounds, cuts))
        moves = list(zip(*(each.tolist() for each in bounds), strict=True))
        for part, (low, high) in zip(parts, pairwise(cuts), strict=True):
            for name, values in part.line.items():
                _copy(values, moves[low:high], self._room(name, values.dtype))

    def _room(self, name: str, dtype: np.dtype[Any]) -> Array:
        """The output of a column, flat."""
        if name not in self._out:
            self._out[name] = self._blocks.empty(self._shape, dtype)
        return self._out[name].reshape(-1)

    def finish(self) -> dict[str, Array]:
        """All columns [rows, length], with int32 `ids`."""
        if not self._out:
            return {}
        ids = self._numbered() if self._ids else {}
        gaps = self._gaps()
        for name, out in (self._out | ids).items():
            for start, stop in gaps:
                out.reshape(-1)[start:stop] = -1 if name == DOCUMENTS and name in ids else 0
        return self._out | ids

    def _numbered(self) -> dict[str, Array]:
        """The `ids` [rows, length], as if there were no gaps."""
        rows, length = self._shape
        row_begins = np.arange(rows + 1) * length
        begins = distinct(np.concatenate([row_begins, *self._begins]))
        begins, ends = begins[:-1], begins[1:]
        row = begins // length
        ids: dict[str, Array] = {}
        for name in self._ids:
            if name == DOCUMENTS:
                first = np.searchsorted(begins, row_begins[:-1])
                ids[name] = _spread(np.arange(len(begins)) - first[row], ends, self._shape)
            else:
                out = ids[name] = _spread(begins - row * length, ends, self._shape)
                np.subtract(np.arange(length, dtype=_ID), out, out=out)
        return ids

    def _gaps(self) -> list[tuple[int, int]]:
        """The places that no token was copied to: padding, and what cannot be decoded."""
        total = self._shape[0] * self._shape[1]
        if sum(int(lengths.sum()) for _, lengths in self._runs) == total:
            return []
        places, lengths = (np.concatenate(each) for each in zip(*self._runs, strict=True))
        order = np.argsort(places, kind="stable")
        begins = np.concatenate([[0], (places + lengths)[order]])
        ends = np.concatenate([places[order], [total]])
        return [(b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True) if b < e]


def _by_row_group(
    wanted: Sequence[MicroBatch], bounds: Sequence[int], length: int
) -> dict[int, list[_Runs]]:
    """Runs by row group, as long as possible, and by epoch. The rows of micro-batch j are
    bounds[j] ≤ i < bounds[j + 1] of the output."""
    each = [m.work[1] for m in wanted]
    groups, starts, lengths, places = map(np.concatenate, zip(*each, strict=True))
    counts = [len(segments.groups) for segments in each]
    places = places + np.repeat(np.array(bounds[:-1]) * length, counts)
    epochs = np.repeat([m.work[2] for m in wanted], counts)

    order = np.lexsort((starts, groups, epochs))
    groups, epochs = groups[order], epochs[order]
    starts, lengths, places = starts[order], lengths[order], places[order]
    new_part = (groups[1:] != groups[:-1]) | (epochs[1:] != epochs[:-1])
    gap = (starts + lengths)[:-1] != starts[1:]
    new_run = new_part | gap | ((places + lengths)[:-1] != places[1:])
    runs = np.flatnonzero(np.concatenate([[True], new_run]))
    parts = np.concatenate([[0], np.flatnonzero(new_part) + 1, [len(groups)]])
    cuts = np.searchsorted(runs, parts).tolist()
    groups, epochs, starts, places = groups[runs], epochs[runs], starts[runs], places[runs]
    lengths = np.add.reduceat(lengths, runs)
    found: dict[int, list[_Runs]] = {}
    for low, high in pairwise(cuts):
        here = slice(low, high)
        runs_here = _Runs(int(epochs[low]), starts[here], lengths[here], places[here])
        found.setdefault(int(groups[low]), []).append(runs_here)
    return found


def _begins_of(
    parts: Sequence[_Part], bounds: tuple[Ints, Ints, Ints, Ints], cuts: Sequence[int]
) -> Ints:
    """Where runs and documents begin in the output. `bounds`: the moves of the runs of all parts;
    `cuts` [parts + 1]: the first run of each part among them."""
    # The documents that the parts touch are laid end to end. A run lies by the part's number of
    # `shifts` later there than in its row group.
    begins, shifts, end = list[Ints](), list[int](), 0
    for line, of_part in parts:
        first, stop = int(of_part.starts[0]), int(of_part.starts[-1] + of_part.lengths[-1])
        low, high = line.begins.searchsorted([first, stop])
        shifts.append(end - first)
        begins.append(line.begins[low:high] + shifts[-1])
        end = stop + shifts[-1]
    begin, shift = np.concatenate(begins), np.repeat(shifts, np.diff(cuts))
    starts, stops, places, _ = bounds
    low_of = begin.searchsorted(starts + shift)
    counts = begin.searchsorted(stops + shift) - low_of
    ends = np.cumsum(counts)
    document = np.arange(ends[-1]) + np.repeat(low_of + counts - ends, counts)
    of_documents = begin[document] + np.repeat(places - starts - shift, counts)
    return np.concatenate([places, of_documents])


def _spread(values: Ints, ends: Ints, shape: tuple[int, int]) -> Array:
    """An array of this shape with `values[i]` at ends[i - 1] ≤ place < ends[i], in memory
    that Arrow has kept, where `np.repeat` would get fresh pages, which takes longer than all."""
    runs = pa.RunEndEncodedArray.from_arrays(ends, pa.array(values.astype(_ID)))
    return aligned(view(pc.run_end_decode(runs)).reshape(shape))


def _copy(values: Any, moves: Sequence[_Move], out: Any) -> None:
    """`values` and `out`: flat."""
    if moves[0][1] - moves[0][0] >= _LONG:
        for source, source_stop, place, stop in moves:
            out[place:stop] = values[source:source_stop]
        return
    values, out = memoryview(values.data), memoryview(out.data)
    for source, source_stop, place, stop in moves:
        out[place:stop] = values[source:source_stop]


def _taken(values: Array, begins: Ints, numbers: Ints) -> Array:
    """The documents `numbers` of `values`, end to end. To Arrow each is an item of bytes, which it
    copies as one."""
    buffers = [None, pa.py_buffer(begins * values.itemsize), pa.py_buffer(values)]
    documents = pa.Array.from_buffers(pa.large_binary(), len(begins) - 1, buffers)
    taken = documents.take(pa.array(numbers)).buffers()[2]
    return np.frombuffer(taken, values.dtype, len(values))


def _flat(column: Column) -> Array:
    return column.values if isinstance(column, Lists) else column.reshape(-1)  # type: ignore[return-value]


def _bounds_of(column: Column) -> Ints:
    if isinstance(column, Lists):
        return column.offsets
    rows, length = column.shape
    return np.arange(rows + 1) * length
