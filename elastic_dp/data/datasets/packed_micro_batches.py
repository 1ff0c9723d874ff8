"""Micro-batches of packed rows: documents end to end, with the position of each token in its
document, and the number of its document in the row.

`sampling/packing.py` says which tokens of which row groups a packed row has. Here they are copied
as row groups arrive, one at a time, as rows are: a packed row that begins in one row group and ends
in another does not need both in memory.

Padding, which only the last row of an epoch with tail="short" has, is 0, and its document is -1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.arrow_arrays import Array, Column, Lists
from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream
from elastic_dp.data.pipeline.array_memory import BlockPool, aligned
from elastic_dp.data.pipeline.batch_assembler import Ints
from elastic_dp.data.pipeline.micro_batch_plan import MicroBatch
from elastic_dp.data.pipeline.row_group_reader import Columns, Key
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard, DataError
from elastic_dp.sampling import PackedOrder, Segments

POSITIONS, DOCUMENTS = "position_ids", "document_ids"
_ID_BYTES = 8  # of both columns, for each token
# From this mean number of tokens on, pieces of documents are copied one by one: a call costs as
# much as gathering so many tokens.
_LONG_PIECES = 128
_DOCUMENTS_KEPT = 1 << 20  # whose order is kept, of row groups; 16 bytes each
_NAMED = 3  # segments, in an error message

Work = tuple[Ints, Segments, int]  # row groups, what the rows consist of, epoch


class _Layout(NamedTuple):
    """Documents of a row group in the order of an epoch. `begins` int64 [documents + 1]: the first
    token of each in that order. `sources` int64 [documents]: in the file's order."""

    begins: Ints
    sources: Ints


class _Pieces(NamedTuple):
    """Parts of documents: `lengths[i]` tokens from token `sources[i]` of the row group go to
    `places[i]` in the output."""

    sources: Ints
    places: Ints
    lengths: Ints


class PackedStream(MicroBatchStream):
    def __init__(
        self, config: DataConfig, row_groups: RowGroups, order: PackedOrder, **options: Any
    ) -> None:
        token_bytes = int(row_groups.nbytes.sum()) // order.num_tokens + _ID_BYTES
        super().__init__(config, row_groups, max(1, token_bytes * order.length), **options)
        self._order = order
        self._layouts: OrderedDict[tuple[int, int], _Layout] = OrderedDict()
        self._lock = Lock()

    def masked(self, step: int, virtual_worker: int) -> int:
        return 0  # `on_bad_shard="skip"` is refused

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        return frozenset()

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
        each = zip(steps, self._order.locate_each(steps, virtual_worker), strict=True)
        return [((s.groups, s, self._order.epoch_of(step)), rows) for step, (s, rows) in each]

    def make(self, key: Key, wanted: Sequence[MicroBatch], producer: int) -> tuple[list[Any], int]:
        assembler = _PackedRows(self._order.length, self._blocks)
        bounds, todo = [0], dict[int, list[tuple[int, Segments, Ints]]]()
        for m in wanted:
            _, segments, epoch = m.work
            places = _places(segments, bounds[-1], self._order.length)
            bounds.append(bounds[-1] + m.rows)
            for group in np.unique(segments.groups).tolist():
                at = np.flatnonzero(segments.groups == group)
                part = Segments(*(each[at] for each in segments))
                todo.setdefault(group, []).append((epoch, part, places[at]))
        assembler.rows = bounds[-1]
        failed = self._fill(assembler, key, todo)
        made: list[Any] = []
        columns = assembler.finish()
        for m, (start, stop) in zip(wanted, pairwise(bounds), strict=True):
            needed = failed and set(m.work[0].tolist()) & failed.keys()
            if needed:
                made.append(failed[min(needed)])
            else:
                arrays = {name: aligned(out[start:stop]) for name, out in columns.items()}
                made.append(self._finish(arrays, m, producer))
        return made, sum(out.nbytes for out in columns.values())

    def _fill(
        self,
        assembler: _PackedRows,
        key: Key,
        wanted: Mapping[int, Sequence[tuple[int, Segments, Ints]]],
    ) -> dict[int, BadShard]:
        """Copies tokens from row groups as these arrive. Returns those that cannot be decoded."""
        todo, failed = sorted(wanted), dict[int, BadShard]()
        while todo:
            here = self.reader.take(key, todo)
            todo = [row_group for row_group in todo if row_group not in here]
            taken = list(here)
            try:
                for row_group, content in here.items():
                    if isinstance(content, BadShard):
                        failed[row_group] = content
                        continue
                    for epoch, segments, places in wanted[row_group]:
                        layout = self._layout(epoch, row_group, content)
                        assembler.copy(content, _pieces_of(layout, segments, places))
            finally:
                here.clear()  # drops the references before the reader counts the memory as free
                self.reader.release(key, taken)
        return failed

    def _layout(self, epoch: int, row_group: int, columns: Columns) -> _Layout:
        key = epoch, row_group
        with self._lock:
            if key in self._layouts:
                self._layouts.move_to_end(key)
                return self._layouts[key]
        bounds = self._bounds(row_group, columns)
        order = self._order.documents(epoch, row_group, len(bounds) - 1)
        sources, lengths = bounds[:-1], np.diff(bounds)
        if order is not None:
            sources, lengths = sources[order], lengths[order]
        layout = _Layout(np.concatenate([[0], np.cumsum(lengths)]), sources)
        with self._lock:
            self._layouts[key] = layout
            kept = sum(len(each.sources) for each in self._layouts.values())
            while kept > _DOCUMENTS_KEPT and len(self._layouts) > 1:
                kept -= len(self._layouts.popitem(last=False)[1].sources)
        return layout

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
        if bounds[-1] != (counted := self._order.tokens_of(row_group)):
            raise DataError(
                f"DataConfig.pack: {self.describe_row_group(row_group)} has {bounds[-1]} tokens, "
                f"and had {counted} when the data set was opened; a data set must not change "
                "under a run"
            )
        return bounds


