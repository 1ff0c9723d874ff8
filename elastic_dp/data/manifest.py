"""The manifest: which shards, which row groups, how many rows. Read once, by the driver, then shipped.

Its fingerprint covers what decides the order and the tensors (names relative to the URL, rows of each row
group, columns and their types) and not where the data set lies, so a copy in another bucket is the same one.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from elastic_dp.errors import DataError
from elastic_dp.spec import DataConfig

FOOTER_THREADS = 16
_NAMES_SHOWN = 20


@dataclass(frozen=True)
class Shard:
    """One file. `path` is absolute, for the file system; `name` is relative to the URL, for people."""

    path: str
    name: str
    group_rows: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Picklable, about 100 bytes per shard. `columns`: (name, type) of those that the job reads."""

    url: str
    shards: tuple[Shard, ...]
    columns: tuple[tuple[str, str], ...]

    @cached_property
    def num_rows(self) -> int:
        return sum(sum(shard.group_rows) for shard in self.shards)

    @cached_property
    def group_rows(self) -> tuple[int, ...]:
        """Of all shards, in file order."""
        return tuple(rows for shard in self.shards for rows in shard.group_rows)

    @cached_property
    def groups(self) -> tuple[tuple[int, int, int], ...]:
        """Per row group: its shard, its index in that, and the number in the shard of its first row."""
        found = []
        for number, shard in enumerate(self.shards):
            first = 0
            for index, rows in enumerate(shard.group_rows):
                found.append((number, index, first))
                first += rows
        return tuple(found)

    @cached_property
    def digest(self) -> str:
        shards = [(shard.name, shard.group_rows) for shard in self.shards]
        content = json.dumps(["manifest 1", shards, self.columns], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


def read_manifest(config: DataConfig) -> Manifest:
    """Lists the shards and reads their footers. Raises DataError if there is nothing that can be trained on."""
    system, path = open_file_system(config)
    try:
        root, paths = _list_shards(system, path)
    except Exception as error:  # a foreign file system may raise anything
        raise DataError(f"DataConfig.url: cannot list {config.url!r}: {_say(error)}") from error
    if not paths:
        raise DataError(
            f"DataConfig.url: no *.parquet file at {config.url!r}; it must be a folder that holds them "
            "directly, one file, or a glob such as 'folder/**/*.parquet'"
        )
    names = [shard_path.removeprefix(root).lstrip("/") for shard_path in paths]

    def footer(number: int) -> tuple[tuple[int, ...], pa.Schema]:
        try:
            with system.open(paths[number], "rb") as file:
                metadata = pq.read_metadata(file)
        except Exception as error:
            raise DataError(f"cannot read the footer of {names[number]}: {_say(error)}") from error
        rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return rows, metadata.schema.to_arrow_schema()

    with ThreadPoolExecutor(min(FOOTER_THREADS, len(paths))) as pool:
        footers = list(pool.map(footer, range(len(paths))))

    columns = _columns(config, names[0], footers[0][1])
    for name, (_, schema) in zip(names, footers, strict=True):
        _check_same(names[0], columns, name, schema)
    shards = tuple(
        Shard(shard_path, name, rows)
        for shard_path, name, (rows, _) in zip(paths, names, footers, strict=True)
    )
    manifest = Manifest(config.url, shards, columns)
    if manifest.num_rows == 0:
        raise DataError(f"DataConfig.url: the {len(paths)} shard(s) at {config.url!r} hold no rows")
    return manifest


def open_file_system(config: DataConfig) -> tuple[Any, str]:
    """The fsspec file system of the URL, and the absolute path in it."""
    try:
        system, path = url_to_fs(config.url, **dict(config.storage_options or {}))
    except (ImportError, ValueError) as error:
        raise DataError(f"DataConfig.url: cannot open {config.url!r}: {_say(error)}") from error
    return system, str(path)


def _list_shards(system: fsspec.AbstractFileSystem, path: str) -> tuple[str, list[str]]:
    """(what names are relative to, the shards' paths sorted by name)."""
    if any(mark in path for mark in "*?["):
        fixed = min(path.index(mark) for mark in "*?[" if mark in path)
        found = [item for item in system.glob(path) if str(item).endswith(".parquet")]
        return path[: path.rfind("/", 0, fixed) + 1], _visible(found)
    if path.endswith(".parquet") and system.isfile(path):
        return path[: path.rfind("/") + 1], [path]
    folder = path.rstrip("/") + "/"
    return folder, _visible(system.glob(folder + "*.parquet"))


def _visible(paths: list[str]) -> list[str]:
    """Without the half-written files of other writers (".part-0.parquet", "_temporary.parquet")."""
    return sorted(path for path in paths if path.rsplit("/", 1)[-1][0] not in "._")


def _columns(config: DataConfig, name: str, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    wanted = schema.names if config.columns is None else list(config.columns)
    missing = [column for column in wanted if column not in schema.names]
    if missing:
        there = ", ".join(map(repr, schema.names[:_NAMES_SHOWN]))
        raise DataError(
            f"DataConfig.columns: no column {', '.join(map(repr, missing))} in {name}, which has {there}"
        )
    return tuple((column, _type_name(schema.field(column).type)) for column in wanted)


def _check_same(
    first: str, columns: tuple[tuple[str, str], ...], name: str, schema: pa.Schema
) -> None:
    for column, kind in columns:
        other = _type_name(schema.field(column).type) if column in schema.names else "missing"
        if other != kind:
            raise DataError(
                f"the shards' schemas differ: column {column!r} is {kind} in {first} and {other} in "
                f"{name}; rewrite one of them, or leave the column out of DataConfig.columns"
            )


def _type_name(kind: pa.DataType) -> str:
    """As Arrow says it, without the names that writers give to list items ("item", "element")."""
    if pa.types.is_fixed_size_list(kind):
        return f"list<{_type_name(kind.value_type)}>[{kind.list_size}]"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    return str(kind)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
