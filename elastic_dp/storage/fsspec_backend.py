"""Any other URL through its fsspec file system: memory, chained URLs, and where obstore cannot be
told the options.

fsspec's reads do not say which version they came from. Where one is asked for, the object's record
is read after the bytes: a rewritten object is noticed, at the price of one more request; a server
that answers one read with a stale copy is not. Use obstore where that matters. A file system
without an event loop has no timeout of ours.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from elastic_dp.storage.backend import (
    ODD_KEYS,
    SLOWEST_BYTES_PER_S,
    Entry,
    FolderListing,
    without_weakness,
)
from elastic_dp.storage.option_names import fsspec_options

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Where pipe_file(mode="create") was seen to refuse.
_CREATES_ONLY = {"memory", "s3", "s3a", "gs", "gcs"}
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
# For the one memory:// of this process, whose "create" looks first and writes then.
_memory = threading.Lock()


class FsspecBackend:
    def __init__(self, scheme: str, url: str, options: Mapping[str, Any], stall_s: float) -> None:
        self._system, path = url_to_fs(
            url, **_exact(scheme, fsspec_options(scheme, options), stall_s)
        )
        if isinstance(
            self._system, DirFileSystem
        ):  # which says it has an event loop, whatever is in it
            self._system, path = self._system.fs, self._system.path
        if hasattr(self._system, "retries") and scheme in ("s3", "s3a"):
            self._system.retries = 1
        self._before = self._after = ""
        if scheme in ("http", "https"):
            parts = urlsplit(url)
            self._before, path = f"{scheme}://{parts.netloc}", parts.path
            self._after = f"?{parts.query}" if parts.query else ""
        self.path, self._stall_s = path, stall_s
        self.lists, self.creates_only = scheme not in ("http", "https"), scheme in _CREATES_ONLY
        self._in_memory = scheme == "memory"

    def find(self, folder: str, deep: bool) -> list[Entry]:
        self._system.invalidate_cache()
        found = self._system.find(
            folder, maxdepth=None if deep else 1, detail=True, **self._limit(0)
        )
        return [entry_of(path, info) for path, info in found.items() if path != folder]

    def look(self, folder: str, deep: bool) -> FolderListing:
        return look_in(self._system, folder, deep, **self._limit(0))

    def stat(self, path: str) -> Entry:
        self._system.invalidate_cache()
        info = self._system.info(self._full(path), **self._limit(0))
        if info["type"] != "file":
            raise FileNotFoundError(f"{path} is not a file")
        return entry_of(path, info)

    def read(
        self, path: str, start: int, end: int | None, versioned: bool
    ) -> tuple[Buffer, Entry | None]:
        span = {} if end is None and not start else {"start": start, "end": end}
        limit = self._limit(0 if end is None else end - start)
        content = self._system.cat_file(self._full(path), **span, **limit)
        short = end is not None and len(content) < end - start
        return content, self.stat(path) if versioned or short else None

    def write(self, path: str, content: Buffer, create_only: bool) -> None:
        value, limit = bytes(content), self._limit(memoryview(content).nbytes)
        if not create_only:
            self._make_folder(path)
            self._system.pipe_file(self._full(path), value, **limit)
        elif self._in_memory:
            with _memory:
                self._system.pipe_file(path, value, mode="create")
        else:
            self._system.pipe_file(path, value, mode="create", **limit)

    def delete(self, path: str) -> None:
        self._system.rm_file(self._full(path), **self._limit(0))

    def local_path(self, path: str) -> str | None:
        return None

    def _full(self, path: str) -> str:
        return f"{self._before}{path}{self._after}"

    def _make_folder(self, path: str) -> None:
        """Make the folder, which a write does not do where folders are real (sftp, hdfs)."""
        if not isinstance(self._system, AsyncFileSystem):
            self._system.makedirs(self._system._parent(path), exist_ok=True)

    def _limit(self, size: int) -> dict[str, float]:
        """fsspec's own argument of every call that runs on its event loop."""
        if not isinstance(self._system, AsyncFileSystem):
            return {}
        return {"timeout": self._stall_s + size / SLOWEST_BYTES_PER_S}


def look_in(system: Any, folder: str, deep: bool, **limit: float) -> FolderListing:
    """Lists a folder of a file system; see `Backend.look`."""
    system.invalidate_cache()
    depth = None if deep else 1
    found = system.find(folder, maxdepth=depth, withdirs=not deep, detail=True, **limit)
    look = FolderListing([], [], {})
    for path, info in found.items():
        inside = path.removeprefix(folder).removeprefix("/")
        if not inside or path.endswith("/"):
            continue  # the folder itself, or the object that stands for one
        if not deep and "/" in inside:
            continue  # some file systems know no depth
        if any(part in ("", ".", "..") for part in inside.split("/")):
            look.unreadable.setdefault(ODD_KEYS, []).append(path)
        elif info["type"] != "directory":
            look.entries.append(entry_of(path, info))
        else:
            look.folders.append(path)
    return look


def _exact(scheme: str, options: Mapping[str, Any], stall_s: float) -> dict[str, Any]:
    """The options, with retries and compression turned off. s3fs has two layers of retries; an
    instance of its own lets us turn off both."""
    if scheme in ("http", "https"):
        # aiohttp asks for gzip by default, and a server that compresses ignores ranges.
        headers = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        return {**options, "headers": headers}
    if scheme not in ("s3", "s3a"):
        return dict(options)
    limits = {"connect_timeout": stall_s, "read_timeout": stall_s}
    config = {
        "retries": {"total_max_attempts": 1}, **limits, **(options.get("config_kwargs") or {})
    }  # fmt: skip
    return {**options, "config_kwargs": config, "skip_instance_cache": True}


def entry_of(path: str, info: Mapping[str, Any]) -> Entry:
    """`info`: what a file system of fsspec says of a file."""
    size = info.get("size") or 0
    for name in _VERSIONS:
        value = info.get(name)
        if value is not None:
            if name.lower() == "etag":
                return Entry(path, size, without_weakness(str(value)))
            value = value.timestamp() if hasattr(value, "timestamp") else value
            return Entry(path, size, f"{value}-{size}")
    return Entry(path, size, "")
