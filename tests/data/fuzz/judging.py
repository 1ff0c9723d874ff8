"""What must hold of any bytes: rows as the producer's own reader has them, or an error of this
package.

`judge(kind, damaged, folder)` reads them in place, through `convert` and by `inspect`, and raises
`Finding` for an exception of anyone else's, and for rows that differ from the ones that the
reference reader has.
"""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
import tarfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import tar as tar_format
from elastic_dp.data.formats import text as text_format
from elastic_dp.data.pipeline.row_groups import ShardRowGroups
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError, ElasticError
from elastic_dp.storage import Store
from tests.data.fuzz.compressed import decompressed
from tests.data.fuzz.mutations import Damaged, format_of
from tests.data.values import Columns, columns_of, plain, same

MEMORY_BYTES = 256 << 20
CsvOptions = Mapping[str, Any] | None
Way = Callable[[Path, CsvOptions], Columns]


class Finding(Exception):
    """One input for which something does not hold."""


def judge(kind: str, damaged: Damaged, folder: Path, seed: int, say: Callable[[str], None]) -> str:
    """ "rows", or the name of the error, for each way of reading; "rows?" where no reference reads
    the file. `say` is told which way is tried next."""
    chosen = format_of(kind)
    path = folder / f"a{damaged.ending or f'.{chosen}'}{damaged.codec}"
    path.write_bytes(damaged.content)
    _cut_small(random.Random(seed))
    found: list[str] = []
    made: dict[str, Columns] = {}
    ways: dict[str, Way] = {"read": _in_place, "convert": _converted, "inspect": _inspected}
    if chosen not in ("parquet", "arrow"):
        del ways["convert"]  # which reads text by other rules than training
    must = _ways_that_must_read(chosen, damaged)
    for name, way in ways.items():
        say(name)
        outcome = _tried(name, way, path, damaged)
        found.append(outcome if isinstance(outcome, str) else "rows")
        if isinstance(outcome, dict):
            if outcome:
                say(f"{name}: reference")
                found[-1] += "" if _compare(name, chosen, damaged, path, outcome) else "?"
                made[name] = outcome
        elif name in must:
            raise Finding(f"{name}: a whole file is refused: {outcome}")
    if len(made) == 2:
        _compare_columns("read, beside convert", made["read"], made["convert"])
    if "read" in made and chosen in ("parquet", "arrow") and found[-1] == "rows":
        rows, counted = len(next(iter(made["read"].values()))), inspect(str(path)).rows
        if counted not in (None, rows):
            raise Finding(f"inspect: {counted} rows, and {rows} are read")
    return " ".join(found)


def _ways_that_must_read(chosen: str, damaged: Damaged) -> tuple[str, ...]:
    if not damaged.whole:
        return ()
    return ("read",) if chosen == "tar" else ()


def _cut_small(rng: random.Random) -> None:
    """Row groups of text are cut often, so that cuts are tried too."""
    size = rng.choice((64, 200, 4 << 20))
    text_format.GROUP_BYTES = size
    tar_format.GROUP_BYTES = size * 16


def _tried(name: str, way: Way, path: Path, damaged: Damaged) -> Columns | str:
    try:
        return way(path, damaged.csv_options)
    except ElasticError as error:
        return type(error).__name__
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (
            f"{type(error).__name__}: {str(error)[:200]} "
            f"({Path(where.filename).name}:{where.lineno})"
        )
        raise Finding(f"{name}: an untyped error: {said}") from error


def _in_place(path: Path, csv_options: CsvOptions) -> Columns:
    config = DataConfig(str(path), micro_batch_size=4, csv_options=csv_options)
    index = read_index(config)
    groups = ShardRowGroups(config, index, [Store(str(path))])
    found: Columns = {name: [] for name, _ in index.columns}
    try:
        if groups.reading_bytes.max(initial=0) > MEMORY_BYTES:  # as open_data does, without torch
            raise DataError("a row group takes more than DataConfig.memory_bytes")
        for number in range(len(index.rows)):
            for name, column in groups.read(number)[0].items():
                found[name] += plain(column)
    finally:
        groups.close()
    return found


