"""Consecutive rows of an Arrow file are read straight to their place, or else copied: the same
rows."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.columns.mapped_file import MappedFile
from elastic_dp.data.datasets import packed_micro_batches
from elastic_dp.data.pipeline import batch_assembler
from elastic_dp.data.pipeline.row_group_reader import RowGroupReader
from elastic_dp.errors import DataError

ROWS, GROUP = 192, 48
NUMBERS = np.arange(ROWS * 6, dtype=np.int32)
READ = {
    "int": pa.array(NUMBERS[:ROWS]),
    "sliced": pa.array(NUMBERS).slice(5, ROWS),
    "lists": pa.ListArray.from_arrays(np.arange(0, NUMBERS.size + 1, 6, np.int32), NUMBERS),
    "fixed lists": pa.FixedSizeListArray.from_arrays(pa.array(NUMBERS.astype(np.float32)), 6),
    "binary": pa.array([bytes([n] * 5) for n in range(ROWS)], pa.binary(5)),
    "in struct": pa.StructArray.from_arrays([pa.array(NUMBERS[:ROWS])], ["a"]),
    "date": pa.array(NUMBERS[:ROWS].astype(np.int64)).view(pa.timestamp("s")),
}
COPIED = {
    "ragged": pa.array([list(range(n % 3)) for n in range(ROWS)]),
    "filled": pa.array([None if n % 2 else n for n in range(ROWS)], pa.int64()),
    "bool": pa.array([n % 3 == 0 for n in range(ROWS)]),
    "text": pa.array([str(n) for n in range(ROWS)]),
    "dictionary": pa.array([str(n % 3) for n in range(ROWS)]).dictionary_encode(),
}
OPTIONS = {"filled": {"fill_nulls": {"x": -1}}, "ragged": {"collate_fn": dict}}


def write(path: Path, column: pa.Array, compression: str | None = None) -> None:
    table = pa.table({"x": column})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=GROUP)


def rows_of(folder: Path, **options) -> list:
    config = DataConfig(str(folder), micro_batch_size=16, shuffle="none", epochs=1, **options)
    data = open_data(config, virtual_workers=3)
    try:
        steps = range(1, data.steps_per_epoch + 1)
        batches = [next(iter(data.batch(step, v).values())) for step in steps for v in range(3)]
    finally:
        data.close()
    return [row if isinstance(row, str) else row.tolist() for batch in batches for row in batch]


@pytest.fixture
def read(monkeypatch):
    """How many rows were read to their place, by call; each run of them is long enough here."""
    monkeypatch.setattr(batch_assembler, "READ_BYTES", 1)
    calls, read = list[int](), MappedFile.read

    def counting(self, rows, into):
        calls.append(len(rows))
        return read(self, rows, into)

    monkeypatch.setattr(MappedFile, "read", counting)
    return calls


@pytest.mark.parametrize("name", [*READ, *COPIED])
def test_rows_are_those_that_copying_gives(name, tmp_path, read, monkeypatch):
    write(tmp_path / "a.arrow", (READ | COPIED)[name])
    options = OPTIONS.get(name, {})
    rows = rows_of(tmp_path, **options)
    assert sum(read) == (ROWS if name in READ else 0)
    monkeypatch.setattr(batch_assembler, "READ_BYTES", 1 << 30)
    assert rows == rows_of(tmp_path, **options) and len(rows) == ROWS


def test_compressed_rows_are_copied(tmp_path, read):
    write(tmp_path / "a.arrow", READ["int"], "zstd")
    assert rows_of(tmp_path) == NUMBERS[:ROWS].tolist() and not read


def test_rows_of_two_types_are_copied_where_they_are_cast(tmp_path, read):
    write(tmp_path / "a.arrow", pa.array(NUMBERS[:ROWS].astype(np.int16)))
    write(tmp_path / "b.arrow", READ["int"])
    assert rows_of(tmp_path) == 2 * NUMBERS[:ROWS].tolist() and sum(read) == ROWS


def test_packed_documents_of_a_file_are_read(tmp_path, read, monkeypatch):
    monkeypatch.setattr(packed_micro_batches, "_LONG", 1)
    write(tmp_path / "a.arrow", READ["lists"])
    rows = rows_of(tmp_path, pack=16, pack_columns=())
    assert len(rows) == 48 and rows == NUMBERS[: 48 * 16].reshape(-1, 16).tolist()
    assert sum(read) == 48 * 16


def test_a_file_that_is_cut_off_while_the_run_uses_it(tmp_path, read, monkeypatch):
    """The file is cut off when its rows are decoded and not copied yet."""
    path, take = tmp_path / "a.arrow", RowGroupReader.take
    table = pa.table({"x": READ["int"]})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)  # one record batch: nothing else is decoded meanwhile

    def cutting(self, key, groups):
        here = take(self, key, groups)
        os.truncate(path, path.stat().st_size // 2)
        return here

    monkeypatch.setattr(RowGroupReader, "take", cutting)
    with pytest.raises(DataError, match=r"a\.arrow was rewritten while the run used it"):
        rows_of(tmp_path)
