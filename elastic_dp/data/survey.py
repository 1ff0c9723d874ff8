"""What lies in a data set's shards, in numbers: read from Parquet's footers, or from the record batches of Arrow.

Formats that have neither (JSON Lines, CSV, tar, streams of Arrow, text, images) are counted and weighed. Of JSON Lines
and CSV the first rows of each file are read, since most of what makes a file unreadable is seen there.
Schemas are compared, and row groups weighed, as training does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.formats.csv import CsvRows
from elastic_dp.data.formats.jsonl import JsonRows
from elastic_dp.data.formats.parquet import chunk_numbers, decoded_bytes
from elastic_dp.data.intake.files import Files, list_files
from elastic_dp.data.intake.lines import check_first_rows
from elastic_dp.data.intake.opening import find_format
from elastic_dp.data.schema import Columns, same, top_level
from elastic_dp.data.skipped import Skipped
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

FOOTER_THREADS = 16
FIRST_ROWS_BYTES = 256 << 10
ARROW_MAGIC = b"ARROW1"  # of the format that can be read in parts; a stream has none

Ints = npt.NDArray[np.int64]


@dataclass
class Column:
    """Per row group: `stored` and `decoded` bytes, and `values`, the items of lists counted. `nulls`: where known."""

    name: str
    type: pa.DataType
    stored: list[int] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    nulls: int = 0
    codecs: set[str] = field(default_factory=set)
    encodings: set[str] = field(default_factory=set)
    chunks: int = 0  # a row group has one for each leaf


@dataclass
class Survey:
    """`columns` are those that were asked for; row groups are in file order, and there are none to know of in some formats."""

    url: str
    format: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    job_columns: Columns
    skipped: tuple[Skipped, ...] = ()
    schema: pa.Schema | None = None
    columns: list[Column] = field(default_factory=list)
    group_rows: list[int] = field(default_factory=list)
    group_bytes: list[int] = field(default_factory=list)  # as DataConfig.memory_bytes counts them
    shard_rows: list[int] = field(default_factory=list)
    footer_bytes: int = 0
    differing: str = ""  # in what the first shard that does is not like those before it
    unreadable: list[str] = field(default_factory=list)  # what is wrong in the first rows of text
    ragged: set[str] = field(default_factory=set)  # columns of lists of several lengths

    @property
    def has_row_groups(self) -> bool:
        return self.schema is not None

    @property
    def rows(self) -> int:
        return sum(self.group_rows)

    def decoded(self) -> Ints:
        """Bytes of each row group in memory, all columns."""
        return _sum([column.decoded for column in self.columns], len(self.group_rows))

    def stored(self) -> Ints:
        return _sum([column.stored for column in self.columns], len(self.group_rows))


def survey(url: str, columns: Sequence[str] | None = None) -> Survey:
    """Raises DataError where there is no data set, or one without these columns."""
    there = list_files(url)
    kind, files = find_format(url, there)
    wanted = None if columns is None else list(columns)
    skipped = there.beside(files)
    found = Survey(redact_url(url), kind, files.names, files.sizes, Columns(wanted), skipped)
    if kind == "parquet":
        _survey_parquet(found, files, wanted)
    elif kind == "arrow":
        _survey_arrow(found, files, wanted)
    elif kind in ("csv", "jsonl"):
        _survey_text(found, files, wanted)
    return found


def _survey_text(found: Survey, files: Files, wanted: list[str] | None) -> None:
    def wrong(name: str) -> str:
        rows = CsvRows(name, wanted) if found.format == "csv" else JsonRows(name)
        try:
            with files.open(name) as raw:
                check_first_rows(raw, name, rows, FIRST_ROWS_BYTES)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        found.unreadable = [said for said in pool.map(wrong, files.names) if said]


def _survey_parquet(found: Survey, files: Files, wanted: list[str] | None) -> None:
    def footer(name: str) -> pq.FileMetaData:
        with files.open(name) as raw:
            return pq.read_metadata(raw)

    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        for name, metadata in zip(files.names, pool.map(footer, files.names), strict=True):
            _take_schema(found, name, metadata.schema.to_arrow_schema(), wanted)
            found.footer_bytes += metadata.serialized_size
            found.shard_rows.append(metadata.num_rows)
            numbers = chunk_numbers(metadata, wanted)
            for index in range(metadata.num_row_groups):
                _take_row_group(found, metadata.row_group(index))
                size = decoded_bytes(metadata, metadata.row_group(index), numbers)
                found.group_bytes.append(size)
    for column in found.columns:
        if _is_list(column.type) and _lengths_differ(column, found, files):
            found.ragged.add(column.name)


def _take_row_group(found: Survey, group: pq.RowGroupMetaData) -> None:
    found.group_rows.append(group.num_rows)
    by_name = {column.name: column for column in found.columns}
    for column in found.columns:
        for per_group in (column.stored, column.decoded, column.values):
            per_group.append(0)
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        owner = by_name.get(path) or by_name.get(path.split(".")[0])
        if owner is not None:
            _take_chunk(owner, chunk)
    for column in found.columns:
        if width := _width(column.type):
            column.decoded[-1] = group.num_rows * width


def _take_chunk(column: Column, chunk: pq.ColumnChunkMetaData) -> None:
    column.chunks += 1
    column.stored[-1] += chunk.total_compressed_size
    column.decoded[-1] += chunk.total_uncompressed_size
    column.values[-1] += chunk.num_values
    column.codecs.add(chunk.compression.lower())
    column.encodings.update(chunk.encodings)
    if chunk.is_stats_set and chunk.statistics.has_null_count:
        column.nulls += chunk.statistics.null_count


def _survey_arrow(found: Survey, files: Files, wanted: list[str] | None) -> None:
    for name in files.names:
        with files.open_mapped(name) as raw:
            if raw.read(len(ARROW_MAGIC)) != ARROW_MAGIC:
                found.format, found.schema = "arrow stream", None
                return
            reader = pa.ipc.open_file(raw)
            _take_schema(found, name, reader.schema, wanted)
            found.shard_rows.append(0)
            for index in range(reader.num_record_batches):
                _take_batch(found, reader.get_batch(index))


def _take_batch(found: Survey, batch: pa.RecordBatch) -> None:
    found.group_rows.append(batch.num_rows)
    found.shard_rows[-1] += batch.num_rows
    found.group_bytes.append(batch.nbytes)
    for column in found.columns:
        if column.name not in batch.schema.names:
            column.stored.append(0)
            column.decoded.append(0)
            continue
        array = batch.column(column.name)
        column.stored.append(array.nbytes)
        column.decoded.append(array.nbytes)
        column.nulls += array.null_count
        if _is_list(array.type) and len(array.value_lengths().unique()) > 1:
            found.ragged.add(column.name)


def _take_schema(found: Survey, name: str, schema: pa.Schema, wanted: list[str] | None) -> None:
    """Raises DataError where the first shard lacks a column; what a later one has amiss is a finding."""
    try:
        if not found.differing:
            found.job_columns.add(name, schema, same)
    except DataError as error:
        if found.schema is None:
            raise
        found.differing = str(error)
    if found.schema is None:
        found.schema = pa.schema([schema.field(top) for top in top_level(schema, wanted)])
        found.columns = [Column(f.name, f.type) for f in found.schema]


def _lengths_differ(column: Column, found: Survey, files: Files) -> bool:
    """From the counts where they tell; else the first row group with rows is taken for all."""
    lengths = {
        values / rows for values, rows in zip(column.values, found.group_rows, strict=True) if rows
    }
    if len(lengths) > 1 or any(length % 1 for length in lengths):
        return True
    shard = next((i for i, rows in enumerate(found.shard_rows) if rows), None)
    if shard is None:
        return False
    with files.open(found.names[shard]) as raw:
        batch = next(
            pq.ParquetFile(raw, pre_buffer=False).iter_batches(1024, columns=[column.name])
        )
    return len(batch.column(0).value_lengths().unique()) > 1


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _width(kind: pa.DataType) -> int:
    """Bytes of a value, 0 where they differ."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    return -(-kind.bit_width // 8) if pa.types.is_primitive(kind) else 0


def _sum(columns: list[list[int]], row_groups: int) -> Ints:
    total = np.zeros(row_groups, dtype=np.int64)
    for column in columns:
        total += np.asarray(column, dtype=np.int64)
    return total
