"""`elastic-dp doctor`: checks this machine, a cluster and a store before a run depends on them."""

from __future__ import annotations

import importlib
import secrets
from dataclasses import asdict
from typing import Annotated

import typer

from elastic_dp.cli.run_options import Json, StorageOption, print_json, storage_options
from elastic_dp.cli.run_tables import one_line
from elastic_dp.errors import ClusterError
from elastic_dp.urls import StorageURL
from elastic_dp.wording import counted

_LEVELS = ("ok", "warning", "fails")


def doctor(
    storage_path: Annotated[
        str | None, typer.Option(metavar="URL", help="A storage_path to try.")
    ] = None,
    storage_option: StorageOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="A Ray cluster to check, as HOST:6379. Default: this machine alone.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check versions, clocks, the network between nodes, and the store.

    Each line is ok, a warning or a failure, with what to do. The exit code is 1 if something fails.
    """
    from elastic_dp.cluster.ray.cluster_connection import connect

    checks = importlib.import_module("elastic_dp.extensions.doctor")
    storage, token = None, secrets.token_hex(8)
    found = [checks.check_machine(checks.facts_of_this_machine())]
    if storage_path is not None:
        storage = StorageURL(storage_path, storage_options(storage_option))
        of_store = checks.check_store(storage, token)
        found += of_store
        if of_store[0].level == "fails":
            storage = None
    if address is not None:
        try:
            connect(address)
            found += checks.check_cluster(storage, token)
        except ClusterError as error:
            text, _, remedy = str(error).partition(": ")
            found.append(checks.Check("cluster", "fails", text, remedy))
    counts = {level: sum(check.level == level for check in found) for level in _LEVELS}
    if as_json:
        checked = [asdict(check) for check in found]
        print_json({"ok": not counts["fails"], "checks": checked})
        raise typer.Exit(int(counts["fails"] > 0))
    width = max(len(check.check) for check in found)
    for check in found:
        where = f"{check.where}: " if check.where else ""
        line = f"{check.level:<7}  {check.check:<{width}}  {one_line(f'{where}{check.text}')}"
        line += f". To do: {one_line(check.remedy)}" if check.remedy else ""
        print(line)
    print(
        f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, "
        f"{counted(counts['fails'], 'failure')}"
        + ("" if address is not None else "; no cluster was checked: --address HOST:6379")
        + ("" if storage_path is not None else "; no store was tried: --storage-path URL")
    )
    raise typer.Exit(int(counts["fails"] > 0))
