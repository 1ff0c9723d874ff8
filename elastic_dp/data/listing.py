"""Which files of a URL are shards, and of what format.

A folder's shards are the files directly in it whose ending is a format's; a glob's are those that it matches;
one file is itself. Hidden names (".part-0.parquet", "_temporary/…") are half-written files of other writers.
A folder that holds `_incomplete` is a conversion that has not finished, and no data set, also for a glob.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from elastic_dp.data.destination import INCOMPLETE, not_whole
from elastic_dp.data.formats import FORMATS
from elastic_dp.data.skipped import Skipped, count_skipped
from elastic_dp.errors import DataError
from elastic_dp.spec import DataConfig
from elastic_dp.storage import Entry, Store, redact_url

_GLOB_MARKS = "*?["


@dataclass(frozen=True)
class Listed:
    """Of one source, in the order of the names. `is_file`: the URL is that of the one shard. `skipped`: files beside the
    shards that are of no format."""

    format: str
    is_file: bool
    root: str
    entries: list[Entry]
    skipped: tuple[Skipped, ...] = ()

    def name(self, number: int) -> str:
        return _name(self.root, self.entries[number])


def list_shards(config: DataConfig, url: str, store: Store) -> Listed:
    """Raises DataError where there is none, they are not all there yet, or formats are mixed.

    Names are made only as they are needed.
    """
    entries = _find(config, store)
    is_file = len(entries) == 1 and entries[0].path == store.path
    is_glob = glob_mark(store.path) is not None
    file_path = store.path.split("?", 1)[0]  # without the query of an http URL
    root = file_path[: file_path.rfind("/") + 1] if is_file else root_of(store.path)
    seen = [entry for entry in entries if is_file or _is_shown(_name(root, entry), is_glob)]
    if config.format is None:
        chosen = _only_format(url, root, seen)
        kept = [entry for entry in seen if format_of(_name(root, entry))]
    elif is_file or is_glob:
        chosen, kept = str(config.format), seen
    else:
        chosen = str(config.format)
        kept = [entry for entry in seen if format_of(_name(root, entry)) == chosen]
    _refuse_incomplete(url, root, entries, kept)
    if not kept:
        raise DataError(_nothing(config, url))
    return Listed(chosen, is_file, root, kept, _skipped(root, seen, kept))


def root_of(path: str) -> str:
    """What the names of shards are relative to, for a folder or a glob."""
    mark = glob_mark(path)
    if mark is not None:
        return path[: path.rfind("/", 0, mark) + 1]
    return path.rstrip("/") + "/" if path.strip("/") else ""


def path_of(store_path: str, name: str, is_file: bool) -> str:
    """Of a shard, as the store's methods take it."""
    return store_path if is_file else root_of(store_path) + name


def prefix_of(url: str, is_file: bool) -> str:
    """Of shards' names, for people, where there are several sources."""
    shown = redact_url(url)
    return shown[: shown.rfind("/") + 1] if is_file else root_of(shown)


def glob_mark(path: str) -> int | None:
    return min((path.index(mark) for mark in _GLOB_MARKS if mark in path), default=None)


def format_of(name: str) -> str:
    """ "" if the ending is of no format."""
    lower = name.lower()
    return next((f.name for f in FORMATS.values() if lower.endswith(f.endings)), "")


def _find(config: DataConfig, store: Store) -> list[Entry]:
    """One that may be a file is looked up; of a folder only what is directly in it is listed."""
    may_be_file = config.format is not None or format_of(store.path.split("?", 1)[0])
    if glob_mark(store.path) is not None or (may_be_file and not store.path.endswith("/")):
        return store.find(store.path, and_named=INCOMPLETE)
    return store.find(root_of(store.path) + "*")


def _refuse_incomplete(url: str, root: str, entries: list[Entry], kept: list[Entry]) -> None:
    """Where a shard lies beside the mark; or the mark alone, before the first shard."""
    parts = (entry.path.rpartition("/") for entry in entries)
    marked = {folder for folder, _, name in parts if name == INCOMPLETE}
    folders = (entry.path.rpartition("/")[0] for entry in kept)
    if marked and (root.rstrip("/") in marked or any(folder in marked for folder in folders)):
        raise DataError(f"DataConfig.url: {not_whole(url)}")


def _name(root: str, entry: Entry) -> str:
    return entry.path[len(root) :].split("?", 1)[0]


def _is_shown(name: str, is_deep: bool) -> bool:
    parts = name.split("/")
    return (is_deep or len(parts) == 1) and not any(part[:1] in ("", ".", "_") for part in parts)


def _only_format(url: str, root: str, entries: list[Entry]) -> str:
    counts, examples = Counter[str](), {}
    for entry in entries:
        name = _name(root, entry)
        if found := format_of(name):
            counts[found] += 1
            examples[found] = name
    if len(counts) > 1:
        said = " and ".join(f"{count} {f} (such as {examples[f]})" for f, count in counts.items())
        raise DataError(
            f"DataConfig.url: {redact_url(url)!r} holds shards of several formats: {said}; set "
            "DataConfig.format, or move some away"
        )
    return next(iter(counts), "")


def _skipped(root: str, seen: list[Entry], kept: list[Entry]) -> tuple[Skipped, ...]:
    if len(seen) == len(kept):
        return ()
    read = {entry.path for entry in kept}
    return count_skipped(_name(root, entry) for entry in seen if entry.path not in read)


def _nothing(config: DataConfig, url: str) -> str:
    formats = [FORMATS[config.format]] if config.format else list(FORMATS.values())
    endings = ", ".join(f"*{ending}" for f in formats for ending in f.endings)
    return (
        f"DataConfig.url: no shard ({endings}) at {redact_url(url)!r}; it must be a folder that holds "
        "them directly, one file, or a glob such as 'folder/**/*.parquet'"
    )