def _converted(path: Path, csv_options: CsvOptions) -> Columns:
    to = path.parent / "converted"
    shutil.rmtree(to, ignore_errors=True)
    convert(str(path), str(to))
    tables = [pq.ParquetFile(part).read(use_threads=False) for part in sorted(to.glob("*.parquet"))]
    return columns_of(pa.concat_tables(tables))


def _inspected(path: Path, csv_options: CsvOptions) -> Columns:
    inspect(str(path))
    return {}


# ------------------------------------------------------------------------------------ the other
# side


def _compare(way: str, chosen: str, damaged: Damaged, path: Path, ours: Columns) -> bool:
    """Whether there was something to compare with. A compressed file must be whole for its codec,
    or what lay behind the damage may be lost."""
    try:
        damaged = _unpacked(damaged)
    except Exception as error:
        raise Finding(
            f"{way}: rows of content that {damaged.codec} refuses: {error!r:.100}"
        ) from error
    compared = False
    for reference in _REFERENCES[chosen]:
        try:
            theirs = reference(path, damaged, ours)
        except Exception:  # a reference reader may raise anything
            continue
        _compare_columns(way, ours, theirs)
        compared = True
    return compared


def _unpacked(damaged: Damaged) -> Damaged:
    if not damaged.codec:
        return damaged
    return replace(damaged, content=decompressed(damaged.content, damaged.codec))


def _compare_columns(way: str, ours: Columns, theirs: Columns) -> None:
    for name, values in ours.items():
        if name not in theirs:
            raise Finding(
                f"{way}: a column {name!r} that the reference does not have: {sorted(theirs)}"
            )
        if len(values) != len(theirs[name]):
            raise Finding(f"{way}: {len(values)} rows for {len(theirs[name])} of column {name!r}")
        for number, (one, other) in enumerate(zip(values, theirs[name], strict=True)):
            if not same(one, other):
                raise Finding(
                    f"{way}: row {number} of {name!r} is {one!r:.80}, must be {other!r:.80}"
                )
    for name in theirs.keys() - ours.keys():
        raise Finding(f"{way}: the column {name!r} is lost; there are {sorted(ours)}")
    if len(rows := {len(values) for values in ours.values()}) > 1:
        raise Finding(f"{way}: columns of {sorted(rows)} rows")


