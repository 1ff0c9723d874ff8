"""The files of a source: listed once, of one format, and read through the store with its retries.

A source is a file, a folder with all below it, or a glob. What is not read is counted.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from elastic_dp.data.discovery.incomplete import INCOMPLETE
from elastic_dp.errors import DataError, ElasticError
from elastic_dp.storage import Entry, FolderListing, Store, glob_translate, redact_url

FORMATS = {
    **dict.fromkeys(("parquet", "pq", "parq"), "parquet"),
    **dict.fromkeys(("arrow", "feather", "ipc"), "arrow"),
    **dict.fromkeys(("jsonl", "ndjson"), "jsonl"),
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"), "images"),
    **dict.fromkeys(("tar", "tgz"), "tar"),
    "json": "json",
    "txt": "text",
    "mds": "mds",
}
_CODECS = ("gz", "bz2", "xz", "zst", "lz4")
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"version https://git-lfs": "LFS pointer",
}
_READ_BYTES = 4 << 20
GLOB_MARKS = "*?["
_DESCRIPTIONS = ("text", "json")  # a README.txt or config.json next to files of another format
_MARKS = {INCOMPLETE, "_temporary", "__magic", "_delta_log"}
_CACHED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")  # results of `datasets`
_TABLES = {
    "_delta_log": "a Delta table, whose folder holds deleted rows too: "
    "write_shards(DeltaTable(url).to_pyarrow_dataset().scanner().to_reader(), …)",
    "metadata": "an Iceberg table, whose folder holds deleted rows too: "
    "write_shards(table.scan().to_arrow_batch_reader(), …)",
}


@dataclass(frozen=True)
class SourceFiles:
    """Files of one format. `names`: their paths below `root`, sorted. `skipped`: how many other
    files there are, by ending, and "hidden" ones."""

    url: str
    store: Store
    root: str
    kind: str
    entries: dict[str, Entry]
    skipped: dict[str, int]

    @property
    def names(self) -> list[str]:
        return [*self.entries]

    @property
    def is_local(self) -> bool:
        return self.store.local_path(self.store.path) is not None

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """A seekable file, as it is stored. Errors of decoders name it. Raises DataError if it has
        changed since it was listed."""
        entry = self.entries[name]
        with named(name):
            yield io.BufferedReader(_Ranges(self.store, entry), _READ_BYTES)
        found = self.store.look_up(entry.path)
        if found is None or found.version != entry.version:
            raise DataError(f"{name} changed while it was read; convert a source at rest")

    @contextmanager
    def decompressed(self, name: str) -> Iterator[BinaryIO]:
        """A file of text, decompressed by its first bytes, whatever its ending."""
        with self.opened(name) as raw:
            found = next((m for m in _MAGIC if raw.peek(len(m)).startswith(m)), None)  # type: ignore[attr-defined]
            yield _decoder(_MAGIC[found] if found else "", name, raw)


def find_files(
    url: str, storage_options: Mapping[str, Any] | None = None, *, documents: bool = False
) -> SourceFiles:
    """`documents`: files without a known ending that a glob names are documents of text. Raises
    DataError if there is no file of a known format, or there are several formats."""
    store = Store(url, storage_options)
    shown, path = redact_url(url), store.path
    root, listed, is_glob = _list(store)
    found = listed.entries
    paths = {entry.path[len(root) :]: entry for entry in found}
    _refuse_unfinished(shown, paths)
    _refuse_part_of_table(shown, store, root)
    is_file = len(found) == 1 and found[0].path == path
    hidden = (".",) if documents and is_glob else (".", "_")  # __init__.py is a document
    seen = {
        name: entry
        for name, entry in paths.items()
        if is_file or not any(not part or part.startswith(hidden) for part in name.split("/"))
    }
    kinds = {name: FORMATS.get(_ending(name), "") for name in seen}
    counts = Counter(kind for kind in kinds.values() if kind)
    if {"state.json", "dataset_info.json"} <= {*seen}:
        kind, names = "arrow", _saved(store, seen)
    elif documents and not counts and is_glob and seen:
        kind, names = "text", sorted(seen)
    else:
        kind = _only(shown, counts, seen)
        names = sorted(name for name in seen if kinds[name] == kind)
        results = {name for name in names if _CACHED.fullmatch(name.rpartition("/")[2])}
        if len(results) < len(names):
            names = [name for name in names if name not in results]
    skipped = Counter(f".{_ending(n)}" if "." in n else "no ending" for n in {*seen} - {*names})
    if len(paths) > len(seen):
        skipped["hidden"] = len(paths) - len(seen)
    skipped.update({why: len(names) for why, names in listed.unreadable.items()})
    return SourceFiles(
        shown, store, root, kind, {name: seen[name] for name in names}, dict(skipped.most_common())
    )


@contextmanager
def named(name: str) -> Iterator[None]:
    """Errors of decoders as a DataError that names the file."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:  # decoders may raise anything for damaged content
        raise DataError(f"cannot read {name}: {type(error).__name__}: {error}") from error


