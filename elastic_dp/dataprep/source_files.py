"""The files of a source: listed as training lists them, of one format, and read through the store
with its retries.

A source is a file, a folder with all below it, or a glob. What is not read is counted.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from elastic_dp.data.discovery.listing import INFO, STATE, Listing, files_of_saved, list_files
from elastic_dp.data.formats import MAGIC_BYTES, content_of
from elastic_dp.data.formats.file_format import ShardAt, ShardFile
from elastic_dp.errors import DataError, ElasticError
from elastic_dp.storage import Entry, Store, redact_url

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
_NO_TEXT = {
    "a zip archive": "; unpack it first",
    "a Parquet file": "; give it the ending .parquet",
    "an Arrow file": "; give it the ending .arrow",
    "a pointer of Git LFS; run `git lfs pull` in the clone": "",
}
_READ_BYTES = 4 << 20
_DESCRIPTIONS = ("text", "json")  # a README.txt or config.json next to files of another format
_UNFINISHED = {"_temporary", "__magic"}


@dataclass(frozen=True)
class SourceFiles:
    """Files of one format. `names`: their paths in the source, sorted. `skipped`: how many other
    files there are, by ending, and "hidden" ones."""

    url: str
    store: Store
    kind: str
    entries: dict[str, Entry]
    skipped: dict[str, int]

    @property
    def names(self) -> list[str]:
        return [*self.entries]

    def shard(self, name: str) -> ShardAt:
        entry = self.entries[name]
        return ShardAt(self.store, entry.path, entry.size, entry.version, name)

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """A seekable file, as it is stored. Errors of decoders name it. Raises DataError if it has
        changed since it was listed."""
        entry = self.entries[name]
        with named(name):
            yield ShardFile.buffered(self.shard(name), _READ_BYTES)
        found = self.store.look_up(entry.path)
        if found is None or found.version != entry.version:
            raise DataError(f"{name} changed while it was read; convert a source at rest")

    @contextmanager
    def decompressed(self, name: str) -> Iterator[BinaryIO]:
        """A file of text, decompressed by its first bytes, whatever its ending."""
        with self.opened(name) as raw:
            yield _decoder(content_of(raw.peek(MAGIC_BYTES)), name, raw)  # type: ignore[attr-defined]


def find_files(
    url: str, storage_options: Mapping[str, Any] | None = None, *, documents: bool = False
) -> SourceFiles:
    """`documents`: files without a known ending that a glob names are documents of text. Raises
    DataError if there is no file of a known format, or there are several formats."""
    store = Store(url, storage_options)
    shown = redact_url(url)
    listing, is_glob = _list(url, store, storage_options)
    entries = {listing.name(entry): entry for entry in listing.entries}
    if documents:  # __init__.py is a document
        named = [name for name in listing.hidden if not re.search(r"(^|/)\.", name)]
        found = {name: store.look_up(listing.root + name) for name in named}
        entries |= {name: entry for name, entry in found.items() if entry is not None}
    kinds = {name: FORMATS.get(_ending(name), "") for name in entries}
    counts = Counter(kind for kind in kinds.values() if kind)
    if documents and not counts and entries and is_glob:
        kind, names = "text", sorted(entries)
    else:
        kind = _only(shown, counts, entries)
        names = sorted(name for name in entries if kinds[name] == kind)
    if kind == "arrow" and {STATE, INFO} <= {*entries}:  # in the order of `datasets`
        names = files_of_saved(bytes(store.read_all(entries[STATE].path)))
    read = {name: entries[name] for name in names}
    others = listing.skipped([*read.values()])
    skipped = {ending or "no ending": len(names) for ending, names in others.items()}
    return SourceFiles(shown, store, kind, read, skipped)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Errors of decoders as a DataError that names the file."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:  # decoders may raise anything for damaged content
        raise DataError(f"cannot read {name}: {type(error).__name__}: {error}") from error


def _list(
    url: str, store: Store, storage_options: Mapping[str, Any] | None
) -> tuple[Listing, bool]:
    """(the files of the source, whether its URL is a glob)."""
    try:
        listing = list_files(url, store)
        is_glob = listing.is_glob
        if not (listing.is_file or is_glob):  # a folder: all below it
            deep = re.sub(r"([*?[])", r"[\1]", url.rstrip("/")) + "/**/*"
            listing = list_files(deep, Store(deep, storage_options))
    except DataError as error:
        raise DataError(str(error).removeprefix("DataConfig.url: ")) from None
    for name in listing.hidden:
        if unfinished := _UNFINISHED & {*name.split("/")}:
            raise DataError(
                f"{listing.url!r} holds {min(unfinished)!r}: the Spark or Hadoop job that writes "
                "it has not finished, or failed, so rows may be missing. Wait until it ends, or "
                "write it again"
            )
    return listing, is_glob


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


def _decoder(what: str, name: str, raw: Any) -> Any:
    if what in _NO_TEXT:
        raise DataError(f"{name} is {what}{_NO_TEXT[what]}")
    codec = what.removeprefix("compressed with ")
    if codec in ("zstd", "lz4"):
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec)
    if codec == "gzip":
        return gzip.GzipFile(fileobj=raw)
    return bz2.BZ2File(raw) if codec == "bzip2" else lzma.LZMAFile(raw) if codec == "xz" else raw
