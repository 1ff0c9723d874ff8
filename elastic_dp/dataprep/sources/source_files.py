"""The files of a source and their content: a folder with everything below it, one file, or a glob,
without hidden files.

Messages with a URL, or with the text of a foreign exception, go through `redact`. The foreign
exception itself is dropped from the chain, since its text may have secrets.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any

import pyarrow as pa

from elastic_dp.data.discovery.duplicate_files import ListedFiles, duplicate_files, local_place
from elastic_dp.data.discovery.incomplete import INCOMPLETE, incomplete_message
from elastic_dp.data.discovery.listing import glob_mark
from elastic_dp.data.discovery.saved_datasets import CACHED, INFO, STATE, cached_results
from elastic_dp.data.discovery.skipped_files import Skipped, count_skipped
from elastic_dp.data.discovery.table_formats import refuse_table, table_above, tables_among
from elastic_dp.data.formats.litdata_index import is_chunk
from elastic_dp.errors import DataError, ElasticError, StorageError
from elastic_dp.storage import (
    Entry,
    FolderListing,
    entry_of,
    glob_translate,
    is_local,
    list_folder,
    look_up,
    open_file_system,
    redact,
    redact_url,
)

_UNPACKED = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_OF_MDS = (".mds.zstd", ".mds.br")  # read in place, and not opened here


@dataclass(frozen=True)
class Files:
    """`names` are relative to `root`, sorted; `sizes` in bytes; `versions` as `Entry` has them.
    `query`: of an http URL, which may be a signature. `hidden`: names that are there, too, and
    begin with "." or "_"; `unread`: other names that are not read, by the reason.

    Files must not change while they are read, once or several times: DataError.
    """

    system: Any
    root: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    versions: tuple[str, ...]
    query: str = ""
    hidden: tuple[str, ...] = ()
    unread: Mapping[str, Sequence[str]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def path(self, name: str) -> str:
        return (f"{self.root}/{name}" if self.root else name) + self.query

    def ending_in(self, *endings: str) -> Files:
        return self.only(lambda name: kind_of(name) in endings)

    def matching(self, globs: Sequence[str]) -> Files:
        return self.only(lambda name: _matches(name, globs))

    def beside(self, read: Files) -> tuple[Skipped, ...]:
        """The files that are not in `read`, which is a part of these."""
        chosen = set(read.names)
        others = (name for name in self.names if name not in chosen)
        return count_skipped(others, self.hidden, self.unread)

    def duplicates(self) -> str:
        """What is said of files with several names; "" if there are none."""
        if not self.is_local:  # an object has one name
            return ""
        entries = [Entry(*e) for e in zip(self.names, self.sizes, self.versions, strict=True)]
        listed = ListedFiles(
            entries, self.names.__getitem__, lambda name: local_place(self.path(name))
        )
        return duplicate_files([listed])

    def only(self, is_kept: Callable[[str], bool]) -> Files:
        kept = [is_kept(name) for name in self.names]
        return replace(
            self,
            names=tuple(compress(self.names, kept)),
            sizes=tuple(compress(self.sizes, kept)),
            versions=tuple(compress(self.versions, kept)),
        )

    @property
    def is_local(self) -> bool:
        return is_local(self.system)

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """The decompressed file, as a file object for pyarrow. Errors within the `with` block name
        the file."""
        path = self.path(name)
        with (
            self._one_version(name),
            reading(name, self.options),
            self.system.open(path, "rb") as raw,
        ):
            codec = next((c for end, c in _UNPACKED.items() if name.lower().endswith(end)), None)
            if codec:
                yield pa.CompressedInputStream(raw, codec)
            else:
                yield raw

    def decompressed_bytes(self, name: str) -> int | None:
        """How many bytes `open` gives. None: unknown."""
        if name.lower().endswith(tuple(_UNPACKED)):
            return None
        return self.sizes[bisect_left(self.names, name)]

    @contextmanager
    def open_mapped(self, name: str) -> Iterator[Any]:
        """Opens a file as `open` does. A local file is memory mapped, so a large record batch takes
        no memory."""
        if not self.is_local:
            with self.open(name) as raw:
                yield raw
        else:
            with (
                self._one_version(name),
                reading(name, self.options),
                pa.memory_map(self.path(name)) as mapped,
            ):
                yield mapped

    def refuse_changed(self, name: str) -> None:
        """Raises DataError if the file is not the version that was listed."""
        at = bisect_left(self.names, name)
        size, version = self.sizes[at], self.versions[at]
        with reading(name, self.options):
            try:
                now = look_up(self.system, self.path(name))
            except FileNotFoundError:
                now = Entry(name, -1, "")
        if (now.size, now.version) != (size, version):
            raise DataError(
                f"{name} was {'removed' if now.size < 0 else 'changed'} while it was read; start "
                "again when nothing writes to the source any more"
            )

    @contextmanager
    def _one_version(self, name: str) -> Iterator[None]:
        """Checks the version at the end, also after an error: a changed file may look damaged."""
        try:
            yield
        except Exception:
            self.refuse_changed(name)
            raise
        self.refuse_changed(name)


def list_files(
    url: str,
    text_globs: Sequence[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Files:
    """`text_globs`: files that match one of them are read even if their name begins with "_"
    ("__init__.py").

    Raises DataError if there are no files, or a conversion has not finished, and StorageError if
    the store refuses.
    """
    try:
        system, path = open_file_system(url, storage_options)
        system.invalidate_cache()  # a cached listing may be out of date
        path, query = _split(system, str(path).rstrip("/"))
        is_http = "http" in _protocols(system)
        found = _find_unlisted(system, path, query) if is_http else _find(url, system, path)
        if not is_http:
            _refuse_table(url, system, found)
        found = _without_cached_results(system, found)
    except ElasticError:
        raise
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise DataError(_said(f"cannot list {url!r}", error, storage_options)) from None
    except Exception as error:  # a foreign file system may raise anything
        raise StorageError(_said(f"cannot list {url!r}", error, storage_options)) from None
    entries = {found.name(entry.path): entry for entry in found.entries}
    if any(name.rpartition("/")[2] == INCOMPLETE for name in entries):
        raise DataError(incomplete_message(url))
    hidden = [name for name in sorted(entries) if _is_hidden(name, text_globs)]
    names = sorted(entries.keys() - set(hidden))
    if not names:
        raise DataError(
            f"no file at {redact_url(url)!r}; it must be a folder, a file or a glob such as "
            "'dir/**/*.csv'"
        )
    return Files(
        system,
        found.root,
        tuple(names),
        tuple(entries[name].size for name in names),
        tuple(entries[name].version for name in names),
        query,
        tuple(hidden),
        {reason: sorted(map(found.name, paths)) for reason, paths in found.unread.items()},
        storage_options or {},
    )


def kind_of(name: str) -> str:
    """The ending of a name without that of a codec: "jsonl" for "a/b.jsonl.gz"; "litdata" for the
    names of litdata's chunks."""
    file = name.rpartition("/")[2].lower()
    if file.endswith(_OF_MDS):
        return "mds"
    if is_chunk(file):  # of litdata
        return "litdata"
    if file.endswith(".tgz"):
        return "tar"
    for packed in _UNPACKED:
        file = file.removesuffix(packed)
    return file.rpartition(".")[2] if "." in file else ""


