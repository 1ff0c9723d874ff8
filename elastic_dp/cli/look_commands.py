"""`elastic-dp status`: runs of a cluster, or at a storage path, in one look."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from elastic_dp.cli.run_options import Address, Json, StorageOption, StoragePath
from elastic_dp.cli.run_tables import (
    age,
    metric_fact,
    one_line,
    overview_facts,
    overview_table,
    screen,
    show,
    show_run,
    text_table,
)
from elastic_dp.report.report_model import Report, WorkerCondition
from elastic_dp.wording import counted

if TYPE_CHECKING:
    from elastic_dp.cli.run_sources import SeenRun

_WATCH_S = 1.0
_GONE = (WorkerCondition.LEFT, WorkerCondition.LOST, WorkerCondition.ENDED)


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run's name. Default: all runs.")
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
    from elastic_dp.cli.run_sources import run_source, runs_source

    where = address, storage_path, storage_option
    look = runs_source(*where) if name is None else run_source(name, *where)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            seen = look()
            if watch and not as_json:
                screen().clear()  # of a terminal
            _print(seen, name, as_json)
            if not watch or (name is not None and seen[0].overview.is_over):
                return
            time.sleep(_WATCH_S)


def run_facts(seen: SeenRun) -> list[tuple[str, str]]:
    """Return what is known of a run, as (name, value)."""
    if seen.report is not None:
        return overview_facts(seen.overview, _facts_of(seen.report))
    status = seen.status
    waits = status.get("waits_for") or ""
    more = [
        ("phase", f"{status.get('phase')}: {one_line(status.get('reason', ''))}"),
        metric_fact(status.get("metrics", {})),
        *(("not exact", one_line(because)) for because in status.get("inexact_because", ())),
        ("sharding", one_line(status.get("sharding") or "")),
        ("waits for", f"a node: {one_line(waits)}" if waits else ""),
    ]
    return overview_facts(seen.overview, more)


def run_workers(seen: SeenRun) -> list[Table]:
    """Return the table of the workers that are there, if there are any."""
    if seen.report is None:
        status = seen.status
        processes = status.get("processes", {})
        rows = []
        for name, stage in status.get("workers", {}).items():
            process = processes.get(name, {"pid": "-", "node": "-"})
            row = name, stage, process["pid"], process["node"]
            rows.append(tuple(one_line(cell) for cell in row))
        return [text_table(("worker", "stage", "pid", "node"), rows)] if rows else []
    there = [row for row in seen.report.workers if row.condition not in _GONE]
    rows_of_report = [
        (
            one_line(row.name),
            row.condition.value,
            one_line(row.node) or "-",
            f"{row.steps}",
            "-" if row.step_s is None else f"{row.step_s:.3g} s",
            age(seen.report.until - row.since),
        )
        for row in there
    ]
    header = ("worker", "stage", "node", "steps", "mean step", "since")
    return [text_table(header, rows_of_report)] if rows_of_report else []


def add_to(app: typer.Typer) -> None:
    app.command()(status)


# ---------------------------------------------------------------------------------- private


def _print(seen: list[SeenRun], name: str | None, as_json: bool) -> None:
    if as_json:
        rows = [each.to_json() for each in seen]
        print(json.dumps(rows if name is None else rows[0], default=str), flush=True)
    elif name is not None:
        show_run(seen[0].overview, run_facts(seen[0]), run_workers(seen[0]))
    elif seen:
        show(overview_table([each.overview for each in seen]))
    else:
        print("no runs here")


def _facts_of(report: Report) -> list[tuple[str, str]]:
    newest = {
        name: points[-1].value
        for name, points in report.curves.items()
        if points and points[-1].value is not None
    }
    lost = counted(report.lost, "worker")
    if report.rollbacks:
        lost += f", and {counted(report.rollbacks, 'time')} back to a checkpoint"
    return [
        metric_fact(newest),
        *(("not exact", one_line(because)) for because in report.inexact_because),
        ("lost", lost if report.lost or report.rollbacks else ""),
    ]
