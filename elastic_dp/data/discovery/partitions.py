"""Partition columns, whose values are in the names of folders, as Hive, Spark, DuckDB and Polars
write them: `year=2024/month=01/a.parquet`.

`convert` writes them as columns. Training does not read them, and warns. A column is int64 if its
value is an integer without leading zeros in every folder, and text otherwise. Escapes such as `%20`
are decoded.
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
    """The partition columns of files with these names."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._folders = {folder: parts_of(folder) for folder in {_folder(name) for name in names}}
        keys = dict.fromkeys(
            key for folder in sorted(self._folders) for key in self._folders[folder]
        )
        self._types = {key: self._type(key) for key in keys}

    def fields(self, there: pa.Schema, wanted: Sequence[str] | None = None) -> list[pa.Field]:
        """The partition columns that are `wanted` (None: all) and are not in `there`, the schema of
        the files."""
        return [
            pa.field(key, kind)
            for key, kind in self._types.items()
            if key not in there.names and (wanted is None or key in wanted)
        ]

    def column(self, field: pa.Field, name: str, rows: int) -> pa.Array:
        """The values [rows] of one of `fields` in the file `name`."""
        value = self._folders[_folder(name)].get(field.name)
        whole = value is not None and pa.types.is_integer(field.type)
        return pa.repeat(pa.scalar(int(value) if whole and value else value, field.type), rows)

    def _type(self, key: str) -> pa.DataType:
        values = {parts[key] for parts in self._folders.values() if key in parts} - {None}
        whole = all(_WHOLE.fullmatch(value) for value in values if value is not None)
        return pa.int64() if whole and values else pa.string()


def parts_of(folder: str) -> dict[str, str | None]:
    """The value of each partition column in the path of a folder; None for a null."""
    found = (_PART.fullmatch(part) for part in folder.split("/"))
    return {unquote(m[1]): None if m[2] == _NULL else unquote(m[2]) for m in found if m}


def partition_names(folders: Iterable[tuple[str, str]]) -> list[str]:
    """The partition columns in these paths. `folders`: (path of the data set's root, path below
    it). A column above the root counts only if its value differs between roots, as in a list of
    files of several partitions."""
    below = dict[str, None]()
    above: dict[str, set[str | None]] = {}
    for root, folder in folders:
        below |= dict.fromkeys(parts_of(folder))
        for key, value in parts_of(root).items():
            above.setdefault(key, set()).add(value)
    return [*below, *(key for key, values in above.items() if len(values) > 1 and key not in below)]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
