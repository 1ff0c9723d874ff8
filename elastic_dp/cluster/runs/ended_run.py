"""A run that is not live, read from its folder: how it ended, its events, and what its workers
printed.

Nothing here imports ray or torch, so the command line answers in a fraction of a second, also on a
machine that reaches the run's storage but no cluster. The lease says whether a cluster may still
train: a run that ends releases it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_dp.checkpoint.lease import Lease
from elastic_dp.cluster.runs.run_history import address_of, total_steps_of
from elastic_dp.cluster.worker_logs import follow_logs, read_logs
from elastic_dp.errors import ClusterError
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.run_record import run_names, run_url
from elastic_dp.storage import Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.telemetry.journal_reader import JournalTail
from elastic_dp.wording import did_you_mean

_FOLLOW_S = 1.0  # between two looks at the folder


class EndedRun:
    """The part of `Run` that needs no controller."""

    def __init__(
        self,
        name: str,
        storage_path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ClusterError if no run has started there."""
        self.name, self.url = name, run_url(name, storage_path, storage_options)
        self._store = Store(self.url)
        files = (path_in(self._store, f"{n}.json") for n in ("run", "result"))
        if not any(self._store.look_up(file) for file in files):
            where = Store(os.fspath(storage_path), storage_options)
            raise ClusterError(
                f"no run named {name!r} is at {self._store.url}: it has no run.json"
                + did_you_mean(name, run_names(where))
            )
        self._folder = RunFolder(name, self.url)

    @property
    def holder(self) -> str:
        """Who holds the run's lease now, so that the run may be live; "" if nobody does. A killed
        cluster has not released it, either.
        """
        newest = Lease(self._store, "", "").newest()
        return newest.holder if newest is not None and newest.state == "held" else ""

    def status(self) -> dict[str, Any]:
        """Return the status, with the fields of a live run's."""
        now, holder = time.time(), self.holder
        report = self._folder.report(now)
        status = self._folder.status(report, now) | {"max_steps": total_steps_of(self.url)}
        if report.is_over and not holder:
            return status
        address, where = address_of(self.url), "a cluster that does not answer here"
        if address is not None:
            where = f"the Ray cluster at {address}: --address asks that one"
        held = f"{holder} holds its lease, and may train on {where}; "
        newest = status["newest_event"] or {"text": "none"}
        reason = (held if holder else "it has no result; ") + "the last event is: "
        return status | {"phase": "unfinished", "reason": reason + newest["text"]}

    def events(self, *, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield every event, command and metric, by time. With `follow`, also those that a cluster
        adds, as long as one holds the lease.
        """
        journal, is_live = JournalTail(self._store), follow and bool(self.holder)
        yield from journal.lines()
        while is_live:
            is_live = self._goes_on()
            yield from journal.lines()

    def logs(
        self, worker: str | None = None, *, tail: int = 100, follow: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Yield (worker, line) of what all workers printed. With `follow`, also what is added, as
        long as a cluster holds the lease.
        """
        if follow and self.holder:
            return follow_logs(self._store, worker, tail, self._goes_on)
        return read_logs(self._store, worker, tail)

    def _goes_on(self) -> bool:
        time.sleep(_FOLLOW_S)
        return bool(self.holder)
