"""Numbers about the shards of a data set, from Parquet's footers or Arrow's record batches.

For formats that have neither (JSON Lines, CSV, tar, Arrow streams, text, images), for MDS and for
litdata, files and bytes are counted. Of JSON Lines and CSV the first rows of each file are parsed,
since most of what makes a file unreadable shows there. Schemas are compared, and the memory of row
groups is estimated, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.config import DataConfig
from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.columns.column_types import lossless, plain_schema
from elastic_dp.data.columns.nulls import Nulls, count_null_lists, count_nulls
from elastic_dp.data.columns.schema import Columns, top_level
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.skipped_files import Skipped
from elastic_dp.data.formats.arrow import refuse_old_feather
from elastic_dp.data.formats.arrow_messages import refuse_large_batches
from elastic_dp.data.formats.csv_headers import HeaderLines
from elastic_dp.data.formats.encryption import codec_of
from elastic_dp.data.formats.parquet import (
    chunk_numbers,
    countable,
    null_counts,
    num_chunks,
    open_footer,
)
from elastic_dp.data.formats.parquet_memory import decoded_bytes, widths_of
from elastic_dp.data.formats.text import flat_columns
from elastic_dp.data.pipeline.row_groups import ShardRowGroups
from elastic_dp.dataprep.sources.detect_format import InputSource, find_format, open_rows
from elastic_dp.dataprep.sources.source_files import Files, list_files, reading
from elastic_dp.dataprep.sources.text_lines import (
    TextReader,
    check_first_rows,
    csv_reader,
    json_reader,
)
from elastic_dp.errors import DataError
from elastic_dp.storage import Store, redact_url

FOOTER_THREADS = 16
FIRST_ROWS_BYTES = 256 << 10
_CONVERTED = ("parquet", "arrow", "csv", "jsonl")  # `deep` decodes these as `convert` does
_IN_PLACE = ("tar", "mds", "litdata")  # `deep` decodes these as training does
ARROW_MAGIC = b"ARROW1"  # of the format that can be read in parts; a stream has none

Ints = npt.NDArray[np.int64]


@dataclass
class Column:
    """A top-level column. For each row group: `stored` and `decoded` bytes, and the number of
    `values`, which counts the items of lists."""

    name: str
    type: pa.DataType
    stored: list[int] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    codecs: set[str] = field(default_factory=set)
    encodings: set[str] = field(default_factory=set)
    chunks: int = 0  # column chunks: a row group has one for each leaf


@dataclass
class Survey:
    """The numbers. `columns`: those that the job needs. Row groups are in file order; some formats
    have none."""

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
    differing: str = ""  # how the first shard differs whose schema does not fit the others
    unreadable: list[str] = field(default_factory=list)  # errors of rows that were parsed
    ragged: set[str] = field(default_factory=set)  # columns of lists with several lengths
    nulls: Nulls = field(default_factory=Nulls)  # of leaves, as far as known

    @property
    def has_row_groups(self) -> bool:
        return self.schema is not None

    @property
    def rows(self) -> int:
        return sum(self.group_rows)

    def decoded(self) -> Ints:
        """Bytes in memory of all columns, int64 [row groups]."""
        return _by_row_group([column.decoded for column in self.columns], len(self.group_rows))

    def stored(self) -> Ints:
        return _by_row_group([column.stored for column in self.columns], len(self.group_rows))


def survey(
    url: str,
    columns: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    deep: bool = False,
    csv: CsvOptions | None = None,
) -> Survey:
    """`deep`: decode every row, but of images and plain text. `csv`: how CSV files are
    written. Raises DataError if there is no data set, or it lacks one of `columns`."""
    there = list_files(url, storage_options=storage_options)
    kind, files = find_format(url, there)
    csv = csv or CsvOptions()
    if csv.identity and kind != "csv":
        raise DataError(f"csv_options are set, and {redact_url(url)!r} holds no CSV")
    wanted = None if columns is None else list(columns)
    skipped = there.beside(files)
    found = Survey(redact_url(url), kind, files.names, files.sizes, Columns(wanted), skipped)
    if kind == "parquet":
        _survey_parquet(found, files, wanted)
    elif kind == "arrow":
        _survey_arrow(found, files, wanted)
    elif kind in ("csv", "jsonl") and not deep:
        _survey_text(found, files, csv_reader(wanted, csv) if kind == "csv" else json_reader())
    if deep and kind in (*_CONVERTED, *_IN_PLACE):
        _decode_all(found, InputSource(url, kind, files, csv=csv), wanted)
    if found.has_row_groups:
        found.job_columns.refuse_missing()
        found.nulls.add_missing(found.job_columns.absent())
    return found


def _decode_all(found: Survey, source: InputSource, wanted: list[str] | None) -> None:
    """Decodes all rows as `convert` does, and tar and MDS as training does, up to the first
    error."""
    try:
        if source.kind in _IN_PLACE:
            _read_in_place(source, wanted)
        else:
            for _ in open_rows(source, wanted).batches():
                pass
    except DataError as error:
        found.unreadable.append(str(error))


def _read_in_place(source: InputSource, wanted: list[str] | None) -> None:
    options = source.files.options
    config = DataConfig(source.url, micro_batch_size=1, columns=wanted, storage_options=options)
    index = read_index(config)
    row_groups = ShardRowGroups(config, index, [Store(source.url, options)])
    try:
        for number in range(len(index.rows)):
            row_groups.read(number)
    finally:
        row_groups.close()


def _survey_text(found: Survey, files: Files, reader: TextReader) -> None:
    def look(name: str) -> tuple[list[str], str]:
        """The names of the columns, and the first error."""
        try:
            with files.open(name) as raw:
                return check_first_rows(raw, name, reader, FIRST_ROWS_BYTES), ""
        except DataError as error:
            return [], str(error)

    headers = HeaderLines()
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        for name, (columns, error) in zip(files.names, pool.map(look, files.names), strict=True):
            if error:
                found.unreadable.append(error)
            elif columns and reader.has_headers:
                headers.add(name, columns)
    try:
        headers.check()
    except DataError as error:
        found.unreadable.append(str(error))


def _survey_parquet(found: Survey, files: Files, wanted: list[str] | None) -> None:
    def footer(name: str) -> tuple[pq.FileMetaData, frozenset[int]]:
        with files.open(name) as raw:
            return open_footer(raw, name, wanted)

    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        footers = pool.map(footer, files.names)
        for name, (metadata, encrypted) in zip(files.names, footers, strict=True):
            if not _num_rows(metadata):  # training skips it
                found.shard_rows.append(0)
                continue
            with reading(name, files.options):
                _take_footer(found, name, metadata, encrypted, wanted)
    if found.schema is None:
        schema = footer(files.names[0])[0].schema.to_arrow_schema()
        _take_schema(found, files.names[0], schema, wanted, 0)
    for column in found.columns:
        if _is_list(column.type) and _lengths_differ(column, found, files):
            found.ragged.add(column.name)


def _take_footer(
    found: Survey,
    name: str,
    metadata: pq.FileMetaData,
    encrypted: frozenset[int],
    wanted: list[str] | None,
) -> None:
    schema = metadata.schema.to_arrow_schema()
    _take_schema(found, name, schema, wanted, _num_rows(metadata))
    found.footer_bytes += metadata.serialized_size
    found.shard_rows.append(_num_rows(metadata))
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    counted = null_counts(metadata, groups, countable(metadata, schema, wanted))
    found.nulls.add(name, counted, {})
    widths = widths_of(metadata, chunk_numbers(metadata, wanted))
    owners = [field.name for field in schema for _ in range(num_chunks(field.type))]
    by_name = {column.name: column for column in found.columns}
    for index, owner in enumerate(owners if groups else ()):
        if owner in by_name and index not in encrypted:
            by_name[owner].codecs.add(codec_of(metadata, index).lower())
    for group in groups:
        _take_row_group(found, group, owners, encrypted)
        found.group_bytes.append(decoded_bytes(group, widths))


def _num_rows(metadata: pq.FileMetaData) -> int:
    """Count the rows as training does: a damaged footer may hold another number for the file."""
    return sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))


def _take_row_group(
    found: Survey, group: pq.RowGroupMetaData, owners: list[str], encrypted: frozenset[int]
) -> None:
    """`owners`: the top-level column of each column chunk."""
    found.group_rows.append(group.num_rows)
    by_name = {column.name: column for column in found.columns}
    for column in found.columns:
        for per_group in (column.stored, column.decoded, column.values):
            per_group.append(0)
    for index, owner in enumerate(owners):
        if owner in by_name and index not in encrypted:
            _take_chunk(by_name[owner], group.column(index))
    for column in found.columns:
        if width := _width(column.type):
            column.decoded[-1] = group.num_rows * width


def _take_chunk(column: Column, chunk: pq.ColumnChunkMetaData) -> None:
    column.chunks += 1
    column.stored[-1] += chunk.total_compressed_size
    column.decoded[-1] += chunk.total_uncompressed_size
    column.values[-1] += chunk.num_values
    column.encodings.update(chunk.encodings)


def _survey_arrow(found: Survey, files: Files, wanted: list[str] | None) -> None:
    for name in files.names:
        with files.open_mapped(name) as raw:
            refuse_old_feather(name, first := raw.read(len(ARROW_MAGIC)))
            if first != ARROW_MAGIC:
                found.format, found.schema = "arrow stream", None
                return
            refuse_large_batches(raw, name)
            reader = pa.ipc.open_file(raw)
            _take_schema(found, name, reader.schema, wanted, 0)
            found.shard_rows.append(0)
            for index in range(reader.num_record_batches):
                with reading(name, files.options):
                    _take_batch(found, name, reader.get_batch(index))


def _take_batch(found: Survey, shard: str, batch: pa.RecordBatch) -> None:
    batch.validate(full=True)  # Arrow itself does not check offsets
    found.group_rows.append(batch.num_rows)
    found.shard_rows[-1] += batch.num_rows
    found.job_columns.add_rows(batch.num_rows)
    found.group_bytes.append(batch.nbytes)
    for column in found.columns:
        if column.name not in batch.schema.names:
            column.stored.append(0)
            column.decoded.append(0)
            continue
        array = batch.column(column.name)
        column.stored.append(array.nbytes)
        column.decoded.append(array.nbytes)
        if _is_list(array.type) and len(array.value_lengths().unique()) > 1:
            found.ragged.add(column.name)
    here = [column.name for column in found.columns if column.name in batch.schema.names]
    each = dict(flat_columns(pa.Table.from_batches([batch.select(here)])))
    null_lists = {name: count_null_lists(column) for name, column in each.items()}
    nulls = {name: count_nulls(column) for name, column in each.items()}
    found.nulls.add(shard, found.job_columns.valued(nulls), null_lists)


def _take_schema(
    found: Survey, name: str, schema: pa.Schema, wanted: list[str] | None, rows: int
) -> None:
    """Raises DataError if the schema of the first shard cannot be used. Of a later shard, this is a
    finding."""
    try:
        if not found.differing:
            found.job_columns.add(name, schema, lossless, rows)
    except DataError as error:
        if found.schema is None:
            raise
        found.differing = str(error)
    fields = [schema.field(top) for top in top_level(plain_schema(schema), wanted)]
    if found.schema is None:
        found.schema = pa.schema(fields)
    known, before = {column.name for column in found.columns}, len(found.group_rows)
    for new in (f for f in fields if f.name not in known):
        column = Column(new.name, new.type, [0] * before, [0] * before, [0] * before)
        found.columns.append(column)


def _lengths_differ(column: Column, found: Survey, files: Files) -> bool:
    """Whether lists have several lengths: from the counts if they tell, otherwise from the first
    row group with rows."""
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
    """Bytes of a value; 0 if the type has no fixed size."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    return -(-kind.bit_width // 8) if pa.types.is_primitive(kind) else 0


def _by_row_group(columns: list[list[int]], row_groups: int) -> Ints:
    total = np.zeros(row_groups, dtype=np.int64)
    for column in columns:
        total += np.asarray(column, dtype=np.int64)
    return total
