"""Refuses folders that belong to a table of Delta Lake, Apache Iceberg or Apache Hudi.

Such a folder also has files of deleted and of replaced rows. The table's log says which files make
up the table; a listing does not. The message has a line of Python that gives exactly the rows of
the table. It names a list of files only if the log says that no row in them is marked as deleted.

A table is recognized by its log: `_delta_log/`, `.hoodie/`, or `metadata/*.metadata.json`. The log
is in the folder that is read, or above it if that is a partition (`date=2026-01-01/`) or the
`data/` of Iceberg.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elastic_dp.data.discovery.table_logs import (
    DELTA_LOG,
    ICEBERG_LOG,
    IS_ICEBERG_LOG,
    LOG_ERRORS,
    NamesIn,
    Read,
    delta_version,
    iceberg_snapshot,
    join,
)
from elastic_dp.errors import DataError, StorageError

_FOLDERS = {DELTA_LOG: "Delta", ".hoodie": "Hudi"}
_MAY_BE_LOG = re.compile(r"_delta_log/|\.hoodie/|\.metadata\.json")
_PARTITION = re.compile(r"[^/=]+=[^/]*")
_HASHED = re.compile(r"[01]{4}|[01]{8}|[0-9a-f]{8}")  # folders of Iceberg's object store layout


class Table(NamedTuple):
    """A table. `root`: its folder, without a "/" at the end."""

    kind: str
    root: str


def refuse_table(
    table: Table | None,
    url: str,
    root_url: str,
    names_in: NamesIn,
    read: Read,
    field: str = "",
) -> None:
    """Raises DataError unless `table` is None.

    `url`: the URL in the parameter `field`. `root_url`: the URL of the table. `names_in(path)`: the
    names in a folder. `read(path)`: the content of a file.
    """
    if table is not None:
        is_live = _has_only_live_rows(table, names_in, read)
        ways_out = _LIVE_WAYS_OUT if is_live else _WAYS_OUT
        raise DataError(
            f"{field}{url!r} belongs to the {table.kind} table {root_url!r}, whose folders "
            "also hold files of "
            f"deleted and replaced rows. {ways_out[table.kind].format(root=repr(root_url))}"
        )


def tables_among(paths: Iterable[str]) -> set[Table]:
    """The tables whose logs are among these files."""
    found = set()
    for path in paths:
        if not _MAY_BE_LOG.search(path):  # fast, since there may be a million files
            continue
        for folder, kind in _FOLDERS.items():
            root, mark, _ = f"/{path}".partition(f"/{folder}/")
            if mark:
                found.add(Table(kind, root[1:]))
        folder, _, name = path.rpartition("/")
        if IS_ICEBERG_LOG.search(name) and f"/{folder}".endswith(f"/{ICEBERG_LOG}"):
            found.add(Table("Iceberg", folder[: -len(ICEBERG_LOG) - 1]))
    return found


def table_in(folder: str, folders: Iterable[str], names_in: NamesIn) -> Table | None:
    """The table whose log is one of `folders`, which are names directly in `folder`."""
    there = set(folders)
    for name, kind in _FOLDERS.items():
        if name in there and names_in(join(folder, name)):
            return Table(kind, folder)
    if ICEBERG_LOG in there and any(
        map(IS_ICEBERG_LOG.search, names_in(join(folder, ICEBERG_LOG)))
    ):
        return Table("Iceberg", folder)
    return None


def table_at(folder: str, names_in: NamesIn) -> Table | None:
    """The table whose own folder is `folder`."""
    return table_in(folder, (*_FOLDERS, ICEBERG_LOG), names_in)


def table_above(folder: str, names_in: NamesIn, *, itself: bool) -> Table | None:
    """The table to which `folder` belongs as a partition or data folder. `itself`: also if it is
    the table's own folder."""
    for above in [*([folder] if itself else []), *folders_above(folder)]:
        try:
            found = table_at(above, names_in)
        except StorageError:
            continue  # permission to read a folder does not include listing the one above it
        if found:
            return found
    return None


def folders_above(folder: str) -> Iterator[str]:
    """The folders that may be the root of a table of which `folder` is a part."""
    while folder:
        folder, _, name = folder.rpartition("/")
        if name != "data" and not (_PARTITION.fullmatch(name) or _HASHED.fullmatch(name)):
            return
        yield folder


# ----------------------------------------------------------------------- rows marked as deleted


def _has_only_live_rows(table: Table, names_in: NamesIn, read: Read) -> bool:
    """Whether the files of the table's newest version hold its rows under the names of its columns,
    and no deleted rows. False if the log cannot be read."""
    try:
        if table.kind == "Delta":
            version = delta_version(table.root, names_in, read)
            return not version.maps_columns and not any(version.files.values())
        if table.kind == "Iceberg":
            snapshot = iceberg_snapshot(table.root, names_in, read)
            return not snapshot.renames and snapshot.delete_files == 0
    except LOG_ERRORS:
        pass
    return False


WRITE_DELTA = (
    "pyarrow.parquet.write_table(pyarrow.table(DeltaTable({root}).scan()), 'rows.parquet')"
)
WRITE_ICEBERG = (
    "pyarrow.parquet.write_table(catalog.load_table('namespace.name').scan().to_arrow(), "
    "'rows.parquet')"
)
_LIVE_WAYS_OUT = {
    "Delta": (
        "Name the files of its newest version, a list that is one data set: "
        "DataConfig(DeltaTable({root}).file_uris()), "
        "of the package deltalake. Columns that partition the table are read from the names of "
        "their folders, as int64 or text, unless all files have one value; otherwise write the "
        f"rows out, and name that file: {WRITE_DELTA}"
    ),
    "Iceberg": (
        "Name the files of its newest snapshot, a list that is one data set: "
        "DataConfig([task.file.file_path for task in "
        "catalog.load_table('namespace.name').scan().plan_files()]), with a catalog of the "
        "package pyiceberg"
    ),
}
_WAYS_OUT = {
    "Delta": (
        "Its newest files may also hold deleted rows (deletion vectors), or columns under other "
        "names (column mapping). Write the rows out, and name that file: "
        f"{WRITE_DELTA}, of the package deltalake"
    ),
    "Iceberg": (
        "Its newest files may also hold deleted rows (delete files), or columns under the names "
        "that they had before they were renamed or dropped. Write the rows out, and name that "
        "file: "
        f"{WRITE_ICEBERG}, with a catalog of the package pyiceberg. Where that says that it "
        "does not read equality "
        "deletes, Spark does: spark.table('namespace.name').write.parquet('rows')"
    ),
    "Hudi": (
        "Write out the rows of its newest snapshot with Spark, and name that folder: "
        "spark.read.format('hudi').load({root}).write.parquet('rows')"
    ),
}
