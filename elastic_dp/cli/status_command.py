"""`elastic-dp status`: runs of a cluster, or at a storage path, in one look.

What is shown of a run comes from its controller, or from its folder.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from elastic_dp.cli.run_options import (
    Address,
    Json,
    StorageOption,
    StoragePath,
    find_run,
    name_and_path,
    print_json,
    storage_options,
)
from elastic_dp.cli.run_tables import overview_table, run_text
from elastic_dp.errors import ClusterError, ElasticError
from elastic_dp.report.run_status import health_of

_Status = dict[str, Any]  # of one run, with its name and health
_THREADS = 8


def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="The run's name, or its folder. Default: all runs."),
    ] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Print the health of a run and the reason for it, how far it is, and its workers, or how it
    ended; without RUN one line for each run of the cluster, or at --storage-path.
    """
    where = address, storage_path, storage_option
    seen = _all_runs(*where) if name is None else [_one_run(name, *where)]
    if as_json:
        print_json(seen if name is None else seen[0])
    elif name is not None:
        print(run_text(seen[0]))
    else:
        print(overview_table(seen) if seen else "no runs here")


def _all_runs(
    address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> list[_Status]:
    """Return all runs: those of a cluster, or at the storage path."""
    if storage_path is None:
        from elastic_dp.cluster.runs.attach import runs

        return [_seen(row["name"], row) for row in runs(address)]
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.run_record import run_names
    from elastic_dp.storage import Store

    options = storage_options(storage_option)

    def look_or_say(name: str) -> _Status:
        """A run that cannot be read must not hide the others."""
        try:
            return _seen(name, EndedRun(name, storage_path, options).status())
        except ElasticError as error:
            return _seen(name, {"phase": "unknown", "reason": f"{type(error).__name__}: {error}"})

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(look_or_say, run_names(Store(storage_path, options))))


def _one_run(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> _Status:
    """Raises ClusterError if there is none."""
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.cluster.runs.run_history import total_steps_of

    found = find_run(name, address, storage_path, storage_option)
    name = name_and_path(name, storage_path)[0]
    status = found.status()
    if not isinstance(found, EndedRun):
        with contextlib.suppress(ClusterError):  # it has ended since
            processes = found.processes()
            status["processes"] = {w: {"pid": p, "node": n} for w, (p, n) in processes.items()}
        if status.get("max_steps") is None and storage_path is not None:
            status["max_steps"] = total_steps_of(found.url)
    return _seen(name, status)


def _seen(name: str, status: _Status) -> _Status:
    health, reason = health_of(status)
    return {"name": name} | status | {"health": health.value, "health_reason": reason}
