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
from typing import TYPE_CHECKING, Annotated, Any

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
from elastic_dp.cli.run_tables import is_over, overview_table, run_text
from elastic_dp.errors import ClusterError, ElasticError
from elastic_dp.report.run_status import health_of

if TYPE_CHECKING:
    from elastic_dp.cluster.run_handle import Run

_Status = dict[str, Any]  # of one run, with its name and health
_WATCH_S = 1.0
_THREADS = 8


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
            if not watch or (name is not None and is_over(seen[0])):
                return
            time.sleep(_WATCH_S)


def _print(seen: list[_Status], name: str | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(seen if name is None else seen[0], default=str), flush=True)
    elif name is not None:
        print(run_text(seen[0]), flush=True)
    elif seen:
        print(overview_table(seen), flush=True)
    else:
        print("no runs here")


# ------------------------------------------------------------------------------ where it comes from


def _look_at_all(
    address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Callable[[], list[_Status]]:
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

    def look_or_say(name: str) -> _Status:
        """A run that cannot be read must not hide the others."""
        try:
            if name not in folders:
                folders[name] = EndedRun(name, storage_path, options)
            return _seen(name, folders[name].status())
        except ElasticError as error:
            return _seen(name, {"phase": "unknown", "reason": f"{type(error).__name__}: {error}"})

    def look() -> list[_Status]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(look_or_say, run_names(store, folders)))

    return look


def _look_at_one(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Callable[[], list[_Status]]:
    """Return a function that looks at one run. Raises ClusterError if there is none."""
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.cluster.runs.run_history import total_steps_of
    from elastic_dp.run_record import run_url

    found = find_run(name, address, storage_path, storage_option)
    if isinstance(found, EndedRun):
        return lambda: [_seen(name, found.status())]
    total = None
    if storage_path is not None:
        total = total_steps_of(run_url(name, storage_path, storage_options(storage_option)))
    return lambda: [_live(name, found, total)]


def _live(name: str, run: Run, total_steps: int | None) -> _Status:
    status = run.status()
    with contextlib.suppress(ClusterError):  # it has ended since
        processes = run.processes()
        status["processes"] = {w: {"pid": p, "node": n} for w, (p, n) in processes.items()}
    if status.get("max_steps") is None:
        status["max_steps"] = total_steps
    return _seen(name, status)


def _seen(name: str, status: _Status) -> _Status:
    health, reason = health_of(status)
    return {"name": name} | status | {"health": health.value, "health_reason": reason}
