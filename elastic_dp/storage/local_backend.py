"""Files of this machine, through the operating system's own calls: `pread`, `link`, `rename`,
`fsync`.

A version is the time of the last change and the size. It is compared after a read, so that a file
rewritten meanwhile is noticed. A write is atomic, and its content is on the disk when `write`
returns.

Large contents that begin at a page of memory bypass the page cache (O_DIRECT) if the file system
supports it: the cache would cost a copy of them and evict other content.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import uuid
from stat import S_ISREG
from typing import TYPE_CHECKING

from elastic_dp.errors import FileDamaged, StorageError
from elastic_dp.storage.backend import Backend, Entry, FolderListing

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOVE = "Delete it, or move it away"
PAGE_BYTES = 4096  # alignment of direct writes, in memory and in the file
LINKS = "links to nothing"
NO_FILES = "pipes, sockets or devices"
NOT_UTF8 = "names that are not UTF-8"
_ATTEMPTS = 5  # of a write whose temporary file vanishes
_DIRECT_BYTES = 1 << 20  # smaller writes use the page cache


class LocalBackend(Backend):
    def __init__(self, path: str) -> None:
        if _shown(path) != path:
            raise StorageError(f"{_shown(path)}: the name is not UTF-8; rename it")
        self.path = path

    def look(self, folder: str, deep: bool) -> FolderListing:
        found = FolderListing([], [], {})
        _look(folder or "/", deep, found, ())
        return found

    def stat(self, path: str) -> Entry:
        try:
            found = os.stat(path)
        except NotADirectoryError as error:  # below a file there is none
            raise FileNotFoundError(*error.args) from None
        if not S_ISREG(found.st_mode):
            raise FileNotFoundError(f"{path} is not a file")
        return _entry(path, found)

    def read(
        self, path: str, start: int, end: int | None, versioned: bool
    ) -> tuple[Buffer, Entry | None]:
        descriptor = _open(path)
        try:
            found = os.fstat(descriptor)
            if not S_ISREG(found.st_mode):
                raise FileDamaged(path, "it is not a file", _MOVE)
            content = _pread(descriptor, start, found.st_size if end is None else end)
            return content, _entry(path, os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def write(self, path: str, content: Buffer, create_only: bool) -> None:
        for _ in range(_ATTEMPTS):
            # The temporary file may vanish: who cleans the folder cannot tell it from one that a
            # killed writer left. The name was not given then, so the write starts again.
            with contextlib.suppress(FileNotFoundError):
                return self._write(path, content, create_only)
        raise StorageError(
            f"{path}: the temporary file of this write was deleted {_ATTEMPTS} times before it "
            "was complete; stop what deletes files in this folder"
        )

    def _write(self, path: str, content: Buffer, create_only: bool) -> None:
        folder, name = os.path.split(path)
        try:
            os.makedirs(folder, exist_ok=True)
        except FileExistsError as error:  # a parent folder is a file
            raise FileDamaged(error.filename or folder, "it is not a folder", _MOVE) from None
        aside = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(aside, "xb", buffering=0) as file:
                rest = memoryview(content).cast("B")
                rest = rest[_write_direct(file.fileno(), rest) :]
                while rest:  # the kernel takes at most 2 GiB at once
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            _link(aside, path) if create_only else os.replace(aside, path)
            _sync_folder(folder)
        except IsADirectoryError:
            raise FileDamaged(path, "it is a folder where a file must be", _MOVE) from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)

    def delete(self, path: str) -> None:
        os.unlink(path)

    def local_path(self, path: str) -> str | None:
        return path


def _look(folder: str, deep: bool, into: FolderListing, above: tuple[tuple[int, int], ...]) -> None:
    """Lists a folder. `above` identifies the folders around it: following a link to one would never
    end."""
    try:
        here, inside = os.stat(folder), list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.ELOOP:
            return
        raise
    if (here.st_dev, here.st_ino) in above:
        return
    above = (*above, (here.st_dev, here.st_ino))
    for item in inside:
        if _shown(item.name) != item.name:
            into.unreadable.setdefault(NOT_UTF8, []).append(_shown(item.path))
            continue
        try:
            is_folder = item.is_dir()
            found = None if is_folder else item.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            if item.is_symlink():  # else deleted meanwhile
                into.unreadable.setdefault(LINKS, []).append(item.path)
            continue
        if found is not None:
            if S_ISREG(found.st_mode):
                into.entries.append(_entry(item.path, found))
            else:
                into.unreadable.setdefault(NO_FILES, []).append(item.path)
        elif deep:
            _look(item.path, deep, into, above)
        else:
            into.folders.append(item.path)


def _shown(path: str) -> str:
    """The path, with the bytes in it that are not UTF-8 as "\\xe9"."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _open(path: str) -> int:
    """Opens a file without waiting for the other end, in case it is a named pipe."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except NotADirectoryError as error:  # below a file there is none
        raise FileNotFoundError(*error.args) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileDamaged(path, "it is a link to itself", _MOVE) from None
        raise


def _entry(path: str, found: os.stat_result) -> Entry:
    return Entry(path, found.st_size, f"{found.st_mtime_ns}-{found.st_size}")


def _pread(descriptor: int, start: int, end: int) -> bytes:
    """Reads up to `end` or the end of the file. The kernel returns at most 2 GiB per call."""
    parts = [os.pread(descriptor, end - start, start)]
    while parts[-1] and sum(map(len, parts)) < end - start:
        start_of_rest = start + sum(map(len, parts))
        parts.append(os.pread(descriptor, end - start_of_rest, start_of_rest))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_direct(descriptor: int, content: memoryview) -> int:
    """Writes whole pages directly. Returns the number of bytes written, 0 if that is not
    possible."""
    end = len(content) // PAGE_BYTES * PAGE_BYTES
    if end < _DIRECT_BYTES or content.readonly:  # whose place ctypes does not tell
        return 0
    if ctypes.addressof(ctypes.c_char.from_buffer(content)) % PAGE_BYTES:
        return 0
    before, written = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    with contextlib.suppress(OSError, AttributeError):  # the other way says what is wrong
        fcntl.fcntl(descriptor, fcntl.F_SETFL, before | os.O_DIRECT)
        while written < end:
            written += os.write(descriptor, content[written:end])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, before)
    return written


def _link(aside: str, path: str) -> None:
    """Gives the file its name, unless that is taken, in one atomic call."""
    try:
        os.link(aside, path)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageError(
            f"{path}: the file system here has no hard links ({error.strerror}), so a file "
            "cannot be created only if there is none; use another file system or an object store"
        ) from error


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
