"""The runs that are served: those below a storage path, or one of them.

A report is built when somebody asks for it. Clients of one run share its report.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_dp.errors import StorageError
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.run_record import run_names, run_url
from elastic_dp.storage import StorageURL, Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.storage.redact import redact

_MOST_OPEN = 256  # runs whose reports are in memory
MOST_LISTED = 200
_LIST_S = 3.0  # between two listings of the storage path
_LOCAL_S, _REMOTE_S = 0.2, 2.0  # between two looks at a folder
_MOST_LOCAL_S = 0.7  # with long histories; an event is to be visible within a second
_CLOCK_S = 1.0  # between two reports of a run that has written nothing new
_NAME_BYTES = 255
_THREADS = 8


class ServedRun:
    """One run. All clients that follow it see the same report."""

    def __init__(self, name: str, url: StorageURL) -> None:
        self.name, self.url = name, url
        self._lock = threading.Lock()
        self._folder = RunFolder(name, url)
        self._usual_s = _LOCAL_S if self._folder.is_local else _REMOTE_S
        self._report: dict[str, Any] | None = None
        self._due = self._built_at = -float("inf")

    def report(self) -> dict[str, Any]:
        """Return the report as JSON values, of at most a moment ago. The same report is the same
        object. Raises StorageError.
        """
        with self._lock:
            began = time.monotonic()
            if self._report is not None and began < self._due:
                return self._report
            grown = self._folder.read()
            if self._report is None or grown or began >= self._built_at + _CLOCK_S:
                self._report = self._folder.report(time.time()).to_json()
                self._built_at = began
            # Building takes at most a third of the time.
            took_s = time.monotonic() - began
            self._due = began + max(self._usual_s, min(3 * took_s, _MOST_LOCAL_S))
            return self._report


class ServedRuns:
    """The runs below `storage_path`; with `only`, just that one. Any thread may call it."""

    def __init__(self, storage_path: StorageURL, only: str | None = None) -> None:
        self._path, self._only = storage_path, only
        self._store = Store(storage_path, timeout_s=15.0)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, ServedRun] = OrderedDict()
        self._list_lock = threading.Lock()
        self._listed: list[dict[str, Any]] = []
        self._number = 0  # of all runs, at the last listing
        self._listed_at = -float("inf")

    @property
    def only(self) -> str | None:
        return self._only

    def find(self, name: str) -> ServedRun | None:
        """Return the run of that name, or None. Raises StorageError."""
        if not _is_name(name) or (self._only is not None and name != self._only):
            return None
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
        if not self._exists(name):
            return None
        run = ServedRun(name, run_url(name, self._path, self._path.options))
        with self._lock:
            run = self._open.setdefault(name, run)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return run

    def summaries(self) -> tuple[list[dict[str, Any]], int]:
        """Return what the list of runs shows, the run that wrote last first, and the number of all
        runs: of many, the first ones by name are listed. Raises StorageError.
        """
        with self._list_lock:
            if time.monotonic() >= self._listed_at + _LIST_S:
                names = [self._only] if self._only is not None else self._names()
                with ThreadPoolExecutor(_THREADS) as pool:
                    rows = list(pool.map(self._summary, names[:MOST_LISTED]))
                self._listed = sorted(rows, key=lambda row: -(row["last_line"] or 0))
                self._number = len(names)
                self._listed_at = time.monotonic()
            return self._listed, self._number

    def clean(self, text: str) -> str:
        """Return a text without credentials."""
        return redact(text, self._path.options)

    def print_error(self) -> None:
        """Print the exception that is being handled to standard error, without credentials."""
        print(self.clean(traceback.format_exc()), file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------ private

    def _exists(self, name: str) -> bool:
        files = (path_in(self._store, f"{name}/{file}.json") for file in ("run", "result"))
        return any(self._store.look_up(path) is not None for path in files)

    def _names(self) -> list[str]:
        return run_names(self._store, known=self._open)

    def _summary(self, name: str) -> dict[str, Any]:
        empty = {"phase": "unknown", "step": 0, "last_line": None, "goodput": None, "health": ""}
        try:
            run = self.find(name)
            report = None if run is None else run.report()
        except StorageError as error:
            return {"name": name} | empty | {"health": self.clean(str(error))}
        if report is None:
            return {"name": name} | empty
        same = {key: report[key] for key in ("phase", "step", "last_line")}
        more = {"goodput": report["goodput"]["fraction"], "health": report["verdict"][2]}
        return {"name": name} | same | more


def _is_name(name: str) -> bool:
    """Whether a run may have this name: it is one folder's, and leads to no other folder."""
    ok = name.isprintable() and "/" not in name and name.strip() not in ("", ".", "..")
    return ok and len(name.encode(errors="replace")) <= _NAME_BYTES
