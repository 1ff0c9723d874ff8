"""Checks a Parquet footer before pyarrow reads the metadata of its column chunks, which can end the
process.

`RowGroupMetaData.column` and `ColumnChunkMetaData.statistics` call C++ code whose exceptions are
not caught. A damaged footer, or one by a faulty writer, would end the worker without a message. The
footer is encoded in Thrift's compact protocol; field numbers are those of parquet.thrift.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow.parquet as pq

I64, BINARY, LIST, STRUCT = 6, 8, 9, 12
_TRUE, _FALSE, _BYTE, _DOUBLE, _SET = 1, 2, 3, 7, 10
_INTEGERS = (4, 5, I64)
_TYPES = (
    "BOOLEAN",
    "INT32",
    "INT64",
    "INT96",
    "FLOAT",
    "DOUBLE",
    "BYTE_ARRAY",
    "FIXED_LEN_BYTE_ARRAY",
)
_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_CODECS = 8
_MOST = 1 << 48
_VARINT = re.compile(rb"[\x80-\xff]*[\x00-\x7f]")


def refuse_what_ends_the_process(tail: memoryview | bytes, footer: pq.FileMetaData) -> None:
    """Raises OSError for such a footer. `tail`: its bytes in the file."""
    leaves = [footer.schema.column(number) for number in range(footer.num_columns)]
    facts = [
        (leaf.physical_type, leaf.length, leaf.max_repetition_level, leaf.max_definition_level)
        for leaf in leaves
    ]
    try:
        for number, group in enumerate(_struct(bytes(tail), 0)[0].get(4, [])):
            if not 0 <= group.get(3, 0) <= _MOST:
                raise OSError(f"row group {number} has {group[3]} rows")
            chunks = group.get(1, [])
            if len(chunks) != len(leaves):
                raise OSError(
                    f"row group {number} has {len(chunks)} columns, and its schema {len(leaves)}"
                )
            for chunk, leaf, fact in zip(chunks, leaves, facts, strict=True):
                if found := _contradiction(chunk.get(3), group.get(3, 0), *fact):
                    raise OSError(
                        f"its footer contradicts itself: column {leaf.path!r} of row group "
                        f"{number} has {found}"
                    )
    except (AttributeError, IndexError, RecursionError, TypeError) as error:
        raise OSError(f"its footer is not as Parquet has it: {error}") from error


def _contradiction(
    facts: dict[int, Any] | None,
    rows: int,
    physical: str,
    length: int,
    repetition: int,
    definition: int,
) -> str:
    """In what the metadata of a column chunk contradicts the schema; "" if in nothing."""
    if facts is None:
        return ""  # it is encrypted: see encryption.py
    kind = facts.get(1, -1)
    if not 0 <= kind < len(_TYPES) or _TYPES[kind] != physical:
        return f"the type {kind}, and {physical} in the schema"
    if not 0 <= facts.get(4, 0) < _CODECS:
        return f"the unknown compression {facts[4]}"
    for field in (5, 6, 7):  # values, bytes decompressed, bytes compressed
        if not 0 <= facts.get(field, 0) <= _MOST:
            return f"{facts[field]} values or bytes"
    values = facts.get(5, 0)
    if values < rows or (values > rows and not repetition):
        return f"{values} values for {rows} rows"  # some rows would be lost
    if sizes := facts.get(16):
        for field, level in ((2, repetition), (3, definition)):
            if (count := len(sizes.get(field, ()))) not in (0, level + 1):
                return f"{count} counts for levels up to {level}"
        if 1 in sizes and physical != "BYTE_ARRAY":
            return f"the size of texts, and is {physical}"
    if statistics := facts.get(12):
        needed = length if physical == "FIXED_LEN_BYTE_ARRAY" else _BYTES.get(physical, 0)
        for field in (1, 2, 5, 6):
            if len(statistics.get(field, b"")) < needed and field in statistics:
                return f"a bound of {len(statistics[field])} bytes, and is {physical}"
    return ""


def _struct(content: bytes, at: int) -> tuple[dict[int, Any], int]:
    """(fields by number, index after the struct). Integers are decoded, lists of integers are
    not."""
    fields: dict[int, Any] = {}
    last = 0
    while head := content[at]:
        at += 1
        kind = head & 15
        if head > 15:
            last += head >> 4
        else:
            last, kind, at = next_field(content, at - 1, last)
        if kind in _INTEGERS:
            number = content[at]
            if number > 127:
                number, at = varint(content, at)
            else:
                at += 1
            fields[last] = (number >> 1) ^ -(number & 1)
        elif kind == STRUCT:
            fields[last], at = _struct(content, at)
        else:
            fields[last], at = _value(content, at, kind)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == BINARY:
        size, at = varint(content, at)
        if at + size > len(content):
            raise IndexError("a text goes past its end")
        return content[at : at + size], at + size
    if kind in (LIST, _SET):
        return _list(content, at)
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in (_BYTE, _DOUBLE):
        size = 1 if kind == _BYTE else 8
        return content[at : at + size], at + size
    raise IndexError(f"there is a field of type {kind}")


def _list(content: bytes, at: int) -> tuple[Any, int]:
    size, kind, at = list_header(content, at)
    items: list[Any] = []
    for _ in range(size):
        item: Any = None
        if kind in _INTEGERS:
            found = _VARINT.match(content, at)
            if found is None:
                raise IndexError("an integer goes past its end")
            at = found.end()
        elif kind == STRUCT:
            item, at = _struct(content, at)
        else:
            item, at = _value(content, at, _BYTE if kind in (_TRUE, _FALSE) else kind)
        items.append(item)
    return items, at


def next_field(content: bytes, at: int, last: int) -> tuple[int, int, int]:
    """(number of the field whose header is at index `at`, type, index after the header). `last`:
    the number of the field before it."""
    head = content[at]
    if head > 15:
        return last + (head >> 4), head & 15, at + 1
    number, at = varint(content, at + 1)
    return (number >> 1) ^ -(number & 1), head & 15, at


def list_header(content: bytes, at: int) -> tuple[int, int, int]:
    """(number of items, their type, index of the first one)"""
    size, kind = content[at] >> 4, content[at] & 15
    at += 1
    if size == 15:
        size, at = varint(content, at)
    if size > len(content):
        raise IndexError(f"a list would have {size} items")
    return size, kind, at


def skip(content: bytes, at: int, kind: int) -> int:
    """The index after a value of this type."""
    if kind == STRUCT:
        return _struct(content, at)[1]
    if kind in _INTEGERS:
        return varint(content, at)[1]
    return _value(content, at, kind)[1]


def varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := content[at]) > 127:
        at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
    return number | byte << shift, at + 1
