"""Reads the journal in a run's folder, after the run or while it goes on.

The lines of a file ("events" or "metrics") are in `events.jsonl` on a disk. Other stores have them
in segments. A run that began with an earlier version has both.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
from collections.abc import Iterator
from typing import Any

from elastic_dp.storage import Entry, ObjectRewritten, Store
from elastic_dp.storage.json_files import numbers, path_in

JOURNAL_FILES = ("events", "metrics")
_CHUNK_BYTES = 4 * 2**20
_MOST = 1e11  # of a time (of the year 5138) and of a step


class JournalTail:
    """A journal, from which each line is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Bytes of each object, by file, and what was read of a line that was not complete.
        self._read: dict[str, dict[str, int]] = {file: {} for file in JOURNAL_FILES}
        self._rest: dict[str, bytes] = {}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of both files that have been added, by time.

        Raises ObjectRewritten if it is not the journal that was read before.
        """
        return heapq.merge(*map(self.lines_of, JOURNAL_FILES), key=lambda line: line["time"])

    def lines_of(self, file: str) -> Iterator[dict[str, Any]]:
        """Yield those of one file, in its order."""
        read, whole = self._read[file], self._store.look_up(path_in(self._store, f"{file}.jsonl"))
        entries = [*([whole] if whole else ()), *segments(self._store, file)]
        missing = read.keys() - {entry.path for entry in entries}
        if missing or any(entry.size < read.get(entry.path, 0) for entry in entries):
            raise ObjectRewritten(f"{self._store.url}: the journal is shorter than before")
        for entry in entries:
            yield from journal_lines(file, self._texts(entry, read))

    def _texts(self, entry: Entry, read: dict[str, int]) -> Iterator[str]:
        offset, rest = read.get(entry.path, 0), self._rest.pop(entry.path, b"")
        while offset < entry.size:
            end = min(entry.size, offset + _CHUNK_BYTES)
            rest += bytes(self._store.read(entry.path, offset, end))
            read[entry.path] = offset = end
            lines, newline, after = rest.rpartition(b"\n")
            if newline:
                yield from lines.decode(errors="replace").split("\n")
                rest = after
        if rest:
            self._rest[entry.path] = rest


def read_events(url: str) -> Iterator[dict[str, Any]]:
    """Return the lines of both files of a run's folder, by time. Empty if no run has written
    there.
    """
    return JournalTail(Store(url)).lines()


def segments(store: Store, file: str) -> list[Entry]:
    """Return the segments of a file in their order."""
    entries = store.look(path_in(store, "journal"), deep=False).entries if store.lists else ()
    numbered = [(segment_number(entry.path, file), entry) for entry in entries]
    return [entry for number, entry in sorted(numbered) if number]


def segment_path(store: Store, file: str, number: int, writer: str) -> str:
    return path_in(store, f"journal/{file}-{number:08}-{writer}.jsonl")


def segment_number(path: str, file: str) -> int:
    """Return the number of a segment of this file, from 1; 0 for other objects."""
    match = re.fullmatch(rf"{file}-(\d+)-\w+\.jsonl", path.rpartition("/")[2])
    return int(match[1]) if match else 0


def journal_lines(file: str, texts: Iterator[str] | list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file ("events" or "metrics"), without those that a process did not
    finish or that are not ours.
    """
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            wanted = ("time", "step") if file == "metrics" else ("time",)
            if isinstance(line, dict) and all(_is_number(line.get(name)) for name in wanted):
                yield numbers(line) if "NaN" in text or "Infinity" in text else line


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < _MOST  # what is not a number is not less
