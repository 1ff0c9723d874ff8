"""CSV with a header line and the double quotes of RFC 4180, parsed by pyarrow.

A newline inside quotes does not end a row. A quote opens a quoted field only at the field's start;
a quoted field ends at the first quote that is not doubled. These are pyarrow's rules, so shards are
cut where pyarrow ends rows. A quote that is never closed would turn the rest of the file into one
value, and is refused. See docs/csv-and-jsonl.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.columns.schema import top_level, widest
from elastic_dp.data.formats.csv_dialect import Dialect
from elastic_dp.data.formats.csv_escapes import escaped_quote
from elastic_dp.data.formats.csv_headers import NUMBERS, has_numbers
from elastic_dp.data.formats.csv_numbers import CsvNumbers
from elastic_dp.data.formats.csv_row_ends import RowEnds, header_end, quoted_or_row_end
from elastic_dp.data.formats.exact_numbers import LeadingZeros, Rounded
from elastic_dp.data.formats.file_format import RowGroupLocation, Scan, ShardAt
from elastic_dp.data.formats.lfs_pointer import refuse_pointer
from elastic_dp.data.formats.row_group_headers import RowGroupHeaders
from elastic_dp.data.formats.text import (
    BYTE_ORDER_MARK,
    GROUP_BYTES,
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
_QUOTED_FIELD = re.compile(r'"(?<![^,;|\t]")[^"]*+(?:""[^"]*+)*+"')
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_ONE = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
_EXCEL_LINE = re.compile("sep=.", re.IGNORECASE)
_TWO_ROW_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BLANK_LINES = (
    "blank lines of CSV files with one column are not rows (an empty text is written as two quotes)"
)
_RETURNS = (
    "lone carriage returns in CSV files with one column end rows, beside other line ends (within a "
    "text, which pandas writes so, they belong in quotes)"
)
_WHOLE = "files in an encoding that cannot be cut, each of which is read as one row group"
_BLANK = re.compile(rb"[\r\n]*")
_SHOWN = 80  # characters of a row, in an error message
_AT_ONCE = 1 << 17  # bytes that are compared together: arrays for more are fresh memory each time


class Csv:
    name = "csv"
    endings: tuple[str, ...] = with_codecs(".csv", ".tsv")
    scans_content = True
    growth = 1.0
    merge = staticmethod(widest)

    def __init__(self, options: CsvOptions | None = None) -> None:
        self._options = options or CsvOptions()
        self._headers = RowGroupHeaders()

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        dialect = Dialect.of(shard.name, self._options)
        if dialect.can_be_cut:
            return scan_rows(shard, columns, CsvRows(shard.name, columns, dialect), _merge)
        rows = CsvRows(shard.name, columns, dialect.of_decoded())
        rows.remarks[_WHOLE] = 1, "all rows"
        return scan_rows(shard, columns, rows, _merge, self._whole)

    def first_columns(self, shard: ShardAt, columns: Sequence[str] | None) -> pa.Schema | None:
        dialect = Dialect.of(shard.name, self._options)
        if not dialect.can_be_cut:
            return None
        rows = CsvRows(shard.name, columns, dialect)
        rows.head(first_bytes(shard, HEAD_BYTES), False)
        return pa.schema([(name, pa.null()) for name in rows.names]) if rows.names else None

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        dialect = Dialect.of(shard.name, self._options)
        content = bytes(shard.read(location.start, location.end))
        if is_compressed(shard) or not dialect.can_be_cut:
            content = self._whole(shard, content)
        else:
            if shard.head:
                content = self._headers.read(shard, shard.head) + content
            content = dialect.utf8(content, shard.name)
        return dialect.parse(content, schema, fill_missing=True)

    def close(self) -> None:
        self._headers.clear()

    def _whole(self, shard: ShardAt, content: bytes) -> bytes:
        """A whole shard as UTF-8."""
        content = decompress(shard, content) if is_compressed(shard) else content
        return Dialect.of(shard.name, self._options).utf8(content, shard.name)


class CsvRows:
    """A `TextRows`. Rows are counted from 1; the header line and blank lines do not count."""

    def __init__(
        self, name: str, columns: Sequence[str] | None, dialect: Dialect | None = None
    ) -> None:
        self._name, self._columns = name, columns
        self._dialect = dialect or Dialect()
        self._header = b""  # in UTF-8
        self.names: list[str] = []  # of the header line
        self._ends = RowEnds(self._dialect.separator)
        self._has_rest = False  # the next rows are the last ones, and were not given to `_ends`
        self._rows = 0  # parsed so far
        wanted = None if columns is None else list(columns)
        self._numbers = CsvNumbers(name, wanted, self._dialect)
        self.rounded: Rounded = self._numbers.rounded
        self.leading_zeros: LeadingZeros = self._numbers.leading_zeros
        self.remarks: dict[str, tuple[int, str]] = {}

    def head(self, content: bytes, is_all: bool) -> int | None:
        refuse_utf_16(self._name, content)
        refuse_pointer(self._name, content)
        end = header_end(content, self._dialect.separator)
        if end and (end < len(content) or is_all):  # otherwise "\n" may follow "\r"
            self._refuse_utf_8_mark(content)
            self._header = self._dialect.utf8(content[:end], f"the header line of {self._name}")
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

    def takes_rest(self, content: bytes) -> bool:
        self._has_rest = content.endswith(b"\n")
        return self._has_rest

    def parse(self, content: bytes, schema: pa.Schema | None = None) -> pa.Table:
        is_rest, self._has_rest = self._has_rest, False
        if is_rest:  # which begins with a row
            self._ends = RowEnds(self._dialect.separator)
        content = self._dialect.utf8(content, f"{self._name}, after row {self._rows},")
        ragged: list[Any] = []

        def keep(row: Any) -> str:
            ragged.append(row)
            return "error"

        if _BLANK.fullmatch(content):
            if schema is None and len(self.names) == 1:
                self._look_at_lines(content, 0)
            return self._dialect.parse(self._header, schema, fill_missing=schema is not None)
        if schema is None and (at := escaped_quote(content, self._dialect.separator)) >= 0:
            self._refuse_escapes(at, content)
        try:
            table = self._dialect.parse(
                content, schema, self.names, keep, fill_missing=schema is not None
            )
        except pa.ArrowInvalid:
            if is_rest:
                self._look_through(content)
            if ragged:
                self._refuse_ragged(ragged[0])
            raise
        if schema is None:
            if is_rest and _may_end_quoted(table):
                self._look_through(content)
            if len(self.names) == 1:
                self._look_at_lines(content, table.num_rows)
            self._refuse_bytes(table)
            self._numbers.check(content, table, self.names, self._rows)
        self._rows += table.num_rows
        return table

    def end(self) -> None:
        if self._ends.is_quoted:
            self._refuse_open_quote(self._rows)

    def _look_through(self, content: bytes) -> None:
        """Finds out whether `content`, the last rows of the file, ends within a quoted field."""
        for at in range(0, len(content), GROUP_BYTES):
            self._ends.last(content[at : at + GROUP_BYTES])

    def _check_header(self) -> None:
        if b"\0" in self._header:
            raise DataError(
                f"{self._name} has zero bytes in its header line, so it is UTF-16 or no "
                "text; if UTF-16, write it as "
                f"UTF-8: {iconv('UTF-16LE', self._name)}"
            )
        try:
            names = self.names = list(_column_names(self._dialect, self._header))
        except UnicodeDecodeError:
            raise DataError(
                f"{self._name} has a header line that is not UTF-8; if it is Latin-1, set "
                'csv_options={"encoding": "latin-1"}, or write it as UTF-8: '
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
        if has_numbers(names):
            self.remarks[NUMBERS] = 1, repr(line[:_SHOWN])
        if len(names) == 1 and not self._dialect.is_given:
            self._refuse_other_separator(names[0], line)

    def _refuse_utf_8_mark(self, content: bytes) -> None:
        if self._dialect.encoding != "utf-8" and content.startswith(BYTE_ORDER_MARK):
            raise DataError(
                f"{self._name} begins with the byte-order mark of UTF-8, and is to be read as "
                f"{self._dialect.encoding} (csv_options); leave the encoding out"
            )

    def _refuse_other_separator(self, name: str, line: str) -> None:
        unquoted = _QUOTED_FIELD.sub("", line)
        own = self._dialect.delimiter
        for separator, word in _SEPARATORS.items():
            if separator != own and separator in unquoted:
                quoted = '"' + name.replace('"', '""') + '"'
                sep = separator.replace("\t", r"\t")
                raise DataError(
                    f"{self._name} has {word} and no {_ONE[own]} in its header line, and is read "
                    f'with {_SEPARATORS[own]}; set csv_options={{"delimiter": "{sep}"}}, or '
                    "rewrite it: "
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
        own = self._dialect.delimiter
        escaped = ""
        if '\\"' in row.text:
            escaped = ' If \\" stands for a quote in it, write it doubled ("").'
        raise DataError(
            f"cannot read {self._name}: row {number} has {row.actual_columns} field(s), and "
            "the header line has "
            f"{row.expected_columns}; fix or remove the row, and quote a field that holds a "
            f"{_ONE.get(own, repr(own))}.{escaped} It begins with {row.text[:_SHOWN]!r}"
        )

    def _refuse_escapes(self, at: int, content: bytes) -> None:
        """`content`: the next rows. `at`: where the field begins in it."""
        row = self._rows + 1 + sum(not blank for _, blank in self._lines(content[:at]))
        shown = content[at : at + _SHOWN].decode(errors="replace")
        raise DataError(
            f'{self._name}: a quoted field of row {row} holds a quote behind a backslash (\\") and '
            "goes on behind it, as programs write it that escape quotes; here quotes are doubled "
            '(""). Write the file so (Spark: option("escape", "\\""), pandas: doublequote=True), '
            f"or as Parquet. The field begins with {shown!r}"
        )

    def _refuse_open_quote(self, row: int) -> None:
        raise DataError(
            f'{self._name}: a quote (") in row {row} is never closed, so all that follows '
            "would be one value; was the "
            "file cut off? Close the quote, or double it and quote the whole field"
        )

    def _look_at_lines(self, content: bytes, rows: int) -> None:
        """Counts lines of a file of one column that may be something else: blank ones, which some
        programs write for nulls, and those that end with a "\\r" among others, which some write in
        a text. `rows`: the number of rows in `content`."""
        ends = np.count_nonzero(np.frombuffer(content, np.uint8) == ord("\n"))
        has_returns = b"\r" in content
        if not has_returns and ends + (not content.endswith(b"\n")) == rows:
            return  # every line is a row
        returns = has_returns and ends and _has_lone_return(content)
        blank = content.startswith((b"\n", b"\r")) or any(two in content for two in _TWO_ROW_ENDS)
        if not returns and not blank:
            return
        row, cut, others = self._rows, list[int](), False
        for end, is_blank in self._lines(content):
            if is_blank:
                self._remark(_BLANK_LINES, row)
                continue
            row += 1
            if end == b"\r":
                cut.append(row)
            else:
                others = True
        if others:
            for number in cut:
                self._remark(_RETURNS, number)

    def _lines(self, content: bytes) -> Iterator[tuple[bytes, bool]]:
        """(line end, whether the line is blank) of each line of `content` that ends there."""
        start = 0
        for found in quoted_or_row_end(self._dialect.separator).finditer(content):
            if found[1] is not None:
                yield found[1], found.start() == start
                start = found.end()

    def _remark(self, what: str, row: int) -> None:
        before, first = self.remarks.get(what, (0, f"behind row {row}"))
        self.remarks[what] = before + 1, first

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
                        'set csv_options={"encoding": "latin-1"}, or write it as UTF-8: '
                        f"{iconv('LATIN1', self._name)}"
                    ) from None


def _has_lone_return(content: bytes) -> bool:
    """Whether there is a "\\r" without a "\\n" behind it, but for the last byte."""
    data = np.frombuffer(content, np.uint8)
    pieces = (data[at : at + _AT_ONCE + 1] for at in range(0, len(data), _AT_ONCE))
    return any(((p[:-1] == ord("\r")) > (p[1:] == ord("\n"))).any() for p in pieces)


def _may_end_quoted(table: pa.Table) -> bool:
    """Whether the content, which ends with a newline, may end within a quoted field: then the last
    value of `table`, which was parsed from it, ends with that newline. No number, bool or time
    does."""
    last = table.column(table.num_columns - 1)[-1] if table.num_rows else None
    if last is None or not last.is_valid:
        return True
    if not pa.types.is_string(last.type) and not pa.types.is_binary(last.type):
        return False
    text = last.as_buffer()
    return text.size > 0 and text[text.size - 1] == ord("\n")


@lru_cache(maxsize=16)  # the files of a data set mostly have one header line
def _column_names(dialect: Dialect, header: bytes) -> tuple[str, ...]:
    return tuple(dialect.parse(header).column_names)


def _merge(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Merges the types of two row groups of a shard. Types that have no common one become text, as
    they would within one row group."""
    kinds = [widest(a.type, b.type) or pa.string() for a, b in zip(one, other, strict=True)]
    return pa.schema([pa.field(name, kind) for name, kind in zip(one.names, kinds, strict=True)])
