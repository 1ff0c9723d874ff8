"""`elastic-dp checkpoints`: lists, verifies and exports checkpoints.

Modules that need torch are imported where they are used: `elastic-dp` starts without it.
"""

from __future__ import annotations

import json
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
    name_and_path,
    storage_options,
)
from elastic_dp.cli.run_tables import text_table
from elastic_dp.errors import CheckpointDamaged, CheckpointError
from elastic_dp.urls import StorageURL, redact_url

if TYPE_CHECKING:
    from elastic_dp.checkpoint.catalog import Catalog, CommitName

checkpoints = typer.Typer(help="Make a run's checkpoints, and look at them.", no_args_is_help=True)

_Url = Annotated[
    str,
    typer.Argument(
        metavar="RUN|URL",
        help="The name of a run at --storage-path; without that option, the URL of the run's "
        "folder: storage_path/name.",
    ),
]
_Step = Annotated[int | None, typer.Option(help="The step to export. Default: the newest.")]


@checkpoints.command("list")
def list_(
    url: _Url,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Print the committed checkpoints, oldest first, and damage that names and sizes of files
    show.
    """
    catalog = _catalog(url, storage_path, storage_option)
    rows = [_row(catalog, name) for name in catalog.names()]
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print(
            f"no committed checkpoints at {catalog.store.url}; a run's folder is its "
            "storage_path/name"
        )
        return
    lines = []
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved_at"]))
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in row["metrics"].items())
        words = str(row["step"]), str(row["claim"]), saved, f"{row['nbytes'] / 1e6:.1f}"
        lines.append((*words, metrics))
    print(text_table(("step", "claim", "saved", "MB", "metrics"), lines))
    for row in rows:
        if row["wrong"]:
            print(f"step {row['step']}: {'; '.join(row['wrong'])}")


@checkpoints.command()
def verify(
    url: _Url,
    step: Annotated[int | None, typer.Option(help="Verify only this step. Default: all.")] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Read every byte of every checkpoint (or of one step) and compare it with what was
    committed.
    """
    from elastic_dp.checkpoint.checkpoint_reader import verify as verify_checkpoint

    catalog = _catalog(url, storage_path, storage_option)
    names = [name for name in catalog.names() if step in (None, name.step)]
    if not names:
        raise CheckpointError(
            f"{catalog.store.url} has no committed checkpoint{f' of step {step}' if step else ''}"
        )
    wrong = {name.step: verify_checkpoint(catalog, name) for name in names}
    if as_json:
        print(json.dumps(wrong))
    else:
        for number, words in wrong.items():
            print(f"step {number}: {'; '.join(words) or 'intact'}")
    if any(wrong.values()):
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
    step: _Step = None,
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
    if as_json:
        print(json.dumps({"step": commit.step, "destination": redact_url(destination)}))
    else:
        print(f"step {commit.step} → {redact_url(destination)}")


@checkpoints.command()
def save(
    name: Name,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Let a live run make a checkpoint of one of its next steps."""
    name, storage_path = name_and_path(name, storage_path)
    find_live_run(name, address, storage_path, storage_option).checkpoint()
    done = "a checkpoint of one of the next steps will be made"
    print(json.dumps({"name": name}) if as_json else done)


def _catalog(url: str, storage_path: str | None, said: list[str] | None) -> Catalog:
    from elastic_dp.checkpoint.catalog import Catalog
    from elastic_dp.storage import Store

    options = storage_options(said)
    if storage_path is not None:
        from elastic_dp.cluster.runs.ended_run import EndedRun

        url = EndedRun(url, storage_path, options).url  # tells if there is none of that name
    return Catalog(Store(url, options))


def _row(catalog: Catalog, name: CommitName) -> dict[str, Any]:
    from elastic_dp.checkpoint.checkpoint_reader import missing_files

    row = {"step": name.step, "claim": name.fence, "saved_at": 0.0, "nbytes": 0, "metrics": {}}
    try:
        commit = catalog.read(name)
    except (CheckpointDamaged, CheckpointError) as error:
        return {**row, "wrong": [str(error)]}
    metadata = {"saved_at": commit.metadata.saved_at, "metrics": dict(commit.metadata.metrics)}
    return {**row, **metadata, "nbytes": commit.nbytes, "wrong": missing_files(catalog, commit)}
