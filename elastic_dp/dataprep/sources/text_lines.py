"""JSON Lines and CSV, which are read twice: the first pass finds the types of all rows, the second
one reads the rows.

A single pass would have to trust its first block, and would fail hours later at the first "1.5" in
a column of integers. The code of training cuts and parses the files (formats/text.py), so the rows
are the same. Dates stay text. A CSV column that has numbers in one block and words in another is
text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.columns.schema import Columns, leaves
from elastic_dp.data.discovery.partitions import Partitions
from elastic_dp.data.formats import text
from elastic_dp.data.formats.csv import CsvRows
from elastic_dp.data.formats.csv_dialect import Dialect
from elastic_dp.data.formats.csv_headers import HeaderLines
from elastic_dp.data.formats.exact_numbers import (
    LeadingZeros,
    Rounded,
    leading_zero_warnings,
    refuse_rounded,
)
from elastic_dp.data.formats.jsonl import JsonRows, is_array, lines_of_array
from elastic_dp.data.formats.text import TextRows
from elastic_dp.dataprep.sources.row_stream import Rows, choose, rows_of_files
from elastic_dp.dataprep.sources.source_files import Files, reading
from elastic_dp.errors import DataError

_log = logging.getLogger(__name__)
_NO_COLUMNS = pa.schema([])
_Whole = Callable[[bytes], bytes]


@dataclass(frozen=True)
class TextReader:
    """A reader of text rows. `rows(name)`: its parser of a file. `whole(name, first)`: what makes
    text rows of the whole file, if it cannot be cut; None if it can. `first`: its first bytes.
    `has_headers`: files begin with a line of names."""

    rows: Callable[[str], TextRows]
    whole: Callable[[str, bytes], _Whole | None]
    has_headers: bool = False


def json_reader() -> TextReader:
    def whole(name: str, first: bytes) -> _Whole | None:
        return partial(lines_of_array, name) if is_array(name, first) else None

    return TextReader(JsonRows, whole)


def csv_reader(columns: Sequence[str] | None, options: CsvOptions) -> TextReader:
    def rows(name: str) -> TextRows:
        dialect = Dialect.of(name, options)
        return CsvRows(name, columns, dialect if dialect.can_be_cut else dialect.of_decoded())

    def whole(name: str, first: bytes) -> _Whole | None:
        dialect = Dialect.of(name, options)
        return None if dialect.can_be_cut else partial(dialect.utf8, where=name)

    return TextReader(rows, whole, has_headers=True)


def open_jsonl(files: Files, columns: list[str] | None, partitions: Partitions) -> Rows:
    return _rows(files, json_reader(), columns, partitions, mixed_is_text=False)


def open_csv(
    files: Files,
    columns: list[str] | None,
    partitions: Partitions,
    options: CsvOptions | None = None,
) -> Rows:
    reader = csv_reader(columns, options or CsvOptions())
    return _rows(files, reader, columns, partitions, mixed_is_text=True)


def check_first_rows(raw: Any, name: str, reader: TextReader, nbytes: int) -> list[str]:
    """Returns the names of their columns, none if there is no row. Raises DataError if the header
    line, or a row in the first `nbytes`, cannot be read."""
    content, rows = raw.read(nbytes), reader.rows(name)
    if reader.whole(name, content) is not None:
        return []  # only the whole file can be checked
    is_all = len(content) < nbytes
    if not content.strip() or (head := rows.head(content, is_all)) is None:
        return []
    body = content[head:]
    end = rows.last_row_end(body)
    table = rows.parse(body if is_all else body[:end])
    if is_all:
        rows.end()
    return list(table.schema.names) if table.num_rows else []


def _rows(
    files: Files,
    reader: TextReader,
    columns: list[str] | None,
    partitions: Partitions,
    *,
    mixed_is_text: bool,
) -> Rows:
    schema, rounded, leading_zeros = _types_of_all(files, reader, columns, mixed_is_text)
    if columns is not None:
        added = [f.name for f in partitions.fields(schema, columns)]
        schema = choose(schema, [name for name in columns if name not in added], files.names[0])
    refuse_rounded(rounded, leaves(schema))
    for warning in leading_zero_warnings(leading_zeros, leaves(schema)):
        _log.warning("%s", warning)

    def batches_of(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for table in _tables(files, name, reader, reader.rows(name), schema):
            if table.num_rows:
                with reading(name, files.options):
                    table = table.select(schema.names).cast(schema).combine_chunks()
                yield from table.to_batches()

    return rows_of_files(files.names, schema, batches_of, columns, partitions)


def _types_of_all(
    files: Files, reader: TextReader, columns: list[str] | None, mixed_is_text: bool
) -> tuple[pa.Schema, Rounded, LeadingZeros]:
    """The first pass. Files without a row have no say, unless all are such."""
    schema, without_rows, cases, headers = _NO_COLUMNS, _NO_COLUMNS, Columns(columns), HeaderLines()
    rounded, leading_zeros = dict[str, str](), dict[str, str]()
    for name in files.names:
        here = dict[str, None]()  # the names of its columns
        with reading(name, files.options):
            for table in _tables(files, name, reader, rows := reader.rows(name)):
                if not table.num_rows:
                    without_rows = without_rows if len(without_rows) else table.schema
                    continue
                schema = _unify(schema, table.schema, name, mixed_is_text)
                here |= dict.fromkeys(table.schema.names)
        if reader.has_headers and here:
            headers.add(name, [*here])
        cases.add(name, pa.schema([(column, pa.null()) for column in here]), lambda one, _: one)
        rounded = {**rows.rounded, **rounded}
        leading_zeros = {**rows.leading_zeros, **leading_zeros}
        for what, (count, first) in rows.remarks.items():
            _log.warning("%s: %s, such as %s of %s", what, f"{count:,}", first, name)
    cases.refuse_case()
    headers.check()
    schema = schema if len(schema) else without_rows
    return pa.schema([(f.name, _settled(f.type)) for f in schema]), rounded, leading_zeros


def _tables(
    files: Files, name: str, reader: TextReader, rows: TextRows, schema: pa.Schema | None = None
) -> Iterator[pa.Table]:
    with files.open(name) as raw:
        chunks = iter(lambda: raw.read(text.GROUP_BYTES), b"")
        first, head, nbytes = b"", None, files.decompressed_bytes(name)
        while head is None:
            chunk = next(chunks, b"")
            first += chunk
            if not chunk and not first.strip():
                return  # an empty file
            if (whole := reader.whole(name, first)) is not None:
                first, chunks = whole(first + b"".join(chunks)), iter(())
                chunk, nbytes = b"", len(first)
            head = rows.head(first, not chunk)
        if schema is None:
            yield rows.parse(b"")  # gives the columns of a file without rows
        rest = None if nbytes is None else nbytes - head
        for content in text.cut(chain([first[head:]], chunks), rows, name, rest):
            yield rows.parse(content, schema)
        rows.end()


def _unify(known: pa.Schema, new: pa.Schema, name: str, mixed_is_text: bool) -> pa.Schema:
    fields = {field.name: field for field in known}
    for field in pa.schema([(f.name, text.without_times(f.type)) for f in new]):
        before = fields.get(field.name, field)
        try:
            pair = [pa.schema([before]), pa.schema([field])]
            fields[field.name] = pa.unify_schemas(pair, promote_options="permissive").field(0)
        except pa.ArrowException as error:
            if not mixed_is_text:
                raise DataError(
                    f"column {field.name!r} is {field.type} in {name} and {before.type} "
                    "before; make it one type"
                ) from error
            fields[field.name] = pa.field(field.name, pa.string())
    return pa.schema(list(fields.values()))


def _settled(kind: pa.DataType) -> pa.DataType:
    """A column without any value becomes text."""
    return pa.string() if pa.types.is_null(kind) else kind
