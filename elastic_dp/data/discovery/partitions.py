"""Columns that only the names of folders hold, as Hive, Spark, DuckDB and Polars write them:
`year=2024/month=01/a.parquet`.

`convert` writes them as columns. Training does not read them, and says so. A value is a whole
number if it is written as one in every folder, without zeros in front, and text otherwise; escapes
such as `%20` are what they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

import pyarrow as pa

_PART = re.compile(r"([^/=]+)=([^/]*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")


class Partitions:
    """Of files by these names."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._folders = {folder: parts_of(folder) for folder in {_folder(name) for name in names}}
        keys = dict.fromkeys(
            key for folder in sorted(self._folders) for key in self._folders[folder]
        )
        self._types = {key: self._type(key) for key in keys}

    def fields(self, there: pa.Schema, wanted: Sequence[str] | None = None) -> list[pa.Field]:
        """Those that are wanted and that the files, whose columns are `there`, do not have
        themselves."""
        return [
            pa.field(key, kind)
            for key, kind in self._types.items()
            if key not in there.names and (wanted is None or key in wanted)
        ]

    def column(self, field: pa.Field, name: str, rows: int) -> pa.Array:
        """One of `fields` in the file of this name."""
        value = self._folders[_folder(name)].get(field.name)
        whole = value is not None and pa.types.is_integer(field.type)
        return pa.repeat(pa.scalar(int(value) if whole and value else value, field.type), rows)

    def _type(self, key: str) -> pa.DataType:
        values = {parts[key] for parts in self._folders.values() if key in parts} - {None}
        whole = all(_WHOLE.fullmatch(value) for value in values if value is not None)
        return pa.int64() if whole and values else pa.string()


def parts_of(folder: str) -> dict[str, str | None]:
    """By column: the value, None for a null."""
    found = (_PART.fullmatch(part) for part in folder.split("/"))
    return {unquote(m[1]): None if m[2] == _NULL else unquote(m[2]) for m in found if m}


def partition_names(folders: Iterable[tuple[str, str]]) -> list[str]:
    """The columns in the names of these folders, of which each is split where the data set begins.
    What is above that counts only if it is not the same for all, as in a list of files of several
    partitions."""
    below = dict[str, None]()
    above: dict[str, set[str | None]] = {}
    for root, folder in folders:
        below |= dict.fromkeys(parts_of(folder))
        for key, value in parts_of(root).items():
            above.setdefault(key, set()).add(value)
    return [*below, *(key for key, values in above.items() if len(values) > 1 and key not in below)]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
