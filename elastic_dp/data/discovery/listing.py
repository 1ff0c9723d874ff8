"""The one listing: which files a URL names.

A URL names a file, a folder (the files directly in it), or a glob (the files that match it). Hidden
names (".part-0.parquet", "_temporary/…") are never read: they are unfinished files or notes of
other programs. A folder with an `_incomplete` object is refused, also for a glob, and so is a
folder of a table (Delta Lake, Iceberg, Hudi), since it also holds files of deleted rows. Other
files that are not read are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elastic_dp.data.discovery.shard_index import glob_mark, root_of
from elastic_dp.errors import DataError, StorageError
from elastic_dp.storage import Entry, FolderListing, Store, glob_translate, redact_url

STATE, INFO = "state.json", "dataset_info.json"  # notes of Hugging Face `datasets`
CACHED = "cached results of Hugging Face datasets"
_CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_NAMED = 3
_PARTITION = re.compile(r"[^/=]+=[^/]*")
_HASHED = re.compile(r"[01]{4}|[01]{8}|[0-9a-f]{8}")  # folders of Iceberg's object store layout
_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi", "metadata": "Iceberg"}
_TABLE_LINES = {
    "Delta": "Name the files of its newest version: "
    "DataConfig(DeltaTable({root!r}).file_uris(), …), of the package deltalake. If it has deletion "
    "vectors or column mapping, write its rows instead: "
    "write_shards(DeltaTable({root!r}).to_pyarrow_dataset().scanner().to_reader(), 'rows/')",
    "Iceberg": "Name the files of its newest snapshot: DataConfig([task.file.file_path for task in "
    "table.scan().plan_files()], …), with a table of the package pyiceberg. If it has delete "
    "files, write its rows instead: write_shards(table.scan().to_arrow_batch_reader(), 'rows/')",
    "Hudi": "Write its rows with Spark: "
    "spark.read.format('hudi').load({root!r}).write.parquet('rows')",
}


@dataclass(frozen=True)
class Listing:
    """The files that a URL names, without hidden ones, by name.

    `root`: the path that names are relative to. `is_file`: the URL names one file. `is_glob`: it is
    a pattern. `folders`: the folders in the one that was listed, which are not read. `hidden`,
    `unreadable`: names of other files; `unreadable` by the reason.
    """

    url: str
    root: str
    entries: list[Entry]
    is_file: bool = False
    is_glob: bool = False
    folders: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    unreadable: dict[str, list[str]] = field(default_factory=dict)

    def name(self, entry: Entry) -> str:
        return _without_query(entry.path)[len(self.root) :]

    def skipped(self, read: Sequence[Entry]) -> dict[str, list[str]]:
        """The names of files that are not among `read`: by ending, such as ".py" or "", by HIDDEN,
        or by another reason. The most frequent come first."""
        chosen = {entry.path for entry in read}
        found: dict[str, list[str]] = {}
        for name in (self.name(entry) for entry in self.entries if entry.path not in chosen):
            file = name.rpartition("/")[2]
            ending = f".{file.rpartition('.')[2].lower()}" if "." in file else ""
            found.setdefault(ending, []).append(name)
        found |= {HIDDEN: self.hidden} if self.hidden else {}
        found |= {reason: names for reason, names in self.unreadable.items() if names}
        return dict(sorted(found.items(), key=lambda one: (-len(one[1]), one[0])))


def list_files(url: str, store: Store, *, in_list: bool = False) -> Listing:
    """`in_list`: the URL is one of a list. Its file may then be one of a table, as the table's own
    library names them.

    Raises DataError for a folder that is not complete, or belongs to a table; StorageError if the
    store refuses."""
    look, listing = _find(url, store)
    _refuse_incomplete(url, look, listing)
    if store.lists and not (listing.is_file and in_list):
        _refuse_table(url, store, look, listing)
    return _without_cached(store, look, listing)


def _find(url: str, store: Store) -> tuple[FolderListing, Listing]:
    """Resolves a URL with one listing. Only a glob with a mark before its last part lists deeper
    than one folder."""
    path, none = store.path, FolderListing([], [], {})
    if not store.lists:
        return none, _file(url, store.find(path)[0])
    if glob_mark(path) is not None:
        return _find_glob(url, store)
    last = path.rstrip("/").rpartition("/")[2]
    entry = store.look_up(path) if "." in last and not path.endswith("/") else None
    if entry is not None and (entry.size or not _has_anything(store, path)):
        return none, _file(url, entry)
    folder = root_of(path)
    look = store.look(folder, deep=False)
    if not look.entries and not look.folders and (entry := store.look_up(path)) is not None:
        return none, _file(url, entry)
    return look, _listing(url, folder, folder, look, look.entries)


def _find_glob(url: str, store: Store) -> tuple[FolderListing, Listing]:
    path, root = store.path, root_of(store.path)
    rest = path[glob_mark(path) :]
    look = store.look(root, deep="/" in rest or "**" in rest)
    matches = _pattern(url, path)
    matched = [entry for entry in look.entries if matches(entry.path)]
    if matched and not matches(path) and any(entry.path == path for entry in look.entries):
        raise DataError(
            f"DataConfig.url: {redact_url(url)!r} is the name of a file, and also a pattern that "
            f"matches {matched[0].path[len(root) :]}; write '[[]' for '[' of a name"
        )
    folders = [folder for folder in look.folders if matches(folder)]
    return look, replace(_listing(url, root, root, look, matched), is_glob=True, folders=folders)


def _listing(
    url: str, root: str, folder: str, look: FolderListing, entries: list[Entry]
) -> Listing:
    shown, hidden = list[Entry](), list[str]()
    for entry in entries:
        parts = entry.path[len(folder) :].split("/")
        if any(part[:1] in ("", ".", "_") for part in parts):
            hidden.append(entry.path[len(root) :])
        else:
            shown.append(entry)
    return Listing(
        url=redact_url(url),
        root=root,
        entries=shown,
        folders=[f for f in look.folders if f.rpartition("/")[2][:1] not in (".", "_")],
        hidden=hidden,
        unreadable={
            reason: [path[len(root) :] for path in paths]
            for reason, paths in look.unreadable.items()
        },
    )


def _pattern(url: str, pattern: str) -> Callable[[str], object]:
    try:
        return re.compile(glob_translate(pattern)).match
    except ValueError:  # "**.parquet"
        shown = redact_url(url)
        corrected = re.sub(r"(?<=[^/*])\*\*+", "*", shown)
        corrected = re.sub(r"\*\*+(?=[^/*])", "**/*", corrected)
        raise DataError(
            f"DataConfig.url: in {shown!r} '**' is part of a name, and must stand alone between "
            f"two '/'; for the files in all folders below write {corrected!r}"
        ) from None


def _file(url: str, entry: Entry) -> Listing:
    path = _without_query(entry.path)
    return Listing(redact_url(url), path[: path.rfind("/") + 1], [entry], is_file=True)


def _has_anything(store: Store, folder: str) -> bool:
    """Whether there is something in a folder: some tools create an object of 0 bytes for one."""
    look = store.look(folder, deep=False)
    return bool(look.entries or look.folders)


def _without_query(path: str) -> str:
    """The path without a query. Only in a path that is an http URL does "?" begin one."""
    return path.split("?", 1)[0] if path.startswith(("http://", "https://")) else path


# ---------------------------------------------------------------------------- what is not a set


def _refuse_incomplete(url: str, look: FolderListing, listing: Listing) -> None:
    """Raises DataError if the mark is in a folder of a file, or in the folder itself."""
    marks = (entry.path.rpartition("/") for entry in look.entries)
    marked = {folder for folder, _, name in marks if name == INCOMPLETE}
    folders = {entry.path.rpartition("/")[0] for entry in listing.entries}
    if marked & {listing.root.rstrip("/"), *folders}:
        raise DataError(
            f"DataConfig.url: {redact_url(url)!r} is a data set that is not complete: it holds "
            f"{INCOMPLETE!r}. What writes it still runs, or was killed. Wait until it ends; if it "
            "was killed, remove the folder and write it again"
        )


def _refuse_table(url: str, store: Store, look: FolderListing, listing: Listing) -> None:
    found: tuple[str, str] | None = None
    for entry in look.entries if listing.is_glob else ():
        for mark, kind in _LOGS.items():
            root, log, _ = f"/{entry.path}".partition(f"/{mark}/")
            is_log = log and (kind != "Iceberg" or ".metadata.json" in entry.path)
            if is_log and any(f"/{e.path}".startswith(f"{root}/") for e in listing.entries):
                found = root[1:], kind
    folder = (listing.entries[0].path if listing.is_file else listing.root).rpartition("/")[0]
    if found is None and not listing.is_file:
        names = {path.rpartition("/")[2] for path in look.folders}
        found = _table_at(store, folder, names & _LOGS.keys())
    above = folder if listing.is_file else _above(folder)
    while found is None and above:
        # Permission to read a folder does not include listing the one above it.
        with suppress(StorageError):
            found = _table_at(store, above, _LOGS)
        above = _above(above)
    if found is not None:
        root, kind = found
        shown, inside = redact_url(url), store.path
        root_url = shown[: len(shown) - len(inside)] + root if shown.endswith(inside) else root
        raise DataError(
            f"DataConfig.url: {shown!r} belongs to the {kind} table {root_url!r}, whose folders "
            f"also hold files of deleted and replaced rows. {_TABLE_LINES[kind]}".replace(
                "{root!r}", repr(root_url)
            )
        )


def _table_at(store: Store, folder: str, marks: Iterable[str]) -> tuple[str, str] | None:
    """(folder, kind) if the log of a table is directly in the folder."""
    for mark in marks:
        inside = store.look(f"{folder}/{mark}" if folder else mark, deep=False)
        names = [entry.path for entry in inside.entries] + inside.folders
        if _LOGS[mark] == "Iceberg":
            names = [name for name in names if ".metadata.json" in name]
        if names:
            return folder, _LOGS[mark]
    return None


def _above(folder: str) -> str:
    """The folder that may be the root of a table of which `folder` is a part; "" if there is
    none."""
    above, _, name = folder.rpartition("/")
    is_part = name == "data" or _PARTITION.fullmatch(name) or _HASHED.fullmatch(name)
    return above if is_part else ""


def _without_cached(store: Store, look: FolderListing, listing: Listing) -> Listing:
    """The listing without results that Hugging Face `datasets` caches in the folder that it reads:
    they repeat rows. `state.json` names the files of the data set."""
    notes = {entry.path for entry in look.entries if entry.path.endswith((STATE, INFO))}
    if listing.is_file or not notes:
        return listing
    inside: dict[str, list[Entry]] = {}
    for entry in listing.entries:
        if entry.path.endswith(".arrow"):
            inside.setdefault(entry.path.rpartition("/")[0] + "/", []).append(entry)
    cached: set[str] = set()
    for folder, there in inside.items():
        if folder + STATE in notes and folder + INFO in notes:
            named = {folder + n for n in files_of_saved(bytes(store.read_all(folder + STATE)))}
            if not listing.is_glob and (lost := sorted(named - {e.path for e in there})):
                raise DataError(
                    f"DataConfig.url: {folder}{STATE} names {lost[0]!r}, which is no file of this "
                    "folder; copy the whole folder again"
                )
            results = {e.path for e in there if e.path not in named}
        else:
            results = {e.path for e in there if _CACHE.fullmatch(e.path.rpartition("/")[2])}
        if len(results) < len(there):  # else the user named them
            cached |= results
    if not cached:
        return listing
    kept = [entry for entry in listing.entries if entry.path not in cached]
    named_so = {CACHED: [path[len(listing.root) :] for path in sorted(cached)]}
    return replace(listing, entries=kept, unreadable={**listing.unreadable, **named_so})


def files_of_saved(content: bytes) -> list[str]:
    try:
        state = json.loads(content)
        names = [str(file["filename"]) for file in state["_data_files"]]
        indices = state.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"state.json is not what datasets.save_to_disk writes: {error!r}") from None
    if indices:  # by versions of `datasets` before 2.0
        raise DataError(
            "state.json names files of indices, which choose the rows of the data set. Save it "
            "with a newer version: load_from_disk(folder).flatten_indices().save_to_disk(other)"
        )
    return names


# ------------------------------------------------------------------------------- nothing to read


def why_nothing(listing: Listing) -> str:
    """Why no file of the listing is a shard, and what to do."""
    skipped = listing.skipped([])
    if listing.hidden and len(skipped) == 1:
        return (
            f"only {skipped_message(skipped)}. Names that begin with '.' or '_' are files that are "
            "not finished, or notes of the program that wrote them; rename them if they are shards"
        )
    below = ""
    if listing.folders:
        base = listing.url if listing.is_glob else f"{listing.url.rstrip('/')}/"
        base = base[: glob_mark(base)].rpartition("/")[0] + "/"
        some = ", ".join(f"{path[len(listing.root) :]}/" for path in listing.folders[:_NAMED])
        below = f"there are folders ({some}): '{base}**' reads what lies below"
    if listing.entries or listing.unreadable:
        why = f"none of the files can be read: {skipped_message(skipped)}"
        return f"{why}; {below}" if below else why
    if below:
        return below
    if listing.is_glob:
        return (
            "no file matches the pattern; correct it, and write '[[]' for '[', '[*]' for '*' and "
            "'[?]' for '?' of a name"
        )
    return "no file of that name or below it; look at its spelling, and whether it is mounted here"


INCOMPLETE = "_incomplete"  # an object that is there while `write_shards` writes to a store


_ENDINGS = 6  # endings that a message names
HIDDEN = "hidden"
_LABELS = {"": "without an ending", HIDDEN: "hidden by a leading '.' or '_'"}


def skipped_message(skipped: Mapping[str, Sequence[str]]) -> str:
    """A message of one line."""
    total = sum(map(len, skipped.values()))
    words = [
        f"{len(names):,} {_LABELS.get(ending, ending)} (such as {min(names)})"
        for ending, names in [*skipped.items()][:_ENDINGS]
    ]
    more = [f"{len(skipped) - _ENDINGS} more endings"] if len(skipped) > _ENDINGS else []
    return f"{total:,} file{'s' * (total != 1)}: {', '.join([*words, *more])}"