@contextmanager
def reading(name: str, options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Raises DataError, without secrets, for errors while the file `name` is read."""
    try:
        yield
    except (ElasticError, AssertionError):
        raise
    except Exception as error:  # of a foreign file system, or of a decoder
        raise DataError(_said(f"cannot read {name}", error, options)) from None


def _split(system: Any, path: str) -> tuple[str, str]:
    """(path, query). Only in http does "?" begin a query; elsewhere it is a mark of a glob."""
    if "http" not in _protocols(system):
        return path, ""
    path, mark, query = path.partition("?")
    return path, mark + query


def _protocols(system: Any) -> Sequence[str]:
    protocol: Sequence[str] | str = system.protocol
    return (protocol,) if isinstance(protocol, str) else protocol


@dataclass
class _SourceListing:
    """What a URL means. `entries`: its files, and the `_incomplete` objects next to them. `root`:
    the path that names are relative to. `listed`: all paths that were listed. `unread`: paths that
    cannot be read, or are not part of the data, by the reason. `matches`: whether the URL names a
    path."""

    root: str
    entries: list[Entry]
    listed: Sequence[str] = ()
    unread: dict[str, list[str]] = field(default_factory=dict)
    matches: Callable[[str], object] = lambda path: True
    is_file: bool = False

    def name(self, path: str) -> str:
        return path.removeprefix(self.root).lstrip("/")


def _find(url: str, system: Any, path: str) -> _SourceListing:
    """A name with marks of a pattern may be the name of a file or folder. Links to folders are
    followed. Keys with an empty part are no paths, and are not read."""
    mark = glob_mark(path)
    if mark is None:
        file = look_up(system, path) if system.isfile(path) else None
        if file is not None and (file.size or not _has_anything(system, path)):
            return _SourceListing(path.rpartition("/")[0], [file], is_file=True)
        return _folder(path, list_folder(system, path, deep=True))
    root = path[:mark].rpartition("/")[0]
    look = list_folder(system, root, deep="/" in path[mark:] or "**" in path)
    pattern = re.compile(glob_translate(path)).match
    beside = re.compile(glob_translate(f"{path.rpartition('/')[0]}/{INCOMPLETE}")).match
    matched = [entry for entry in look.entries if pattern(entry.path) or beside(entry.path)]
    inside = [entry for entry in look.entries if entry.path.startswith(f"{path}/")]
    is_file = [entry for entry in look.entries if entry.path == path]
    if is_file or inside or path in look.folders:
        if others := [entry for entry in matched if entry.path != path]:
            raise DataError(
                f"{redact_url(url)!r} is the name of a file or folder, and also a pattern that "
                f"matches {others[0].path}; in a pattern "
                "write '[[]' for '[', '[*]' for '*' and '[?]' for '?'"
            )
        if is_file:
            return _SourceListing(path.rpartition("/")[0], is_file, is_file=True)
        return _folder(path, list_folder(system, path, deep=True))
    return _SourceListing(
        root, matched, [e.path for e in look.entries], dict(look.unreadable), pattern
    )


def _folder(path: str, look: FolderListing) -> _SourceListing:
    return _SourceListing(path, look.entries, [e.path for e in look.entries], dict(look.unreadable))


def _has_anything(system: Any, folder: str) -> bool:
    """Whether there is something in a folder: some tools create an object of 0 bytes for one."""
    look = list_folder(system, folder, deep=False)
    return bool(look.entries or look.folders)


def _find_unlisted(system: Any, path: str, query: str) -> _SourceListing:
    """Over http, where a page with links is all that there is of a folder."""
    if glob_mark(path) is not None:
        root = path[: glob_mark(path)].rpartition("/")[0]
        found = system.glob(path, detail=True)
    elif system.isfile(path + query):
        root, found = path.rpartition("/")[0], {path: system.info(path + query)}
    else:
        root, found = path, system.find(path, detail=True)
    files = {name: info for name, info in found.items() if info["type"] == "file"}
    return _SourceListing(
        root, [entry_of(name, info) for name, info in files.items()], is_file=True
    )


def _refuse_table(url: str, system: Any, found: _SourceListing) -> None:
    """Raises DataError for a table, also if the glob or file name does not include its log."""

    def names_in(folder: str) -> list[str]:
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in system.ls(folder, detail=False)]
        except OSError:
            return []

    for table in sorted(tables_among(found.listed)):
        if any(entry.path.startswith(f"{table.root}/") for entry in found.entries):
            refuse_table(table, redact_url(url), table.root, names_in, system.cat_file)
    above = table_above(found.root, names_in, itself=True)
    root_url = above.root if above else ""
    refuse_table(above, redact_url(url), root_url, names_in, system.cat_file)


def _without_cached_results(system: Any, found: _SourceListing) -> _SourceListing:
    """Without what Hugging Face `datasets` cached beside the files of a data set."""
    arrow = [] if found.is_file else [e.path for e in found.entries if e.path.endswith(".arrow")]
    notes = {path for path in found.listed if path.endswith((STATE, INFO))}
    cached = cached_results(arrow, notes.__contains__, system.cat_file, found.matches)
    if not cached:
        return found
    kept = [entry for entry in found.entries if entry.path not in cached]
    return replace(found, entries=kept, unread={**found.unread, CACHED: sorted(cached)})


def _said(what: str, error: Exception, options: Mapping[str, Any] | None) -> str:
    return redact(f"{what}: {type(error).__name__}: {error}", options or {})


def _is_hidden(name: str, text_globs: Sequence[str]) -> bool:
    marks = (".",) if _matches(name, text_globs) else (".", "_")
    return any(part.startswith(marks) for part in name.split("/"))


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a pattern matches. One without "/" is matched with the file name, in any folder."""
    file = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else file, glob) for glob in globs)
