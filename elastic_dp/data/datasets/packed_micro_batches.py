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
_ID = np.dtype(np.int32)
_ID_BYTES = 2 * _ID.itemsize  # of both columns, for each token
# From this mean number of tokens on, pieces of documents are copied one by one: a call costs as
# much as gathering so many tokens.
_LONG_PIECES = 128
_DOCUMENTS_KEPT = 1 << 22  # whose order is kept, of row groups; 16 bytes each
_NAMED = 3  # segments, in an error message

Work = tuple[Ints, Segments, int]  # row groups, what the rows consist of, epoch


class _Layout(NamedTuple):
    """Documents of a row group in the order of an epoch. `is_file_order`: it is that of the file.
    `begins` int64 [documents + 1]: the first
    token of each in that order. `sources` int64 [documents]: in the file's order."""

    is_file_order: bool
    begins: Ints
    sources: Ints


class _Pieces(NamedTuple):
    """Parts of documents: `lengths[i]` tokens from token `sources[i]` of the row group go to
    `places[i]` in the output."""

    sources: Ints
    places: Ints
    lengths: Ints


class _Part(NamedTuple):
    """What packed rows have of a row group in an epoch: as `Segments`, in the order of `starts`.
    `places`: where each begins in the output."""

    epoch: int
    starts: Ints
    lengths: Ints
    places: Ints


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
        bounds = [0, *np.cumsum([m.rows for m in wanted]).tolist()]
        assembler = _PackedRows(bounds[-1], self._order.length, self._blocks)
        failed = self._fill(assembler, key, _by_row_group(wanted, bounds, self._order.length))
        columns = assembler.finish()
        made: list[Any] = []
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
        wanted: Mapping[int, Sequence[_Part]],
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
                    for part in wanted[row_group]:
                        layout = self._layout(part.epoch, row_group, content)
                        assembler.copy(content, part, layout)
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
        layout = _Layout(order is None, np.concatenate([[0], np.cumsum(lengths)]), sources)
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
    """The columns of packed rows that are made together."""

    def __init__(self, rows: int, length: int, blocks: BlockPool) -> None:
        self._shape, self._blocks = (rows, length), blocks
        self._out: dict[str, Array] = {}
        self._places: list[Ints] = []
        self._lengths: list[Ints] = []

    def copy(self, columns: Mapping[str, Column], part: _Part, layout: _Layout) -> None:
        pieces = _pieces_of(layout, part)
        index = None if layout.is_file_order else _index_of(pieces)
        copied = pieces
        if layout.is_file_order:
            copied = _Pieces(part.starts, part.places, part.lengths)
        elif index is not None:
            ends = np.cumsum(part.lengths)
            copied = _Pieces(ends - part.lengths, part.places, part.lengths)
        for name, column in columns.items():
            values: Array = column.values if isinstance(column, Lists) else column.reshape(-1)  # type: ignore[assignment]
            if name not in self._out:
                self._out[name] = self._blocks.empty(self._shape, values.dtype)
            out = self._out[name].reshape(-1)
            _copy(values if index is None else values[index], copied, out)
        self._places.append(pieces.places)
        self._lengths.append(pieces.lengths)

    def finish(self) -> dict[str, Array]:
        """All columns, int32 positions and documents too; [rows, length]."""
        if not self._out:
            return {}
        rows, length = self._shape
        total = rows * length
        places, lengths = np.concatenate(self._places), np.concatenate(self._lengths)
        order = np.argsort(places, kind="stable")
        places, lengths = places[order], lengths[order]
        row = places // length
        numbers = np.arange(len(places)) - np.searchsorted(row, row)
        left = total - int(lengths.sum())
        if left:
            places, lengths, numbers = self._with_padding(places, lengths, numbers)
        # Running sums in place: `np.repeat` would make arrays of fresh memory
        positions, documents = (self._blocks.empty((total,), _ID) for _ in range(2))
        positions[...] = 1
        positions[places] = 1 - np.concatenate([[1], lengths[:-1]])
        documents[...] = 0
        documents[places] = np.diff(numbers, prepend=0)
        for ids in (positions, documents):
            np.cumsum(ids, dtype=_ID, out=ids)
        if left:
            positions[documents < 0] = 0
        return {
            **self._out,
            POSITIONS: positions.reshape(self._shape),
            DOCUMENTS: documents.reshape(self._shape),
        }

    def _with_padding(self, places: Ints, lengths: Ints, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """The pieces, and one for each gap. What cannot be decoded is a gap, too."""
        total = self._shape[0] * self._shape[1]
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


def _by_row_group(
    wanted: Sequence[MicroBatch], bounds: Sequence[int], length: int
) -> dict[int, list[_Part]]:
    """Parts by row group. The rows of micro-batch j are bounds[j] ≤ i < bounds[j + 1] of the
    output."""
    each = [m.work[1] for m in wanted]
    groups, starts, lengths, rows = map(np.concatenate, zip(*each, strict=True))
    counts = [len(segments.rows) for segments in each]
    rows = rows + np.repeat(bounds[:-1], counts)
    epochs = np.repeat([m.work[2] for m in wanted], counts)
    before = np.cumsum(lengths) - lengths
    places = rows * length + before - before[np.searchsorted(rows, rows)]

    order = np.lexsort((starts, groups, epochs))
    groups, epochs = groups[order], epochs[order]
    starts, lengths, places = starts[order], lengths[order], places[order]
    changes = (groups[1:] != groups[:-1]) | (epochs[1:] != epochs[:-1])
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(groups)]
    found: dict[int, list[_Part]] = {}
    for low, high in pairwise(cuts):
        here = slice(low, high)
        part = _Part(int(epochs[low]), starts[here], lengths[here], places[here])
        found.setdefault(int(groups[low]), []).append(part)
    return found


def _pieces_of(layout: _Layout, part: _Part) -> _Pieces:
    """Cuts the segments of a row group at the ends of documents."""
    begins, stops = layout.begins, part.starts + part.lengths
    low = np.searchsorted(begins, part.starts, side="right") - 1
    counts = np.searchsorted(begins, stops, side="left") - low
    owner = np.repeat(np.arange(len(counts)), counts)
    document = np.arange(len(owner)) - (np.cumsum(counts) - counts - low)[owner]
    first = np.maximum(begins[document], part.starts[owner])
    lengths = np.minimum(begins[document + 1], stops[owner]) - first
    if not lengths.all():  # documents may be empty
        kept = lengths > 0
        document, owner, first, lengths = document[kept], owner[kept], first[kept], lengths[kept]
    sources = layout.sources[document] + first - begins[document]
    return _Pieces(sources, part.places[owner] + first - part.starts[owner], lengths)


def _index_of(pieces: _Pieces) -> Ints | None:
    """Which tokens of a row group the pieces have, one after the other; None if the pieces are long
    and better copied one by one."""
    sources, _, lengths = pieces
    total = int(lengths.sum())
    if len(lengths) * _LONG_PIECES <= total:
        return None
    index: Ints = np.repeat(sources - (np.cumsum(lengths) - lengths), lengths)
    index += np.arange(total)
    return index


def _copy(values: Array, pieces: _Pieces, out: Array) -> None:
    """`values` and `out`: flat."""
    for source, place, length in zip(*(each.tolist() for each in pieces), strict=True):
        out[place : place + length] = values[source : source + length]


def _bounds_of(column: Column) -> Ints:
    if isinstance(column, Lists):
        return column.offsets
    rows, length = column.shape
    return np.arange(rows + 1) * length
