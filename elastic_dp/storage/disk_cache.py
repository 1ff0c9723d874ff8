"""A cache of ranges of objects in a folder of this machine, shared by its processes.

    FOLDER/cache.lock                held while space is taken or freed, or a data set is opened
    FOLDER/cache.used                the bytes that are taken; the files never have more
    FOLDER/cache.boot                the boot of the machine whose files these are
    FOLDER/DATASET.ranges/open       a process that reads the data set holds a shared lock on it
    FOLDER/DATASET.ranges/RANGE      a complete range
    FOLDER/DATASET.ranges/RANGE.part one that a process reads from the store, with a lock on it

- FOLDER may hold files and folders of others, such as a whole disk does. Only what has these names
  is counted or deleted.

- A process may be killed at any point. A range gets its name when it is complete, its space is
  taken before it is written, and the locks of a process end with it.
- Files are not synced to the disk, so those of an earlier boot are deleted.
- A limit that is lower than before is reached when a data set is opened, by deleting ranges.
- Ranges are read again in every epoch. When the budget is used up, replacing some of them by others
  would only make all of them be read from the store, so they stay, and what does not fit is not
  kept. Space comes from data sets that no process has open: the one that was opened first is
  deleted first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WAIT_S = 10.0  # for another process, which may be stopped; then the cache is not used
_POLL_S = 0.005
_FULL_S = 30.0  # how long no space is looked for after there was none
_RECENT_S = 1.0
_LOCK, _USED, _BOOT, _RANGES = "cache.lock", "cache.used", "cache.boot", ".ranges"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_on_read: list[Callable[[int, int], None]] = []


def on_cached_read(tell: Callable[[int, int], None]) -> None:
    """Calls `tell(from_cache, from_store)` with the bytes of each read through any cache of this
    process, on the thread that reads.
    """
    _on_read.append(tell)


class DiskCache:
    """The cached ranges of one data set. Threads may share it.

    `folder`: is created with the first read; processes of one machine share it. `limit_bytes`: the
    size of all its files, also of other data sets. `dataset`: any text that names the content of
    the data set. `say(message)`: called once if the folder cannot be used; from then on every read
    goes to the store.
    """

    def __init__(
        self, folder: str, limit_bytes: int, dataset: str, say: Callable[[str], None]
    ) -> None:
        self._folder, self._limit_bytes, self._say = Path(folder), limit_bytes, say
        self._dataset = self._folder / f"{_digest(dataset)}{_RANGES}"
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
        """Return the `nbytes` of the range named `key`. `fetch` reads them from the store if they
        are not cached; what it raises is raised.
        """
        content, is_cached = self._read(key, nbytes, fetch)
        for tell in _on_read:
            tell(nbytes if is_cached else 0, 0 if is_cached else nbytes)
        return content

    def close(self) -> None:
        """Let other data sets have the space of this one. Call it after the last read."""
        with self._lock:
            if self._open is not None:
                _unlock(self._open)
                self._open = None

    # ------------------------------------------------------------------------------ ranges

    def _read(self, key: str, nbytes: int, fetch: Callable[[], Buffer]) -> tuple[Buffer, bool]:
        """Return the content, and whether the cache had it."""
        if not nbytes:
            return fetch(), False  # there is no mapped memory of no bytes
        path, part = self._dataset / _digest(key), None
        try:
            self._open_once()
            content = self._cached(path, nbytes)
            if content is not None:
                return content, True
            self._missed_at = time.monotonic()
            if not self._failed and nbytes <= self._limit_bytes:
                part = self._lock_part(path)
        except OSError as error:
            self._fail(error)
        if part is None:
            return fetch(), False
        try:
            content = self._cached(path, nbytes)  # another process may have read it meanwhile
            if content is not None:
                return content, True
            fetched = fetch()
            self._keep(path, part, fetched)
            return fetched, False
        finally:
            with contextlib.suppress(OSError):
                if _is_at(part, _part(path)):  # it was not kept
                    os.unlink(_part(path))
            _unlock(part)

    def _cached(self, path: Path, nbytes: int) -> Buffer | None:
        """Return the file in mapped memory, which stays if the file is deleted."""
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != nbytes:  # whoever did it: it is not complete
                    return None
                content = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail(error)
            return None
        with self._lock:
            self._bytes_read += nbytes
        return memoryview(content)

    def _lock_part(self, path: Path) -> int | None:
        """Return a file descriptor of the unfinished range, locked; None if another process or
        thread has held it for too long.
        """
        while True:
            part = os.open(_part(path), os.O_RDWR | os.O_CREAT, 0o600)
            if not _lock_within(part, _WAIT_S):
                os.close(part)
                return None
            if _is_at(part, _part(path)):  # else it was finished or deleted meanwhile
                return part
            _unlock(part)

    def _keep(self, path: Path, part: int, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        taken = 0
        try:
            if not self._take(part, view.nbytes):
                return
            taken = view.nbytes
            written = 0
            while written < taken:
                written += os.pwrite(part, view[written:], written)
            os.rename(_part(path), path)
        except OSError as error:
            self._fail(error)
            with contextlib.suppress(OSError):
                self._give_back(part, taken)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._say(
                f"DataConfig.cache_dir: {self._folder} cannot be used, so every read goes to the "
                f"store: {error.strerror or error}"
            )

    # ------------------------------------------------------------------------------- space

    def _take(self, part: int, nbytes: int) -> bool:
        """Take space for a range before it is written. Return whether there is enough."""
        if time.monotonic() < self._full_until:
            return False
        with self._locked():
            used = self._used()
            if used + nbytes > self._limit_bytes:
                used = self._make_room(nbytes)
            fits = used + nbytes <= self._limit_bytes
            self._set_used(used + nbytes if fits else used)
            if fits:
                os.ftruncate(part, nbytes)  # so it counts with its full size
            else:
                self._full_until = time.monotonic() + _FULL_S
        return fits

    def _give_back(self, part: int, nbytes: int) -> None:
        with self._locked():
            os.ftruncate(part, 0)
            self._set_used(max(0, self._used() - nbytes))

    def _set_used(self, used: int) -> None:
        (self._folder / _USED).write_text(str(used))

    def _used(self) -> int:
        try:
            return int((self._folder / _USED).read_text())
        except (FileNotFoundError, ValueError):  # a process was killed while it wrote the number
            return self._count()

    def _make_room(self, nbytes: int) -> int:
        """Delete data sets that no process has open until `nbytes` fit. Return the used bytes."""
        used = self._count()
        for dataset in self._datasets():
            if used + nbytes <= self._limit_bytes:
                break
            if dataset != self._dataset and _is_unused(dataset):
                shutil.rmtree(dataset, ignore_errors=True)
                used = self._count()
        return used

    def _shrink(self) -> int:
        """Delete other data sets, then ranges of this one, until the limit holds. Return the used
        bytes. Processes that have mapped a range keep its content."""
        used = self._make_room(0)
        for path in self._dataset.iterdir():
            if used <= self._limit_bytes:
                break
            if path.name != "open" and path.suffix != ".part":
                used -= path.stat().st_size
                path.unlink()
        return used

    def _count(self) -> int:
        """Return the bytes of all ranges. The parts of processes that were killed are deleted."""
        used = 0
        for dataset in self._datasets():
            with os.scandir(dataset) as entries:
                for entry in entries:
                    if entry.name.endswith(".part") and _delete_if_left(entry.path):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # its process has just deleted it
                        used += entry.stat().st_size
        return used

    def _datasets(self) -> list[Path]:
        """The folders of data sets, the one first that was opened first."""
        folders = [path for path in self._folder.glob(f"*{_RANGES}") if path.is_dir()]
        return sorted(folders, key=_opened_at)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises TimeoutError if a process that is stopped has it."""
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock_within(lock, _WAIT_S):
                raise TimeoutError("another process holds its lock")
            yield
        finally:
            _unlock(lock)

    def _open_once(self) -> None:
        with self._lock:
            if self._open is None and not self._failed:
                self._open = self._open_dataset()

    def _open_dataset(self) -> int:
        """Create what is missing, and return a descriptor with a shared lock on the data set."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            boot, at = _boot_id(), self._folder / _BOOT
            if not at.exists() or at.read_text() != boot:
                for dataset in self._datasets():
                    shutil.rmtree(dataset)
                self._set_used(0)
                at.write_text(boot)
            self._dataset.mkdir(exist_ok=True)
            if self._used() > self._limit_bytes:
                self._set_used(self._shrink())
            opened = os.open(self._dataset / "open", os.O_RDWR | os.O_CREAT, 0o600)
            os.utime(opened)
            fcntl.flock(opened, fcntl.LOCK_SH)
            return opened


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _part(path: Path) -> str:
    return f"{path}.part"


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text()
    except OSError:  # not on Linux
        return ""


def _opened_at(dataset: Path) -> float:
    try:
        return (dataset / "open").stat().st_mtime
    except OSError:
        return 0.0


def _is_unused(dataset: Path) -> bool:
    try:
        opened = os.open(dataset / "open", os.O_RDWR)
    except OSError:
        return True
    unused = _try_lock(opened)
    _unlock(opened)
    return unused


def _delete_if_left(path: str) -> bool:
    """Delete the part of a process that was killed. Return whether it is gone."""
    try:
        part = os.open(path, os.O_RDWR)
    except OSError:
        return True
    left = _try_lock(part)
    if left and _is_at(part, path):
        os.unlink(path)
    _unlock(part)
    return left


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_within(descriptor: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not _try_lock(descriptor):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _unlock(descriptor: int) -> None:
    """Unlock and close. A process that was forked meanwhile does not keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
