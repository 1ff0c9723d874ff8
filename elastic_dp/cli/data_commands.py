"""`elastic-dp data`: inspects and converts data sets.

Modules that take long to import (torch, pyarrow) are imported where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from elastic_dp.cli.store_options import StorageOption, storage_options
from elastic_dp.urls import redact_url

if TYPE_CHECKING:
    from elastic_dp.data.discovery.skipped_files import Skipped
    from elastic_dp.dataprep.convert import Converted
    from elastic_dp.dataprep.inspection.inspect_dataset import Inspection, Spread

data = typer.Typer(
    help="Look at data sets, and make good ones.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


class FormatName(StrEnum):
    parquet = "parquet"
    arrow = "arrow"


class CompressionName(StrEnum):
    none = "none"
    snappy = "snappy"
    lz4 = "lz4"
    zstd = "zstd"


_Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
_CsvOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="How CSV files are written: delimiter=';', delimiter='\\t', encoding=latin-1, "
        'null_values=\'["-", "n/a"]\'. May be repeated.',
    ),
]
_Columns = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="Only these columns, by name. Default: all.")
]


@data.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Parquet, Arrow, JSON Lines, CSV or .txt files (a folder with all below it, a "
            "file, a glob), a folder by "
            "datasets.save_to_disk, or images in a folder per class; a path or any fsspec URL.",
        ),
    ],
    destination: Annotated[
        str,
        typer.Argument(metavar="DST", help="An empty or absent folder, a path or any fsspec URL."),
    ],
    rows_per_group: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a row group. Default: 2 MiB of the widest column."),
    ] = None,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, help="Size of a shard. Default: 512 MiB.")
    ] = None,
    columns: _Columns = None,
    format: Annotated[
        FormatName | None, typer.Option(help="Default: parquet; arrow with --pack.")
    ] = None,
    compression: Annotated[
        CompressionName | None,
        typer.Option(help="Default: none for lists, images and Arrow, else snappy."),
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
    text_glob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="With --pack: read the files of these names as text, and no others, e.g. '*.py'. "
            "May be repeated.",
        ),
    ] = None,
    fill_null: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=VALUE",
            help="Write VALUE for a column's nulls: x=0.0, x=NaN, name=unknown. May be repeated.",
        ),
    ] = None,
    csv_option: _CsvOption = None,
    storage_option: StorageOption = None,
    as_json: _Json = False,
) -> None:
    """Write SRC as shards that train well. DST is a data set only when all of it is there."""
    from elastic_dp.dataprep.convert import SHARD_BYTES
    from elastic_dp.dataprep.convert import convert as convert_data

    with _progress(quiet=as_json) as progress:
        task = progress.add_task("reading", total=None)
        converted = convert_data(
            source,
            destination,
            rows_per_group=rows_per_group,
            shard_bytes=shard_bytes or SHARD_BYTES,
            columns=_names(columns),
            format=format.value if format else None,
            compression=compression.value if compression else None,
            tokenizer=tokenizer,
            end_of_text=end_of_text,
            pack=pack,
            text_glob=text_glob or (),
            fill_nulls=dict(_named("--fill-null", each) for each in fill_null or ()),
            storage_options=storage_options(storage_option),
            csv_options=dict(_named("--csv-option", each) for each in csv_option or ()),
            on_progress=lambda now: progress.update(task, description=_said(now)),
        )
    if as_json:
        print(json.dumps(asdict(converted)))
        return
    _out().print(
        f"{_said(converted)}, {converted.rows_per_group} rows in a row group → "
        f"{redact_url(destination)}"
    )
    if converted.dropped_tokens:
        _out().print(f"{converted.dropped_tokens} last tokens were too few for a row")
    _print_skipped(converted.skipped)
    if converted.skipped and pack is not None and not text_glob:
        _out().print("    --text-glob '*.ENDING' reads files of any ending as text")


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
    csv_option: _CsvOption = None,
    storage_option: StorageOption = None,
    as_json: _Json = False,
) -> None:
    """Describe the data at URL, what in it reads badly and why, and the command that fixes it."""
    from elastic_dp.dataprep.inspection.inspect_dataset import inspect as inspect_data

    found = inspect_data(
        url,
        columns=_names(columns),
        virtual_workers=virtual_workers,
        micro_batch_size=micro_batch_size,
        storage_options=storage_options(storage_option),
        csv_options=dict(_named("--csv-option", each) for each in csv_option or ()),
        deep=deep,
    )
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print_inspection(found)


def _named(option: str, said: str) -> tuple[str, Any]:
    """Parse NAME=VALUE. A value that is not JSON is a string."""
    name, mark, value = said.partition("=")
    if not mark:
        form = "COLUMN=VALUE" if option == "--fill-null" else "NAME=VALUE"
        raise typer.BadParameter(f"{option} {said} is not of the form {form}")
    if option == "--csv-option" and value == r"\t":
        return name, "\t"
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _print_inspection(found: Inspection) -> None:
    from elastic_dp.dataprep.inspection.findings import size

    out = _out()
    rows = "rows not counted" if found.rows is None else f"{found.rows:,} rows"
    out.print(f"{found.url}: {found.shards:,} {found.format} shards, {size(found.nbytes)}, {rows}")
    if found.group_rows:
        out.print(f"{found.row_groups:,} row groups of {_range(found.group_rows, str)} rows")
        table = Table("column", "type", "in the file", "in memory", "compression", box=None)
        for column in found.columns:
            sizes = _range(column.stored, size), _range(column.decoded, size)
            table.add_row(column.name, column.type, *sizes, ", ".join(column.compression))
        out.print(table)
    if plan := found.plan:
        out.print(
            f"{plan.steps_per_epoch:,} steps per epoch of {plan.global_batch:,} rows, "
            f"{plan.dropped_rows:,} rows "
            f"left over; {plan.streams} streams, whose open row groups take "
            f"{size(plan.virtual_worker_bytes)} for each virtual worker, "
            f"{size(plan.all_bytes)} if one worker runs all"
        )
    _print_skipped(found.skipped)
    for finding in found.findings:
        out.print(
            f"{finding.kind}: {finding.message}",
            style="red" if finding.kind == "refused" else "yellow",
        )
        out.print(f"    {finding.fix}")
    if not found.findings:
        out.print("nothing found that would read badly", style="green")


def _print_skipped(skipped: Sequence[Skipped]) -> None:
    from elastic_dp.data.discovery.skipped_files import skipped_message

    if skipped:
        _out().print(f"not read: {skipped_message(skipped)}", style="yellow")


def _out() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)


def _progress(*, quiet: bool) -> Progress:
    shown = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    return Progress(
        *shown, console=console, transient=True, disable=quiet or not console.is_terminal
    )


def _names(columns: str | None) -> list[str] | None:
    return None if columns is None else [name.strip() for name in columns.split(",")]


def _said(now: Converted) -> str:
    from elastic_dp.dataprep.inspection.findings import size

    return (
        f"{now.rows:,} rows, {now.row_groups:,} row groups, {now.shards:,} shards, "
        f"{size(now.nbytes)}"
    )


def _range(spread: Spread, say: Any) -> str:
    low, median, high = (say(value) for value in (spread.min, spread.median, spread.max))
    return low if low == high else f"{low} … {median} … {high}"
