"""`convert`: writes any supported source as shards that train well, with row groups of 1 to 4 MiB
and a footer per shard.

It streams: its memory does not depend on the size of the source. The same source gives the same
bytes. The destination becomes a data set only when it is complete (see destination.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import pyarrow as pa

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.columns.nulls import Nulls, check_nulls, fill_column
from elastic_dp.data.columns.schema import leaves
from elastic_dp.data.discovery.skipped_files import NO_ROWS, Skipped, count_skipped, skipped_message
from elastic_dp.dataprep.destination import Destination
from elastic_dp.dataprep.shard_writer import (
    Compression,
    OutputFormat,
    ShardWriter,
    refuse_columns_parquet_cannot_give_back,
)
from elastic_dp.dataprep.sources import find_source, open_documents, open_rows
from elastic_dp.dataprep.token_packing import Packing, Tokenizer, open_tokenizer
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

SHARD_BYTES = 512 << 20


@dataclass(frozen=True)
class Converted:
    """The result of `convert`. `nbytes`: size of the files. `dropped_tokens`: the last tokens, too
    few for a row. `skipped`: files of the source that were not read, or have no rows."""

    rows: int
    row_groups: int
    shards: int
    nbytes: int
    rows_per_group: int
    dropped_tokens: int = 0
    skipped: tuple[Skipped, ...] = ()


def convert(
    source: str,
    destination: str,
    *,
    rows_per_group: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    columns: Sequence[str] | None = None,
    format: OutputFormat | None = None,
    compression: Compression | None = None,
    tokenizer: str | Tokenizer | None = None,
    end_of_text: str | None = None,
    pack: int | None = None,
    text_glob: Sequence[str] = (),
    fill_nulls: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    csv_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Converted], None] | None = None,
) -> Converted:
    """Writes all rows of `source` to `destination`, in their order.

    - `source`: a folder, file or glob of Parquet, Arrow, JSON Lines, CSV or text files; a folder
      that `datasets.save_to_disk` wrote; or a folder of images with a subfolder per class. Any
      fsspec URL. Its files must not change meanwhile.
    - `destination`: an empty or absent folder. Any fsspec URL.
    - `rows_per_group`: rows of a row group. None: as many as take 2 MiB in the widest column.
    - `shard_bytes`: a shard ends with the row group that takes its file to this size.
    - `columns`: the columns to write, in this order. None: all.
    - `format`: None: Parquet, but Arrow for tokens, which takes half the bytes and no decoding.
    - `compression`: None: "none" for lists, images and Arrow, otherwise "snappy".
    - `tokenizer` and `pack`: one column of text, or .txt files that are one document each, become
      rows of `pack` tokens (see token_packing.py). The tokenizer is "bytes", a tokenizer.json, a
      name on the Hugging Face hub, or any `Tokenizer`.
    - `end_of_text`: the token after each document. None: the tokenizer's usual one.
    - `text_glob`: with `pack`, only the files whose names match one of these patterns are read, as
      text, whatever their ending. "*.py" matches in every folder, "docs/*" in that folder.
    - `fill_nulls`: the value that is written for a column's nulls, as in `DataConfig.fill_nulls`.
    - `storage_options`: for both URLs, as in `DataConfig`. Local paths take none.
    - `csv_options`: how CSV files are written, as in `DataConfig`.
    - `on_progress`: called after each batch.

    Raises DataError where the source cannot be read or written as asked, and StorageError where the
    store refuses.
    """
    _check(rows_per_group, shard_bytes, format, compression, tokenizer, pack, text_glob)
    if fill_nulls and pack is not None:
        raise DataError("fill_nulls goes without pack: a row without text is no document")
    wanted = None if columns is None else list(columns)
    packing: Packing | None = None
    without_rows: list[str] = []
    csv = CsvOptions.of(csv_options, "convert")
    found = replace(find_source(source, text_glob, storage_options), csv=csv)
    if csv.identity and found.kind != "csv":
        raise DataError(
            f"csv_options are set, and {redact_url(source)!r} holds no CSV; leave them out"
        )
    if pack is None:
        rows = open_rows(found, wanted)
        schema, without_rows = rows.schema, rows.empty
        values = check_nulls(Nulls(), fill_nulls, leaves(schema), "fill_nulls")
        batches: Iterator[pa.RecordBatch] = (_filled(batch, values) for batch in rows.batches())
    else:
        assert tokenizer is not None
        loaded = open_tokenizer(tokenizer, end_of_text) if isinstance(tokenizer, str) else tokenizer
        packing = Packing(loaded, pack)
        schema, batches = packing.schema, packing.batches(open_documents(found, wanted))
    format = format or ("arrow" if packing else "parquet")
    _check_schema(schema, format, source)
    to = Destination(destination, storage_options)
    with to.writing():
        writer = ShardWriter(
            to,
            schema,
            rows_per_group=rows_per_group,
            shard_bytes=shard_bytes,
            format=format,
            compression=compression or _compression(format, schema),
        )
        with writer:
            for batch in batches:
                writer.write(batch)
                if on_progress is not None:
                    on_progress(_count(writer, packing, found.skipped))
        if not writer.rows:
            raise DataError(_nothing(source, packing, found.skipped))
    return _count(
        writer, packing, found.skipped + count_skipped((), reasons={NO_ROWS: without_rows})
    )


def _check_schema(schema: pa.Schema, format: OutputFormat, source: str) -> None:
    """Raises DataError if files of `format` cannot give back every column."""
    if not len(schema):
        raise DataError(f"{redact_url(source)!r} has no columns")
    if format != "parquet":
        return
    empty = [field.name for field in schema if _has_lists_of_no_items(field.type)]
    if empty:
        raise DataError(
            f"column {empty[0]!r} of {redact_url(source)!r} holds lists of the fixed size 0, "
            "which Parquet cannot give "
            "back; leave it out by columns="
        )
    refuse_columns_parquet_cannot_give_back(schema)


def _filled(batch: pa.RecordBatch, values: Mapping[str, Any]) -> pa.RecordBatch:
    if not values:
        return batch
    named = zip(batch.schema.names, batch.columns, strict=True)
    columns = [fill_column(column, name, values) for name, column in named]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _has_lists_of_no_items(kind: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(kind) and kind.list_size == 0:
        return True
    return any(_has_lists_of_no_items(kind.field(n).type) for n in range(kind.num_fields))


def _count(writer: ShardWriter, packing: Packing | None, skipped: tuple[Skipped, ...]) -> Converted:
    return Converted(
        writer.rows,
        writer.row_groups,
        writer.shards,
        writer.nbytes,
        writer.rows_per_group or 0,
        packing.dropped_tokens if packing else 0,
        skipped,
    )


def _compression(format: OutputFormat, schema: pa.Schema) -> Compression:
    """The default. Images are compressed already, numbers hardly get smaller, and Arrow without
    compression can be memory mapped."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    dense = "image" in schema.names or any(is_one(f.type) for f in schema for is_one in lists)
    return "none" if format == "arrow" or dense else "snappy"