def _reference_parquet(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    """Each row group by itself, as Polars and DuckDB have it: pyarrow moves what a damaged page has
    too much into the next one."""
    file = pq.ParquetFile(path)
    groups = range(file.num_row_groups)
    tables = [
        pq.ParquetFile(path, page_checksum_verification=True).read_row_group(n, use_threads=False)
        for n in groups
    ]
    return columns_of(pa.concat_tables(tables) if tables else file.schema_arrow.empty_table())


def _reference_arrow(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    content = pa.py_buffer(damaged.content)
    is_file = damaged.content[:6] == b"ARROW1"
    reader = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
    return columns_of(reader.read_all())


def _reference_csv(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    """All in one piece."""
    content = damaged.content
    if damaged.csv_options is not None:
        content = _csv_text(damaged).encode()
    words = _null_words(damaged)
    types = {name: pa.array(values).type for name, values in ours.items()}
    table = pa.csv.read_csv(
        pa.BufferReader(content),
        pa.csv.ReadOptions(use_threads=False, block_size=len(content) + 1),
        pa.csv.ParseOptions(delimiter=_delimiter(damaged), newlines_in_values=True),
        pa.csv.ConvertOptions(
            column_types=types, null_values=words, strings_can_be_null=words is not None
        ),
    )
    return columns_of(table)


def _reference_csv_module(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    """Python's, which takes a quote that is never closed."""
    types = {name: pa.array(values).type for name, values in ours.items()}
    header, *rows = _csv_rows(_csv_text(damaged), damaged)
    texts = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    words = _null_words(damaged)
    return {
        name: [_of_text(v, types[name], words) for v in values] for name, values in texts.items()
    }


def _csv_rows(text: str, damaged: Damaged) -> list[list[str]]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(damaged))
    return [row for row in rows if row]


def _csv_text(damaged: Damaged) -> str:
    text = damaged.content.decode((damaged.csv_options or {}).get("encoding", "utf-8"))
    return text.removeprefix("\ufeff")


def _delimiter(damaged: Damaged) -> str:
    default = "\t" if damaged.ending == ".tsv" else ","
    return str((damaged.csv_options or {}).get("delimiter", default))


def _null_words(damaged: Damaged) -> list[str] | None:
    return (damaged.csv_options or {}).get("null_values")


def _of_text(value: str, kind: pa.DataType, words: list[str] | None) -> Any:
    if words is not None and value in words:
        return None
    nulls = pa.csv.ConvertOptions().null_values
    if words is None and not pa.types.is_string(kind) and value in nulls:
        return None
    if pa.types.is_integer(kind):
        return int(value)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_boolean(kind):
        return value.lower() == "true"
    return value


def _reference_jsonl(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    """A byte order mark before a row is no part of it; pyarrow takes one away from the start of
    each piece of a file."""
    lines = (line.removeprefix("\ufeff") for line in damaged.content.decode().split("\n"))
    return _json_columns([json.loads(line) for line in lines if line.strip()], ours)


def _reference_json(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    """One array, or JSON Lines."""
    text = damaged.content.decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        return _reference_jsonl(path, damaged, ours)
    return _json_columns(json.loads(text), ours)


def _json_columns(rows: list[Any], ours: Columns) -> Columns:
    assert all(isinstance(row, dict) for row in rows)
    lost = {
        key
        for row in rows
        for key, value in row.items()
        if not any(name == key or name.startswith(f"{key}.") for name in ours) and _has_value(value)
    }
    names = [*ours, *lost]
    return {name: [_inside(row, name) for row in rows] for name in names}


def _reference_jsonl_arrow(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    """All in one piece; how many rows there are, since it takes texts for dates."""
    content = damaged.content
    options = pa.json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    rows = pa.json.read_json(pa.BufferReader(content), options).num_rows
    return {name: values if len(values) == rows else [None] * rows for name, values in ours.items()}


def _has_value(value: Any) -> bool:
    """An object without keys has no column, and says nothing."""
    if isinstance(value, dict):
        return any(map(_has_value, value.values()))
    return value is not None


def _inside(value: Any, name: str) -> Any:
    """`name`: a key, which may have dots itself, or "key.name" of what an object holds."""
    if not isinstance(value, dict):
        return None
    if name in value:
        return value[name]
    key, _, inner = name.partition(".")
    return _inside(value.get(key), inner) if inner else None


def _reference_tar(path: Path, damaged: Damaged, ours: Columns) -> Columns:
    samples: list[dict[str, Any]] = []
    with tarfile.open(fileobj=io.BytesIO(damaged.content), mode="r:") as members:
        for member in members:
            folder, slash, file = member.name.rpartition("/")
            if not member.isfile() or file.startswith(".") or tar_format._is_note(file):
                continue  # a note is no sample, and said
            key, _, ending = file.partition(".")
            key, ending = folder + slash + key, ending.lower()
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            reading = members.extractfile(member)
            assert reading is not None
            content = reading.read()
            assert len(content) == member.size
            samples[-1][ending] = content
    names = {name: ours.get(name, ()) for sample in samples for name in sample}
    return {
        name: [
            _member(sample.get(name), values[n] if n < len(values) else None)
            for n, sample in enumerate(samples)
        ]
        for name, values in names.items()
    }


def _member(content: Any, ours: Any) -> Any:
    """Text and numbers as they are read; the rest is bytes."""
    if isinstance(content, bytes) and isinstance(ours, str):
        return content.decode()
    return int(content) if isinstance(content, bytes) and isinstance(ours, int | float) else content


_REFERENCES: dict[str, tuple[Callable[[Path, Damaged, Columns], Columns], ...]] = {
    "parquet": (_reference_parquet,),
    "arrow": (_reference_arrow,),
    "csv": (_reference_csv, _reference_csv_module),
    "jsonl": (_reference_jsonl, _reference_jsonl_arrow),
    "json": (_reference_json, _reference_jsonl_arrow),
    "tar": (_reference_tar,),
}
