"""Lists the shards at a URL, and finds their format.

The shards of a folder are the files directly in it with the ending of a format. The shards of a
glob are the files that match it. Hidden names (".part-0.parquet", "_temporary/…") are not read:
they are unfinished files of other writers. A folder with an `_incomplete` object is a conversion
that has not finished, and is refused, also for a glob. Other files are counted and reported. Tables
are refused (table_formats.py). `.json` files mostly describe a data set, so they are shards only
where the URL says "json" or the format is given.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.duplicate_files import ListedFiles, duplicate_files, local_place
from elastic_dp.data.discovery.incomplete import INCOMPLETE, incomplete_message, unfinished_job
from elastic_dp.data.discovery.no_shards import IsShard, shown_folder, why_no_shard
from elastic_dp.data.discovery.saved_datasets import CACHED, INFO, STATE, cached_results
from elastic_dp.data.discovery.skipped_files import HIDDEN, Skipped, count_skipped, skipped_message
from elastic_dp.data.discovery.streaming_index import refuse_other_shards
from elastic_dp.data.discovery.table_formats import (
    Table,
    refuse_table,
    table_above,
    table_in,
    tables_among,
)
from elastic_dp.data.formats.format_registry import FORMATS, format_of
from elastic_dp.data.formats.jsonl import is_json
from elastic_dp.data.formats.litdata_index import INDEX
from elastic_dp.errors import DataError
from elastic_dp.storage import Entry, FolderListing, Store, glob_translate, redact_url

_GLOB_MARKS = "*?["
_NAMED = 3
_INDEXED = ("mds", "litdata")  # formats with an index.json that names the shards
_CODECS = (".gz", ".zst", ".bz2", ".lz4", ".zstd", ".br")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
}
_SPLIT = re.compile(rf"(?:^|[^a-z])({'|'.join(_SPLITS)})(?![a-z])")


@dataclass(frozen=True)
class ShardListing:
    """The shards of a source, in the order of their names.

    `is_file`: the URL names a single shard. `root`: the path that names are relative to. `skipped`:
    files that are not read. `remarks`: warnings for the user.
    """

    format: str
    is_file: bool
    root: str
    entries: list[Entry]
    skipped: tuple[Skipped, ...] = ()
    remarks: tuple[str, ...] = ()

    def name(self, number: int) -> str:
        return _name(self.root, self.entries[number])


@dataclass
class _Found:
    """What a URL means. `entries`: the files, with hidden ones. `root`: the path that names are
    relative to. `folder`: the folder that was listed, `look`: its listing. `is_deep`: `look` has
    all files below the folder."""

    root: str
    folder: str
    entries: list[Entry]
    look: FolderListing = field(default_factory=lambda: FolderListing([], [], {}))
    is_file: bool = False
    is_glob: bool = False
    is_deep: bool = False
    reads_json: bool = False  # whether `.json` files are shards

    def format_of(self, name: str) -> str:
        return "" if is_json(name) and not self.reads_json else format_of(name)

    def name(self, entry: Entry) -> str:
        return _name(self.root, entry)

    def is_shown(self, entry: Entry) -> bool:
        parts = entry.path[len(self.folder) :].split("/")
        return self.is_file or not any(part[:1] in ("", ".", "_") for part in parts)


def list_shards(config: DataConfig, url: str, store: Store) -> ShardListing:
    """Raises DataError if there is no shard, the data set is not complete, or formats are mixed.

    Names are computed only when they are needed.
    """
    found = _find(config, url, store)
    last = store.path.rstrip("/").rpartition("/")[2].lower()
    found.reads_json = found.is_file or config.format == "jsonl" or ".json" in last
    seen = [entry for entry in found.entries if found.is_shown(entry)]
    if config.format is None:
        chosen = _only_format(url, found, seen)
        kept = [entry for entry in seen if found.format_of(found.name(entry))]
    elif found.is_file or found.is_glob:
        chosen, kept = str(config.format), seen
    else:
        chosen = str(config.format)
        kept = [entry for entry in seen if found.format_of(found.name(entry)) == chosen]
    _refuse_incomplete(url, found, kept)
    _refuse_table(config, url, store, found, kept)
    cached = _cached(url, store, found, kept) if chosen == "arrow" else set()
    kept = [entry for entry in kept if entry.path not in cached] if cached else kept
    indexes = _indexes(url, store, chosen, found, kept) if chosen in _INDEXED else set()
    skipped = _skipped(found, seen, kept, cached, indexes)
    if not kept:
        raise DataError(_nothing(config, url, store, found, skipped))
    remarks = tuple(_remarks(url, store, found, kept, skipped))
    return ShardListing(chosen, found.is_file, found.root, kept, skipped, remarks)


def root_of(path: str) -> str:
    """The path that the names of shards are relative to, for a folder or a glob."""
    mark = glob_mark(path)
    if mark is not None:
        return path[: path.rfind("/", 0, mark) + 1]
    return path.rstrip("/") + "/" if path.strip("/") else ""


def path_of(store_path: str, name: str, is_file: bool) -> str:
    """The path of a shard in its store."""
    return store_path if is_file else root_of(store_path) + name


def prefix_of(url: str, is_file: bool) -> str:
    """What precedes the names of shards in messages if there are several sources."""
    shown = redact_url(url)
    return shown[: shown.rfind("/") + 1] if is_file else root_of(shown)


def glob_mark(path: str) -> int | None:
    return min((path.index(mark) for mark in _GLOB_MARKS if mark in path), default=None)


def duplicate_files_warning(sources: Iterable[tuple[Store, ShardListing, str]]) -> str:
    """A warning about files that are listed under several names, and so are read several times; ""
    if there are none. `sources`: (store, listing, prefix of names)."""

    def files(store: Store, listed: ShardListing, prefix: str) -> ListedFiles:
        return ListedFiles(
            listed.entries, lambda n: prefix + listed.name(n), partial(_place, store)
        )

    words = duplicate_files(files(*source) for source in sources)
    return words and f"DataConfig.url: {words}"


# ------------------------------------------------------------------------------- what a URL means


def _find(config: DataConfig, url: str, store: Store) -> _Found:
    """Resolves a URL with one listing. Only a glob with a mark before its last part lists deeper
    than one folder."""
    path = store.path
    if not store.lists:
        return _file(store.find(path)[0])
    mark = glob_mark(path)
    if mark is not None:
        return _find_glob(url, store, mark)
    may_be_file = config.format is not None or format_of(path)
    entry = store.look_up(path) if may_be_file and not path.endswith("/") else None
    if entry is not None and (entry.size or not _has_anything(store, path)):
        return _file(entry)
    folder = root_of(path)
    look = store.look(folder, deep=False)
    return _Found(folder, folder, look.entries, look)


def _find_glob(url: str, store: Store, mark: int) -> _Found:
    """Resolves a URL with "[", "*" or "?", which may be a pattern or the name of a file or
    folder."""
    path, root = store.path, root_of(store.path)
    exact = path.rstrip("/")
    is_deep = "/" in exact[mark:] or "**" in exact
    look = store.look(root, deep=is_deep)
    is_folder = exact in look.folders or any(e.path.startswith(f"{exact}/") for e in look.entries)
    is_file = [entry for entry in look.entries if entry.path == exact]
    if not (is_folder or is_file) or path.endswith("/"):
        matched = [] if path.endswith("/") else _matched(url, exact, look.entries)
    else:
        matched = [e for e in _matched(url, exact, look.entries) if e.path != exact]
    if (is_folder or is_file) and matched:
        what = "file" if is_file else "folder"
        raise DataError(
            f"DataConfig.url: {redact_url(url)!r} is the name of a {what}, and also a "
            "pattern that matches "
            f"{_name(root, matched[0])}. In a pattern write '[[]' for '[', '[*]' for '*' and "
            "'[?]' for '?'; or rename it"
        )
    if is_file:
        return _file(is_file[0])
    if is_folder:
        inside = store.look(exact, deep=False)
        return _Found(root, f"{exact}/", inside.entries, inside)
    return _Found(root, root, matched, look, is_glob=True, is_deep=is_deep)


def _matched(url: str, pattern: str, entries: list[Entry]) -> list[Entry]:
    matches = _pattern(url, pattern)
    return [entry for entry in entries if matches(entry.path)]


def _pattern(url: str, pattern: str) -> Callable[[str], object]:
    try:
        return re.compile(glob_translate(pattern)).match
    except ValueError:  # "**.parquet"
        shown = redact_url(url)
        corrected = re.sub(r"(?<=[^/*])\*\*+", "*", shown)
        corrected = re.sub(r"\*\*+(?=[^/*])", "**/*", corrected)
        raise DataError(
            f"DataConfig.url: in {shown!r} '**' is part of a name, and must stand alone "
            "between two '/'; for the files in "
            f"all folders below write {corrected!r}"
        ) from None


def _file(entry: Entry) -> _Found:
    path = _without_query(entry.path)
    root = path[: path.rfind("/") + 1]
    return _Found(root, root, [entry], is_file=True)


def _has_anything(store: Store, folder: str) -> bool:
    """Whether there is something in a folder: some tools create an object of 0 bytes for one."""
    look = store.look(folder, deep=False)
    return bool(look.entries or look.folders)


def _name(root: str, entry: Entry) -> str:
    return _without_query(entry.path)[len(root) :]


def _without_query(path: str) -> str:
    """The path without a query. Only in a path that is an http URL does "?" begin one."""
    return path.split("?", 1)[0] if path.startswith(("http://", "https://")) else path


# ----------------------------------------------------------------------------- what is not read


def _refuse_incomplete(url: str, found: _Found, kept: list[Entry]) -> None:
    """Raises DataError if the marker object is in a folder of a shard, or in the folder itself."""
    marks = (e.path for e in found.look.entries if e.path.endswith(INCOMPLETE))
    parts = (path.rpartition("/") for path in marks)
    marked = {folder for folder, _, name in parts if name == INCOMPLETE}
    folders = (entry.path.rpartition("/")[0] for entry in kept)
    if marked and (
        found.folder.rstrip("/") in marked or any(folder in marked for folder in folders)
    ):
        raise DataError(f"DataConfig.url: {incomplete_message(url)}")


def is_list(config: DataConfig) -> bool:
    return not isinstance(config.url, str) or len(config.urls) > 1


def _refuse_table(
    config: DataConfig, url: str, store: Store, found: _Found, kept: list[Entry]
) -> None:
    """Raises DataError for a table. Not for a file in a list of URLs: see listed_files.py."""
    if not store.lists or (found.is_file and is_list(config)):
        return

    def names_in(folder: str) -> list[str]:
        look = store.look(folder, deep=False)
        return [
            path.rpartition("/")[2] for path in [*(e.path for e in look.entries), *look.folders]
        ]

    folder = found.folder.rstrip("/")
    table: Table | None = None
    if found.is_deep:
        for one in tables_among(entry.path for entry in found.look.entries):
            inside = f"{one.root}/" if one.root else ""
            if any(entry.path.startswith(inside) for entry in kept):
                table = one
    elif not found.is_file:
        names = (path.rpartition("/")[2] for path in found.look.folders)
        table = table_in(folder, names, names_in)
    table = table or table_above(folder, names_in, itself=found.is_file)
    shown = redact_url(url)
    root_url = shown_folder(shown, store.path, table.root).rstrip("/") if table else ""
    refuse_table(
        table,
        shown,
        root_url,
        names_in,
        lambda path: bytes(store.read_all(path)),
        "DataConfig.url: ",
    )


def _only_format(url: str, source: _Found, entries: list[Entry]) -> str:
    counts, examples = Counter[str](), {}
    for entry in entries:
        name = source.name(entry)
        if found := source.format_of(name):
            counts[found] += 1
            examples[found] = name
    if len(counts) > 1:
        counted = (f"{count} {f} (such as {examples[f]})" for f, count in counts.items())
        raise DataError(
            f"DataConfig.url: {redact_url(url)!r} holds shards of several formats: "
            f"{' and '.join(counted)}; set DataConfig.format, or move some away"
        )
    return next(iter(counts), "")


def _cached(url: str, store: Store, found: _Found, kept: list[Entry]) -> set[str]:
    """The cached results of Hugging Face `datasets` among the shards of a folder or glob."""
    if found.is_file:
        return set()
    notes = {entry.path for entry in found.look.entries if entry.path.endswith((STATE, INFO))}
    matches = _pattern(url, store.path.rstrip("/")) if found.is_glob else lambda path: True
    try:
        return cached_results(
            (entry.path for entry in kept),
            has=notes.__contains__,
            read=lambda path: bytes(store.read_all(path)),
            is_wanted=matches,
        )
    except DataError as error:
        raise DataError(f"DataConfig.url: {error}") from None


def _indexes(url: str, store: Store, chosen: str, found: _Found, kept: list[Entry]) -> set[str]:
    """The indexes of MDS shards, or of litdata's chunks. Raises DataError if `kept` are not the
    shards that they name."""
    if found.is_file or not kept:
        return set()
    there = {e.path for e in found.look.entries if e.path.rpartition("/")[2] == INDEX}
    matches = _pattern(url, store.path.rstrip("/")) if found.is_glob else None
    try:
        refuse_other_shards(
            chosen,
            {entry.path: entry.size for entry in kept},
            there,
            read=lambda path: bytes(store.read_all(path)),
            is_wanted=matches
            or (lambda path: found.is_deep or "/" not in path[len(found.folder) :]),
            is_folder=not found.is_glob,
        )
    except DataError as error:
        raise DataError(f"DataConfig.url: {error}") from None
    return there


def _skipped(
    found: _Found,
    seen: list[Entry],
    kept: list[Entry],
    cached: Collection[str],
    indexes: Collection[str],
) -> tuple[Skipped, ...]:
    reasons = {
        reason: [path[len(found.root) :] for path in paths]
        for reason, paths in {**found.look.unreadable, CACHED: sorted(cached)}.items()
    }
    if len(found.entries) == len(kept) and not found.look.unreadable:
        return ()
    read = {*cached, *indexes, *(entry.path for entry in kept)}
    shown = {entry.path for entry in seen}
    others = (found.name(entry) for entry in seen if entry.path not in read)
    hidden = [found.name(entry) for entry in found.entries if entry.path not in shown]
    return count_skipped(others, hidden, reasons)


def _nothing(
    config: DataConfig, url: str, store: Store, found: _Found, skipped: tuple[Skipped, ...]
) -> str:
    formats = [FORMATS[config.format]] if config.format else list(FORMATS.values())
    every = [ending for f in formats for ending in f.endings]
    if not found.reads_json:
        every = [ending for ending in every if not is_json(ending)]
    endings = ", ".join(f"*{ending}" for ending in every if not ending.endswith(_CODECS))
    shown = redact_url(url)
    cause = why_no_shard(
        shown,
        store,
        found.folder,
        found.look,
        skipped=skipped,
        is_glob=found.is_glob,
        is_shard=IsShard(every),
        given_format=config.format,
    )
    return f"DataConfig.url: no shard ({endings}) at {shown!r}: {cause}"


# ------------------------------------------------------------------------------------- remarks


def _remarks(
    url: str, store: Store, found: _Found, kept: list[Entry], skipped: tuple[Skipped, ...]
) -> Iterable[str]:
    # `_SUCCESS`, `_metadata` and the like need no warning; a hidden shard does.
    are_some = any(one.ending == HIDDEN for one in skipped)  # there may be a million files
    hidden = [found.name(e) for e in found.entries if not found.is_shown(e)] if are_some else []
    if any(one.ending != HIDDEN for one in skipped) or (
        skipped and any(map(found.format_of, hidden))
    ):
        files = skipped_message(skipped)
        yield f"DataConfig.url: not read at {store.url}, since these are no shards: {files}"
    folders = (path[len(found.root) :].lstrip("/") for path in found.look.folders)
    if words := unfinished_job([*hidden, *folders]):
        yield f"DataConfig.url: at {store.url} {words}"
    yield from _folders(url, store, found)
    yield from _splits(url, store, found, kept)


def _folders(url: str, store: Store, found: _Found) -> Iterable[str]:
    """Warns of folders that are not read. Some programs name a folder as a file, such as
    "part.parquet/" of Spark."""
    matches = _pattern(url, store.path.rstrip("/")) if found.is_glob else None
    names = [
        path[len(found.folder) :].lstrip("/")
        for path in found.look.folders
        if not matches or matches(path)
    ]
    names = [name for name in names if name[:1] not in (".", "_")]
    if names:
        base = shown_folder(redact_url(url), store.path, found.folder)
        some = ", ".join(f"{name}/" for name in names[:_NAMED])
        more = ", …" if len(names) > _NAMED else ""
        folders = "1 folder" if len(names) == 1 else f"{len(names):,} folders"
        yield (
            f"DataConfig.url: not read at {store.url}: {folders}, with whatever lies below "
            f"({some}{more}). '{base}**' "
            "reads all of it"
        )


def _splits(url: str, store: Store, found: _Found, kept: list[Entry]) -> Iterable[str]:
    base = shown_folder(redact_url(url), store.path, found.root)
    if words := splits_message(map(found.name, kept), base):
        yield f"DataConfig.url: {redact_url(url)!r} {words}"


def splits_message(names: Iterable[str], base: str) -> str:
    """A warning for a data set with files of several splits; "" for any other. `base`: the folder
    of the names, with a "/" at the end."""
    names = list(names)
    # One search over all names takes a tenth of the time of a search for each.
    if len({_SPLITS[word] for word in _SPLIT.findall("\n".join(names).lower())}) < 2:
        return ""
    counts, examples = Counter[str](), dict[str, tuple[str, int]]()
    for name in names:
        if match := _SPLIT.search(name.lower()):
            split = _SPLITS[match[1]]
            counts[split] += 1
            examples.setdefault(split, (name, match.end()))
    if len(counts) < 2:
        return ""
    there = ", ".join(f"{count:,} of {s} (such as {examples[s][0]})" for s, count in counts.items())
    name, end = examples.get("train", next(iter(examples.values())))
    glob = name[:end] + ("/**" if name[end : end + 1] == "/" else "*")
    return (
        f"holds files of several splits, and all of them are read as one data set: {there}. "
        "Name one split by a glob, such "
        f"as '{base}{glob}'"
    )


def _place(store: Store, path: str) -> object:
    local = store.local_path(path)
    return (urlsplit(store.url).netloc, path) if local is None else local_place(local)
