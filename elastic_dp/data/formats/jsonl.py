"""JSON Lines: one JSON object per line. A newline is never inside a value, since JSON escapes it.

A line that is not one object is refused with its row number. NaN and Infinity are numbers, as
Python writes them. A file named `.json` may also be one array of objects: its first character
tells. Such a file cannot be cut, and is one row group. See docs/csv-and-jsonl.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial, reduce
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from elastic_dp.data.columns.schema import widest
from elastic_dp.data.formats.exact_numbers import LeadingZeros, Rounded, add_json, add_whole_numbers
from elastic_dp.data.formats.file_format import RowGroupLocation, Scan, ShardAt
from elastic_dp.data.formats.json_tables import refuse_table
from elastic_dp.data.formats.lfs_pointer import refuse_pointer
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

FIRST_BYTES = 1 << 20  # read to find out whether the columns that the job names exist
_BLOCK_LIMIT = (1 << 31) - 1
# Matches a null that is probably neither the value of a key nor in a list. The literal comes first
# in the pattern, because `re` searches for a literal prefix fast.
_ODD_NULL = re.compile(rb"null(?<![:,\[]null)(?<![:,\[] null)")
_BEFORE_NULL = 64  # bytes
# Matches content whose first row is null. pyarrow would end the process.
_NULL_FIRST = re.compile(rb"(?:\s|\xef\xbb\xbf)*+null")
_NOT_UTF_8 = re.compile(r"\\udc[89a-f]")
_SHOWN = 80  # bytes of a line
# Limit of lists and objects inside each other. Parquet and Arrow files that nest deeper cannot be
# read either.
MAX_NESTING = 100
# Limit of open brackets in a row that is given to pyarrow. pyarrow takes about 420 bytes of stack
# for each one, and a stack overflow ends the process. A row with fewer bytes needs no check.
_OPEN_BRACKETS = 500
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
# Bytes that are looked at together. A long row takes little memory, and arrays for more bytes are
# fresh memory each time.
_AT_ONCE = 1 << 18
_CASE = np.uint8(0xDF)
_ARRAYS = (
    "files that are one JSON array, each of which is read as one row group (JSON Lines is cut into "
    "several)"
)
_ONE_ROW = (
    "files named .json that hold a single row (if its rows are in a list of an object: jq -c "
    "'.data[]' file.json > rows.jsonl)"
)
_IN_ROW = re.compile(r"\.? in row (\d+)")
_JSON_ENDINGS = with_codecs(".json")
_SPACE = re.compile(r"[ \t\r\n]*")
_AROUND = 8  # bytes before and after a line break that are searched for the brackets of rows


class JsonLines:
    name = "jsonl"
    endings: tuple[str, ...] = with_codecs(".jsonl", ".ndjson", ".json")
    scans_content = True
    growth = 1.0
    merge = staticmethod(widest)

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        rows = JsonRows(shard.name)
        is_one = is_json(shard.name) and is_array(shard.name, first_bytes(shard, HEAD_BYTES))
        if not is_one:
            return scan_rows(shard, columns, rows, partial(_merge, shard.name))
        rows.remarks[_ARRAYS] = 1, "all rows"
        return scan_rows(shard, columns, rows, partial(_merge, shard.name), _unpack_array)

    def first_columns(self, shard: ShardAt, columns: Sequence[str] | None) -> pa.Schema | None:
        content = first_bytes(shard, FIRST_BYTES)
        if is_array(shard.name, content):
            return None
        start = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
        content = content[start : content.rfind(b"\n") + 1]
        return _parse(content).schema if content.strip() else None

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        content = shard.read(location.start, location.end)
        if is_compressed(shard):
            content = decompress(shard, content)
        if is_array(shard.name, content):
            content = lines_of_array(shard.name, content)
        return _parse(content, schema)

    def close(self) -> None:
        pass


class JsonRows:
    """A `TextRows`. Rows are counted from 1; blank lines do not count."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows = 0  # parsed so far
        self.rounded: Rounded = {}
        self.leading_zeros: LeadingZeros = {}  # stays empty: JSON does not allow them
        self.remarks: dict[str, tuple[int, str]] = {}

    def head(self, content: bytes, is_all: bool) -> int | None:
        refuse_utf_16(self._name, content)
        refuse_pointer(self._name, content)
        mark = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
        begins = content[mark:].lstrip()[:1]
        if begins == b"[":
            raise DataError(
                f"{self._name} is a JSON array, and JSON Lines has one object a line; rewrite it: "
                f"jq -c '.[]' {quote(self._name)} > rows.jsonl"
            )
        refuse_table(self._name, content[mark:])
        return mark if begins or is_all else None

    def last_row_end(self, content: bytes) -> int:
        return content.rfind(b"\n") + 1

    def takes_rest(self, content: bytes) -> bool:
        return False

    def parse(self, content: bytes, schema: pa.Schema | None = None) -> pa.Table:
        if not content or content.isspace():  # strip() would copy it
            table = pa.table({})
        else:
            try:
                table = self._infer(content) if schema is None else _parse(content, schema)
            except _TooDeep as error:
                raise self._too_deep(f"row {self._number_at(content, error.at)}") from None
            for field in table.schema:
                if _levels(field.type) > MAX_NESTING:
                    raise self._too_deep(f"column {field.name!r}")
            if schema is None:
                add_whole_numbers(table, self._rows, self._name, self.rounded)
                add_json(content, table, self._rows, self._name, self.rounded)
        self._rows += table.num_rows
        return table

    def end(self) -> None:
        """`parse` refuses a line that was cut off."""
        if self._rows == 1 and is_json(self._name):
            self.remarks[_ONE_ROW] = 1, "row 1"

    def _infer(self, content: bytes) -> pa.Table:
        self._check_utf_8(content)
        try:
            table = _parse(content)
        except _TooDeep:
            raise
        except pa.ArrowInvalid as error:
            lines = (line for line in content.split(b"\n") if line.strip())
            for number, line in enumerate(lines, self._rows + 1):
                if reason := _why_no_object(line):
                    self._refuse_line(number, line, reason)
            found = _IN_ROW.search(text := str(error))
            row = f"row {self._rows + int(found[1]) + 1}: " if found else ""
            way_out = "make the column one type" if "changed from" in text else "fix the value"
            raise DataError(
                f"cannot read {self._name}: {row}{_IN_ROW.sub('', text)}; {way_out}"
            ) from None
        if _has_row_of_nulls(table):
            self._refuse_null_rows(content)
        return table

    def _check_utf_8(self, content: bytes) -> None:
        """pyarrow does not check it, and the text would fail where it is used."""
        if content.isascii():
            return
        try:
            str(content, "utf-8")
        except UnicodeDecodeError as error:
            start = content.rfind(b"\n", 0, error.start) + 1
            line = content[start : content.find(b"\n", error.start) % (len(content) + 1)]
            number = self._number_at(content, start)
            raise DataError(
                f"{self._name}: {_column_not_utf_8(line)}row {number} is not UTF-8; if it is "
                "Latin-1, write it as "
                f"UTF-8: {iconv('LATIN1', self._name)}"
            ) from None

    def _refuse_null_rows(self, content: bytes) -> None:
        """pyarrow makes rows without values of them."""
        checked = 0
        for found in _ODD_NULL.finditer(content):
            at = found.start()
            before = content[max(0, at - _BEFORE_NULL) : at].rstrip()
            if at < checked or (before and not before.endswith((b"}", BYTE_ORDER_MARK))):
                continue
            start = content.rfind(b"\n", 0, at) + 1
            checked = content.find(b"\n", at) % (len(content) + 1)
            if reason := _why_no_object(content[start:checked]):
                number = self._number_at(content, start)
                self._refuse_line(number, content[start:checked], reason)

    def _too_deep(self, what: str) -> DataError:
        return DataError(
            f"cannot read {self._name}: {what} has more than {MAX_NESTING} lists and objects "
            "inside each other; write its "
            "value as text, or remove it"
        )

    def _number_at(self, content: bytes, start: int) -> int:
        """The number of the row whose line begins at `start`."""
        return self._rows + sum(map(bool, map(bytes.strip, content[:start].split(b"\n")))) + 1

    def _refuse_line(self, number: int, line: bytes, reason: str) -> None:
        raise DataError(
            f"cannot read {self._name}: row {number} is not a JSON object on one line ({reason}); "
            "fix or remove it, and if objects go over several lines: "
            f"jq -c . {quote(self._name)} > rows.jsonl. It begins with {line[:_SHOWN]!r}"
        )


