"""`elastic-dp report`: a run on a page, from its folder alone."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_dp.cli.run_options import (
    Address,
    Name,
    StorageOption,
    StoragePath,
    find_run,
    name_and_path,
    print_json,
    print_reply,
    storage_options,
)
from elastic_dp.cli.run_tables import one_line
from elastic_dp.errors import SpecError
from elastic_dp.urls import StorageURL

if TYPE_CHECKING:
    from elastic_dp.cluster.run_handle import Run

_PORT = 8642


def report(
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="Default: RUN.html, here."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve a page that follows the run, until Ctrl-C.")
    ] = False,
    control: Annotated[
        bool,
        typer.Option("--control", help="Let whoever has the token scale, checkpoint and stop it."),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help=f"The port to listen on; 0: any free one. Default: {_PORT}."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ELASTIC_DP_UI_TOKEN",
            hidden=True,  # other users of the machine can read a command's arguments
        ),
    ] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the report (with --live, the address) as JSON, and nothing else."
        ),
    ] = False,
) -> None:
    """Write the report of a run as one HTML file that needs nothing else: a verdict, workers with
    every event, and goodput. With --live, serve it instead.

    The printed address has the token, without which nobody reads or steers the run: also other
    users of this machine reach its ports. ELASTIC_DP_UI_TOKEN sets another one.
    """
    from elastic_dp.cluster.runs.ended_run import EndedRun

    if (as_json or live) and output is not None:
        raise SpecError(
            "--output names a file for the page, and --json and --live write none: give one of them"
        )
    if not live and (control or port is not None):
        option = "--control" if control else "--port"
        raise SpecError(f"{option} is of a served page: add --live")
    name, storage_path = name_and_path(name, storage_path)
    if storage_path is None:
        found = find_run(name, address, None, None).url
        assert isinstance(found, StorageURL)  # as `attach` finds it
        url = found
    else:
        url = EndedRun(name, storage_path, storage_options(storage_option)).url
    if not live:
        _write(name, url, output, as_json)
        return
    from elastic_dp.ui.server import ServedRun, serve

    asking = threading.Lock()

    def find_live() -> Run:
        from elastic_dp.cluster.runs import attach

        with asking:
            found = attach.find_live(name, url, address)
            attach.check_may_steer(found, storage_path)
            return found

    secret = "" if token else secrets.token_urlsafe(32)

    def ready(here: str) -> None:
        shown = f"{here}#token={secret}" if secret else here
        print_reply({"url": shown}, shown, as_json)

    serve(
        ServedRun(name, url, find_live if control else None),
        token or secret,
        _PORT if port is None else port,
        ready,
    )


def _write(name: str, url: StorageURL, output: Path | None, as_json: bool) -> None:
    from elastic_dp.report.report_page import report_page
    from elastic_dp.report.report_reader import RunFolder

    made = RunFolder(name, url).report(time.time())
    if as_json:
        print_json(made.to_json())
        return
    output = Path(f"{name}.html") if output is None else output
    page = report_page(made)
    try:
        output.write_text(page, "utf-8")
    except OSError as error:
        raise SpecError(f"--output is {str(output)!r}, and cannot be written: {error}") from None
    for sentence in made.verdict:
        print(one_line(sentence))
    print(f"the page is in {output}")
