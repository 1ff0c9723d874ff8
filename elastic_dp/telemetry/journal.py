"""The journal of a run, as JSON lines: `events.jsonl` (events, commands and reasons) and
`metrics.jsonl`.

Lines are kept in memory for clients that follow the run, up to a limit, and written to the run's
folder at any fsspec URL: on a local disk they are appended at once, several together if they come
together; elsewhere the whole file is written at intervals. Nothing waits for the disk. A store that
is unavailable is waited for, and nothing is written before the existing files have been read.

A process that takes over a run reads what the previous one wrote and continues its numbering. A
client passes a `JournalPosition`, so it receives each line once: events that were sent but never
written are not sent again, and metrics are recorded again in the same order, so the same number
means the same line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import heapq
import io
import itertools
import json
import math
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from elastic_dp.errors import FileDamaged
from elastic_dp.storage import ObjectMissing, Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.telemetry.batch_queue import BatchQueue
from elastic_dp.threads import background

MAX_KEPT = 10_000  # lines in memory
# Seconds between two writes of a whole file; writing takes at most a twentieth of the time.
_PAUSE_S = 10.0
_TIMEOUT_S = 20.0  # for one request, which the store retries
_AGAIN_S = 1.0  # between two attempts while the store is unavailable
_DIGITS = 4  # decimals of a time in seconds
_FILES = ("events", "metrics")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # numbers that JSON does not have
P = ParamSpec("P")
T = TypeVar("T")


class JournalPosition(NamedTuple):
    """How far a client has followed: the number of lines of each file, as `writer` counts them."""

    writer: str = ""
    events: int = 0
    metrics: int = 0


class Journal:
    """The journal of one run. `url` is the run's folder; None keeps everything in memory.

    `on_line` is called with each line. `since` continues a journal from that time (of `time.time`):
    the lines are read before the constructor returns, however long the store is unavailable.
    """

    def __init__(
        self,
        url: str | None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        since: float | None = None,
    ) -> None:
        self._store = None if url is None else Store(url, timeout_s=_TIMEOUT_S)
        self._on_line = on_line
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._id = secrets.token_hex(4)
        self._kept: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=MAX_KEPT)
        self._count = dict.fromkeys(_FILES, 0)
        self._changed = threading.Condition()
        self._queue: BatchQueue[tuple[str, str] | None] = BatchQueue(gather_s=0.0)
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
                lambda: any(self._count[f] > seen[f] for f in _FILES), timeout=timeout_s
            )
            now = {file: max(seen[file], self._count[file]) for file in _FILES}
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
            self._queue.put(None, urgent=True)
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
        if self._on_line is not None:
            self._on_line(line)
        if self._writer is not None:
            entry = file, json_line(line)
            self._queue.put(entry, urgent=True)

    def _keep(self, file: str, line: dict[str, Any]) -> None:
        self._count[file] += 1
        self._kept.append((file, self._count[file], line))

    def _take_back(self, since: float) -> None:
        """Load the lines of each file, in their order, from the first one that is new enough.

        Later lines may have an earlier time, because the clock may have been set.
        """

        def is_old(each: tuple[str, dict[str, Any]]) -> bool:
            return bool(each[1]["time"] < round(since, _DIGITS))

        texts = {file: self._patiently(self._written, file) for file in _FILES}
        files = ([(file, line) for line in journal_lines(file, texts[file])] for file in _FILES)
        new = (itertools.dropwhile(is_old, lines) for lines in files)
        for file, line in heapq.merge(*new, key=lambda each: each[1]["time"]):
            self._keep(file, line)

    def _written(self, file: str) -> list[str]:
        assert self._store is not None
        return _texts(self._store, file)

    def _patiently(self, attempt: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Call `attempt` until it succeeds, whatever the store raises.

        When the journal is closed, a last attempt is made, and its exception is raised.
        """
        while True:
            closing = self._closing.is_set()
            try:
                return attempt(*args, **more)
            except Exception:
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
        if folder is None:
            self._rewrite(self._store)
        else:
            self._patiently(os.makedirs, folder, exist_ok=True)
            self._append(folder)

    def _append(self, path: str) -> None:
        files = {name: f"{path}/{name}.jsonl" for name in _FILES}
        lines: dict[str, deque[str]] = {name: deque() for name in _FILES}
        for name in _FILES:  # a reader finds both, whatever comes
            self._patiently(_append_lines, files[name], lines[name])
        open_ = True
        while open_:
            for entry in self._queue.take():
                if entry is None:
                    open_ = False
                else:
                    lines[entry[0]].append(entry[1])
            for name in _FILES:
                if lines[name]:
                    self._patiently(_append_lines, files[name], lines[name])

    def _rewrite(self, store: Store) -> None:
        """Write whole files at intervals, because stores cannot append."""
        texts = {name: bytearray() for name in _FILES}
        for name, text in texts.items():
            text += "".join(line + "\n" for line in self._patiently(self._written, name)).encode()
        changed: set[str] = set()
        due, open_ = 0.0, True
        while open_:
            wait_s = max(0.0, due - time.monotonic()) if changed else None
            for entry in self._queue.take(wait_s):
                if entry is None:
                    open_ = False
                else:
                    texts[entry[0]] += entry[1].encode() + b"\n"
                    changed.add(entry[0])
            began = time.monotonic()
            if changed and (began >= due or not open_):
                # A store may raise anything; it may be available later.
                with contextlib.suppress(Exception):
                    for name in sorted(changed):
                        store.write(path_in(store, f"{name}.jsonl"), bytes(texts[name]))
                        changed.discard(name)
                due = time.monotonic() + max(_PAUSE_S, 20 * (time.monotonic() - began))


