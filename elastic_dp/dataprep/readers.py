"""Readers of `convert`: the rows of a source as Arrow batches of one schema, each with its value or
a typed error.

Parquet and Arrow are read by pyarrow, and JSON by Python's own parser, which has integers without a
limit, and Arrow refuses to round them. The types of JSON are those of all rows: it is read twice.
Dates in text stay text.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.config.removed_names import REMOVED_FORMATS
from elastic_dp.data.columns.column_types import plain, rebuilt
from elastic_dp.data.columns.null_views import clear_null_views
from elastic_dp.data.columns.schema import name_is_no_text
from elastic_dp.data.discovery.partitions import FolderColumns
from elastic_dp.data.formats.arrow_messages import refuse_large_batches
from elastic_dp.data.formats.file_format import ShardAt
from elastic_dp.data.formats.parquet import check_footer
from elastic_dp.dataprep.source_files import SourceFiles
from elastic_dp.dataprep.token_packing import PIECE_CHARS, Piece, pieces
from elastic_dp.dataprep.write_shards import as_written
from elastic_dp.errors import DataError

BATCH_BYTES = 4 << 20
BATCH_ROWS = 1024
_THREADS = 16

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True)
class Rows:
    """`batches(name)`: the rows of one file, in `schema`."""

    schema: pa.Schema
    batches: Callable[[str], Batches]


def open_rows(files: SourceFiles, columns: Sequence[str] | None = None) -> Rows:
    """All rows, with columns from the names of folders (`year=2024/`). Raises DataError if the
    source cannot be read as a table."""
    openers: dict[str, Callable[[], Rows]] = {
        "parquet": lambda: _tables(files, _parquet, check_footer, columns),
        "arrow": lambda: _tables(
            files, _arrow, lambda shard, _: refuse_large_batches(shard), columns
        ),
        "json": lambda: _json(files),
        "jsonl": lambda: _json(files),
        "text": lambda: Rows(pa.schema([("text", pa.string())]), lambda n: _lines(files, n)),
        "images": lambda: _images(files),
    }
    if files.kind not in openers:
        of_tar = "them without compression, which training reads as they are"
        _, instead = REMOVED_FORMATS.get(f".{files.kind}", ("", of_tar))
        raise DataError(
            f"{files.url!r} holds {files.kind} files, which convert does not read; write "
            f"{instead.format(url=files.url)}"
        )
    rows = openers[files.kind]()
    lower = {name.lower(): name for name in rows.schema.names}
    if same := [name for name in rows.schema.names if lower[name.lower()] != name]:
        raise DataError(
            f"{files.url!r} has the columns {same[0]!r} and {lower[same[0].lower()]!r}; give "
            "columns names that differ by more than case"
        )
    folders = FolderColumns([("", files.names if files.kind != "images" else ())], columns)
    added = [pa.field(*each) for each in folders.types.items() if each[0] not in rows.schema.names]
    names = [*rows.schema.names, *(field.name for field in added)]
    if missing := [name for name in columns or () if name not in names]:
        raise DataError(
            f"no column {', '.join(map(repr, missing))} in {files.url!r}, which has "
            f"{', '.join(map(repr, names))}"
        )
    chosen = names if columns is None else list(columns)

    def batches(name: str) -> Batches:
        values = folders.of_shard(name, name.rpartition("/")[0], rows.schema.names)
        for batch in rows.batches(name):
            for field in added:
                value = pa.scalar(values.get(field.name), field.type)
                batch = batch.append_column(field, pa.repeat(value, batch.num_rows))
            yield batch.select(chosen)

    every = pa.schema([*rows.schema, *added], metadata=rows.schema.metadata)
    schema = pa.schema([every.field(name) for name in chosen], metadata=every.metadata)
    return Rows(schema, batches)


def _parquet(raw: Any, columns: Sequence[str] | None) -> tuple[pa.Schema, Batches]:
    # With buffer_size and without pre_buffer, a large row group is not read all at once.
    file = pq.ParquetFile(
        raw, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
    )
    footer = file.metadata
    decoded = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    rows = max(1, BATCH_BYTES * footer.num_rows // max(decoded, 1))
    # Each row group by itself: surplus values of a damaged page would shift those of the next one.
    every, groups = file.schema_arrow.names, range(file.num_row_groups)
    names = [name for name in every if columns is None or name in columns]
    return file.schema_arrow, (b for g in groups for b in file.iter_batches(rows, [g], names))


def _arrow(raw: Any, columns: Sequence[str] | None) -> tuple[pa.Schema, Batches]:
    magic = raw.read(6)
    raw.seek(0)
    if magic.startswith(b"FEA1"):
        raise ValueError("a Feather file of version 1; write it again as Parquet")
    if magic != b"ARROW1":
        stream = pa.ipc.open_stream(raw)
        return stream.schema, iter(stream)
    file = pa.ipc.open_file(pa.PythonFile(raw, "r"))
    return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))


def _tables(
    files: SourceFiles,
    opened: Callable[[Any, Sequence[str] | None], tuple[pa.Schema, Batches]],
    check: Callable[[ShardAt, Sequence[str] | None], Any],
    columns: Sequence[str] | None,
) -> Rows:
    """Files that have a schema. All are read in the types that hold every value of each.

    `check(shard, columns)` refuses a file that must not be decoded. Every file is checked before
    any row is read.
    """

    def schema_of(name: str) -> pa.Schema:
        with files.opened(name) as raw:
            try:
                check(files.shard(name), columns)
                schema = opened(raw, columns)[0]
                fields = [pa.field(f.name, plain(f.type), metadata=f.metadata) for f in schema]
            except UnicodeDecodeError as error:
                raise name_is_no_text(name, error) from error
            return pa.schema(fields, schema.metadata)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-dp-schemas") as pool:
        schemas = dict(zip(files.names, pool.map(schema_of, files.names), strict=True))
    schema = schemas[files.names[0]]
    for name, other in schemas.items():
        if not other.equals(schema):
            try:
                schema = pa.unify_schemas([schema, other], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{name} has other types than the files before: {error}") from error

    def batches(name: str) -> Batches:
        with files.opened(name) as raw:
            for batch in opened(raw, columns)[1]:
                batch.validate(full=True)  # Arrow itself does not check offsets
                yield as_written(clear_null_views(batch), schema)

    return Rows(schema, batches)


# --------------------------------------------------------------------------------------- JSON


def _json(files: SourceFiles) -> Rows:
    """JSON Lines, or files that are one array of objects."""
    kind: pa.DataType = pa.struct([])
    for name in files.names:
        for first, rows in _objects(files, name):
            with _rows_named(name, first, rows):
                kind = _merged(kind, pa.array(rows).type)
    if not kind.num_fields:
        raise DataError(f"{files.url!r} holds no rows with columns")
    kind = _without_nulls(kind)

    def batches(name: str) -> Batches:
        for first, rows in _objects(files, name):
            with _rows_named(name, first, rows):
                yield pa.RecordBatch.from_struct_array(pa.array(rows, kind))

    return Rows(pa.schema(list(kind)), batches)


def _objects(files: SourceFiles, name: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first row, rows)."""
    rows, nbytes, done = list[dict[str, Any]](), 0, 0
    for text in _json_texts(files, name):
        try:
            row = _DECODER.decode(text) if isinstance(text, str) else text
        except (ValueError, RecursionError) as error:
            raise DataError(f"row {done + len(rows)} of {name} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"row {done + len(rows)} of {name} is no object: {str(row)[:80]}")
        rows.append(row)
        nbytes += len(text) if isinstance(text, str) else 0
        if len(rows) == BATCH_ROWS or nbytes >= BATCH_BYTES:
            yield done, rows
            rows, nbytes, done = [], 0, done + len(rows)
    if rows:
        yield done, rows


def _json_texts(files: SourceFiles, name: str) -> Iterator[Any]:
    """The text of each row. A file that is one array is parsed whole."""
    with files.decompressed(name) as raw:
        text = io.TextIOWrapper(raw, "utf-8-sig", newline="\n")
        for line in text:
            if line.startswith("["):
                yield from _DECODER.decode(line + text.read())
            elif line.strip():
                yield line


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _float(digits: str) -> float:
    found = float(digits)
    if math.isinf(found):
        raise ValueError(f"no float64 holds {digits[:40]}")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_float)