class _PackedRows:
    """The columns of packed rows that are made together; `rows` is set before the first copy."""

    def __init__(self, length: int, blocks: BlockPool) -> None:
        self.rows, self._length, self._blocks = 0, length, blocks
        self._out: dict[str, Array] = {}
        self._places: list[Ints] = []
        self._lengths: list[Ints] = []

    def copy(self, columns: Mapping[str, Column], pieces: _Pieces) -> None:
        for name, column in columns.items():
            values: Array = column.values if isinstance(column, Lists) else column.reshape(-1)  # type: ignore[assignment]
            if name not in self._out:
                shape = self.rows, self._length
                self._out[name] = self._blocks.empty(shape, values.dtype)
            _copy(values, self._out[name].reshape(-1), pieces)
        self._places.append(pieces.places)
        self._lengths.append(pieces.lengths)

    def finish(self) -> dict[str, Array]:
        """All columns, int32 positions and documents too; [rows, length]."""
        if not self._out:
            return {}
        total = self.rows * self._length
        places, lengths = np.concatenate(self._places), np.concatenate(self._lengths)
        order = np.argsort(places, kind="stable")
        places, lengths = places[order], lengths[order]
        rows = places // self._length
        numbers = np.arange(len(places)) - np.searchsorted(rows, rows)
        left = total - int(lengths.sum())
        if left:
            places, lengths, numbers = self._with_padding(places, lengths, numbers)
        positions = self._blocks.empty((total,), np.dtype(np.int32))
        starts = np.repeat(places.astype(np.int32), lengths)
        np.subtract(np.arange(total, dtype=np.int32), starts, out=positions)
        documents = np.repeat(numbers.astype(np.int32), lengths)
        if left:
            positions[documents < 0] = 0
        shape = self.rows, self._length
        return {
            **self._out,
            POSITIONS: positions.reshape(shape),
            DOCUMENTS: documents.reshape(shape),
        }

    def _with_padding(self, places: Ints, lengths: Ints, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """The pieces, and one for each gap. What cannot be decoded is a gap, too."""
        total = self.rows * self._length
        begins = np.concatenate([[0], places + lengths])
        gaps = np.concatenate([places, [total]]) - begins
        at = np.flatnonzero(gaps)
        for out in self._out.values():
            for first, count in zip(begins[at].tolist(), gaps[at].tolist(), strict=True):
                out.reshape(-1)[first : first + count] = 0
        places = np.concatenate([places, begins[at]])
        order = np.argsort(places, kind="stable")
        lengths = np.concatenate([lengths, gaps[at]])[order]
        return places[order], lengths, np.concatenate([numbers, np.full(len(at), -1)])[order]


def _places(segments: Segments, first_row: int, length: int) -> Ints:
    """Where each segment begins in the output, of which the micro-batch begins at `first_row`."""
    before = np.cumsum(segments.lengths) - segments.lengths
    first = np.searchsorted(segments.rows, segments.rows)
    places: Ints = (first_row + segments.rows) * length + before - before[first]
    return places


def _pieces_of(layout: _Layout, segments: Segments, places: Ints) -> _Pieces:
    """Cuts segments of a row group at the ends of documents."""
    begins, stops = layout.begins, segments.starts + segments.lengths
    low = np.searchsorted(begins, segments.starts, side="right") - 1
    counts = np.searchsorted(begins, stops, side="left") - low
    owner = np.repeat(np.arange(len(counts)), counts)
    document = np.arange(len(owner)) - (np.cumsum(counts) - counts - low)[owner]
    first = np.maximum(begins[document], segments.starts[owner])
    lengths = np.minimum(begins[document + 1], stops[owner]) - first
    kept = lengths > 0  # documents may be empty
    document, owner, first, lengths = document[kept], owner[kept], first[kept], lengths[kept]
    sources = layout.sources[document] + first - begins[document]
    return _Pieces(sources, places[owner] + first - segments.starts[owner], lengths)


def _copy(values: Array, out: Array, pieces: _Pieces) -> None:
    """`values` and `out`: flat."""
    sources, places, lengths = pieces
    if len(lengths) * _LONG_PIECES <= lengths.sum():
        for source, place, length in zip(*(each.tolist() for each in pieces), strict=True):
            out[place : place + length] = values[source : source + length]
        return
    before = np.cumsum(lengths) - lengths
    numbers = np.arange(int(lengths.sum()))
    out[numbers + np.repeat(places - before, lengths)] = values[
        numbers + np.repeat(sources - before, lengths)
    ]


def _bounds_of(column: Column) -> Ints:
    if isinstance(column, Lists):
        return column.offsets
    rows, length = column.shape
    return np.arange(rows + 1) * length
