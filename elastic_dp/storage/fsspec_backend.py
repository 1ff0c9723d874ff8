"""Any other URL through its fsspec file system, such as sftp:// or hdfs://.

fsspec's reads do not say which version they came from. Where one is asked for, the object's record
is read after the bytes: a rewritten object is noticed, at the price of one more request; a server
that answers one read with a stale copy is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from elastic_dp.storage.backend import (
    SLOWEST_BYTES_PER_S,
    Backend,
    Entry,
    FolderListing,
    without_weakness,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ODD_KEYS = "keys with an empty, '.' or '..' part, which cannot be read"
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")


class FsspecBackend(Backend):
    creates_only = False

    def __init__(self, url: str, options: Mapping[str, Any], stall_s: float) -> None:
        self._system, self.path = url_to_fs(url, **options)
        if isinstance(self._system, DirFileSystem):  # it claims to have an event loop
            self._system, self.path = self._system.fs, self._system.path
        self._stall_s = stall_s

    def look(self, folder: str, deep: bool) -> FolderListing:
        self._system.invalidate_cache()
        depth = None if deep else 1
        found = self._system.find(
            folder, maxdepth=depth, withdirs=not deep, detail=True, **self._limit(0)
        )
        look = FolderListing([], [], {})
        for path, info in found.items():
            inside = path.removeprefix(folder).removeprefix("/")
            if not inside or path.endswith("/") or path == folder:
                continue  # the folder itself, or the object that stands for one
            if not deep and "/" in inside:
                continue  # some file systems know no depth
            if any(part in ("", ".", "..") for part in inside.split("/")):
                look.unreadable.setdefault(_ODD_KEYS, []).append(path)
            elif info["type"] != "directory":
                look.entries.append(_entry(path, info))
            else:
                look.folders.append(path)
        return look

    def stat(self, path: str) -> Entry:
        self._system.invalidate_cache()
        info = self._system.info(path, **self._limit(0))
        if info["type"] != "file":
            raise FileNotFoundError(f"{path} is not a file")
        return _entry(path, info)

    def read(
        self, path: str, start: int, end: int | None, versioned: bool
    ) -> tuple[Buffer, Entry | None]:
        span = {} if end is None and not start else {"start": start, "end": end}
        limit = self._limit(0 if end is None else end - start)
        content = self._system.cat_file(path, **span, **limit)
        short = end is not None and len(content) < end - start
        return content, self.stat(path) if versioned or short else None

    def write(self, path: str, content: Buffer, create_only: bool) -> None:
        value, limit = bytes(content), self._limit(memoryview(content).nbytes)
        assert not create_only  # `Store` refuses it
        if not isinstance(self._system, AsyncFileSystem):  # where folders may be real (sftp, hdfs)
            self._system.makedirs(self._system._parent(path), exist_ok=True)
        self._system.pipe_file(path, value, **limit)

    def delete(self, path: str) -> None:
        self._system.rm_file(path, **self._limit(0))

    def _limit(self, size: int) -> dict[str, float]:
        """fsspec's own argument of every call that runs on its event loop."""
        if not isinstance(self._system, AsyncFileSystem):
            return {}
        return {"timeout": self._stall_s + size / SLOWEST_BYTES_PER_S}


def _entry(path: str, info: Mapping[str, Any]) -> Entry:
    size = info.get("size") or 0
    for name in _VERSIONS:
        value = info.get(name)
        if value is not None:
            if name.lower() == "etag":
                return Entry(path, size, without_weakness(str(value)))
            value = value.timestamp() if hasattr(value, "timestamp") else value
            return Entry(path, size, f"{value}-{size}")
    return Entry(path, size, "")