def _nothing(source: str, packing: Packing | None, skipped: tuple[Skipped, ...]) -> str:
    beside = f". Not read there: {skipped_message(skipped)}" if skipped else ""
    if packing is None:
        return f"{redact_url(source)!r} holds no rows{beside}"
    return (
        f"{redact_url(source)!r} holds {packing.dropped_tokens} tokens, too few for one row; "
        f"lower pack{beside}"
    )


def _check(
    rows_per_group: int | None,
    shard_bytes: int,
    format: str | None,
    compression: str | None,
    tokenizer: str | Tokenizer | None,
    pack: int | None,
    text_glob: Sequence[str],
) -> None:
    for name, value in (("rows_per_group", rows_per_group), ("shard_bytes", shard_bytes)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}, must be at least 1")
    if (tokenizer is None) != (pack is None):
        raise DataError(
            "tokenizer and pack go together: how text becomes tokens, and how many a row has"
        )
    if isinstance(text_glob, str):
        raise DataError(f"text_glob is {text_glob!r}, must be a list of patterns: [{text_glob!r}]")
    if text_glob and pack is None:
        raise DataError("text_glob goes with tokenizer and pack: text alone has no columns")
    if format not in (None, *get_args(OutputFormat)):
        raise DataError(f"format is {format!r}, must be 'parquet' or 'arrow'")
    is_arrow = format == "arrow" or (format is None and pack is not None)
    allowed = ("none", "lz4", "zstd") if is_arrow else get_args(Compression)
    if compression not in (None, *allowed):
        raise DataError(f"compression is {compression!r}, must be one of {', '.join(allowed)}")
