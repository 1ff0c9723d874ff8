"""The journal of a run, as JSON lines: events (with commands and reasons) and metrics.

Lines are kept in memory for clients that follow the run, up to a limit, and written to the run's
folder. On a local disk they are appended to `events.jsonl` and `metrics.jsonl` at once, several
together if they come together. Other stores cannot append: there each writer has segments, such as
`journal/events-00000001-WRITER.jsonl`, and writes the newest again at intervals until it is full.
Nothing waits for the disk. A store that is unavailable is waited for.

A process that takes over a run reads what the previous one wrote and continues its numbering. A
client passes a `JournalPosition`, so it receives each line once: events that were sent but never
written are not sent again, and metrics are recorded again in the same order, so the same number
means the same line.
"""

from __future__ import annotations

import dataclasses
import errno
import heapq
import io
import itertools
import os
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store
from elastic_dp.storage.json_files import to_json
from elastic_dp.telemetry.journal_reader import (
    JOURNAL_FILES,
    JournalTail,
    segment_number,
    segment_path,
    segments,
)
from elastic_dp.threads import background, take_all

MAX_KEPT = 10_000  # lines in memory
# Seconds between two writes of a segment; writing takes at most a twentieth of the time.
_PAUSE_S = 10.0
_SEGMENT_BYTES = 256 << 10
_TIMEOUT_S = 20.0  # for one request, which the store retries
_AGAIN_S = 1.0  # between two attempts while the store is unavailable
_DIGITS = 4  # decimals of a time in seconds
T = TypeVar("T")


class JournalPosition(NamedTuple):
    """How far a client has followed: the number of lines of each file, as `writer` counts them."""

    writer: str = ""
    events: int = 0
    metrics: int = 0