def _parse(content: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """Parses `content` in this thread, as one block, so that a line may be of any length.

    `schema`: the columns to parse; None: infer all. Content must be parsed once without a schema
    before it is parsed with one: only then rows that would end the process are refused.
    """
    if schema is None:
        if _NULL_FIRST.match(content):
            raise pa.ArrowInvalid("the first row is null")
        _refuse_deep_rows(content)
    block_size = min(len(content) + 1, _BLOCK_LIMIT)
    reading = pa.json.ReadOptions(use_threads=False, block_size=block_size)
    options = pa.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    return pa.json.read_json(pa.BufferReader(content), reading, options)


def is_json(name: str) -> bool:
    """Whether a file is named `.json`, which may be an array, or no rows at all."""
    return name.lower().endswith(_JSON_ENDINGS)


def is_array(name: str, content: bytes) -> bool:
    """`content`: the first bytes of a file, or of one of its row groups, decompressed."""
    if not is_json(name):
        return False
    return bytes(content[:HEAD_BYTES]).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _unpack_array(shard: ShardAt, content: bytes) -> bytes:
    return lines_of_array(
        shard.name, decompress(shard, content) if is_compressed(shard) else content
    )


def lines_of_array(name: str, content: bytes) -> bytes:
    """The objects of an array as JSON Lines. They are copied as they are written, so that a number
    keeps its digits; a line break lies between values there, never inside a text."""
    try:
        text = str(content, "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 (at byte {error.start}); if it is Latin-1, write it as UTF-8: "
            f"{iconv('LATIN1', name)}"
        ) from None
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    lines: list[str] = []
    at = _behind_space(text, _behind_space(text, 0) + 1)
    while text[at : at + 1] != "]" or lines:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _bad_array(name, len(lines) + 1, text[at : at + _SHOWN], str(error)) from None
        if not isinstance(value, dict):
            reason = "it is another value than an object"
            raise _bad_array(name, len(lines) + 1, text[at : at + _SHOWN], reason)
        lines.append(text[at:end].replace("\r", " ").replace("\n", " "))
        at = _behind_space(text, end)
        if text[at : at + 1] != ",":
            break
        at = _behind_space(text, at + 1)
    end = _behind_space(text, at + 1)
    if text[at : at + 1] != "]" or end < len(text):
        at = end if text[at : at + 1] == "]" else at
        reason = "the array must go on with ',', or end with ']' and nothing behind it"
        raise _bad_array(name, len(lines), text[at : at + _SHOWN], reason)
    return "\n".join(lines).encode()


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _bad_array(name: str, row: int, shown: str, reason: str) -> DataError:
    return DataError(
        f"{name} is a JSON array, and cannot be read at row {row}: {reason}; there is {shown!r}. "
        "Fix the file, or was it cut off?"
    )


def _merge(name: str, one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Merges the types of two row groups of the file `name`."""
    try:
        return pa.unify_schemas([one, other], promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{name}: {error} in later rows; make the column one type") from None


class _TooDeep(pa.ArrowInvalid):
    """`at`: the index where the row begins."""

    def __init__(self, at: int) -> None:
        super().__init__(f"a row has more than {MAX_NESTING} lists and objects inside each other")
        self.at = at


def _refuse_deep_rows(content: bytes) -> None:
    """Raises _TooDeep. Counts the brackets of many rows together, and looks at single rows only
    where there are too many for one row."""
    at = 0
    while len(content) - at > _OPEN_BRACKETS:
        end = _row_end_before(content, at, at + _AT_ONCE)
        if end - at > 2 * _AT_ONCE:  # one long row: an array would take much memory
            _refuse_deep_rows_of(content, at, end)
        else:
            _refuse_deep_rows_in_parts(content, at, end)
        at = end + 1


def _refuse_deep_rows_in_parts(content: bytes, at: int, upto: int) -> None:
    """Like `_refuse_deep_rows`. The parts have half of the allowed brackets on average. `at` and
    `upto` lie between rows."""
    # "{" and "[" differ in the bit that _CASE clears
    opened = np.frombuffer(content, np.uint8, upto - at, at) & _CASE == ord("[")
    part_bytes = (upto - at) // (1 + 2 * int(np.count_nonzero(opened)) // _OPEN_BRACKETS)
    begin = at
    while begin < upto:
        end = _row_end_before(content, begin, min(begin + part_bytes, upto))
        if np.count_nonzero(opened[begin - at : end - at]) > _OPEN_BRACKETS:
            _refuse_deep_rows_of(content, begin, end)
        begin = end + 1


def _has_row_of_nulls(table: pa.Table) -> bool:
    """Whether a row has no value in any column. A row that is null itself has none."""
    if not all(column.null_count for column in table.columns):
        return False
    is_empty = [column.is_null() for column in table.columns]
    return not is_empty or bool(pc.any(reduce(pc.and_, is_empty)).as_py())


def _refuse_deep_rows_of(content: bytes, at: int, upto: int) -> None:
    """Like `_refuse_deep_rows`, row by row. `at` and `upto` lie between rows."""
    while upto - at > _OPEN_BRACKETS:
        end = _row_end_before(content, at, min(at + _OPEN_BRACKETS, upto))
        brackets = content.count(b"[", at, end) + content.count(b"{", at, end)
        if brackets > _OPEN_BRACKETS and _nesting(content[at:end]) > _OPEN_BRACKETS:
            raise _TooDeep(at)
        at = end + 1


def _row_end_before(content: bytes, at: int, limit: int) -> int:
    """The index of the last row end in `content[at:limit]`, or else of the first one after it."""
    end = content.rfind(b"\n", at, limit)
    return end if end >= 0 and _is_between_rows(content, end) else _row_end(content, limit)


def _is_between_rows(content: bytes, at: int) -> bool:
    """Whether the line break at index `at` ends a row: JSON has no "}" and "{" without a comma in
    between, and no line break inside a text. Unless the JSON is malformed before; then pyarrow has
    stopped there."""
    if content[at - 1 : at + 2] == b"}\n{":
        return True
    before, behind = content[max(0, at - _AROUND) : at], content[at : at + _AROUND]
    return before.rstrip().endswith(b"}") and behind.lstrip().startswith(b"{")


def _row_end(content: bytes, at: int) -> int:
    while (end := content.find(b"\n", at)) >= 0:
        if _is_between_rows(content, end):
            return end
        at = end + 1
    return len(content)


def _nesting(row: bytes) -> int:
    """The largest number of brackets that are open at the same time."""
    data = np.frombuffer(_TEXT.sub(b"", row), np.uint8)
    steps = np.zeros(256, np.int64)
    steps[[ord("["), ord("{")]], steps[[ord("]"), ord("}")]] = 1, -1
    level = deepest = 0
    for at in range(0, len(data), _AT_ONCE):
        levels = level + np.cumsum(steps[data[at : at + _AT_ONCE]])
        level, deepest = int(levels[-1]), max(deepest, int(levels.max()))
    return deepest


def _levels(kind: pa.DataType) -> int:
    levels, inner = 0, [kind]
    while inner := [at.field(n).type for at in inner for n in range(at.num_fields)]:
        levels += 1
    return levels


def _why_no_object(line: bytes) -> str:
    """Why the line is not a JSON object; "" if it is one, or is blank."""
    line = line.removeprefix(BYTE_ORDER_MARK).strip()
    if not line:
        return ""
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return str(error)
    return "" if isinstance(value, dict) else "it is another value"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key in found if sum(key == name for name, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _column_not_utf_8(line: bytes) -> str:
    """The words "column 'x' of " for a message; "" if the column cannot be found."""
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return ""
    pairs = row.items() if isinstance(row, dict) else ()
    named = next((key for key, value in pairs if _NOT_UTF_8.search(repr((key, value)))), "")
    return f"column {named!r} of " if named else ""
