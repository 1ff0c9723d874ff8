"""`elastic-dp checkpoints`: lists, exports and makes checkpoints.

Modules that need torch are imported where they are used: `elastic-dp` starts without it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_dp.cli.run_options import (
    Address,
    Json,
    Name,
    StorageOption,
    StoragePath,
    find_live_run,
    print_json,
    print_reply,
    storage_options,
)
from elastic_dp.cli.run_tables import one_line, text_table
from elastic_dp.errors import CheckpointDamaged, CheckpointError
from elastic_dp.urls import StorageURL, redact_url

if TYPE_CHECKING:
    from elastic_dp.checkpoint.catalog import Catalog, CommitName

checkpoints = typer.Typer(help="Make a run's checkpoints, and look at them.", no_args_is_help=True)

_Url = Annotated[
    str,
    typer.Argument(
        metavar="RUN|URL",
        help="The name of a run at --storage-path (default: ~/elastic_dp_runs), or, without that "
        "option, the URL of the run's folder: storage_path/name.",
    ),
]


@checkpoints.command("list")
def list_(
    url: _Url,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte, and compare it with what was committed."),
    ] = False,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Print the committed checkpoints, oldest first, and damage that names and sizes of files
    show; with --verify, what their bytes show. Then the exit code is 1 if there is any.
    """
    catalog = _catalog(url, storage_path, storage_option)
    rows = [_row(catalog, name, verify) for name in catalog.names()]
    if verify and not rows:
        raise CheckpointError(f"{catalog.store.url} has no committed checkpoint")
    if as_json:
        print_json(rows)
    elif not rows:
        print(
            f"no committed checkpoints at {catalog.store.url}; a run's folder is its "
            "storage_path/name"
        )
    else:
        lines = []
        for row in rows:
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved_at"]))
            metrics = one_line(", ".join(f"{n}={v:.6g}" for n, v in row["metrics"].items()))
            words = str(row["step"]), str(row["claim"]), saved, f"{row['nbytes'] / 1e6:.1f}"
            lines.append((*words, metrics))
        print(text_table(("step", "claim", "saved", "MB", "metrics"), lines))
        for row in rows:
            if row["wrong"] or verify:
                print(f"step {row['step']}: {'; '.join(row['wrong']) or 'intact'}")
    if verify and any(row["wrong"] for row in rows):
        raise typer.Exit(1)


@checkpoints.command()
def export(
    url: _Url,
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="FILE.safetensors: the model. FILE.pt: model, optimizer, scheduler and user "
            "state, by torch.save. "
            "A name without an ending: the same as a torch.distributed.checkpoint.",
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="The step to export. Default: the newest.")
    ] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    destination_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="As --storage-option, of DST's store."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a file that opens without this package."""
    from elastic_dp.checkpoint.exporting import export as export_checkpoint

    catalog = _catalog(url, storage_path, storage_option)
    commit = catalog.find("latest" if step is None else step)
    export_checkpoint(catalog, commit, StorageURL(destination, storage_options(destination_option)))
    there = redact_url(destination)
    facts = {"step": commit.step, "destination": there}
    print_reply(facts, f"step {commit.step} → {there}", as_json)


@checkpoints.command()
def save(
    name: Name,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Let a live run make a checkpoint of one of its next steps."""
    find_live_run(name, address, storage_path, storage_option).checkpoint()
    print_reply({"name": name}, "a checkpoint of one of the next steps will be made", as_json)


def _catalog(url: str, storage_path: str | None, said: list[str] | None) -> Catalog:
    from elastic_dp.checkpoint.catalog import Catalog
    from elastic_dp.run_record import default_storage_path
    from elastic_dp.storage import Store

    options = storage_options(said)
    if storage_path is None and "/" not in url and not os.path.isdir(url):
        storage_path = default_storage_path()
    if storage_path is not None:
        from elastic_dp.cluster.runs.ended_run import EndedRun

        url = EndedRun(url, storage_path, options).url  # tells if there is none of that name
    return Catalog(Store(url, options))


def _row(catalog: Catalog, name: CommitName, verify: bool) -> dict[str, Any]:
    from elastic_dp.checkpoint import checkpoint_reader

    row = {"step": name.step, "claim": name.fence, "saved_at": 0.0, "nbytes": 0, "metrics": {}}
    try:
        commit = catalog.read(name)
    except (CheckpointDamaged, CheckpointError) as error:
        return {**row, "wrong": [str(error)]}
    if verify:
        wrong = checkpoint_reader.verify(catalog, name)
    else:
        wrong = checkpoint_reader.missing_files(catalog, commit)
    metadata = {"saved_at": commit.metadata.saved_at, "metrics": dict(commit.metadata.metrics)}
    return {**row, **metadata, "nbytes": commit.nbytes, "wrong": wrong}
