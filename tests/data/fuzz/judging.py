"""What must hold of any bytes: rows as the producer's own reader has them, or an error of this
package.

`judge(kind, damaged, folder)` reads them in place, and raises `Finding` for an exception of anyone
else's, and for rows that differ from the ones that the reference reader has.
"""

from __future__ import annotations

import io
import random
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import tar as tar_format
from elastic_dp.data.pipeline.row_groups import ShardRowGroups
from elastic_dp.errors import DataError, ElasticError
from tests.data.fuzz.mutations import Damaged
from tests.data.values import Columns, columns_of, plain, same

MEMORY_BYTES = 256 << 20


class Finding(Exception):
    """One input for which something does not hold."""


def judge(kind: str, damaged: Damaged, folder: Path, seed: int, say: Callable[[str], None]) -> str:
    """ "rows", or the name of the error; "rows?" where no reference reads the file. `say` is told
    what is tried next."""
    path = folder / f"a.{kind}"
    path.write_bytes(damaged.content)
    _cut_small(random.Random(seed))
    say("read")
    outcome = _tried(path)
    if isinstance(outcome, str):
        if damaged.whole:
            raise Finding(f"read: a whole file is refused: {outcome}")
        return outcome
    say("read: reference")
    return "rows" if not outcome or _compare("read", kind, damaged, path, outcome) else "rows?"


def _cut_small(rng: random.Random) -> None:
    """Row groups are cut often, so that cuts are tried too."""
    tar_format.GROUP_BYTES = rng.choice((64, 200, 4 << 20)) * 16


def _tried(path: Path) -> Columns | str:
    try:
        return _in_place(path)
    except ElasticError as error:
        return type(error).__name__
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (
            f"{type(error).__name__}: {str(error)[:200]} "
            f"({Path(where.filename).name}:{where.lineno})"
        )
        raise Finding(f"read: an untyped error: {said}") from error


def _in_place(path: Path) -> Columns:
    config = DataConfig(str(path), micro_batch_size=4)
    index = read_index(config)
    groups = ShardRowGroups(config, index)
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


# --------------------------------------------------------------------------- the other side


def _compare(way: str, chosen: str, damaged: Damaged, path: Path, ours: Columns) -> bool:
    """Whether there was something to compare with."""
    compared = False
    for reference in _REFERENCES[chosen]:
        try:
            theirs = reference(path, damaged, ours)
        except Exception:  # a reference reader may raise anything
            continue
        _compare_columns(way, ours, theirs)
        compared = True
    return compared


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
    "tar": (_reference_tar,),
}
