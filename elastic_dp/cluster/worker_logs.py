"""Copies what workers print to the run's folder: `logs/<worker>.log`, and `logs/<worker>.last.log`
of workers that died.

- A worker's output is a file on its node (Ray creates it; `elastic_dp.testing` does, too). A thread
  writes a copy at most every `EVERY_S`, so the output can be read some seconds later, even when the
  node is gone.
- A copy is one object that is rewritten whole, because stores cannot append, and numbered pieces
  would have to be cleaned up. It is bounded: of a long output it has the first `HEAD_BYTES` and
  the last `TAIL_BYTES`.
- The last output of a worker that is killed (a segmentation fault, an abort) comes too late for its
  own thread. Its sidecar outlives it and sends the last few kilobytes to the controller, which
  writes them.

Written by hand: Ray 2.60 has no API that keeps the output of a lost node. Its log files go with the
node, and `ray logs` reads them there through the dashboard.

If a node's disk is full, what is printed meanwhile is lost, and nothing else. Output does not go
through a pipe: its reader would need the interpreter, and a library that prints while it holds the
interpreter would wait for that reader for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import re
import stat
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from elastic_dp.errors import SpecError, StorageError
from elastic_dp.storage import ObjectMissing, Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.threads import background

EVERY_S = 5.0
HEAD_BYTES = 64 << 10
TAIL_BYTES = 192 << 10
_FILE = re.compile(r"(.+?)(\.last)?\.log")
_LEFT_OUT = re.compile(r"… \d+ bytes are left out here …")
_OF_RAY = (":job_id:", ":actor_name:", ":task_name:")  # its notes on whose output follows


def read_logs(
    store: Store,
    worker: str | None = None,
    tail: int | None = 100,
    known: dict[str, tuple[str, list[str]]] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (worker, line) from a run's folder: the last `tail` lines of each file, or all of them.

    Lines of `w2.last.log` are yielded as `w2.last`. `known` keeps what was read, by path and
    version, for the next call. Raises SpecError for a worker without a file.
    """
    entries = {e.path.rpartition("/")[2]: e for e in store.find(path_in(store, "logs/"))}
    found = [match for name in entries if (match := _FILE.fullmatch(name))]
    files = sorted(found, key=lambda match: (_by_number(match[1]), match[2] or ""))
    workers = list(dict.fromkeys(match[1] for match in files))
    if worker is not None and worker not in workers:
        raise SpecError(
            f"worker is {worker!r}, must be one of those in {store.url}/logs: "
            f"{', '.join(workers) or 'none'}"
        )
    known = {} if known is None else known
    for match in files:
        if worker in (None, match[1]):
            entry = entries[match[0]]
            if known.get(entry.path, ("",))[0] != entry.version or not entry.version:
                with contextlib.suppress(ObjectMissing):  # deleted since it was listed
                    text = bytes(store.read_all(entry.path)).decode(errors="replace")
                    # without Ray's own notes
                    lines = [line for line in text.splitlines() if not line.startswith(_OF_RAY)]
                    known[entry.path] = entry.version, lines
            for line in known.get(entry.path, ("", []))[1][-tail if tail else None :]:
                yield match[0].removesuffix(".log"), line


def follow_logs(
    store: Store, worker: str | None, tail: int, goes_on: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """Yield what `read_logs` does, and what is added while the run goes on. `goes_on` waits for a
    moment before it answers; what is there after its last answer is yielded, too.
    """
    known: dict[str, tuple[str, list[str]]] = {}
    lines = list(read_logs(store, None, None, known))
    left = Counter(name for name, _ in lines)
    for name, line in lines:
        if left[name] <= tail and worker in (None, name.removesuffix(".last")):
            yield name, line
        left[name] -= 1
    is_live = True
    while is_live:
        is_live, before = goes_on(), lines
        lines = list(read_logs(store, None, None, known))
        for name, line in _added(lines, before):
            if worker in (None, name.removesuffix(".last")):
                yield name, line
    if worker is not None:
        next(read_logs(store, worker), None)  # raises if it has no file


def _added(
    lines: Iterable[tuple[str, str]], before: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the lines that were not there before.

    `w2.last.log` may repeat lines of `w2.log`, which are not yielded twice.
    """
    left = Counter(before)
    known = set(left)
    for name, line in lines:
        if _LEFT_OUT.fullmatch(line):  # another number of bytes each time
            continue
        if left[name, line] > 0:
            left[name, line] -= 1
        elif name == (worker := name.removesuffix(".last")) or (worker, line) not in known:
            yield name, line
        known.add((name, line))


class WorkerLogUploader:
    """Copies the output of one worker, which it prints to the files `fds`.

    While the store is unavailable, copies are skipped and training continues.
    """

    def __init__(self, store: Store, worker: str, fds: Sequence[int] = (1, 2)) -> None:
        self._store, self._path = store, _path(store, f"{worker}.log")
        self._files = _files_behind(fds)
        self._sizes: list[int] = []
        self._closing = threading.Event()
        self._thread = background("logs", self._work)

    def start(self) -> WorkerLogUploader:
        self._thread.start()
        return self

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what was printed up to now, if the store takes it within `timeout_s`."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        with contextlib.suppress(StorageError, OSError):  # the next look tries again
            sizes = [os.stat(path).st_size for path in self._files]
            if sizes != self._sizes and any(sizes):
                self._store.write(self._path, b"".join(map(_bounded, self._files)))
                self._sizes = sizes


class CrashLogWriter:
    """Writes the last output of workers that died, as their sidecars send it.

    While the store is unavailable, it is lost.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = background("last words", self._work)
        self._thread.start()

    def keep(self, worker: str, words: str) -> None:
        self._queue.put((worker, words))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(10.0)

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            worker, words = entry
            with contextlib.suppress(StorageError, OSError):
                self._store.write(_path(self._store, f"{worker}.last.log"), words.encode())


def print_whatever_fits() -> None:
    """Print line by line from now on, and drop output if the disk is full."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


class _LossyFile(io.FileIO):
    """Drops output on a full disk, which must not end a run."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(content).nbytes


def _lossy(stream: TextIO) -> TextIO:
    try:
        stream.flush()
        file = _LossyFile(stream.fileno(), "wb", closefd=False)
    except (AttributeError, OSError):  # the stream of a notebook
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True
    )


def print_to_file() -> None:
    """Send the output of this process, and of its children, to an unnamed file from now on."""
    with tempfile.TemporaryFile() as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)


def _files_behind(fds: Sequence[int]) -> list[str]:
    """Return paths of the regular files among `fds`, each once. Linux only."""
    found: dict[tuple[int, int], str] = {}
    for fd in fds:
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{fd}")
            if stat.S_ISREG(status.st_mode):
                found.setdefault((status.st_dev, status.st_ino), f"/proc/self/fd/{fd}")
    return list(found.values())


def _bounded(path: str) -> bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= HEAD_BYTES + TAIL_BYTES:
            return file.read(size)
        head = file.read(HEAD_BYTES)
        file.seek(size - TAIL_BYTES)
        left_out = size - HEAD_BYTES - TAIL_BYTES
        return head + f"\n… {left_out} bytes are left out here …\n".encode() + file.read(TAIL_BYTES)


def _by_number(name: str) -> list[str]:
    """Sort key that puts w2 before w10."""
    return [part.rjust(12, "0") if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _path(store: Store, name: str) -> str:
    """Return the path of a log. Raises StorageError if the name leads out of the folder: it may
    come from the network.
    """
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name):
        raise StorageError(f"{name!r} cannot be the name of a log")
    return path_in(store, f"logs/{name}")