def _list(store: Store) -> tuple[str, FolderListing, bool]:
    """(folder that names are relative to, its files, whether the URL is a glob)."""
    path = store.path
    one = None if path.endswith("/") or not store.lists else store.look_up(path)
    if one is not None or not store.lists:
        files = [one] if one else store.find(path)
        return path[: path.rfind("/") + 1], FolderListing(files, [], {}), False
    folder = f"{path.rstrip('/')}/"
    mark = min((path.index(mark) for mark in GLOB_MARKS if mark in path), default=None)
    there = store.look(folder, deep=True)
    if there.entries or mark is None:
        return folder, there, False
    base = path[: path.rfind("/", 0, mark) + 1]
    look = store.look(base, deep="/" in path[mark:] or "**" in path)
    matches = re.compile(glob_translate(path)).match
    files = [entry for entry in look.entries if matches(entry.path)]
    inside = {f"{entry.path.rpartition('/')[0]}/" for entry in files}
    for entry in look.entries:
        # What says that the folder of a file is not a plain one.
        if entry.path.startswith((*inside,)) and _MARKS & {*entry.path[len(base) :].split("/")}:
            files.append(entry)
    return base, FolderListing(files, [], look.unreadable), True


def _refuse_unfinished(shown: str, paths: Mapping[str, Entry]) -> None:
    for name in paths:
        folders, last = name.split("/")[:-1], name.rpartition("/")[2]
        if last == INCOMPLETE:
            raise DataError(
                f"{shown!r} is not complete: it holds {name!r}. What writes it still runs, or was "
                "killed: wait until it ends, or remove the folder and write it again"
            )
        if unfinished := {"_temporary", "__magic"} & {*folders}:
            raise DataError(
                f"{shown!r} holds {min(unfinished)!r}: the Spark or Hadoop job that writes it has "
                "not finished, or failed, so rows may be missing. Wait until it ends, or write it "
                "again"
            )
        table = "_delta_log" if "_delta_log" in folders else ""
        if folders[-1:] == ["metadata"] and last.endswith(".metadata.json"):
            table = "metadata"
        if table:
            raise DataError(f"{shown!r} is {_TABLES[table]}")


def _refuse_part_of_table(shown: str, store: Store, folder: str) -> None:
    """Raises DataError if a folder is a partition of a Delta table."""
    while store.lists and folder:
        if store.look(f"{folder}_delta_log/", deep=False).entries:
            raise DataError(f"{shown!r} is part of {_TABLES['_delta_log']}")
        above, _, name = folder.rstrip("/").rpartition("/")
        folder = f"{above}/" if "=" in name else ""


def _only(shown: str, counts: Counter[str], seen: Mapping[str, Entry]) -> str:
    for kind in _DESCRIPTIONS:
        if len(counts) > 1:
            counts.pop(kind, None)
    if len(counts) == 1:
        return next(iter(counts))
    if counts:
        there = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise DataError(
            f"{shown!r} holds several formats ({there}); name one by a glob such as '**/*.parquet'"
        )
    there = f"It has {len(seen)} files, such as {min(seen)}" if seen else "There is no file"
    raise DataError(
        f"no file at {shown!r} has an ending that is known: {', '.join(FORMATS)}. {there}. With "
        "--pack, a glob such as '**/*.py' reads files of any ending as text"
    )


def _ending(name: str) -> str:
    """The last ending that is not one of compression."""
    parts = name.rpartition("/")[2].lower().split(".")[1:]
    while len(parts) > 1 and parts[-1] in _CODECS:
        parts.pop()
    return parts[-1] if parts else ""


def _saved(store: Store, seen: Mapping[str, Entry]) -> list[str]:
    """The files of a folder by `datasets.save_to_disk`, in its order."""
    with named("state.json"):
        state = json.loads(bytes(store.read_all(seen["state.json"].path)))
        names = [file["filename"] for file in state["_data_files"]]
        if state.get("_indices_data_files"):  # by versions of `datasets` before 2.0
            raise DataError(
                "state.json names files of indices, which choose rows; save it again by "
                "load_from_disk(folder).flatten_indices().save_to_disk(another_folder)"
            )
    if lost := [name for name in names if name not in seen]:
        raise DataError(f"state.json names {lost[0]!r}, which is no file of this folder")
    return names


def _decoder(what: str, name: str, raw: Any) -> Any:
    if what == "LFS pointer":
        raise DataError(f"{name} is a pointer of Git LFS, not the file; run `git lfs pull`")
    if what == "zip":
        raise DataError(f"{name} is a zip archive; unpack it first")
    if what in ("Parquet", "Arrow"):
        raise DataError(f"{name} is a {what} file; give it the ending .{what.lower()}")
    if what in ("zstd", "lz4"):
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), what)
    if what == "gzip":
        return gzip.GzipFile(fileobj=raw)
    return bz2.BZ2File(raw) if what == "bz2" else lzma.LZMAFile(raw) if what == "xz" else raw


class _Ranges(io.RawIOBase):
    """The bytes of a file, of the version that was listed."""

    def __init__(self, store: Store, entry: Entry) -> None:
        self._store, self._entry, self._at = store, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._entry.size)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        end = min(self._at + len(into), self._entry.size)
        if end <= self._at:
            return 0
        content = self._store.read(self._entry.path, self._at, end, self._entry.version)
        into[: end - self._at] = content
        count, self._at = end - self._at, end
        return count
