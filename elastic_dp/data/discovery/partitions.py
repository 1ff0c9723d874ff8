"""Partition columns, whose values are in the names of folders, as Hive, Spark, DuckDB and Polars
write them: `year=2024/month=01/a.parquet`.

Training reads them as columns, and `convert` writes them as columns. A column is int64 if its value
is an integer without leading zeros in every folder, and text otherwise. Escapes such as `%20` are
decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from elastic_dp.errors import DataError

_PART = re.compile(r"([^/=]+)=([^/]*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")


class FolderColumns:
    """The partition columns of a data set, while its shards are added.

    `sources`: (root, paths of shards). `wanted`: the columns that are read; None: all. A column
    that the files have is read from the files.
    """

    def __init__(
        self, sources: Iterable[tuple[str, Iterable[str]]], wanted: Sequence[str] | None
    ) -> None:
        folders = sorted(
            {
                (root, path[len(root) :].rpartition("/")[0])
                for root, paths in sources
                for path in paths
                if "=" in path
            }
        )
        parts = [parts_of(f"{root}{folder}") for root, folder in folders]
        names = [n for n in partition_names(folders) if wanted is None or n in wanted]
        self.types = {name: _type_of({p[name] for p in parts if name in p}) for name in names}
        self._in_folders: dict[str, str] = {}  # first shard by column
        self._elsewhere: dict[str, str] = {}

    def of_shard(
        self,
        shown: str,
        folder: str,
        there: Sequence[str],
    ) -> dict[str, Any]:
        """The value of each column in a shard whose files have the columns `there`."""
        found: dict[str, Any] = {}
        parts = parts_of(folder) if self.types else {}
        for name, kind in self.types.items():
            if name in there or name not in parts:
                self._elsewhere.setdefault(name, shown)
                continue
            self._in_folders.setdefault(name, shown)
            value = parts[name]
            whole = value is not None and pa.types.is_integer(kind)
            found[name] = int(value) if whole and value is not None else value
        return found

    def check(self) -> None:
        """Raises DataError if only a part of the shards has a column in the names of its
        folders."""
        for name, shown in self._in_folders.items():
            if name in self._elsewhere:
                raise DataError(
                    f"DataConfig.url: the column {name!r} of {shown} is in the name of its folder, "
                    f"and that of {self._elsewhere[name]} is not; move the shards into folders of "
                    "one kind, or leave the column out by DataConfig.columns"
                )


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


def _type_of(values: Iterable[str | None]) -> pa.DataType:
    said = [value for value in values if value is not None]
    return pa.int64() if said and all(map(_WHOLE.fullmatch, said)) else pa.string()
