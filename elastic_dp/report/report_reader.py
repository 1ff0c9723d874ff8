"""Reads the report of a run from its folder, and follows the folder while the run goes on.

The files of a journal only grow, so each poll reads what is new. If a file is shorter than before,
somebody has replaced the folder, and all of it is read again.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.errors import FileDamaged, RunMismatch, StorageError
from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.report.report_model import Report
from elastic_dp.report.run_status import status_of_report
from elastic_dp.run_record import Result, read_result
from elastic_dp.storage import ObjectMissing, ObjectRewritten, Store
from elastic_dp.telemetry.journal_reader import JournalTail

_TIMEOUT_S = 15.0  # of one request
_LOOK_S = 5.0  # between two looks at what is not in the journal: the checkpoints and the result


class RunFolder:
    """The folder of one run. All methods may be called from any thread."""

    def __init__(self, name: str, url: str) -> None:
        self._name, self._url = name, url
        self._store = Store(url, timeout_s=_TIMEOUT_S)
        self._lock = threading.Lock()
        self._looked_at = -float("inf")
        self._stored: frozenset[int] = frozenset()
        self._result: Result | None = None
        self._damage: Exception | None = None  # of the result
        self._forget()

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a disk of this machine, so that looking at it costs nothing."""
        return self._store.local_path(self._store.path) is not None

    def report(self, now: float) -> Report:
        """Read what is new and return the report at `now` (of `time.time`)."""
        with self._lock:
            try:
                self._read()
            except (ObjectMissing, ObjectRewritten):
                self._read()
            self._look()
            return self._builder.build(now, stored=self._stored, result=self._result)

    def status(self, report: Report, now: float) -> dict[str, Any]:
        """Return the status that a report of this folder gives. Raises FileDamaged or RunMismatch
        if the result cannot be read.
        """
        if self._damage is not None:
            raise self._damage
        return status_of_report(report, now)

    # ------------------------------------------------------------------------------ private

    def _forget(self) -> None:
        self._builder = ReportBuilder(self._name)
        self._journal = JournalTail(self._store)

    def _read(self) -> None:
        try:
            for line in self._journal.lines():
                self._builder.line(line)
        except StorageError:  # lines that were read and not passed on would be missing
            self._forget()
            raise

    def _look(self) -> None:
        if time.monotonic() < self._looked_at + _LOOK_S:
            return
        self._stored = frozenset(name.step for name in Catalog(self._store).names())
        self._result = self._damage = None
        try:
            self._result = read_result(self._url)
        except (FileDamaged, RunMismatch) as error:
            self._damage = error
        self._looked_at = time.monotonic()
