"""Follows the journal in a run's folder while the run goes on: each poll reads what is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_dp.storage import ObjectRewritten, Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.telemetry.journal import journal_lines

JOURNAL_FILES = ("events", "metrics")
_CHUNK_BYTES = 4 * 2**20


class JournalTail:
    """One file of a journal, from which each line is read once."""

    def __init__(self, store: Store, file: str) -> None:
        self._store, self._file = store, file
        self._path = path_in(store, f"{file}.jsonl")
        self._offset = 0
        self._rest = b""  # of a line that was not complete

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that have been added.

        Raises ObjectRewritten or ObjectMissing if it is not the file that was read before.
        """
        entry = self._store.look_up(self._path)
        size = 0 if entry is None else entry.size
        if size < self._offset:
            raise ObjectRewritten(f"{self._path} is shorter than before")
        while self._offset < size:
            end = min(size, self._offset + _CHUNK_BYTES)
            content = bytes(self._store.read(self._path, self._offset, end))
            self._offset = end
            whole, newline, rest = content.rpartition(b"\n")
            if not newline:
                self._rest += rest
                continue
            text, self._rest = self._rest + whole, rest
            yield from journal_lines(self._file, text.decode(errors="replace").split("\n"))
