"""`convert`: writes any supported source as shards that train well.

Each value is the source's, or there is an error that names the file. Memory does not grow with the
source. The same source gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from elastic_dp.dataprep.readers import documents, open_rows
from elastic_dp.dataprep.source_files import find_files
from elastic_dp.dataprep.token_packing import Packing, Tokenizer, open_tokenizer
from elastic_dp.dataprep.write_shards import (
    ROW_GROUP_BYTES,
    SHARD_BYTES,
    NoRows,
    WrittenShards,
    refuse_gone,
    write_shards,
)
from elastic_dp.errors import DataError


@dataclass(frozen=True)
class Converted(WrittenShards):
    """What `convert` has read and written. `rows_in`: rows that were read; with `pack`, documents.
    `files`: of the source. `skipped`: files that are not read, by ending. `dropped_tokens`: the
    last tokens, too few for a row."""

    rows_in: int = 0
    files: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    dropped_tokens: int = 0


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    query: str | None = None,
    columns: Sequence[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    row_group_bytes: int = ROW_GROUP_BYTES,
    tokenizer: str | Tokenizer | None = None,
    end_of_text: str | None = None,
    pack: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Converted], None] | None = None,
    **gone: Any,
) -> Converted:
    """Writes all rows of `source` to `destination`, in their order.

    - `source`: a file, a glob, or a folder with all below it, of Parquet, Arrow, JSON Lines
      or text (.txt: a row for each line), also compressed; a folder that
      `datasets.save_to_disk` wrote; or images in a folder per class. A path or URL.
    - `destination`, `shard_bytes`, `row_group_bytes`: see `write_shards`.
    - `query`: SQL of DuckDB over the table `rows`, such as "SELECT x FROM rows WHERE x > 0".
    - `columns`: the columns to write, in this order. None: all.
    - `tokenizer` and `pack`: one column of text, or .txt files that are one document each, become
      rows of `pack` tokens (see token_packing.py), in Arrow, which takes half the bytes of Parquet
      and no decoding. The tokenizer is "bytes", a tokenizer.json, a
      name on the Hugging Face hub, or any `Tokenizer`. A glob may name files of any ending.
    - `end_of_text`: the token after each document. None: the tokenizer's usual one.
    - `storage_options`: for both URLs, as in `DataConfig`.
    - `on_progress`: called after each row group.

    Raises DataError where the source cannot be read or written as asked, and StorageError where the
    store refuses.
    """
    refuse_gone("convert", gone)
    if (tokenizer is None) != (pack is None):
        raise DataError(
            "tokenizer and pack go together: how text becomes tokens, and how many a row has"
        )
    if pack is not None and query is not None:
        raise DataError("query goes without pack; write its rows first, then pack them")
    if isinstance(columns, str):
        raise DataError(f"columns is {columns!r}, must be a list of column names")
    files = find_files(os.fspath(source), storage_options, documents=pack is not None)
    read = 0

    def counted(some: Iterable[Any], rows_of: Callable[[Any], int]) -> Iterator[Any]:
        nonlocal read
        for each in some:
            read += rows_of(each)
            yield each

    packing: Packing | None = None
    if pack is None:
        rows = open_rows(files, columns)
        every = (batch for name in files.names for batch in rows.batches(name))
        stream = counted(every, lambda batch: batch.num_rows)
        if query is not None:
            stream = _queried(query, rows.schema, stream)
    else:
        assert tokenizer is not None
        loaded = open_tokenizer(tokenizer, end_of_text) if isinstance(tokenizer, str) else tokenizer
        packing = Packing(loaded, pack)
        stream = packing.batches(counted(documents(files, columns), lambda piece: piece[1]))

    def done(now: WrittenShards) -> Converted:
        return Converted(
            **vars(now),
            rows_in=read,
            files=len(files.names),
            skipped=files.skipped,
            dropped_tokens=packing.dropped_tokens if packing else 0,
        )

    try:
        written = write_shards(
            stream,
            destination,
            shard_bytes=shard_bytes,
            row_group_bytes=row_group_bytes,
            format="arrow" if packing else "parquet",
            storage_options=storage_options,
            on_progress=None if on_progress is None else lambda now: on_progress(done(now)),
        )
    except NoRows:
        tokens = f" and {packing.dropped_tokens} tokens, too few for a row" if packing else ""
        raise DataError(f"{files.url!r} has {read:,} rows{tokens}; nothing was written") from None
    return done(written)


def _queried(query: str, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> Any:
    """The rows of a query. An error in `rows` is raised as it is, not as DuckDB repeats it."""
    try:
        import duckdb
    except ImportError as error:
        raise DataError("query needs DuckDB: pip install 'elastic_dp[convert]'") from error
    failed = list[Exception]()

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except Exception as error:
            failed.append(error)
            raise

    connection = duckdb.connect()
    try:
        connection.register("rows", pa.RecordBatchReader.from_batches(schema, batches()))
        kinds = [one.type for one in connection.extract_statements(query)]
        if kinds != [duckdb.StatementType.SELECT]:
            raise DataError(f"the query {query!r} must be one SELECT")
        yield from pa.RecordBatchReader.from_stream(connection.sql(query))
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if failed:
            raise failed[0] from None
        raise DataError(f"the query failed: {error}") from error
