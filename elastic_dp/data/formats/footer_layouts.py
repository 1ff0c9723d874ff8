"""Layouts of Parquet footers that were checked: a footer of the same layout needs no check.

The checks of a footer (parquet_footer.py, encryption.py) take twice as long as reading it. The
files of a data set mostly come from one writer, and then their footers differ only in sizes,
offsets, counts, and the bounds of statistics. A layout is a checked footer without these: a mask
that keeps all other bytes. A footer has the layout if it is as long, and has the same bytes under
the mask. So its numbers have as many bytes as those that were checked, are not negative, and are
below 2**48, which is all that the checks ask of them. The numbers of values and rows, which must
agree, are compared each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.formats.parquet_footer import (
    BINARY,
    I64,
    LIST,
    STRUCT,
    list_header,
    next_field,
    skip,
    varint,
)

LAYOUTS_KEPT = 64
FOOTER_BYTES = 64 << 10  # a longer footer hardly ever has the layout of another one
_NUMBER_BYTES = 7  # of the largest number that may be another one: 48 bits, and a sign
_NUMBER, _ROWS, _VALUES, _BOUND = "number", "rows", "values", "bound"

# What may differ: fields of a struct by their numbers in parquet.thrift, or items of a list.
_STATISTICS = {1: _BOUND, 2: _BOUND, 3: _NUMBER, 4: _NUMBER, 5: _BOUND, 6: _BOUND}
_SIZES = {1: _NUMBER, 2: [_NUMBER], 3: [_NUMBER]}
_METADATA = {5: _VALUES, 12: _STATISTICS, 16: _SIZES, **dict.fromkeys((6, 7, 9, 10, 11), _NUMBER)}
_GROUP = {1: [{2: _NUMBER, 3: _METADATA}], 2: _NUMBER, 3: _ROWS, 5: _NUMBER, 6: _NUMBER}
_FOOTER = {3: _NUMBER, 4: [_GROUP]}


@dataclass(frozen=True)
class FooterLayout:
    """`chunks`: the numbers of the column chunks that are read. `schema`: of all columns. `mask`,
    `same`: see above; the footer's first byte is the lowest one. `counts`: for each row group,
    where its number of rows is, and where the numbers of values of its chunks are."""

    chunks: list[int]
    schema: pa.Schema
    mask: int = 0
    same: int = -1
    counts: list[tuple[int, list[int]]] = field(default_factory=list)
    is_repeated: list[bool] = field(default_factory=list)

    def has(self, tail: bytes) -> bool:
        """Whether a footer of the same length has this layout."""
        return int.from_bytes(tail, "little") & self.mask == self.same and self._counts_agree(tail)

    def _counts_agree(self, tail: bytes) -> bool:
        """Whether a chunk has as many values as rows; one with lists may have more."""
        for at, places in self.counts:
            rows, _ = varint(tail, at)
            for place, is_repeated in zip(places, self.is_repeated, strict=True):
                values, _ = varint(tail, place)
                if values < rows or (values > rows and not is_repeated):
                    return False
        return True


class FooterLayouts:
    """Keeps `LAYOUTS_KEPT` layouts. Thread safe: threads that miss one may each add it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], list[FooterLayout]] = {}  # by length and columns
        self._count = 0

    def find(self, tail: bytes, columns: Sequence[str] | None) -> FooterLayout | None:
        """The layout of a footer that needs no check. `tail`: its bytes in the file. `columns`:
        those that are read."""
        for layout in self._kept.get(_key(tail, columns), ()):
            if layout.has(tail):
                return layout
        return None

    def add(
        self, tail: bytes, columns: Sequence[str] | None, footer: pq.FileMetaData, chunks: list[int]
    ) -> FooterLayout:
        """Keeps and returns the layout of a footer. Call this after all checks. `chunks`: the
        numbers of the column chunks of `columns`."""
        schema = footer.schema.to_arrow_schema()
        if self._count >= LAYOUTS_KEPT or len(tail) > FOOTER_BYTES:
            return FooterLayout(chunks, schema)
        found = _Differences(tail)
        try:
            found.walk(0, STRUCT, _FOOTER)
        except _Unusual:
            return FooterLayout(chunks, schema)
        mask = int.from_bytes(found.mask, "little")
        same = int.from_bytes(tail, "little") & mask
        leaves = map(footer.schema.column, range(footer.num_columns))
        is_repeated = [leaf.max_repetition_level > 0 for leaf in leaves]
        layout = FooterLayout(chunks, schema, mask, same, found.counts, is_repeated)
        self._kept.setdefault(_key(tail, columns), []).append(layout)
        self._count += 1
        return layout


def _key(tail: bytes, columns: Sequence[str] | None) -> tuple[Any, ...]:
    return len(tail), None if columns is None else tuple(columns)


class _Unusual(Exception):
    """The layout is not kept."""


class _Differences:
    """`mask`: one bits where footers of a layout have the same bits. `counts`: see FooterLayout."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.mask = bytearray(b"\xff" * len(content))
        self.counts: list[tuple[int, list[int]]] = []
        self._rows: int | None = None
        self._values: list[int] = []

    def walk(self, at: int, kind: int, differs: Any) -> int:
        """Takes from the mask what differs in the value at index `at`. Returns the index after
        it."""
        if isinstance(differs, dict) and kind == STRUCT:
            return self._walk_struct(at, differs)
        if isinstance(differs, list) and kind == LIST:
            size, item, at = list_header(self._content, at)
            for _ in range(size):
                at = self.walk(at, item, differs[0])
            return at
        end = skip(self._content, at, kind)
        if differs == _BOUND and kind == BINARY:
            size, start = varint(self._content, at)
            self.mask[start:end] = bytes(size)
        elif differs in (_NUMBER, _ROWS, _VALUES) and kind == I64:
            self._free_number(at, end)
            if differs == _ROWS:
                self._rows = at
            elif differs == _VALUES:
                self._values.append(at)
        return end

    def _walk_struct(self, at: int, differs: dict[int, Any]) -> int:
        last, chunks = 0, 0
        while self._content[at]:
            last, kind, at = next_field(self._content, at, last)
            if differs is _GROUP and last == 1 and kind == LIST:
                chunks, _, _ = list_header(self._content, at)
            at = self.walk(at, kind, differs.get(last))
        if differs is _GROUP:
            if self._rows is None or len(self._values) != chunks:
                raise _Unusual
            self.counts.append((self._rows, self._values))
            self._rows, self._values = None, []
        return at + 1

    def _free_number(self, at: int, end: int) -> None:
        """Numbers of as many bytes may stand there, but no negative ones."""
        if end - at > _NUMBER_BYTES or self._content[at] & 1:
            raise _Unusual
        self.mask[at:end] = b"\x80" * (end - at)
        self.mask[at] = 0x81
