"""The runs that are served: those below a storage path, or one of them.

A report is built when somebody asks for it. Clients of one run share its report.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_dp.cluster.runs.ended_run import run_names
from elastic_dp.errors import StorageError
from elastic_dp.report.report_model import Report
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.report.run_overview import overview_of_report
from elastic_dp.run_record import run_url
from elastic_dp.storage import StorageURL, Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.storage.redact import redact

_MOST_OPEN = 256  # runs whose reports are in memory
MOST_LISTED = 200
_LIST_S = 3.0  # between two listings of the storage path
_LOCAL_S, _REMOTE_S = 0.5, 2.0  # between two looks at a folder
_NAME_BYTES = 255
_THREADS = 8


class ServedRun:
    """One run. All clients that follow it see the same report."""

    def __init__(self, name: str, url: StorageURL) -> None:
        self.name, self.url = name, url
        self._lock = threading.Lock()
        self._folder = RunFolder(name, url)
        self._usual_s = _LOCAL_S if self._folder.is_local else _REMOTE_S
        self._report: Report | None = None
        self._json, self.version, self._due = "", 0, -float("inf")

    def report(self) -> Report:
        """Return the report of at most a moment ago. Raises StorageError."""
        with self._lock:
            began = time.monotonic()
            if self._report is None or began >= self._due:
                self._report, before = self._folder.report(time.time()), self._json
                self._json = json.dumps(self._report.to_json(), allow_nan=False)
                self.version += self._json != before
                # Building takes at most a third of the time.
                self._due = began + max(self._usual_s, 3 * (time.monotonic() - began))
            return self._report

    def newest(self) -> tuple[str, str]:
        """Return the report as JSON in ASCII, and its version."""
        self.report()
        with self._lock:
            return self._json, str(self.version)


class ServedRuns:
    """The runs below `storage_path`; with `only`, just that one. Any thread may call it."""

    def __init__(self, storage_path: StorageURL, only: str | None = None) -> None:
        self._path, self.only = storage_path, only
        self._store = Store(storage_path, timeout_s=15.0)
        self._lock, self._list_lock = threading.Lock(), threading.Lock()
        self._open: OrderedDict[str, ServedRun] = OrderedDict()
        self._listed: list[dict[str, Any]] = []
        self._number = 0  # of all runs, at the last listing
        self._listed_at = -float("inf")

    def find(self, name: str) -> ServedRun | None:
        """Return the run of that name, or None. Raises StorageError."""
        if not _is_name(name) or (self.only is not None and name != self.only):
            return None
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
        files = (path_in(self._store, f"{name}/{file}.json") for file in ("run", "result"))
        if all(self._store.look_up(path) is None for path in files):
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
                names = [self.only] if self.only is not None else run_names(self._store)
                with ThreadPoolExecutor(_THREADS) as pool:
                    rows = list(pool.map(self._summary, names[:MOST_LISTED]))
                self._listed = sorted(rows, key=lambda row: -(row["last_line"] or 0))
                self._number, self._listed_at = len(names), time.monotonic()
            return self._listed, self._number

    def clean(self, text: str) -> str:
        """Return a text without credentials."""
        return redact(text, self._path.options)

    def print_error(self) -> None:
        """Print the exception that is being handled to standard error, without credentials."""
        print(self.clean(traceback.format_exc()), file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------ private

    def _summary(self, name: str) -> dict[str, Any]:
        row = {"name": name, "health": "unknown", "health_reason": "", "last_line": None}
        try:
            run = self.find(name)
            if run is None:
                return row
            report = run.report()
        except StorageError as error:
            return row | {"health_reason": self.clean(str(error))}
        times = {"began": report.began, "last_line": report.last_line}
        return overview_of_report(report, time.time()).to_json() | times


def _is_name(name: str) -> bool:
    """Whether a run may have this name: it is one folder's, and leads to no other folder."""
    ok = name.isprintable() and "/" not in name and name.strip() not in ("", ".", "..")
    return ok and len(name.encode(errors="replace")) <= _NAME_BYTES
