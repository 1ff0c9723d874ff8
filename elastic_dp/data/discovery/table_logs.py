"""Reads the logs of Delta Lake and Apache Iceberg as far as they tell which files make up a table.

Of Delta these are the last checkpoint and the commits after it. Of Iceberg it is the newest
metadata; which files it means is in Avro files, which are not read, so there are only numbers.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_dp.errors import ElasticError

DELTA_LOG, ICEBERG_LOG = "_delta_log", "metadata"
IS_ICEBERG_LOG = re.compile(r"\.metadata\.json(\.gz)?$")
# What reading a log may raise.
LOG_ERRORS = (
    *(ElasticError, OSError, ValueError, LookupError, TypeError, AttributeError, EOFError),
    zlib.error,
)
_COMMIT = re.compile(r"\d{20}\.json")
_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.parquet")
_COMMITS = 100  # limit of commits after the last checkpoint that are read

NamesIn = Callable[[str], list[str]]
Read = Callable[[str], bytes]


@dataclass
class DeltaVersion:
    """The newest version of a Delta table. `files`: the path of each file below the table's folder,
    and whether rows of it are marked as deleted. `maps_columns`: the names of columns in the files
    may be others than those of the table."""

    files: dict[str, bool] = field(default_factory=dict)
    maps_columns: bool = False


@dataclass(frozen=True)
class IcebergSnapshot:
    """The newest snapshot of an Iceberg table. `renames`: files may have names of columns that are
    not, or no longer, those of the table. `only_appends`: no snapshot ever took a file away, so
    that every file is live."""

    data_files: int
    delete_files: int
    nbytes: int
    renames: bool
    only_appends: bool


def delta_version(root: str, names_in: NamesIn, read: Read) -> DeltaVersion:
    """Raises one of LOG_ERRORS if the log does not tell."""
    log = join(root, DELTA_LOG)
    names = names_in(log)
    checkpoints = sorted(name for name in names if _CHECKPOINT.fullmatch(name))
    if len(checkpoints) < sum(
        ".checkpoint." in name and name.endswith(".parquet") for name in names
    ):
        raise ValueError("a checkpoint of several files")
    start = int(checkpoints[-1][:20]) + 1 if checkpoints else 0
    commits = sorted(name for name in names if _COMMIT.fullmatch(name) and int(name[:20]) >= start)
    if len(commits) > _COMMITS or not (checkpoints or commits):
        raise ValueError("too many commits, or none")
    if [int(name[:20]) for name in commits] != list(range(start, start + len(commits))):
        raise ValueError("commits are missing")
    version = DeltaVersion()
    if checkpoints:
        _take_checkpoint(version, read(join(log, checkpoints[-1])))
    for name in commits:
        _take_commit(version, read(join(log, name)))
    return version


def iceberg_snapshot(root: str, names_in: NamesIn, read: Read) -> IcebergSnapshot:
    """Raises one of LOG_ERRORS if the log does not tell."""
    folder = join(root, ICEBERG_LOG)
    logs = [name for name in names_in(folder) if IS_ICEBERG_LOG.search(name)]
    newest = max(logs, key=lambda name: int(re.sub(r"^v|\D.*", "", name)))
    content = read(join(folder, newest))
    facts = json.loads(gzip.decompress(content) if newest.endswith(".gz") else content)
    snapshots = {one["snapshot-id"]: one for one in facts["snapshots"]}
    current = snapshots[facts["current-snapshot-id"]]
    summary = current["summary"]
    return IcebergSnapshot(
        data_files=int(summary["total-data-files"]),
        delete_files=int(summary["total-delete-files"]),
        nbytes=int(summary.get("total-files-size", -1)),
        renames=_renames(facts),
        only_appends=_only_appends(current, snapshots),
    )


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _take_checkpoint(version: DeltaVersion, content: bytes) -> None:
    wanted = ["add.path", "add.deletionVector.storageType", "metaData.configuration"]
    table = pq.ParquetFile(pa.BufferReader(content)).read(columns=[*wanted, "sidecar.path"])
    if "sidecar" in table.column_names and table["sidecar"].null_count < len(table):
        raise ValueError("a checkpoint of several files")
    adds = table["add"].combine_chunks().drop_null()
    paths = pc.struct_field(adds, "path").to_pylist()
    marked = [False] * len(paths)
    if adds.type.get_field_index("deletionVector") >= 0:
        kinds = pc.struct_field(adds, ["deletionVector", "storageType"])
        marked = kinds.is_valid().to_pylist()
    version.files = dict(zip(map(unquote, paths), marked, strict=True))
    for settings in table["metaData"].combine_chunks().drop_null().to_pylist():
        _take_settings(version, dict(settings["configuration"]))


def _take_commit(version: DeltaVersion, content: bytes) -> None:
    """A file that gets a deletion vector is removed and added by one commit."""
    actions: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines() if line]
    for action in actions:
        if "metaData" in action:
            _take_settings(version, action["metaData"].get("configuration") or {})
        if "remove" in action:
            version.files.pop(unquote(action["remove"]["path"]), None)
    for action in actions:
        if add := action.get("add"):
            version.files[unquote(add["path"])] = bool(add.get("deletionVector"))


def _take_settings(version: DeltaVersion, settings: dict[str, str]) -> None:
    version.maps_columns = settings.get("delta.columnMapping.mode", "none") != "none"


def _renames(facts: dict[str, Any]) -> bool:
    """Whether a column was renamed or dropped, or has a value where files lack it.

    Columns are known by their numbers, and files keep the names that they were written with.
    """
    current = facts["current-schema-id"]
    (schema,) = (one for one in facts["schemas"] if one["schema-id"] == current)
    now = _names(schema)
    before = [_names(one) for one in facts["schemas"]]
    return "initial-default" in json.dumps(schema) or any(
        now.get(number) != name for names in before for number, name in names.items()
    )


def _names(kind: Any, prefix: str = "") -> dict[int, str]:
    """The dotted names of a schema, or of the type of a column, by their numbers."""
    if not isinstance(kind, dict):
        return {}
    found: dict[int, str] = {}
    for one in kind.get("fields", ()):
        found[one["id"]] = prefix + one["name"]
        found |= _names(one["type"], f"{prefix}{one['name']}.")
    for part in ("element", "key", "value"):
        if f"{part}-id" in kind:
            found[kind[f"{part}-id"]] = prefix + part
            found |= _names(kind[part], f"{prefix}{part}.")
    return found


def _only_appends(snapshot: dict[str, Any], snapshots: dict[int, dict[str, Any]]) -> bool:
    while snapshot["summary"]["operation"] == "append":
        parent = snapshot.get("parent-snapshot-id")
        if parent is None:
            return True
        if parent not in snapshots:  # expired
            return False
        snapshot = snapshots[parent]
    return False
