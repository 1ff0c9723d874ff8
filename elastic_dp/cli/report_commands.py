"""`elastic-dp report`: a run on one page, from its folder alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from elastic_dp.cli.store_options import StorageOption, storage_options
from elastic_dp.errors import ClusterError, SpecError
from elastic_dp.storage import StorageURL


def report(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="Default: RUN.html, here."),
    ] = None,
    storage_path: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The run's storage_path; no cluster is needed then."),
    ] = None,
    storage_option: StorageOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="The Ray cluster on which the run is live, as HOST:6379. Not needed with "
            "--storage-path.",
        ),
    ] = None,
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


def _live_url(name: str, address: str | None) -> StorageURL:
    from elastic_dp.cluster.ray.cluster_connection import connect
    from elastic_dp.cluster.runs.discovery import find

    connect(address, lambda text: typer.echo(text, err=True))
    live = find(name)
    if live is None:
        raise ClusterError(
            f"no run named {name!r} is live on this cluster. One that ended is found by "
            "--storage-path"
        )
    return live.url
