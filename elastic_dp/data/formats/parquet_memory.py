"""Estimates how much memory columns of a Parquet row group take while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
# Types that take more bytes in memory: dates and times of day are read as int32, then become int64.
_WIDTHS_IN_MEMORY = {"DATE": 12, "TIME": 12, "DECIMAL": 32}
_DICTIONARY_FACTOR = 4  # assumed number of times that a text of a dictionary occurs

_Width = tuple[int, int | None, bool]  # of a leaf column, see `widths_of`


def decoded_bytes(group: Any, widths: Sequence[_Width]) -> int:
    """An estimate of the memory that columns of a row group take while they are read: encoded,
    decoded, and for values in lists two levels of 2 bytes each. `widths`: from `widths_of`."""
    total = 0
    for number, width, is_repeated in widths:
        chunk = group.column(number)
        values = chunk.num_values
        total += chunk.total_compressed_size
        total += _text_bytes(chunk) if width is None else width * values
        if is_repeated:
            total += 4 * values + 8 * group.num_rows
    return total


def widths_of(footer: pq.FileMetaData, wanted: Sequence[int]) -> list[_Width]:
    """(number, bytes of a value in memory, whether it is within lists) of the leaf columns
    `wanted`. None bytes: they vary."""
    found: list[_Width] = []
    for number in wanted:
        column = footer.schema.column(number)
        width = None
        if column.physical_type != "BYTE_ARRAY":
            width = _WIDTHS.get(column.physical_type) or column.length
            width = _WIDTHS_IN_MEMORY.get(column.logical_type.type, width)
        found.append((number, width, column.max_repetition_level > 0))
    return found


def _text_bytes(chunk: pq.ColumnChunkMetaData) -> int:
    has_dictionary = any("DICTIONARY" in encoding for encoding in chunk.encodings)
    factor = _DICTIONARY_FACTOR if has_dictionary else 1
    return int(chunk.total_uncompressed_size * factor + 8 * chunk.num_values)
