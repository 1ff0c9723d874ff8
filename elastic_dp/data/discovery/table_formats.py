"""Refuses folders that belong to a table of Delta Lake, Apache Iceberg or Apache Hudi.

Such a folder also has files of deleted and of replaced rows. The table's log says which files make
up the table; a listing does not. The message has a line of Python that gives exactly the rows of
the table. It names a list of files only if the log says that no row in them is marked as deleted.

A table is recognized by its log: `_delta_log/`, `.hoodie/`, or `metadata/*.metadata.json`. The log
is in the folder that is read, or above it if that is a partition (`date=2026-01-01/`) or the
`data/` of Iceberg.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.errors import DataError, ElasticError, StorageError

_FOLDERS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_ICEBERG = "metadata"
_ICEBERG_LOG = re.compile(r"\.metadata\.json(\.gz)?$")
_MAY_BE_LOG = re.compile(r"_delta_log/|\.hoodie/|\.metadata\.json")
_COMMIT = re.compile(r"\d{20}\.json")
_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.parquet")
_COMMITS = 100  # limit of commits after the last checkpoint that are read, for Delta
_PARTITION = re.compile(r"[^/=]+=[^/]*")


class Table(NamedTuple):
    """A table. `root`: its folder, without a "/" at the end."""

    kind: str
    root: str


def refuse_table(
    table: Table | None,
    url: str,
    root_url: str,
    names_in: Callable[[str], list[str]],
    read: Callable[[str], bytes],
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
        if _ICEBERG_LOG.search(name) and f"/{folder}".endswith(f"/{_ICEBERG}"):
            found.add(Table("Iceberg", folder[: -len(_ICEBERG) - 1]))
    return found


def table_in(
    folder: str, folders: Iterable[str], names_in: Callable[[str], list[str]]
) -> Table | None:
    """The table whose log is one of `folders`, which are names directly in `folder`."""
    there = set(folders)
    for name, kind in _FOLDERS.items():
        if name in there and names_in(_join(folder, name)):
            return Table(kind, folder)
    if _ICEBERG in there and any(map(_ICEBERG_LOG.search, names_in(_join(folder, _ICEBERG)))):
        return Table("Iceberg", folder)
    return None


def table_above(folder: str, names_in: Callable[[str], list[str]], *, itself: bool) -> Table | None:
    """The table to which `folder` belongs as a partition or data folder. `itself`: also if it is
    the table's own folder."""
    for above in [*([folder] if itself else []), *_above(folder)]:
        try:
            found = table_in(above, (*_FOLDERS, _ICEBERG), names_in)
        except StorageError:
            continue  # permission to read a folder does not include listing the one above it
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


# ----------------------------------------------------------------------- rows marked as deleted


def _has_only_live_rows(
    table: Table, names_in: Callable[[str], list[str]], read: Callable[[str], bytes]
) -> bool:
    """Whether the log says that no file of the table's newest version has deleted rows. False if it
    cannot be read."""
    says = {"Delta": _no_deletion_vectors, "Iceberg": _no_delete_files}.get(table.kind)
    try:
        return says is not None and says(table.root, names_in, read)
    except (ElasticError, OSError, ValueError, LookupError, TypeError, EOFError, zlib.error):
        return False


def _no_deletion_vectors(
    root: str, names_in: Callable[[str], list[str]], read: Callable[[str], bytes]
) -> bool:
    """Whether the table has no deletion vectors. If it has, its protocol names the feature, in the
    last checkpoint or in a commit after it."""
    log = _join(root, "_delta_log")
    names = names_in(log)
    checkpoints = sorted(name for name in names if _CHECKPOINT.fullmatch(name))
    if len(checkpoints) < sum(
        ".checkpoint." in name and name.endswith(".parquet") for name in names
    ):
        return False
    start = int(checkpoints[-1][:20]) + 1 if checkpoints else 0
    commits = sorted(name for name in names if _COMMIT.fullmatch(name) and int(name[:20]) >= start)
    if len(commits) > _COMMITS or (not checkpoints and int(commits[0][:20]) > 0):
        return False
    if checkpoints:
        content = pa.BufferReader(read(_join(log, checkpoints[-1])))
        protocols = pq.read_table(content, columns=["protocol"]).column("protocol").drop_null()
        if not len(protocols) or "deletionVectors" in str(protocols.to_pylist()):
            return False
    return not any(b"deletionvector" in read(_join(log, name)).lower() for name in commits)


def _no_delete_files(
    root: str, names_in: Callable[[str], list[str]], read: Callable[[str], bytes]
) -> bool:
    """Whether the summary of the newest snapshot counts no delete files."""
    folder = _join(root, _ICEBERG)
    logs = [name for name in names_in(folder) if _ICEBERG_LOG.search(name)]
    newest = max(logs, key=lambda name: int(re.sub(r"^v|\D.*", "", name)))
    content = read(_join(folder, newest))
    facts = json.loads(gzip.decompress(content) if newest.endswith(".gz") else content)
    current = facts["current-snapshot-id"]
    (snapshot,) = (one for one in facts["snapshots"] if one["snapshot-id"] == current)
    return bool(snapshot["summary"]["total-delete-files"] == "0")


_WRITE_DELTA = (
    "pyarrow.parquet.write_table(pyarrow.table(DeltaTable({root}).scan()), 'rows.parquet')"
)
_WRITE_ICEBERG = (
    "pyarrow.parquet.write_table(catalog.load_table('namespace.name').scan().to_arrow(), "
    "'rows.parquet')"
)
_LIVE_WAYS_OUT = {
    "Delta": (
        "Name the files of its newest version, a list that is one data set: "
        "DataConfig(DeltaTable({root}).file_uris()), "
        "of the package deltalake. Columns that partition the table are in none of them; to "
        "read these, write the rows "
        f"out, and name that file: {_WRITE_DELTA}"
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
        "Its newest files may also hold deleted rows (deletion vectors). Write the rows out, "
        "and name that file: "
        f"{_WRITE_DELTA}, of the package deltalake"
    ),
    "Iceberg": (
        "Its newest files may also hold deleted rows (delete files). Write the rows out, and "
        "name that file: "
        f"{_WRITE_ICEBERG}, with a catalog of the package pyiceberg. Where that says that it "
        "does not read equality "
        "deletes, Spark does: spark.table('namespace.name').write.parquet('rows')"
    ),
    "Hudi": (
        "Write out the rows of its newest snapshot with Spark, and name that folder: "
        "spark.read.format('hudi').load({root}).write.parquet('rows')"
    ),
}