class Journal:
    """The journal of one run. `url` is the run's folder; None keeps everything in memory.

    `since` continues a journal from that time (of `time.time`): the lines are read before the
    constructor returns, however long the store is unavailable.
    """

    def __init__(self, url: str | None, since: float | None = None) -> None:
        self._store = None if url is None else Store(url, timeout_s=_TIMEOUT_S)
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._id = secrets.token_hex(4)
        self._kept: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=MAX_KEPT)
        self._count = dict.fromkeys(JOURNAL_FILES, 0)
        self.newest: dict[str, dict[str, Any]] = {}  # the newest line of each kind, in order
        self._changed = threading.Condition()
        self._queue = queue.SimpleQueue[tuple[str, str] | None]()
        self._writer: threading.Thread | None = None
        self._closing = threading.Event()
        if since is not None:
            self._take_back(since)
        self._events_taken_back = self._count["events"]
        if url is not None:
            self._writer = background("journal", self._write)
            self._writer.start()

    def event(self, event: Any) -> None:
        """Record an event."""
        self._message("event", event)

    def command(self, command: Any) -> None:
        """Record a command."""
        self._message("command", command)

    def metrics(self, step: int, metrics: Mapping[str, Any], at: float | None = None) -> None:
        """Record the metrics of a step, which were logged at `at` (of `time.time`; None: now)."""
        at = time.time() if at is None else at
        self._add({"time": round(at, _DIGITS), "step": step, **metrics}, "metrics")

    def since(
        self, position: JournalPosition | None, timeout_s: float
    ) -> tuple[JournalPosition, list[dict[str, Any]]]:
        """Return the new position and the lines after `position` (None: all).

        Waits up to `timeout_s` for a line.
        """
        writer, events, metrics = position or JournalPosition()
        if writer != self._id:
            events = min(events, self._events_taken_back)
        seen = {"events": events, "metrics": metrics}
        with self._changed:
            self._changed.wait_for(
                lambda: any(self._count[f] > seen[f] for f in JOURNAL_FILES), timeout=timeout_s
            )
            now = {file: max(seen[file], self._count[file]) for file in JOURNAL_FILES}
            lines = [line for file, number, line in self._kept if number > seen[file]]
        return JournalPosition(self._id, **now), lines

    def recorded(self) -> list[dict[str, Any]]:
        """Return the lines of metrics in memory."""
        with self._changed:
            return [line for file, _, line in self._kept if file == "metrics"]

    @property
    def store_retries(self) -> int:
        return 0 if self._store is None else self._store.counts.retries

    def listen(self, on_line: Callable[[dict[str, Any]], None]) -> None:
        """Call `on_line` with each line in memory and with every later one, in their order."""
        with self._changed:
            for _, _, line in self._kept:
                on_line(line)
            self._listeners.append(on_line)

    def close(self) -> None:
        """Write what is left; waits up to 30 s."""
        if self._writer is not None:
            self._closing.set()
            assert self._store is not None
            self._store.close()  # a request that fails from now on is not retried
            self._queue.put(None)
            self._writer.join(timeout=30)

    # ------------------------------------------------------------------------------ private

    def _message(self, what: str, message: Any) -> None:
        line = {"time": round(time.time(), _DIGITS), what: type(message).__name__}
        self._add(line | _fields(message), "events")

    def _add(self, line: dict[str, Any], file: str) -> None:
        with self._changed:
            self._keep(file, line)
            for listener in self._listeners:
                listener(line)
            self._changed.notify_all()
        if self._writer is not None:
            self._queue.put((file, to_json(line)))

    def _keep(self, file: str, line: dict[str, Any]) -> None:
        self._count[file] += 1
        self._kept.append((file, self._count[file], line))
        if file == "events":
            kind = line.get("event") or line.get("command", "")
            self.newest.pop(kind, None)
            self.newest[kind] = line

    def _take_back(self, since: float) -> None:
        """Load the lines of each file, in their order, from the first one that is new enough.

        Later lines may have an earlier time, because the clock may have been set.
        """

        store = self._store
        assert store is not None

        def read() -> dict[str, list[dict[str, Any]]]:
            tail = JournalTail(store)
            return {file: [*tail.lines_of(file)] for file in JOURNAL_FILES}

        def is_old(line: dict[str, Any]) -> bool:
            return bool(line["time"] < round(since, _DIGITS))

        files = [
            [(file, line) for line in itertools.dropwhile(is_old, lines)]
            for file, lines in self._patiently(read).items()
        ]
        for file, line in heapq.merge(*files, key=lambda each: each[1]["time"]):
            self._keep(file, line)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until the store or the disk takes it.

        When the journal is closed, a last attempt is made, and its exception is raised.
        """
        while True:
            closing = self._closing.is_set()
            try:
                return attempt()
            except (OSError, StorageError):
                if closing:
                    raise
                self._closing.wait(_AGAIN_S)

    def _write(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # the journal is closed, and the store is still unavailable
            print(f"the journal of the run is incomplete: {error}", file=sys.stderr, flush=True)

    def _write_all(self) -> None:
        assert self._store is not None
        folder = self._store.local_path(self._store.path)
        files: dict[str, _LocalFile | _Segment]
        if folder is None:
            files = {name: _Segment(self._store, name, self._id) for name in JOURNAL_FILES}
        else:
            self._patiently(lambda: os.makedirs(folder, exist_ok=True))
            files = {name: _LocalFile(f"{folder}/{name}.jsonl") for name in JOURNAL_FILES}

        def write() -> float:
            """Return how long it took, without attempts that failed."""
            began = time.monotonic()
            for each in files.values():
                each.write()
            return time.monotonic() - began

        lines: list[tuple[str, str] | None] = []  # a reader finds both files, whatever comes
        while True:
            for file, line in filter(None, lines):
                files[file].add(line)
            took_s = self._patiently(write)
            if None in lines:
                return
            if folder is None and lines:
                self._closing.wait(max(_PAUSE_S, 20 * took_s))
            lines = take_all(self._queue)


class _LocalFile:
    """A file on a disk, and lines that are not in it yet."""

    def __init__(self, path: str) -> None:
        self._path, self._rest = path, deque[str]()

    def add(self, line: str) -> None:
        self._rest.append(line)

    def write(self) -> None:
        """Append all lines. Those that the disk does not take stay.

        An unfinished line before them gets a line of its own. If that unfinished line is the first
        of them without its newline, only the newline is added.
        """
        with open(self._path, "ab+", buffering=0) as file:
            if not self._rest:
                return
            first = self._rest[0].encode()
            file.seek(max(0, file.tell() - max(1, len(first) + 1)))
            there = file.read()
            if there and not there.endswith(b"\n"):
                _write(file, b"\n")
                if there.removeprefix(b"\n") == first:
                    self._rest.popleft()
            content = "".join(line + "\n" for line in self._rest).encode()
            written = _write(file, content)
            for _ in range(content.count(b"\n", 0, written)):
                self._rest.popleft()
            if self._rest:
                raise OSError(errno.ENOSPC, "only some lines were written", self._path)


class _Segment:
    """The newest segment of one file, and lines that come after it."""

    def __init__(self, store: Store, file: str, writer: str) -> None:
        self._store, self._file, self._writer = store, file, writer
        self._number = 0  # 0: not yet known
        self._content = bytearray()
        self._rest: deque[bytes] = deque()

    def add(self, line: str) -> None:
        self._rest.append(line.encode() + b"\n")

    def write(self) -> None:
        """Write all lines. Those that the store does not take stay."""
        while self._rest:
            if not self._number:
                before = segments(self._store, self._file)
                last = segment_number(before[-1].path, self._file) if before else 0
                self._number = last + 1
            count, content = 0, self._content.copy()
            while count < len(self._rest) and len(content) < _SEGMENT_BYTES:
                content += self._rest[count]
                count += 1
            path = segment_path(self._store, self._file, self._number, self._writer)
            self._store.write(path, bytes(content))
            for _ in range(count):
                self._rest.popleft()
            is_full = len(content) >= _SEGMENT_BYTES
            self._number += is_full
            self._content = bytearray() if is_full else content


def _write(file: io.FileIO, content: bytes) -> int:
    return file.write(content)


def _fields(message: Any) -> dict[str, Any]:
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    membership = fields.pop("membership", None)
    if membership is not None:
        fields["generation"] = membership.generation
        fields["members"] = [member.worker for member in membership.members]
        fields["source"] = membership.source
        if membership.topology:
            fields["topology"] = membership.topology
    # without the compressed layout, which is not readable
    if (signature := fields.get("signature")) is not None:
        fields["signature"] = [field for field in signature if not isinstance(field, bytes)]
    return fields