@contextmanager
def _rows_named(name: str, first: int, rows: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, DataError) as error:
        last = first + len(rows) - 1
        raise DataError(f"rows {first} to {last} of {name} are no table: {error}") from error


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The struct that holds the values of both. Raises ArrowTypeError if there is none."""
    schemas = [pa.schema(list(kind)) for kind in (one, other)]
    return pa.struct(list(pa.unify_schemas(schemas, promote_options="permissive")))


def _without_nulls(kind: pa.DataType) -> pa.DataType:
    """What never has a value becomes text."""
    return pa.string() if pa.types.is_null(kind) else rebuilt(kind, _without_nulls)


# ------------------------------------------------------------------------------ text and images


def _lines(files: SourceFiles, name: str) -> Batches:
    with files.decompressed(name) as raw:
        lines = io.TextIOWrapper(raw, "utf-8-sig")
        while some := list(itertools.islice(lines, BATCH_ROWS)):
            yield pa.RecordBatch.from_pydict({"text": [line.removesuffix("\n") for line in some]})


def documents(files: SourceFiles, columns: Sequence[str] | None) -> Iterator[Piece]:
    """Documents of text in pieces: one for each .txt file, or one for each row of a column of text
    (`text`, unless `columns` names it). A null is no document."""
    if files.kind == "text":
        for name in files.names:
            with files.decompressed(name) as raw:
                text, rest = io.TextIOWrapper(raw, "utf-8", newline=""), ""
                while chunk := text.read(PIECE_CHARS):
                    *some, (rest, _) = pieces(rest + chunk)
                    yield from ((piece, False) for piece, _ in some)
                yield rest, True
        return
    rows = open_rows(files, columns)
    texts = [f.name for f in rows.schema if f.type in (pa.string(), pa.large_string())]
    if columns is None and len(texts) > 1:
        texts = [name for name in texts if name == "text"]
    if len(texts) != 1 or (columns is not None and len(columns) != 1):
        raise DataError(
            f"{files.url!r} must have one column of text to pack; name it by columns. It has "
            f"{', '.join(f'{field.name!r} ({field.type})' for field in rows.schema)}"
        )
    for name in files.names:
        for batch in rows.batches(name):
            for document in batch.column(texts[0]).to_pylist():
                if document is not None:
                    yield from pieces(document)


def _images(files: SourceFiles) -> Rows:
    """A folder for each class. A label is the index of the class in alphabetical order; the
    schema's metadata has the names under "classes"."""
    if flat := [name for name in files.names if "/" not in name]:
        raise DataError(
            f"{flat[0]} is not in a subfolder; an image folder has one subfolder for each class, "
            "and no other files"
        )
    classes = sorted({name.split("/")[0] for name in files.names})
    schema = pa.schema(
        [("image", pa.binary()), ("label", pa.int32()), ("path", pa.string())],
        metadata={"classes": json.dumps(classes)},
    )

    def batches(name: str) -> Batches:
        entry = files.entries[name]
        content = bytes(files.shard(name).read(0, entry.size))
        columns = [[content], [classes.index(name.split("/")[0])], [name]]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return Rows(schema, batches)
