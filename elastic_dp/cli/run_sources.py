"""Where the verbs that look at runs get what they show: controllers of a cluster, or folders.

Each entry is the status of a run as a dict, as `--json` prints it, with its overview.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from elastic_dp.cli.run_options import find_run
from elastic_dp.cli.store_options import storage_options
from elastic_dp.cluster.runs.ended_run import EndedRun
from elastic_dp.cluster.runs.run_history import total_steps_of
from elastic_dp.errors import ClusterError, ElasticError
from elastic_dp.report.report_builder import is_committed_checkpoint
from elastic_dp.report.report_model import Report
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.report.run_overview import (
    RunOverview,
    overview_of_report,
    overview_of_status,
)
from elastic_dp.run_record import run_names, run_url
from elastic_dp.storage import Store, redact_url

if TYPE_CHECKING:
    from elastic_dp.cluster.run_handle import Run

_THREADS = 8
MOST_DECISIONS = 50


class SeenRun(NamedTuple):
    """One run. `read_status` returns its status; of a folder that may take a moment. `report` is
    known where the folder was read. `decisions` are the newest ones of the controller, with their
    times, where one run was asked for.
    """

    overview: RunOverview
    read_status: Callable[[], dict[str, Any]]
    report: Report | None = None
    decisions: Sequence[tuple[float, str]] = ()

    def to_json(self) -> dict[str, Any]:
        return self.read_status() | self.overview.to_json()

    def to_json_or_reason(self) -> dict[str, Any]:
        """Return the same, or why the status cannot be read: it must not hide other runs."""
        try:
            return self.to_json()
        except ElasticError as error:
            status = _unknown(self.overview.name, error)
        return status | self.overview.to_json()


class RunSource(Protocol):
    """Runs that may be looked at again and again."""

    where: str  # in words, for people

    def look(self) -> list[SeenRun]:
        """Return the runs by name. Raises ElasticError."""


class ClusterRuns:
    """The runs of the Ray cluster at `address`, or of all clusters of this user on this machine."""

    where = "on this cluster"

    def __init__(self, address: str | None) -> None:
        self._address = address

    def look(self) -> list[SeenRun]:
        from elastic_dp.cluster.runs.live_runs import runs_of

        return [_seen(row["name"], row) for row in runs_of(self._address)]


class StoredRuns:
    """The runs at a storage path, whether they go on or have ended."""

    def __init__(self, storage_path: str, options: dict[str, Any] | None) -> None:
        self.where = f"at {redact_url(storage_path)}"
        self._path, self._options = storage_path, options
        self._store = Store(storage_path, options)
        self._runs: dict[str, StoredRun] = {}

    def look(self) -> list[SeenRun]:
        names = run_names(self._store, known=self._runs)
        self._runs = {name: self._runs.get(name) or self._open(name) for name in names}
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(_look_or_say, names, self._runs.values()))

    def _open(self, name: str) -> StoredRun:
        return StoredRun(name, self._path, self._options)


class StoredRun:
    """One run, from its folder."""

    def __init__(self, name: str, storage_path: str, options: dict[str, Any] | None) -> None:
        self.where = f"named {name!r}"
        self._name, self._path, self._options = name, storage_path, options
        url = run_url(name, storage_path, options)
        self._folder, self._total = RunFolder(name, url), total_steps_of(url)

    def look(self) -> list[SeenRun]:
        return [self.look_at_it()]

    def look_at_it(self) -> SeenRun:
        now = time.time()
        report = self._folder.report(now)
        overview = overview_of_report(report, now, self._total)
        decisions = newest_decisions([(each.time, each.text) for each in report.decisions])
        return SeenRun(overview, self._status, report, decisions)

    def _status(self) -> dict[str, Any]:
        found = EndedRun(self._name, self._path, self._options)
        return {"name": self._name} | found.status()


class LiveRun:
    """One run of a cluster, by its controller. After its end, its last status."""

    def __init__(self, name: str, run: Run, total_steps: int | None) -> None:
        self.where = f"named {name!r}"
        self._name, self._run, self._total = name, run, total_steps
        self._newest = ""  # of the decisions
        self._decisions: list[tuple[float, str]] = []

    def look(self) -> list[SeenRun]:
        status = {"name": self._name} | self._run.status()
        with contextlib.suppress(ClusterError):  # it has ended since
            processes = self._run.processes()
            status["processes"] = {w: {"pid": p, "node": n} for w, (p, n) in processes.items()}
        if status.get("max_steps") is None:
            status["max_steps"] = self._total
        seen = _seen(self._name, status)
        if seen.overview.last_event != self._newest:  # otherwise there are no new ones
            self._newest = seen.overview.last_event
            lines = self._run.events(follow=False)
            texts = [(x["time"], x["text"]) for x in lines if x.get("command") == "Explain"]
            self._decisions = newest_decisions(texts)
        return [seen._replace(decisions=self._decisions)]


def newest_decisions(decisions: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the newest decisions, and of committed checkpoints the last one alone: frequent ones
    would leave no room for others.
    """
    checkpoints = [at for at, (_, text) in enumerate(decisions) if is_committed_checkpoint(text)]
    dropped = set(checkpoints[:-1])
    kept = [each for at, each in enumerate(decisions) if at not in dropped]
    return kept[-MOST_DECISIONS:]


def runs_source(
    address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> RunSource:
    """Return the source of all runs."""
    if storage_path is None:
        return ClusterRuns(address)
    return StoredRuns(storage_path, storage_options(storage_option))


def run_source(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> RunSource:
    """Return the source of one run. Raises ClusterError if there is none of that name."""
    found = find_run(name, address, storage_path, storage_option)
    if storage_path is None:
        assert not isinstance(found, EndedRun)
        return LiveRun(name, found, None)
    options = storage_options(storage_option)
    if isinstance(found, EndedRun):
        return StoredRun(name, storage_path, options)
    return LiveRun(name, found, total_steps_of(run_url(name, storage_path, options)))


def _seen(name: str, status: dict[str, Any]) -> SeenRun:
    return SeenRun(overview_of_status(name, status), lambda: status)


def _look_or_say(name: str, run: StoredRun) -> SeenRun:
    """A run that cannot be read must not hide the others."""
    try:
        return run.look_at_it()
    except ElasticError as error:
        return _seen(name, _unknown(name, error))


def _unknown(name: str, error: ElasticError) -> dict[str, Any]:
    return {"name": name, "phase": "unknown", "reason": f"{type(error).__name__}: {error}"}
