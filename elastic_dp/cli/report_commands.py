"""`elastic-dp report` and `elastic-dp ui`: runs on a page, from their folders alone."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Annotated

import typer

from elastic_dp.cli.run_options import (
    Address,
    AllStoragePath,
    Name,
    StoragePath,
    find_live_run,
)
from elastic_dp.cli.store_options import StorageOption, storage_options
from elastic_dp.errors import SpecError
from elastic_dp.urls import StorageURL


def report(
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="Default: RUN.html, here."),
    ] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead, and nothing else.")
    ] = False,
) -> None:
    """Write the report of a run as one HTML file that needs nothing else: loss, workers with every
    event, goodput, checkpoints, decisions and a verdict.
    """
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.report.report_page import report_page
    from elastic_dp.report.report_reader import read_report

    if as_json and output is not None:
        raise SpecError(
            "--output names a file for the page, and --json prints data: give one of them"
        )
    if storage_path is None:
        url = _live_url(name, address)
    else:
        url = EndedRun(name, storage_path, storage_options(storage_option)).url
    made = read_report(name, url, time.time())
    if as_json:
        print(json.dumps(made.to_json()))
        return
    output = Path(f"{name}.html") if output is None else output
    page = report_page(made)
    try:
        output.write_text(page, "utf-8")
    except OSError as error:
        raise SpecError(f"--output is {str(output)!r}, and cannot be written: {error}") from None
    for sentence in made.verdict:
        print(sentence)
    print(f"the page is in {output}")


def ui(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Only this run. Default: all at --storage-path."),
    ] = None,
    storage_path: AllStoragePath = None,
    storage_option: StorageOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")
    ] = 8642,
    control: Annotated[
        bool,
        typer.Option(
            "--control", help="Let whoever has the token scale, drain, checkpoint and stop runs."
        ),
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ELASTIC_DP_UI_TOKEN",
            hidden=True,  # other users of the machine can read a command's arguments
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name by which browsers may call this server, besides localhost and IP "
            "addresses. May be repeated.",
        ),
    ] = None,
    address: Address = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as JSON, and nothing else.")
    ] = False,
) -> None:
    """Serve the reports of runs as a page that follows them live, until Ctrl-C.

    The printed address has the token, without which nobody reads or steers runs: also other users
    of this machine reach its ports. ELASTIC_DP_UI_TOKEN sets another one.
    """
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.run_record import run_url
    from elastic_dp.ui.access import AccessRules
    from elastic_dp.ui.served_runs import ServedRuns
    from elastic_dp.ui.server import RayControls, serve

    options = storage_options(storage_option)
    if storage_path is not None:
        where = StorageURL(storage_path, options)
        if name is not None:
            EndedRun(name, storage_path, options)  # tells if there is none
    elif name is not None:
        url = _live_url(name, address)
        where = StorageURL(url.rpartition("/")[0], url.options)
        assert run_url(name, where) == url
    else:
        raise SpecError("--storage-path is missing: the runs there, or one RUN of a cluster")
    secret = "" if token else secrets.token_urlsafe(32)
    rules = AccessRules(host, token or secret, tuple(allow_host or ()))
    controls = RayControls(address) if control else None

    def ready(here: str) -> None:
        url = f"{here}#token={secret}" if secret else here
        print(json.dumps({"url": url}) if as_json else url, flush=True)

    serve(ServedRuns(where, name), rules, controls, port, ready)


def _live_url(name: str, address: str | None) -> StorageURL:
    url = find_live_run(name, address, None, None).url
    assert isinstance(url, StorageURL)  # as `attach` finds it
    return url
