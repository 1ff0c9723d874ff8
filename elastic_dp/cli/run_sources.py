"""Where `status` gets what it shows: controllers of a cluster, or folders.

Each entry is the status of a run as a dict, as `--json` prints it, with its overview.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from elastic_dp.cli.run_options import find_run, storage_options
from elastic_dp.cluster.runs.ended_run import EndedRun, run_names
from elastic_dp.cluster.runs.run_history import total_steps_of
from elastic_dp.errors import ClusterError, ElasticError
from elastic_dp.report.report_model import Report
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.report.run_overview import RunOverview, overview_of_report, overview_of_status
from elastic_dp.run_record import run_url
from elastic_dp.storage import Store

_THREADS = 8


class SeenRun(NamedTuple):
    """One run. `report` is known where the folder was read."""

    overview: RunOverview
    status: dict[str, Any]
    report: Report | None = None

    def to_json(self) -> dict[str, Any]:
        return self.status | self.overview.to_json()


def runs_source(
    address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Callable[[], list[SeenRun]]:
    """Return a function that looks at all runs: those of a cluster, or at the storage path."""
    if storage_path is None:
        from elastic_dp.cluster.runs.attach import runs_of

        return lambda: [_seen(row["name"], row) for row in runs_of(address)]
    options = storage_options(storage_option)
    store = Store(storage_path, options)
    folders: dict[str, Callable[[], SeenRun]] = {}

    def look() -> list[SeenRun]:
        for name in run_names(store):
            folders.setdefault(name, _folder(name, storage_path, options))
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(_look_or_say, folders, folders.values()))

    return look


def run_source(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Callable[[], list[SeenRun]]:
    """Return a function that looks at one run. Raises ClusterError if there is none."""
    found = find_run(name, address, storage_path, storage_option)
    options = storage_options(storage_option)
    if isinstance(found, EndedRun):
        assert storage_path is not None
        look = _folder(name, storage_path, options)
        return lambda: [look()]
    total = None if storage_path is None else total_steps_of(run_url(name, storage_path, options))

    def look_at_live() -> list[SeenRun]:
        status = {"name": name} | found.status()
        with contextlib.suppress(ClusterError):  # it has ended since
            processes = found.processes()
            status["processes"] = {w: {"pid": p, "node": n} for w, (p, n) in processes.items()}
        if status.get("max_steps") is None:
            status["max_steps"] = total
        return [_seen(name, status)]

    return look_at_live


def _folder(name: str, storage_path: str, options: dict[str, Any] | None) -> Callable[[], SeenRun]:
    url = run_url(name, storage_path, options)
    folder, total = RunFolder(name, url), total_steps_of(url)

    def look() -> SeenRun:
        now = time.time()
        report = folder.report(now)
        overview = overview_of_report(report, now, total)
        try:
            status = EndedRun(name, storage_path, options).status()
        except ElasticError as error:
            status = _unknown(error)
        return SeenRun(overview, {"name": name} | status, report)

    return look


def _seen(name: str, status: dict[str, Any]) -> SeenRun:
    return SeenRun(overview_of_status(name, status), status)


def _look_or_say(name: str, look: Callable[[], SeenRun]) -> SeenRun:
    """A run that cannot be read must not hide the others."""
    try:
        return look()
    except ElasticError as error:
        return _seen(name, {"name": name} | _unknown(error))


def _unknown(error: ElasticError) -> dict[str, Any]:
    return {"phase": "unknown", "reason": f"{type(error).__name__}: {error}"}