def read_events(url: str) -> Iterator[dict[str, Any]]:
    """Return the lines of both files of a run's folder, by time. Empty if no run has written
    there.
    """
    store = Store(url)
    files = [journal_lines(name, _texts(store, name)) for name in _FILES]
    return heapq.merge(*files, key=lambda line: line["time"])


def _texts(store: Store, file: str) -> list[str]:
    try:
        content = store.read_all(path_in(store, f"{file}.jsonl"))
    except (ObjectMissing, FileDamaged):  # no file, or a folder of that name
        return []
    return bytes(content).decode(errors="replace").splitlines()


def json_line(line: dict[str, Any]) -> str:
    """Return a line as JSON, which has no numbers that are not finite: they are written as the
    texts "NaN", "Infinity" and "-Infinity".
    """
    try:
        return json.dumps(line, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(line), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def journal_lines(file: str, texts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file ("events" or "metrics"), without those that a process did not
    finish or that are not ours.
    """
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            wanted = ("time", "step") if file == "metrics" else ("time",)
            if isinstance(line, dict) and all(_is_number(line.get(name)) for name in wanted):
                if any(word in text for word in _NOT_FINITE):
                    line = {name: _as_number(value) for name, value in line.items()}
                yield line


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _append_lines(path: str, lines: deque[str]) -> None:
    """Append lines to a local file. What was written is removed from `lines`, also if this raises.

    An unfinished line before them gets a line of its own. If that unfinished line is the first of
    them without its newline, only the newline is added.
    """
    with open(path, "ab+", buffering=0) as file:
        if not lines:
            return
        first = lines[0].encode()
        file.seek(max(0, file.tell() - max(1, len(first) + 1)))
        there = file.read()
        if there and not there.endswith(b"\n"):
            _write(file, b"\n")
            if there.removeprefix(b"\n") == first:
                lines.popleft()
        content = "".join(line + "\n" for line in lines).encode()
        written = _write(file, content)
        for _ in range(content.count(b"\n", 0, written)):
            lines.popleft()
        if lines:
            raise OSError(errno.ENOSPC, "only some lines were written", path)


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
