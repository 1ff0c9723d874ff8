"""Numbers of CSV files that the type of their column changes (see exact_numbers.py)."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from elastic_dp.data.columns.schema import top_level
from elastic_dp.data.formats.csv_dialect import Dialect
from elastic_dp.data.formats.exact_numbers import (
    LeadingZeros,
    Rounded,
    add_whole_numbers,
    add_written,
    large_floats,
)
from elastic_dp.errors import DataError

_HEXADECIMAL = r"^\s*0[xX]"
_LEADING_ZEROS = r"^\s*[+-]?0[0-9]+\s*$"
_CASE = np.uint8(0xDF)  # the bits of a letter without the one of its case
_AT_ONCE = 1 << 17  # bytes that are compared together: arrays for more are fresh memory each time

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class CsvNumbers:
    """Checks a file piece by piece. `columns`: those that the job reads; None: all."""

    def __init__(self, name: str, columns: list[str] | None, dialect: Dialect) -> None:
        self._name, self._columns, self._dialect = name, columns, dialect
        self.rounded: Rounded = {}
        self.leading_zeros: LeadingZeros = {}

    def check(self, content: bytes, table: pa.Table, names: list[str], before: int) -> None:
        """Finds numbers that their column's type changes. Where the parsed values do not tell, the
        columns are parsed again as text. `table`: parsed `content`. `names`: of all columns.
        `before`: rows of the file before these."""
        table = table.select([n for n in table.column_names if table.column_names.count(n) == 1])
        add_whole_numbers(table, before, self._name, self.rounded)
        floats = {leaf: rows for leaf, rows in large_floats(table) if leaf not in self.rounded}
        whole = [f.name for f in table.schema if f.type == pa.int64()]
        codes = [f.name for f in table.schema if f.type in (pa.int64(), pa.float64())]
        codes = [name for name in codes if name not in self.leading_zeros]
        hexadecimal, leading_zeros = (
            _zero_first(content, self._dialect) if whole or codes else (False, False)
        )
        negative = {name: _negative(table, name) for name in whole} if hexadecimal else {}
        negative = {name: rows for name, rows in negative.items() if len(rows)}
        codes = codes if leading_zeros else []
        texts_of = dict.fromkeys((*floats, *negative, *codes))
        if not texts_of:
            return
        as_text = pa.schema([(name, pa.string()) for name in texts_of])
        texts = self._dialect.parse(content, as_text, names)
        for name, rows in floats.items():
            values = table.column(name).take(rows).to_numpy()
            # What is written with a fraction or an exponent is no whole number, unless it is too
            # large for float64.
            written = texts.column(name).take(rows)
            matches = _matches(written, "^[^.eE]*$") | np.isinf(values)
            self._add_rounded(name, rows[matches] + before, written.filter(pa.array(matches)))
        for name, rows in negative.items():
            written = texts.column(name).take(rows)
            matches = _matches(written, _HEXADECIMAL)
            if matches.any() and name in top_level(table.schema, self._columns):
                row = int(rows[matches][0]) + before + 1
                self._refuse_hexadecimal(name, row, written.filter(pa.array(matches))[0].as_py())
        for name in codes:
            found = np.flatnonzero(_matches(texts.column(name).fill_null(""), _LEADING_ZEROS))
            if len(found):
                row, text = int(found[0]), texts.column(name)[int(found[0])].as_py()
                self.leading_zeros[name] = f"{text!r} (row {before + row + 1} of {self._name})"

    def _refuse_hexadecimal(self, column: str, row: int, text: str) -> None:
        raise DataError(
            f"{self._name}: column {column!r} of row {row} is {text!r}, which does not fit into "
            "int64; write it as a decimal number or with a letter that makes it text, or leave "
            "the column out"
        )

    def _add_rounded(self, name: str, rows: _Ints, written: pa.ChunkedArray) -> None:
        for row, text in zip(rows + 1, written, strict=True):
            add_written(name, text.as_py(), row, self._name, self.rounded)
            if name in self.rounded:
                return


def _zero_first(content: bytes, dialect: Dialect) -> tuple[bool, bool]:
    """(whether some field may begin with "0x", whether some field may consist of digits that begin
    with a zero)"""
    delimiter = dialect.separator[0]
    field_end = b"(?:[" + re.escape(dialect.separator) + rb"\r\n]|\Z)"
    zeros_first = re.compile(rb'0[0-9]+[ \t]*"?' + field_end)
    start = 1 if content[:1] in (b"+", b"-") else 0
    hexadecimal = content[start : start + 2] in (b"0x", b"0X")
    leading_zeros = zeros_first.match(content, start) is not None
    data = np.frombuffer(content, np.uint8)
    for at in range(0, len(data), _AT_ONCE):
        piece = data[at : at + _AT_ONCE + 2]
        # Commas, line ends, quotes, spaces and plus signs are all bytes up to the comma. Digits and
        # letters are bytes from the zero on.
        found = piece[:-2] <= ord("-")
        if delimiter > ord("-"):
            found |= piece[:-2] == delimiter
        found &= piece[1:-1] == ord("0")
        found &= piece[2:] >= ord("0")
        places = np.flatnonzero(found)
        if not len(places):
            continue
        following = piece[places + 2]
        if not hexadecimal:
            hexadecimal = bool((following & _CASE == ord("X")).any())
        if leading_zeros:
            continue
        places = places[following <= ord("9")]
        # Spaces before a number are ignored, and "-" is its sign, but most of both are within text
        # and dates.
        last, before = piece[places], piece[np.maximum(places - 1, 0)]
        within = (last == ord(" ")) | (last == ord("-"))
        places = places[~within | (places == 0) | (before <= ord(",")) | (before == delimiter)]
        leading_zeros = any(zeros_first.match(content, at + int(place) + 1) for place in places)
    return hexadecimal, leading_zeros


def _matches(texts: pa.ChunkedArray, pattern: str) -> _Bools:
    found: _Bools = pc.match_substring_regex(texts, pattern).to_numpy()
    return found


def _negative(table: pa.Table, name: str) -> _Ints:
    """The rows in which the column is below zero."""
    return np.flatnonzero(pc.less(table.column(name), 0).fill_null(False).to_numpy())
