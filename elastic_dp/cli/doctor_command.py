"""`elastic-dp doctor`: checks this machine, a cluster and a store before a run depends on them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from elastic_dp.cli.run_options import Json
from elastic_dp.cli.run_tables import one_line, screen
from elastic_dp.cli.store_options import StorageOption, storage_options
from elastic_dp.cluster.doctor.check_result import CheckLevel, CheckResult, fails
from elastic_dp.errors import ClusterError
from elastic_dp.urls import StorageURL
from elastic_dp.wording import counted

_STYLES = {CheckLevel.OK: "green", CheckLevel.WARNING: "yellow", CheckLevel.FAILS: "bold red"}


def doctor(
    storage_path: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A storage_path to try: speed, conditional writes, and whether all nodes see it.",
        ),
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
    """Check versions, ports, clocks, GPUs, limits, Ray's settings and the store.

    Each line is ok, a warning (a run works, but slowly, or it recovers slowly) or a failure, with
    what to do. The exit code is 1 if something fails.
    """
    from elastic_dp.cluster.doctor.node_checks import check_machine
    from elastic_dp.cluster.doctor.node_facts import facts_of_this_machine, own_address
    from elastic_dp.cluster.doctor.store_check import check_store

    token = secrets.token_hex(8)
    storage = None
    if storage_path is not None:
        storage = StorageURL(storage_path, storage_options(storage_option))
    results = check_machine(facts_of_this_machine(own_address()))
    if storage is not None:
        results += check_store(storage, token)
    store_works = not any(result.check == "store" for result in results)
    if address is not None:
        results += _cluster(address, storage if store_works else None, token)
    counts = {level: sum(r.level is level for r in results) for level in CheckLevel}
    if as_json:
        said = {"ok": not counts[CheckLevel.FAILS], "checks": [r.to_json() for r in results]}
        print(json.dumps(said))
    else:
        _print(results)
        print(
            f"{counts[CheckLevel.OK]} ok, {counted(counts[CheckLevel.WARNING], 'warning')}, "
            f"{counted(counts[CheckLevel.FAILS], 'failure')}"
            + ("" if address is not None else "; no cluster was checked: --address HOST:6379")
            + ("" if storage is not None else "; no store was tried: --storage-path URL")
        )
    raise typer.Exit(int(counts[CheckLevel.FAILS] > 0))


# ---------------------------------------------------------------------------------- private


def _cluster(address: str, storage: StorageURL | None, token: str) -> list[CheckResult]:
    from elastic_dp.cluster.ray.cluster_connection import connect

    try:
        connect(address)
    except ClusterError as error:
        text, _, way_out = str(error).partition(": ")
        return [fails("cluster", text, way_out)]
    from elastic_dp.cluster.doctor.cluster_probe import check_cluster

    return check_cluster(storage, token)


def _print(results: Sequence[CheckResult]) -> None:
    out = screen()
    width = max(len(result.check) for result in results)
    for result in results:
        place = f"{result.where}: " if result.where else ""
        text = f"{result.check:<{width}}  {one_line(f'{place}{result.text}')}"
        line = f"{result.level.value:<7}  {text}"
        if result.way_out:
            line += f". To do: {one_line(result.way_out)}"
        if not out.is_terminal:
            print(line)
            continue
        drawn = Text(line)
        drawn.stylize(_STYLES[result.level], 0, len(result.level.value))
        out.print(drawn, soft_wrap=True)
