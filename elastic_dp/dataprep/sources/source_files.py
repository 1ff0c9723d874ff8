"""The files of a source and their content: a folder with everything below it, one file, or a glob,
without hidden files.

Messages with a URL, or with the text of a foreign exception, go through `redact`. The foreign
exception itself is dropped from the chain, since its text may have secrets.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any

import pyarrow as pa

from elastic_dp.data.discovery.incomplete import INCOMPLETE, incomplete_message
from elastic_dp.data.discovery.listing import glob_mark
from elastic_dp.data.discovery.skipped_files import Skipped, count_skipped
from elastic_dp.data.discovery.table_formats import refuse_table, table_above, tables_among
from elastic_dp.errors import DataError, ElasticError, StorageError
from elastic_dp.storage import (
    Entry,
    FolderListing,
    entry_of,
    glob_translate,
    is_local,
    look_up,
    open_file_system,
    redact,
    redact_url,
)
from elastic_dp.storage.local_backend import LINKS, LocalBackend

_GLOB_MARKS = "*?["
_UNPACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


@dataclass(frozen=True)
class Files:
    """`names` are relative to `root`, sorted; `sizes` in bytes; `versions` as `Entry` has them.
    `query`: of an http URL, which may be a signature. `hidden`: names that are there, too, and
    begin with "." or "_"; `dead`: dangling links.

    Files must not change while they are read, once or several times: DataError.
    """

    system: Any
    root: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    versions: tuple[str, ...]
    query: str = ""
    hidden: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def path(self, name: str) -> str:
        return (f"{self.root}/{name}" if self.root else name) + self.query

    def ending_in(self, *endings: str) -> Files:
        return self._only([kind_of(name) in endings for name in self.names])

    def matching(self, globs: Sequence[str]) -> Files:
        return self._only([_matches(name, globs) for name in self.names])

    def beside(self, read: Files) -> tuple[Skipped, ...]:
        """The files that are not in `read`, which is a part of these."""
        chosen = set(read.names)
        others = (name for name in self.names if name not in chosen)
        return count_skipped(others, self.hidden, {LINKS: self.dead})

    def _only(self, kept: Sequence[bool]) -> Files:
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

    @contextmanager
    def open_mapped(self, name: str) -> Iterator[Any]:
        """Like `open`; a local file is memory mapped, so that a large record batch takes no
        memory."""
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
        dead: list[str] = []
        if is_local(system):
            root, found, dead = _find_local(url, path)
        else:
            root, found = _find(system, path, query)
    except ElasticError:
        raise
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise DataError(_said(f"cannot list {url!r}", error, storage_options)) from None
    except Exception as error:  # a foreign file system may raise anything
        raise StorageError(_said(f"cannot list {url!r}", error, storage_options)) from None
    entries = {str(name).removeprefix(root).lstrip("/"): entry for name, entry in found.items()}
    if any(name.rpartition("/")[2] == INCOMPLETE for name in entries):
        raise DataError(incomplete_message(url))
    if "http" not in _protocols(system):
        _refuse_table(url, system, path, root, entries)
    hidden = [name for name in sorted(entries) if _is_hidden(name, text_globs)]
    names = sorted(entries.keys() - set(hidden))
    if not names:
        raise DataError(
            f"no file at {redact_url(url)!r}; it must be a folder, a file or a glob such as "
            "'dir/**/*.csv'"
        )
    sizes = tuple(entries[name].size for name in names)
    versions = tuple(entries[name].version for name in names)
    links = tuple(path.removeprefix(root).lstrip("/") for path in dead)
    return Files(
        system,
        root,
        tuple(names),
        sizes,
        versions,
        query,
        tuple(hidden),
        links,
        storage_options or {},
    )


def kind_of(name: str) -> str:
    """The ending of a name without that of a codec: "jsonl" for "a/b.jsonl.gz"."""
    file = name.rpartition("/")[2].lower()
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


def _refuse_table(url: str, system: Any, path: str, root: str, names: Iterable[str]) -> None:
    """Raises DataError for a table, also if the glob or file name does not include its log."""

    def names_in(folder: str) -> list[str]:
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in system.ls(folder, detail=False)]
        except OSError:
            return []

    files = [f"{root}/{name}" for name in names]
    is_deep_glob = any(mark in path for mark in _GLOB_MARKS) and "/" in path[len(root) + 1 :]
    for found in sorted(tables_among(system.find(root) if is_deep_glob else files)):
        if any(file.startswith(f"{found.root}/") for file in files):
            refuse_table(found, redact_url(url), found.root, names_in, system.cat_file)
    table = table_above(root, names_in, itself=True)
    root_url = table.root if table else ""
    refuse_table(table, redact_url(url), root_url, names_in, system.cat_file)


def _find(system: Any, path: str, query: str) -> tuple[str, dict[str, Entry]]:
    """(path that names are relative to, entries by path). For a glob with the `_incomplete` objects
    next to its files."""
    marks = [path.index(mark) for mark in _GLOB_MARKS if mark in path]
    if marks:
        beside = f"{path.rpartition('/')[0]}/{INCOMPLETE}"
        found = system.glob(path, detail=True) | system.glob(beside, detail=True)
        root = path[: min(marks)].rpartition("/")[0]
    elif system.isfile(path + query):
        root, found = path.rpartition("/")[0], {path: system.info(path + query)}
    else:
        root, found = path, system.find(path, detail=True)
    files = {name: info for name, info in found.items() if info["type"] == "file"}
    return root, {name: entry_of(name, info) for name, info in files.items()}


def _find_local(url: str, path: str) -> tuple[str, dict[str, Entry], list[str]]:
    """Like `_find`, with dangling links. Follows links to folders. A name with marks of a pattern
    may be the name of a file."""
    backend, mark, root = LocalBackend(path), glob_mark(path), path
    matched: list[Entry] = []
    look = FolderListing([], [], {})
    if mark is not None:
        root = path[:mark].rpartition("/")[0]
        look = backend.look(root, deep="/" in path[mark:] or "**" in path)
        beside = f"{path.rpartition('/')[0]}/{INCOMPLETE}"
        is_one = re.compile(f"{glob_translate(path)}|{glob_translate(beside)}").match
        matched = [entry for entry in look.entries if is_one(entry.path)]
    if os.path.exists(path):
        if any(entry.path != path for entry in matched):
            raise DataError(
                f"{url!r} is the name of a file or folder, and also a pattern that matches "
                f"{matched[0].path}; in a pattern "
                "write '[[]' for '[', '[*]' for '*' and '[?]' for '?'"
            )
        root, look = path, backend.look(path, deep=True)
        matched = look.entries
        if os.path.isfile(path):
            root, matched = path.rpartition("/")[0], [backend.stat(path)]
    return root, {entry.path: entry for entry in matched}, look.unreadable.get(LINKS, [])


def _said(what: str, error: Exception, options: Mapping[str, Any] | None) -> str:
    return redact(f"{what}: {type(error).__name__}: {error}", options or {})


def _is_hidden(name: str, text_globs: Sequence[str]) -> bool:
    marks = (".",) if _matches(name, text_globs) else (".", "_")
    return any(part.startswith(marks) for part in name.split("/"))


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a pattern matches. One without "/" is matched with the file name, in any folder."""
    file = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else file, glob) for glob in globs)
