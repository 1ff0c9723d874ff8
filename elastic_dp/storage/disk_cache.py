"""A cache of ranges of objects in a folder of this machine, shared by its processes.

    FOLDER/cache.lock                  as long as all ranges; locked while space is taken or freed
    FOLDER/DATASET.BOOT.ranges/open    a process that reads the data set holds a shared lock on it
    FOLDER/DATASET.BOOT.ranges/RANGE   a complete range, and its checksum
    FOLDER/DATASET.BOOT.ranges/*.tmp   a range that a process writes

- Other files may be in FOLDER. Only files with these names are counted or deleted.
- A process may be killed at any point. A range is linked to its name once it is complete.
- A range whose checksum is wrong is deleted, and read from the store again.
- Files are not synced to the disk, so each boot of a machine has folders of its own.
- Every epoch reads every range again. A cache that evicted the least recently used range of a data
  set would never be hit, so ranges stay until the limit is lowered. Space comes from data sets that
  no process has open, the least recently used first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WAIT_S = 10.0  # for the lock; then the cache is not used
_POLL_S = 0.005
_FULL_S = 30.0  # how long a full cache is not asked for space again
_RECENT_S = 1.0
_WRITE_S = 60.0  # a temporary file that is older was left by a killed process
_MAPPED_BYTES = 1 << 20  # a smaller range is read: the number of maps of a process is limited
CHECKSUM_BYTES = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+)?\.ranges")


class DiskCache:
    """The cached ranges of one data set. Threads may share it.

    `folder`: is created with the first read; processes of one machine share it. `limit_bytes`: of
    all ranges in the folder. `dataset`: any text that names the content of the data set.
    `say(message)`: called once if the folder cannot be used; every later read goes to the store.
    """

    def __init__(
        self, folder: str, limit_bytes: int, dataset: str, say: Callable[[str], None]
    ) -> None:
        self._folder, self._limit_bytes, self._say = Path(folder), limit_bytes, say
        self._dataset = self._folder / f"{_digest(dataset)}.{_boot()}.ranges"
        self._lock = threading.Lock()
        self._open: int | None = None  # the descriptor of the data set's "open"
        self._bytes_read = 0
        self._missed_at = -math.inf
        self._full_until = 0.0
        self._failed = False

    @property
    def bytes_read(self) -> int:
        """How many bytes were read from the cache, and not from the store."""
        return self._bytes_read

    @property
    def misses(self) -> bool:
        """Whether a range was missing within the last second."""
        return time.monotonic() - self._missed_at < _RECENT_S

    def read(self, key: str, nbytes: int, fetch: Callable[[], Buffer]) -> Buffer:
        """Returns the `nbytes` of the range named `key`. `fetch` reads them from the store if they
        are not cached; what it raises is raised.
        """
        path = self._dataset / _digest(key)
        content = self._cached(path, nbytes)
        if content is None:
            self._missed_at = time.monotonic()
            content = fetch()
            self._keep(path, memoryview(content).cast("B"))
        return content

    def close(self) -> None:
        """Lets other data sets have the space of this one. Call it after the last read."""
        with self._lock:
            if self._open is not None:
                with contextlib.suppress(OSError):
                    os.utime(self._dataset)
                _unlock(self._open)
                self._open = None

    # ------------------------------------------------------------------------------ ranges

    def _cached(self, path: Path, nbytes: int) -> Buffer | None:
        try:
            with self._lock:
                if self._open is None and not self._failed:
                    self._open = self._open_dataset()
            content = _content(path, nbytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail(error)
            return None
        with self._lock:
            self._bytes_read += nbytes
        return content

    def _keep(self, path: Path, content: memoryview) -> None:
        if self._failed or not content or time.monotonic() < self._full_until:
            return
        aside, nbytes = f"{path}.{secrets.token_hex(8)}.tmp", len(content) + CHECKSUM_BYTES
        try:
            if not self._take(aside, nbytes):
                self._full_until = time.monotonic() + _FULL_S
                return
            try:
                with open(aside, "r+b") as file:
                    file.write(content)
                    file.write(_checksum(content))
                os.link(aside, path)
            except OSError as error:
                self._take(aside, -nbytes)
                if not isinstance(error, FileExistsError):  # another process was faster
                    raise
        except OSError as error:
            self._fail(error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._say(
                f"DataConfig.cache_dir: {self._folder} cannot be used, so every read goes to the "
                f"store: {error.strerror or error}"
            )

    # ------------------------------------------------------------------------------- space

    def _take(self, aside: str, nbytes: int) -> bool:
        """Takes space for a temporary file, or gives it back. Returns whether there is enough."""
        with self._locked() as lock:
            used = os.fstat(lock).st_size
            if used + nbytes > self._limit_bytes:
                used = self._make_room(nbytes)
            fits = used + nbytes <= self._limit_bytes or nbytes < 0
            os.ftruncate(lock, max(0, used + nbytes) if fits else used)
            if fits:
                with open(aside, "ab") as file:
                    file.truncate(max(0, nbytes))  # so it counts with its full size
        return fits

    def _make_room(self, nbytes: int) -> int:
        """Deletes data sets of earlier boots, and others as far as needed, if no process has them
        open. Returns the bytes of all ranges."""
        found = (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        datasets = sorted((path for path in found if path.is_dir()), key=_used_at)
        sizes = {dataset: _size(dataset) for dataset in datasets}
        used = sum(sizes.values())
        for dataset in datasets:
            other_boot = not dataset.name.endswith(f".{_boot()}.ranges")
            # On a shared folder, locks of other hosts may be invisible. What was used since this
            # machine started is not of one of its earlier boots.
            if other_boot and _used_at(dataset) >= _started_at():
                continue
            if (other_boot or used + nbytes > self._limit_bytes) and _is_unused(dataset):
                shutil.rmtree(dataset, ignore_errors=True)
                used += _size(dataset) - sizes[dataset]
        return used

    def _open_dataset(self) -> int:
        """Creates what is missing. Returns a descriptor with a shared lock on the data set."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as lock:
            self._dataset.mkdir(exist_ok=True)
            opened = os.open(self._dataset / "open", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(opened, fcntl.LOCK_SH)
            os.utime(self._dataset)
            used = self._make_room(0)
            for path in self._dataset.iterdir():  # the limit is lower than before
                if used > self._limit_bytes and path.name != "open":
                    used -= path.stat().st_size
                    path.unlink()
            os.ftruncate(lock, used)
            return opened

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Raises TimeoutError if a process that is stopped has the lock."""
        lock = os.open(self._folder / "cache.lock", os.O_RDWR | os.O_CREAT, 0o600)
        until = time.monotonic() + _WAIT_S
        try:
            while not _try_lock(lock):
                if time.monotonic() > until:
                    raise TimeoutError("another process holds its lock")
                time.sleep(_POLL_S)
            yield lock
        finally:
            _unlock(lock)


def _content(path: Path, nbytes: int) -> Buffer:
    """The complete range. Raises FileNotFoundError if it is not cached."""
    import pyarrow as pa  # whose maps need no descriptor, as those of `mmap` do

    stored: Buffer
    if nbytes < _MAPPED_BYTES:
        stored = path.read_bytes()
    else:
        with pa.memory_map(str(path)) as file:
            stored = file.read_buffer()
    whole = memoryview(stored).cast("B")
    content = whole[:nbytes]
    if whole[nbytes:] == _checksum(content):
        return content
    path.unlink()  # whoever changed it
    raise FileNotFoundError(path)


def _checksum(content: memoryview) -> bytes:
    return xxhash.xxh3_64_digest(content)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _boot() -> str:
    try:
        return _digest(_BOOT_ID.read_text())[:12]
    except OSError:  # not on Linux
        return "0"


def _started_at() -> float:
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _used_at(dataset: Path) -> float:
    try:
        return dataset.stat().st_mtime
    except OSError:
        return 0.0


def _size(dataset: Path) -> int:
    """The bytes of its ranges. Temporary files of killed processes are deleted."""
    size = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(dataset) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # its process has just deleted it
                found = entry.stat()
                if entry.name.endswith(".tmp") and found.st_mtime < time.time() - _WRITE_S:
                    os.unlink(entry)
                else:
                    size += found.st_size
    return size


def _is_unused(dataset: Path) -> bool:
    try:
        opened = os.open(dataset / "open", os.O_RDWR)
    except OSError:
        return True
    unused = _try_lock(opened)
    _unlock(opened)
    return unused


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Unlocks and closes. A process that was forked meanwhile does not keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
