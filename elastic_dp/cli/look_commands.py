"""`elastic-dp list` and `status`: runs of a cluster, or at a storage path, in one look."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from elastic_dp.cli.run_options import Address, AllStoragePath, Json, Name, StoragePath
from elastic_dp.cli.run_tables import (
    TextTable,
    age,
    metric_fact,
    one_line,
    overview_facts,
    overview_table,
    print_run,
    print_table,
)
from elastic_dp.cli.store_options import StorageOption
from elastic_dp.report.report_model import Report, WorkerCondition
from elastic_dp.wording import counted

if TYPE_CHECKING:
    from elastic_dp.cli.run_sources import SeenRun

_GONE = (WorkerCondition.LEFT, WorkerCondition.LOST, WorkerCondition.ENDED)


def list_(
    storage_path: AllStoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """List the runs of the cluster, or those at --storage-path: health, step, loss, workers,
    goodput, the age of the newest checkpoint, and the last event.
    """
    from elastic_dp.cli.run_sources import runs_source

    source = runs_source(address, storage_path, storage_option)
    seen = source.look()
    if as_json:
        print(json.dumps([each.to_json_or_reason() for each in seen], default=str))
    elif seen:
        print_table(overview_table([each.overview for each in seen]))
    else:
        print(f"no runs {source.where}")


def status(
    name: Name,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Print the health of a run and the reason for it, how far it is, and its workers; or how it
    ended.
    """
    from elastic_dp.cli.run_sources import run_source

    (seen,) = run_source(name, address, storage_path, storage_option).look()
    if as_json:
        print(json.dumps(seen.to_json(), default=str))
    else:
        print_run(seen.overview, run_facts(seen), run_workers(seen))


def run_facts(seen: SeenRun) -> list[tuple[str, str]]:
    """Return what is known of a run, as (name, value)."""
    if seen.report is not None:
        return overview_facts(seen.overview, _facts_of(seen.report))
    status = seen.read_status()
    waits = status.get("waits_for") or ""
    more = [
        ("phase", f"{status.get('phase')}: {one_line(status.get('reason', ''))}"),
        metric_fact(status.get("metrics", {})),
        *(("not exact", one_line(because)) for because in status.get("inexact_because", ())),
        ("sharding", one_line(status.get("sharding") or "")),
        ("waits for", f"a node: {one_line(waits)}" if waits else ""),
    ]
    return overview_facts(seen.overview, more)


def run_workers(seen: SeenRun) -> list[TextTable]:
    """Return the table of the workers that are there, if there are any."""
    if seen.report is None:
        status = seen.read_status()
        processes = status.get("processes", {})
        rows = []
        for name, stage in status.get("workers", {}).items():
            process = processes.get(name, {"pid": "-", "node": "-"})
            row = name, stage, process["pid"], process["node"]
            rows.append(tuple(one_line(cell) for cell in row))
        return [TextTable(("worker", "stage", "pid", "node"), rows)] if rows else []
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
    return [TextTable(header, rows_of_report)] if rows_of_report else []


def add_to(app: typer.Typer) -> None:
    app.command()(status)
    app.command("list")(list_)


# ---------------------------------------------------------------------------------- private


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
