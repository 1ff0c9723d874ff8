"""A source of a data set whose shards are listed. Checks the columns that a job names against the
first rows and the names of folders, before shards are scanned."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.schema import names_missing
from elastic_dp.data.discovery.listing import ShardListing
from elastic_dp.data.discovery.partitions import FolderColumns
from elastic_dp.data.formats.file_format import FileFormat, ShardAt
from elastic_dp.errors import DataError, StorageError
from elastic_dp.storage import Entry, Store

FOOTERS_IN_FLIGHT = 32
_NAMES_SHOWN = 20


@dataclass(frozen=True)
class OpenedSource:
    """A source whose shards are listed. `prefix`: before the names of its shards in messages."""

    store: Store
    listed: ShardListing
    format: FileFormat
    prefix: str


def refuse_missing(
    sources: Sequence[OpenedSource], config: DataConfig, elsewhere: Collection[str] = ()
) -> None:
    """Raises DataError if no shard has a column of `config.columns` in its first rows, for formats
    whose scan reads all rows and may take hours. Usually the first shard has all columns.
    `elsewhere`: columns that are not in the files."""
    missing = [name for name in config.columns or () if name not in elsewhere]
    if not missing or not all(source.format.scans_content for source in sources):
        return
    shards = ((s, n, entry) for s in sources for n, entry in enumerate(s.listed.entries))
    first: tuple[str, pa.Schema] | None = None
    looked, ahead = 0, 1

    def look(at: tuple[OpenedSource, int, Entry]) -> tuple[str, pa.Schema | None]:
        source, number, entry = at
        name = source.prefix + source.listed.name(number)
        shard = ShardAt(source.store, entry.path, entry.size, entry.version, name)
        try:
            return name, source.format.first_columns(shard, config.columns)
        except StorageError:
            raise
        except Exception:  # the scan reports it
            return name, None

    with ThreadPoolExecutor(FOOTERS_IN_FLIGHT, thread_name_prefix="elastic-dp-index") as pool:
        while some := list(itertools.islice(shards, ahead)):
            for name, schema in pool.map(look, some):
                if schema is None:
                    return
                first = first or (name, schema)
                if not (missing := names_missing(missing, schema)):
                    return
            looked, ahead = looked + len(some), FOOTERS_IN_FLIGHT
    assert first is not None
    name, schema = first
    raise DataError(
        f"DataConfig.columns: no column {', '.join(map(repr, missing))} in the first rows of "
        f"{name}, which have "
        f"{', '.join(map(repr, schema.names[:_NAMES_SHOWN]))}"
        + (f", nor in those of {looked - 1:,} more" if looked > 1 else "")
        + "; a column that only later rows have is found by `elastic-dp data convert`, which "
        "reads all of them"
    )


def folder_columns(sources: Sequence[OpenedSource], wanted: Sequence[str] | None) -> FolderColumns:
    """The columns that only the names of folders hold, among those that are `wanted`."""
    folders = {
        (source.listed.root, entry.path[len(source.listed.root) :].rpartition("/")[0])
        for source in sources
        for entry in source.listed.entries
        if "=" in entry.path
    }
    return FolderColumns(sorted(folders), wanted)
