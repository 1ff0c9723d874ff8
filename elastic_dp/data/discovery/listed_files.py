"""Warns of lists of single files with rows that are no part of a data set.

A list of files is read as it is given, since only the library of a table knows which files make it
up. A list from a listing, such as `glob.glob("table/*.parquet")`, also has files of deleted and of
replaced rows. So a list is compared with the log of the table in which its files lie. An older
version of a table may be meant, and what was meant is not known, so this is no error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

from elastic_dp.data.discovery.no_shards import shown_folder
from elastic_dp.data.discovery.saved_datasets import INFO, is_cached_result
from elastic_dp.data.discovery.table_formats import (
    WRITE_DELTA,
    WRITE_ICEBERG,
    Table,
    folders_above,
    table_at,
)
from elastic_dp.data.discovery.table_logs import LOG_ERRORS, delta_version, iceberg_snapshot
from elastic_dp.errors import StorageError
from elastic_dp.storage import Entry, Store

LOOKS_IN_FLIGHT = 32


class ListedFile(NamedTuple):
    """A file of a list. `store`: opened at the file's URL."""

    store: Store
    entry: Entry

    @property
    def folder(self) -> str:
        return self.entry.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.entry.path.rpartition("/")[2]


def list_warnings(files: Iterable[ListedFile]) -> Iterator[str]:
    """What is said of a list of files. A folder that must not be listed is passed over."""
    buckets: dict[str, list[ListedFile]] = defaultdict(list)
    for file in files:
        if file.store.lists:
            is_local = file.store.local_path(file.entry.path) is not None
            at = urlsplit(file.store.url)
            buckets["" if is_local else f"{at.scheme}://{at.netloc}"].append(file)
    for inside in buckets.values():
        folders: dict[str, list[ListedFile]] = defaultdict(list)
        for file in inside:
            folders[file.folder].append(file)
        yield from _cached_results(folders)
        for table, parts in _tables(inside[0].store, folders).items():
            yield from _table_warnings(
                table, [file for folder in parts for file in folders[folder]]
            )


def _cached_results(folders: dict[str, list[ListedFile]]) -> Iterator[str]:
    for folder, files in folders.items():
        cached = [file for file in files if is_cached_result(file.name)]
        if cached and len(cached) < len(files) and cached[0].store.look_up(f"{folder}/{INFO}"):
            are = (
                "1 file of the list is a cached result"
                if len(cached) == 1
                else f"{len(cached):,} files of the list are cached results"
            )
            yield (
                f"DataConfig.url: {are} of Hugging Face datasets (such as {cached[0].store.url}), "
                "beside the files of the data set: rows count twice. Name the folder, or leave out "
                "the files cache-*.arrow"
            )


# -------------------------------------------------------------------------------------- tables


def _tables(store: Store, folders: Iterable[str]) -> dict[Table, list[str]]:
    """The tables to which folders belong. A folder is looked into once, and none below a table."""
    found: dict[Table, list[str]] = defaultdict(list)
    ways = {folder: [folder, *folders_above(folder)] for folder in folders}
    names_in = _names_in(store)

    def look(folder: str) -> Table | None:
        try:
            return table_at(folder, names_in)
        except StorageError:  # permission to read files does not include listing them
            return None

    with ThreadPoolExecutor(LOOKS_IN_FLIGHT, thread_name_prefix="elastic-dp-tables") as pool:
        while ways:
            tops = list(dict.fromkeys(way[-1] for way in ways.values()))
            tables = dict(zip(tops, pool.map(look, tops), strict=True))
            for folder, way in list(ways.items()):
                table = tables[way.pop()]
                if table is not None:
                    found[table].append(folder)
                if table is not None or not way:
                    del ways[folder]
    return found


def _table_warnings(table: Table, files: Sequence[ListedFile]) -> Iterator[str]:
    store = files[0].store
    root = shown_folder(store.url, store.path, table.root).rstrip("/")
    whose = f"of the {table.kind} table {root!r}"
    try:
        if table.kind == "Delta":
            yield from _delta_warnings(table, files, whose, repr(root))
            return
        if table.kind == "Iceberg":
            yield from _iceberg_warnings(table, files, whose)
            return
    except LOG_ERRORS:
        pass
    yield (
        f"DataConfig.url: {_counted(files)} of the list are {whose}, whose log could not be "
        "compared with the list. They hold deleted or replaced rows if the list comes from a "
        "listing and not from the table's own library"
    )


def _delta_warnings(
    table: Table, files: Sequence[ListedFile], whose: str, root: str
) -> Iterator[str]:
    version = delta_version(table.root, _names_in(files[0].store), _read(files[0].store))
    below = len(table.root) + 1 if table.root else 0
    live = {file: version.files.get(file.entry.path[below:]) for file in files}
    if dead := [file for file in files if live[file] is None]:
        hold = "holds" if len(dead) == 1 else "hold"
        yield (
            f"DataConfig.url: {_counted(dead)} of the list {hold} rows that were deleted or "
            f"replaced: they are no part of the newest version {whose}. Name the files of a "
            f"version by DeltaTable({root}).file_uris(), of the package deltalake; if the list is "
            "one of an older version on purpose, nothing is wrong"
        )
    if marked := [file for file in files if live[file]]:
        yield (
            f"DataConfig.url: {_counted(marked)} of the list hold rows that are marked as deleted "
            f"(deletion vectors {whose}), and these are read. Write the rows out, and name that "
            f"file: {WRITE_DELTA.format(root=root)}"
        )
    if version.maps_columns:
        yield (
            f"DataConfig.url: {_counted(files)} of the list may have columns under other names "
            f"than those {whose} (column mapping). Write the rows out, and name that file: "
            f"{WRITE_DELTA.format(root=root)}"
        )


def _iceberg_warnings(table: Table, files: Sequence[ListedFile], whose: str) -> Iterator[str]:
    """Without its Avro files the log tells how many files and bytes the snapshot has."""
    snapshot = iceberg_snapshot(table.root, _names_in(files[0].store), _read(files[0].store))
    if snapshot.delete_files or snapshot.renames:
        why = (
            "hold rows that are marked as deleted (delete files"
            if snapshot.delete_files
            else "have columns under names that were changed or dropped later (schemas"
        )
        yield (
            f"DataConfig.url: {_counted(files)} of the list may {why} {whose}). Write the rows "
            f"out, and name that file: {WRITE_ICEBERG}"
        )
    listed = len(files), sum(file.entry.size for file in files)
    is_whole = listed == (snapshot.data_files, snapshot.nbytes)
    if not is_whole and not snapshot.only_appends:
        yield (
            f"DataConfig.url: {_counted(files)} of the list are not exactly the "
            f"{snapshot.data_files:,} data files of the newest snapshot {whose}. They hold deleted "
            "or replaced rows if the list comes from a listing; name the files by "
            "catalog.load_table('namespace.name').scan().plan_files(), of the package pyiceberg. "
            "If the scan has a filter or an older snapshot on purpose, nothing is wrong"
        )


def _counted(files: Sequence[ListedFile]) -> str:
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    return f"{count} (such as {files[0].store.url})"


def _names_in(store: Store) -> Callable[[str], list[str]]:
    def names_in(folder: str) -> list[str]:
        look = store.look(folder, deep=False)
        paths = [*(entry.path for entry in look.entries), *look.folders]
        return [path.rpartition("/")[2] for path in paths]

    return names_in


def _read(store: Store) -> Callable[[str], bytes]:
    return lambda path: bytes(store.read_all(path))
