"""Folders that belong to a table of Delta Lake, Apache Iceberg or Apache Hudi.

Such a folder also holds the files of deleted and of replaced rows: which files make up the table is in its log, not in a
listing. So it is refused, with the line of Python that gives exactly the table's rows.

A table is known by its log: `_delta_log/`, `.hoodie/`, or `metadata/*.metadata.json`. It lies in the folder that is
read, or above it where that is a partition (`date=2026-01-01/`) or Iceberg's `data/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from elastic_dp.errors import DataError, StorageError

_FOLDERS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_ICEBERG = "metadata"
_ICEBERG_LOG = re.compile(r"\.metadata\.json(\.gz)?$")
_MAY_BE_LOG = re.compile(r"_delta_log/|\.hoodie/|\.metadata\.json")
_PARTITION = re.compile(r"[^/=]+=[^/]*")


class Table(NamedTuple):
    """`root`: its folder, without a "/" at the end."""

    kind: str
    root: str


def refuse_table(table: Table | None, url: str, root_url: str, field: str = "") -> None:
    """Raises DataError where there is one. `url`: as the user gave it, in `field`; `root_url`: of the table."""
    if table is not None:
        raise DataError(
            f"{field}{url!r} belongs to the {table.kind} table {root_url!r}, whose folders also hold files of "
            f"deleted and replaced rows. {_WAYS_OUT[table.kind].format(root=repr(root_url))}"
        )


def tables_among(paths: Iterable[str]) -> set[Table]:
    """Those whose logs are among these files."""
    found = set()
    for path in paths:
        if not _MAY_BE_LOG.search(path):  # of a million files hardly any is
            continue
        for folder, kind in _FOLDERS.items():
            root, mark, _ = f"/{path}".partition(f"/{folder}/")
            if mark:
                found.add(Table(kind, root[1:]))
        folder, _, name = path.rpartition("/")
        if _ICEBERG_LOG.search(name) and f"/{folder}".endswith(f"/{_ICEBERG}"):
            found.add(Table("Iceberg", folder[: -len(_ICEBERG) - 1]))
    return found


def table_in(
    folder: str, folders: Iterable[str], names_in: Callable[[str], list[str]]
) -> Table | None:
    """The one whose log is one of `folders`, names directly in `folder`. `names_in(path)`: of a folder."""
    there = set(folders)
    for name, kind in _FOLDERS.items():
        if name in there and names_in(_join(folder, name)):
            return Table(kind, folder)
    if _ICEBERG in there and any(map(_ICEBERG_LOG.search, names_in(_join(folder, _ICEBERG)))):
        return Table("Iceberg", folder)
    return None


def table_above(folder: str, names_in: Callable[[str], list[str]], *, itself: bool) -> Table | None:
    """The one whose partition or data folder this is. `itself`: or whose own folder."""
    for above in [*([folder] if itself else []), *_above(folder)]:
        try:
            found = table_in(above, (*_FOLDERS, _ICEBERG), names_in)
        except StorageError:
            continue  # who may read a folder may not be allowed to list the one around it
        if found:
            return found
    return None


def _above(folder: str) -> Iterator[str]:
    while folder:
        folder, _, name = folder.rpartition("/")
        if not _PARTITION.fullmatch(name) and name != "data":
            return
        yield folder


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


_WAYS_OUT = {
    "Delta": (
        "Name the files of its newest version, a list that is one data set: DataConfig(DeltaTable({root}).file_uris()), "
        "of the package deltalake. Where DeltaTable({root}).deletion_vectors() has rows, those files still hold deleted "
        "rows; columns that partition the table are in none of them. Then write the rows out, and name that file: "
        "pyarrow.parquet.write_table(pyarrow.table(DeltaTable({root}).scan()), 'rows.parquet')"
    ),
    "Iceberg": (
        "Name the files of its newest snapshot, a list that is one data set: DataConfig([task.file.file_path for task in "
        "catalog.load_table('namespace.name').scan().plan_files()]), with a catalog of the package pyiceberg. Where a "
        "task has delete_files, those files still hold deleted rows. Then write the rows out, and name that file: "
        "pyarrow.parquet.write_table(catalog.load_table('namespace.name').scan().to_arrow(), 'rows.parquet')"
    ),
    "Hudi": (
        "Write out the rows of its newest snapshot with Spark, and name that folder: "
        "spark.read.format('hudi').load({root}).write.parquet('rows')"
    ),
}
