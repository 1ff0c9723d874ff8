"""`elastic-dp data`: inspects and converts data sets.

Modules that take long to import (torch, pyarrow) are imported where they are used.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_dp.cli.run_options import Json, StorageOption, print_json, storage_options
from elastic_dp.urls import redact_url

if TYPE_CHECKING:
    from elastic_dp.dataprep.convert import Converted
    from elastic_dp.dataprep.inspection import Inspection, Spread

data = typer.Typer(
    help="Look at data sets, and make good ones.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


_Columns = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="Only these columns, by name. Default: all.")
]


@data.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Parquet, Arrow, JSON Lines or .txt files (a folder with all below it, a "
            "file, a glob), a folder by datasets.save_to_disk, or images in a folder per class; a "
            "path or URL.",
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="An empty or absent folder, a path or URL.")
    ],
    query: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="DuckDB's SQL over SRC, such as 'SELECT x FROM rows'."),
    ] = None,
    columns: _Columns = None,
    row_group_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Size of a row group's widest column. Default: 2 MiB."),
    ] = None,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, help="Size of a shard. Default: 128 MiB.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="'bytes', a tokenizer.json, or a Hugging Face name. Goes with --pack."),
    ] = None,
    pack: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a row; the last ones, too few for a row, are dropped."),
    ] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="The token after each document. Default: the tokenizer's usual one."),
    ] = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Write SRC as shards that train well. DST is a data set only when all of it is there."""
    from elastic_dp.dataprep.convert import convert as convert_data
    from elastic_dp.dataprep.write_shards import ROW_GROUP_BYTES, SHARD_BYTES

    converted = convert_data(
        source,
        destination,
        query=query,
        columns=_names(columns),
        row_group_bytes=row_group_bytes or ROW_GROUP_BYTES,
        shard_bytes=shard_bytes or SHARD_BYTES,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        pack=pack,
        storage_options=storage_options(storage_option),
        on_progress=None if as_json or not sys.stderr.isatty() else _tell,
    )
    if as_json:
        print_json(asdict(converted))
        return
    what = "documents" if pack is not None else "rows"
    print(
        f"{converted.rows_in:,} {what} of {converted.files:,} files → {_said(converted)} in "
        f"{redact_url(destination)}"
    )
    if converted.dropped_tokens:
        print(f"{converted.dropped_tokens} last tokens were too few for a row")
    if converted.skipped:
        files = ", ".join(f"{count:,} {ending}" for ending, count in converted.skipped.items())
        print(f"files that were not read: {files}")


@data.command()
def inspect(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A folder, a file or a glob; any fsspec URL.")
    ],
    columns: _Columns = None,
    virtual_workers: Annotated[
        int | None, typer.Option(min=1, help="Also say what a job with these would do.")
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a virtual worker in a step.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Decode every row, to find damaged ones.")
    ] = False,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Describe the data at URL, what in it fails or is slow, and the command that fixes it."""
    from elastic_dp.dataprep.inspection import inspect as inspect_data

    found = inspect_data(
        url,
        columns=_names(columns),
        virtual_workers=virtual_workers,
        micro_batch_size=micro_batch_size,
        storage_options=storage_options(storage_option),
        deep=deep,
    )
    if as_json:
        print_json(asdict(found))
    else:
        _print_inspection(found)
    if any(one.kind == "refused" for one in found.findings):
        raise typer.Exit(1)


def _print_inspection(found: Inspection) -> None:
    from elastic_dp.dataprep.inspection import size

    if found.shards:
        print(
            f"{found.url}: {found.shards:,} {found.format} shards, {size(found.nbytes)}, "
            f"{found.rows:,} rows"
        )
    if found.group_rows and found.group_bytes:
        print(
            f"{found.row_groups:,} row groups of {_range(found.group_rows, str)} rows, "
            f"{_range(found.group_bytes, size)} in memory"
        )
        print(f"columns: {', '.join(f'{name} ({kind})' for name, kind in found.columns)}")
    if plan := found.plan:
        one, every = map(size, plan.open_bytes)
        print(
            f"{plan.steps_per_epoch:,} steps per epoch of {plan.global_batch:,} rows, "
            f"{plan.dropped_rows:,} rows left over; {plan.streams} streams, whose open row groups "
            f"take {one} for each virtual worker, {every} if one worker runs all"
        )
    for finding in found.findings:
        print(f"{finding.kind}: {finding.message}")
        print(f"    {finding.fix}")
    if not found.findings:
        print("nothing found that fails or is slow")


def _tell(now: Converted) -> None:
    """Print one line of the terminal again."""
    print(f"\x1b[K{_said(now)}", end="\r", file=sys.stderr, flush=True)


def _names(columns: str | None) -> list[str] | None:
    return None if columns is None else [name.strip() for name in columns.split(",")]


def _said(now: Converted) -> str:
    from elastic_dp.dataprep.inspection import size

    return (
        f"{now.rows:,} rows, {now.row_groups:,} row groups, {now.shards:,} shards, "
        f"{size(now.nbytes)}"
    )


def _range(spread: Spread, say: Any) -> str:
    low, median, high = (say(value) for value in (spread.min, spread.median, spread.max))
    return low if low == high else f"{low} … {median} … {high}"
