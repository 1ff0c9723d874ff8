"""CSV with a header line, commas, and the double quotes of RFC 4180, parsed by pyarrow.

A newline inside quotes does not end a row. A quote opens a quoted field only at the field's start;
a quoted field ends at the first quote that is not doubled. These are pyarrow's rules, so shards are
cut where pyarrow ends rows. A quote that is never closed would turn the rest of the file into one
value, and is refused. See docs/csv-and-jsonl.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from elastic_dp.data.columns.schema import top_level, widest
from elastic_dp.data.formats.exact_numbers import (
    LeadingZeros,
    Rounded,
    add_whole_numbers,
    add_written,
    large_floats,
)
from elastic_dp.data.formats.format import RowGroupLocation, Scan, ShardAt
from elastic_dp.data.formats.row_group_headers import RowGroupHeaders
from elastic_dp.data.formats.text import (
    BYTE_ORDER_MARK,
    HEAD_BYTES,
    decompress,
    first_bytes,
    iconv,
    is_compressed,
    refuse_utf_16,
    scan_rows,
    with_codecs,
)
from elastic_dp.errors import DataError

_HEADER_BYTES = 4 << 20
_QUOTED = rb'"(?<![^,\r\n]")[^"]*+(?:""[^"]*+)*+(?:"|\Z)'
_QUOTED_OR_ROW_END = re.compile(_QUOTED + rb"|(\r\n|\n|\r)")
_QUOTED_FIELD = re.compile(r'"(?<![^,;|\t]")[^"]*+(?:""[^"]*+)*+"')
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_EXCEL_LINE = re.compile("sep=.", re.IGNORECASE)
_HEXADECIMAL = r"^\s*0[xX]"
_LEADING_ZEROS = r"^\s*\+?0[0-9]+\s*$"
_ZEROS_FIRST = re.compile(rb'0[0-9]+[ \t]*"?(?:[,\r\n]|\Z)')
_AT_ONCE = 1 << 20  # bytes that are compared at once, so that a long chunk takes little memory
_TWO_ROW_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BLANK_LINES = (
    "blank lines of CSV files with one column are not rows (an empty text is written as two quotes)"
)
_BLANK = re.compile(rb"[\r\n]*")
_SHOWN = 80  # characters of a row, in an error message
_BLOCK_LIMIT = (1 << 31) - 1
# Not "1" and "0": a column of these and "true" would be bools in one row group and numbers in
# another.
_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]

# Indexed by the byte before a quote
_STARTS_FIELD = np.zeros(256, dtype=np.bool_)
_STARTS_FIELD[[ord(","), ord("\n"), ord("\r")]] = True
_MAY_OPEN = _STARTS_FIELD.copy()
_MAY_OPEN[ord('"')] = True

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class Csv:
    name = "csv"
    endings: tuple[str, ...] = with_codecs(".csv")
    scans_content = True
    growth = 1.0
    merge = staticmethod(widest)

    def __init__(self) -> None:
        self._headers = RowGroupHeaders()

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        return scan_rows(shard, columns, CsvRows(shard.name, columns), _merge)

    def first_columns(self, shard: ShardAt, columns: Sequence[str] | None) -> pa.Schema | None:
        rows = CsvRows(shard.name, columns)
        rows.head(first_bytes(shard, HEAD_BYTES), False)
        return pa.schema([(name, pa.null()) for name in rows.names]) if rows.names else None

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        content = bytes(shard.read(location.start, location.end))
        if is_compressed(shard):
            content = decompress(shard, content)
        elif shard.head:
            content = self._headers.read(shard, shard.head) + content
        return _parse(content, schema, fill_missing=True)

    def close(self) -> None:
        self._headers.clear()


class CsvRows:
    """A `TextRows`. Rows are counted from 1; the header line and blank lines do not count."""

    def __init__(self, name: str, columns: Sequence[str] | None) -> None:
        self._name, self._columns = name, columns
        self._header = b""
        self.names: list[str] = []  # of the header line
        self._ends = RowEnds()
        self._rows = 0  # parsed so far
        self.rounded: Rounded = {}
        self.leading_zeros: LeadingZeros = {}
        self.remarks: dict[str, tuple[int, str]] = {}

    def head(self, content: bytes, is_all: bool) -> int | None:
        refuse_utf_16(self._name, content)
        end = _header_end(content)
        if end and (end < len(content) or is_all):  # otherwise "\n" may follow "\r"
            self._header = content[:end]
            self._check_header()
            return end
        if is_all or len(content) > _HEADER_BYTES:
            raise DataError(
                f"{self._name} has no header line of column names with rows below it; add "
                "one, or remove the file"
            )
        return None

    def last_row_end(self, content: bytes) -> int:
        return self._ends.last(content)

    def parse(self, content: bytes, schema: pa.Schema | None = None) -> pa.Table:
        ragged: list[Any] = []

        def keep(row: Any) -> str:
            ragged.append(row)
            return "error"

        if _BLANK.fullmatch(content):
            if schema is None and len(self.names) == 1:
                self._count_blank_lines(content, 0)
            return _parse(self._header, schema, fill_missing=schema is not None)
        try:
            table = _parse(content, schema, self.names, keep, fill_missing=schema is not None)
        except pa.ArrowInvalid:
            if ragged:
                self._refuse_ragged(ragged[0])
            raise
        if schema is None:
            if len(self.names) == 1:
                self._count_blank_lines(content, table.num_rows)
            self._refuse_bytes(table)
            self._check_numbers(content, table)
        self._rows += table.num_rows
        return table

    def end(self) -> None:
        if self._ends.is_quoted:
            self._refuse_open_quote(self._rows)

    def _check_header(self) -> None:
        if b"\0" in self._header:
            raise DataError(
                f"{self._name} has zero bytes in its header line, so it is UTF-16 or no "
                "text; if UTF-16, write it as "
                f"UTF-8: {iconv('UTF-16LE', self._name)}"
            )
        try:
            names = self.names = _parse(self._header).column_names
        except UnicodeDecodeError:
            raise DataError(
                f"{self._name} has a header line that is not UTF-8; if it is Latin-1, write "
                "it as UTF-8: "
                f"{iconv('LATIN1', self._name)}"
            ) from None
        line = self._header.removeprefix(BYTE_ORDER_MARK).decode().strip("\r\n")
        if _EXCEL_LINE.fullmatch(line):
            raise DataError(
                f"{self._name} begins with {line!r}, which Excel reads and others take for "
                "column names; remove the line: "
                f"sed 1d {quote(self._name)} > rows.csv"
            )
        wanted = names if self._columns is None else self._columns
        twice = dict.fromkeys(name for name in names if names.count(name) > 1 and name in wanted)
        if twice:
            raise DataError(
                f"{self._name} has several columns named {', '.join(map(repr, twice))}; "
                "rename all but one in its header "
                "line, or choose columns without them"
            )
        if len(names) == 1:
            self._refuse_other_separator(names[0], line)

    def _refuse_other_separator(self, name: str, line: str) -> None:
        unquoted = _QUOTED_FIELD.sub("", line)
        for separator, word in _SEPARATORS.items():
            if separator in unquoted:
                quoted = '"' + name.replace('"', '""') + '"'
                sep = separator.replace("\t", r"\t")
                raise DataError(
                    f"{self._name} has {word} and no comma in its header line, and is read "
                    "with commas; rewrite it: "
                    f'python -c \'import pandas; pandas.read_csv("{self._name}", '
                    f'sep="{sep}", dtype=str, '
                    'keep_default_na=False).to_csv("commas.csv", index=False)\'. If '
                    f"{line[:_SHOWN]!r} is the name of one column, quote it in the file: "
                    f"{quoted[:_SHOWN]}"
                )

    def _refuse_ragged(self, row: Any) -> None:
        number = self._rows + row.number
        if self._ends.is_quoted:
            self._refuse_open_quote(number)
        raise DataError(
            f"cannot read {self._name}: row {number} has {row.actual_columns} field(s), and "
            "the header line has "
            f"{row.expected_columns}; fix or remove the row, and quote a field that holds a "
            "comma. It begins with "
            f"{row.text[:_SHOWN]!r}"
        )

    def _refuse_open_quote(self, row: int) -> None:
        raise DataError(
            f'{self._name}: a quote (") in row {row} is never closed, so all that follows '
            "would be one value; was the "
            "file cut off? Close the quote, or double it and quote the whole field"
        )

    def _check_numbers(self, content: bytes, table: pa.Table) -> None:
        """Finds numbers that their column's type changes. Where the parsed values do not tell, the
        columns are parsed again as text."""
        table = table.select([n for n in table.column_names if table.column_names.count(n) == 1])
        add_whole_numbers(table, self._rows, self._name, self.rounded)
        floats = {leaf: rows for leaf, rows in large_floats(table) if leaf not in self.rounded}
        whole = [field.name for field in table.schema if field.type == pa.int64()]
        below = whole and _may_have_hexadecimals(content)
        negative = {name: _negative(table, name) for name in whole} if below else {}
        negative = {name: rows for name, rows in negative.items() if len(rows)}
        codes = [f.name for f in table.schema if f.type in (pa.int64(), pa.float64())]
        codes = [name for name in codes if name not in self.leading_zeros]
        codes = codes if codes and _may_have_leading_zeros(content) else []
        names = dict.fromkeys((*floats, *negative, *codes))
        if not names:
            return
        as_text = pa.schema([(name, pa.string()) for name in names])
        texts = _parse(content, as_text, self.names)
        for name, rows in floats.items():
            values = table.column(name).take(rows).to_numpy()
            # What is written with a fraction or an exponent is no whole number, unless it is too
            # large for float64.
            written = texts.column(name).take(rows)
            matches = _matches(written, "^[^.eE]*$") | np.isinf(values)
            self._add_rounded(name, rows[matches], written.filter(pa.array(matches)))
        for name, rows in negative.items():
            written = texts.column(name).take(rows)
            matches = _matches(written, _HEXADECIMAL)
            if matches.any() and name in top_level(table.schema, self._columns):
                row = int(rows[matches][0]) + self._rows + 1
                raise DataError(
                    f"{self._name}: column {name!r} of row {row} is "
                    f"{written.filter(pa.array(matches))[0].as_py()!r}, which does not fit into "
                    "int64; write it as a decimal number or with a letter that makes it text, "
                    "or leave the column out"
                )

        for name in codes:
            found = np.flatnonzero(_matches(texts.column(name).fill_null(""), _LEADING_ZEROS))
            if len(found):
                row, written = int(found[0]), texts.column(name)[int(found[0])].as_py()
                self.leading_zeros[name] = (
                    f"{written!r} (row {self._rows + row + 1} of {self._name})"
                )

    def _add_rounded(self, name: str, rows: _Ints, written: pa.ChunkedArray) -> None:
        for row, text in zip(rows + self._rows + 1, written, strict=True):
            add_written(name, text.as_py(), row, self._name, self.rounded)
            if name in self.rounded:
                return

    def _count_blank_lines(self, content: bytes, rows: int) -> None:
        """Counts blank lines in a file of one column, where some programs write them for nulls.
        `rows`: the number of rows in `content`."""
        ends = np.count_nonzero(np.frombuffer(content, np.uint8) == ord("\n"))
        if b"\r" not in content and ends + (not content.endswith(b"\n")) == rows:
            return  # every line is a row
        if not any(two in content for two in _TWO_ROW_ENDS) and not content.startswith(
            (b"\n", b"\r")
        ):
            return
        start, row = 0, self._rows
        for found in _QUOTED_OR_ROW_END.finditer(content):
            if found[1] is None:
                continue
            if found.start() == start:
                before, first = self.remarks.get(_BLANK_LINES, (0, f"behind row {row}"))
                self.remarks[_BLANK_LINES] = before + 1, first
            else:
                row += 1
            start = found.end()

    def _refuse_bytes(self, table: pa.Table) -> None:
        for field in table.schema:
            if not pa.types.is_binary(field.type):
                continue
            if field.name not in top_level(table.schema, self._columns):
                continue
            values = table.column(field.name)
            for number, value in enumerate(values, self._rows + 1):
                content = value.as_buffer()
                try:
                    str(content if content is not None else b"", "utf-8")
                except UnicodeDecodeError:
                    shown = content.to_pybytes()[:_SHOWN]
                    raise DataError(
                        f"{self._name}: column {field.name!r} of row {number} is not UTF-8: "
                        f"{shown!r}; if it is Latin-1, "
                        f"write it as UTF-8: {iconv('LATIN1', self._name)}"
                    ) from None


class RowEnds:
    """Finds where rows end in a file that is given chunk by chunk: which quotes open a field, and
    which close it.

    A run of adjacent quotes acts as one. At a field's start, a run of odd length opens a quoted
    field, or closes the open one. Anywhere else, a run of odd length closes the open field, or is
    text. A run of even length changes nothing. So the state after a run is the parity of the odd
    runs at field starts since the last odd run elsewhere.
    """

    def __init__(self) -> None:
        self._quoted = False  # before the quotes at the end of `_tail`
        # The last byte that is not a quote; and one or two quotes, if an odd or an even number of
        # quotes follows it.
        self._tail = b"\n"

    @property
    def is_quoted(self) -> bool:
        """Whether the bytes so far end within a quoted field."""
        if len(self._tail) != 2:
            return self._quoted
        return not self._quoted and self._tail[:1] in b",\r\n"

    def last(self, content: bytes) -> int:
        """As TextRows.last_row_end. A "\\r" at the end of `content` may be half of a line end, and
        ends no row yet."""
        if len(self._tail) == 1 and b'"' not in content:
            self._tail = content[-1:] or self._tail
            if self._quoted:
                return 0
            return content.rfind(b"\n") + 1 or _last_return(content)
        before = len(self._tail)
        whole = self._tail + content
        data = np.frombuffer(whole, np.uint8)
        pending = len(whole) - len(whole.rstrip(b'"'))
        quotes = np.flatnonzero(data == ord('"'))
        quotes = quotes[: len(quotes) - pending]
        at, states = self._states(data, quotes)
        end = _last_outside(whole, data, ord("\n"), at, states)
        if end < before:
            end = _last_outside(whole, data, ord("\r"), at, states)
        self._quoted = bool(states[-1])
        rest = len(whole) - pending
        self._tail = whole[rest - 1 : rest] + b'"' * (pending and 2 - pending % 2)
        return max(0, end + 1 - before)

    def _states(self, data: npt.NDArray[np.uint8], quotes: _Ints) -> tuple[_Ints, _Bools]:
        """(indices of quotes [n], whether a quoted field is open [n + 1]: before the first of them,
        and after each)"""
        opening = quotes[int(self._quoted) :: 2]
        if _MAY_OPEN[
            data[opening - 1]
        ].all():  # every second quote opens a field, or doubles the quote before it
            states = np.empty(len(quotes) + 1, dtype=np.bool_)
            states[0::2], states[1::2] = self._quoted, not self._quoted
            return quotes, states
        first = np.flatnonzero(np.diff(quotes, prepend=-2) != 1)
        starts = quotes[first]
        odd = np.diff(first, append=len(quotes)) % 2 == 1
        at_start = _STARTS_FIELD[data[starts - 1]]
        toggles = np.cumsum(odd & at_start)
        resets = np.maximum.accumulate(np.where(odd & ~at_start, np.arange(len(odd)), -1))
        known = np.where(resets >= 0, toggles[resets], -int(self._quoted))
        return starts, np.concatenate([[self._quoted], (toggles - known) % 2 == 1])


def _last_outside(
    whole: bytes, data: npt.NDArray[np.uint8], mark: int, at: _Ints, states: _Bools
) -> int:
    """The index of the last row end outside of quoted fields; -1 if there is none."""
    last = whole.rfind(b"\n") if mark == ord("\n") else -1
    if last >= 0 and not states[np.searchsorted(at, last)]:
        return last
    places = np.flatnonzero(data == mark)
    if mark == ord("\r"):
        places = places[places + 1 < len(data)]
        places = places[data[places + 1] != ord("\n")]
    outside = places[~states[np.searchsorted(at, places)]]
    return int(outside[-1]) if len(outside) else -1


def _last_return(content: bytes) -> int:
    """The index after the last "\\r", in content without "\\n". The last byte does not count: it
    may be half of "\\r\\n"."""
    return content.rfind(b"\r", 0, len(content) - 1) + 1


def _parse(
    content: bytes,
    schema: pa.Schema | None = None,
    names: list[str] | None = None,
    ragged: Any = None,
    *,
    fill_missing: bool = False,
) -> pa.Table:
    """Parses `content` in this thread, as one block, so that a row may be of any length. `names`:
    of the columns; None if the header line is part of `content`."""
    if names is not None and content.startswith(BYTE_ORDER_MARK):
        content = BYTE_ORDER_MARK + content  # pyarrow removes one, and this one is part of a value
    types = {} if schema is None else {field.name: field.type for field in schema}
    return pa.csv.read_csv(
        pa.BufferReader(content),
        pa.csv.ReadOptions(
            use_threads=False,
            block_size=min(len(content) + 1, _BLOCK_LIMIT),
            column_names=names,
        ),
        pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=ragged),
        pa.csv.ConvertOptions(
            column_types=types,
            include_columns=list(types) or None,
            include_missing_columns=fill_missing,
            true_values=_TRUE,
            false_values=_FALSE,
        ),
    )


def _may_have_hexadecimals(content: bytes) -> bool:
    """Whether "0x" or "0X" occurs. A search for one byte is many times faster than for two."""
    return any(mark in content and b"0" + mark in content for mark in (b"x", b"X"))


def _may_have_leading_zeros(content: bytes) -> bool:
    """Whether some field may consist of digits that begin with a zero."""
    if _ZEROS_FIRST.match(content):
        return True
    data = np.frombuffer(content, np.uint8)
    for at in range(0, len(data), _AT_ONCE):
        piece = data[at : at + _AT_ONCE + 2]
        # Commas, line ends, quotes and spaces are all bytes up to the comma.
        found = piece[:-2] <= ord(",")
        found &= piece[1:-1] == ord("0")
        found &= piece[2:] - ord("0") < 10
        places = np.flatnonzero(found)
        # Spaces before a number are ignored, but most spaces are in the middle of text.
        spaced = piece[places] == ord(" ")
        places = places[~spaced | (piece[np.maximum(places - 1, 0)] <= ord(","))]
        if any(_ZEROS_FIRST.match(content, at + int(place) + 1) for place in places):
            return True
    return False


def _matches(texts: pa.ChunkedArray, pattern: str) -> _Bools:
    found: _Bools = pc.match_substring_regex(texts, pattern).to_numpy()
    return found


def _negative(table: pa.Table, name: str) -> _Ints:
    """The rows in which the column is below zero."""
    return np.flatnonzero(pc.less(table.column(name), 0).fill_null(False).to_numpy())


def _merge(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Merges the types of two row groups of a shard. Types that have no common one become text, as
    they would within one row group."""
    kinds = [widest(a.type, b.type) or pa.string() for a, b in zip(one, other, strict=True)]
    return pa.schema([pa.field(name, kind) for name, kind in zip(one.names, kinds, strict=True)])


def _header_end(content: bytes) -> int:
    """The index after the first line that is not blank; 0 if there is none."""
    mark = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    body = content[mark:]
    row = 0
    for found in _QUOTED_OR_ROW_END.finditer(body):
        if found[1] is None:
            continue
        if found.start() > row:
            return mark + found.end()
        row = found.end()
    return 0
