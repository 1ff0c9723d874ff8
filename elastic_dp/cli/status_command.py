"""`elastic-dp status`: runs of a cluster, or at a storage path, in one look.

What is shown of a run comes from its controller, or from its folder.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from elastic_dp.cli.run_options import (
    Address,
    Json,
    StorageOption,
    StoragePath,
    find_run,
    name_and_path,
    storage_options,
)
from elastic_dp.cli.run_tables import (
    age,
    is_over,
    metric_fact,
    one_line,
    overview_facts,
    overview_table,
    run_table,
    text_table,
)
from elastic_dp.errors import ClusterError, ElasticError
from elastic_dp.report.report_model import Report, WorkerCondition
from elastic_dp.report.run_status import health_of
from elastic_dp.wording import counted

if TYPE_CHECKING:
    from elastic_dp.cluster.run_handle import Run

_WATCH_S = 1.0
_THREADS = 8
_GONE = (WorkerCondition.LEFT, WorkerCondition.LOST, WorkerCondition.ENDED)


class SeenRun(NamedTuple):
    """One run: its status with its health. `report` is known where the folder was read."""

    status: dict[str, Any]
    report: Report | None = None


def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="The run's name, or its folder. Default: all runs."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print it again every second, until Ctrl-C.")
    ] = False,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Print the health of a run and the reason for it, how far it is, and its workers, or how it
    ended; without RUN one line for each run of the cluster, or at --storage-path.
    """
    if name is not None:
        name, storage_path = name_and_path(name, storage_path)
    where = address, storage_path, storage_option
    look = _look_at_all(*where) if name is None else _look_at_one(name, *where)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            seen = look()
            if watch and not as_json and sys.stdout.isatty():
                print("\x1b[2J\x1b[H", end="")  # clears it
            _print(seen, name, as_json)
            if not watch or (name is not None and is_over(seen[0].status)):
                return
            time.sleep(_WATCH_S)


def _print(seen: list[SeenRun], name: str | None, as_json: bool) -> None:
    if as_json:
        rows = [each.status for each in seen]
        print(json.dumps(rows if name is None else rows[0], default=str), flush=True)
    elif name is not None:
        print(run_table(seen[0].status, run_facts(seen[0]), run_workers(seen[0])), flush=True)
    elif seen:
        print(overview_table([each.status for each in seen]), flush=True)
    else:
        print("no runs here")


# ------------------------------------------------------------------------------ where it comes from


def _look_at_all(
    address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Callable[[], list[SeenRun]]:
    """Return a function that looks at all runs: those of a cluster, or at the storage path."""
    if storage_path is None:
        from elastic_dp.cluster.runs.attach import runs

        return lambda: [_seen(row["name"], row) for row in runs(address)]
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.run_record import run_names
    from elastic_dp.storage import Store

    options = storage_options(storage_option)
    store = Store(storage_path, options)
    folders: dict[str, EndedRun] = {}

    def look_or_say(name: str) -> SeenRun:
        """A run that cannot be read must not hide the others."""
        try:
            if name not in folders:
                folders[name] = EndedRun(name, storage_path, options)
            return _seen(name, *folders[name].look())
        except ElasticError as error:
            return _seen(name, {"phase": "unknown", "reason": f"{type(error).__name__}: {error}"})

    def look() -> list[SeenRun]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(look_or_say, run_names(store, folders)))

    return look


def _look_at_one(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Callable[[], list[SeenRun]]:
    """Return a function that looks at one run. Raises ClusterError if there is none."""
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.cluster.runs.run_history import total_steps_of
    from elastic_dp.run_record import run_url

    found = find_run(name, address, storage_path, storage_option)
    if isinstance(found, EndedRun):
        return lambda: [_seen(name, *found.look())]
    total = None
    if storage_path is not None:
        total = total_steps_of(run_url(name, storage_path, storage_options(storage_option)))
    return lambda: [_live(name, found, total)]


def _live(name: str, run: Run, total_steps: int | None) -> SeenRun:
    status = run.status()
    with contextlib.suppress(ClusterError):  # it has ended since
        processes = run.processes()
        status["processes"] = {w: {"pid": p, "node": n} for w, (p, n) in processes.items()}
    if status.get("max_steps") is None:
        status["max_steps"] = total_steps
    return _seen(name, status)


def _seen(name: str, status: dict[str, Any], report: Report | None = None) -> SeenRun:
    health, reason = health_of(status)
    named = {"name": name} | status | {"health": health.value, "health_reason": reason}
    return SeenRun(named, report)


# ---------------------------------------------------------------------------------- what is printed


def run_facts(seen: SeenRun) -> list[tuple[str, str]]:
    """Return what is known of a run, as (name, value)."""
    status, report = seen.status, seen.report
    waits, lost = status.get("waits_for") or "", ""
    if report is not None and (report.lost or report.rollbacks):
        back = f", and {counted(report.rollbacks, 'time')} back to a checkpoint"
        lost = counted(report.lost, "worker") + (back if report.rollbacks else "")
    phase = f"{status.get('phase')}: {one_line(status.get('reason', ''))}"
    more = [
        ("phase", phase if report is None else ""),
        metric_fact({k: v for k, v in status.get("metrics", {}).items() if v is not None}),
        *(("not exact", one_line(why)) for why in status.get("inexact_because", ())),
        ("sharding", one_line(status.get("sharding") or "")),
        ("waits for", f"a node: {one_line(waits)}" if waits else ""),
        ("lost", lost),
    ]
    return overview_facts(status, more)


def run_workers(seen: SeenRun) -> list[str]:
    """Return the table of the workers that are there, if there are any."""
    if seen.report is None:
        header: tuple[str, ...] = ("worker", "stage", "pid", "node")
        processes = seen.status.get("processes", {})
        nothing = {"pid": "-", "node": "-"}
        rows: list[tuple[str, ...]] = [
            (name, stage, *(processes.get(name, nothing)[fact] for fact in ("pid", "node")))
            for name, stage in seen.status.get("workers", {}).items()
        ]
    else:
        header = ("worker", "stage", "node", "steps", "mean step", "since")
        rows = [
            (
                row.name,
                row.condition.value,
                row.node or "-",
                f"{row.steps}",
                "-" if row.step_s is None else f"{row.step_s:.3g} s",
                age(seen.report.until - row.since),
            )
            for row in seen.report.workers
            if row.condition not in _GONE
        ]
    cells = [tuple(one_line(cell) for cell in row) for row in rows]
    return [text_table(header, cells)] if cells else []
