"""What happened, as JSON lines: `events.jsonl` (facts, requests and their reasons) and `metrics.jsonl`.

Lines are kept in memory for those who follow a run, up to a limit, and written to the run's folder at any fsspec
URL: on a local disk as they come, elsewhere when the run closes. Nothing waits for the disk.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import fsspec

MAX_KEPT = 10_000


class Journal:
    """`url` is the run's folder; None keeps everything in memory only."""

    def __init__(
        self, url: str | None, on_line: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._url, self._on_line = url, on_line
        self._kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_KEPT)
        self._count = 0
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        if url is not None:
            self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
            self._writer.start()

    def event(self, event: Any) -> None:
        self._line("events", "event", type(event).__name__, _fields(event))

    def command(self, command: Any) -> None:
        self._line("events", "command", type(command).__name__, _fields(command))

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._line("metrics", "metrics", "metrics", {"step": step, **metrics})

    def since(self, position: int, timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
        """The lines after `position`, waiting for one up to `timeout_s`; and where to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > position, timeout=timeout_s)
            return self._count, [line for i, line in self._kept if i > position]

    def close(self) -> None:
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join(timeout=30)

    def _line(self, file: str, what: str, name: str, fields: dict[str, Any]) -> None:
        line = {"time": round(time.time(), 4), what: name} | fields
        if what == "metrics":
            line = {"time": line["time"]} | fields
        with self._changed:
            self._count += 1
            self._kept.append((self._count, line))
            self._changed.notify_all()
        if self._on_line is not None:
            self._on_line(line)
        if self._writer is not None:
            self._queue.put((file, json.dumps(line, default=str)))

    def _write(self) -> None:
        assert self._url is not None
        fs, path = fsspec.url_to_fs(self._url)
        fs.makedirs(path, exist_ok=True)
        local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
        texts: dict[str, list[str]] = {}
        while (entry := self._queue.get()) is not None:
            name, text = entry
            if local:
                with open(f"{path}/{name}.jsonl", "a", encoding="utf-8") as file:
                    file.write(text + "\n")
            else:
                texts.setdefault(name, []).append(text)
        for name, lines in texts.items():
            with fs.open(f"{path}/{name}.jsonl", "w") as file:
                file.write("\n".join(lines) + "\n")


def _fields(message: Any) -> dict[str, Any]:
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    membership = fields.pop("membership", None)
    if membership is not None:
        fields["generation"] = membership.generation
        fields["members"] = [seat.worker for seat in membership.seats]
        fields["source"] = membership.source
    return fields
