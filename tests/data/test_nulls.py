"""Nulls of columns that have tensors: refused when a data set is opened, or when they are read."""

import tarfile

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import DataError
from tests.data.shards import add, refused, rows_of, write_arrow
from tests.data.test_index import config, opened

ROWS = pa.table(
    {
        "x": [None if i % 7 == 3 else i / 2 for i in range(40)],
        "n": [None if i == 30 else i for i in range(40)],
        "t": pa.nulls(40, pa.string()),
        "b": [i % 2 == 0 for i in range(40)],
        "l": [None if i < 2 else [i] for i in range(40)],
        "s": pa.array([{"m": [i]} if i else None for i in range(40)]),
    }
)
WRITERS = {
    "parquet": lambda path, rows: pq.write_table(rows, path, row_group_size=16),
    "stream.arrow": lambda path, rows: write_arrow(path, rows, stream=True),
    "file.arrow": lambda path, rows: write_arrow(path, rows, stream=False, compression="lz4"),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_nulls_are_refused_at_open_with_column_count_and_shard(ending, tmp_path):
    without = ROWS.filter(pc.field("x").is_valid() & pc.field("n").is_valid())
    WRITERS[ending](tmp_path / f"a.{ending}", without)
    WRITERS[ending](tmp_path / f"z.{ending}", ROWS)
    for columns, said in {
        ("x", "n", "b"): rf"'x' \(double\) holds 6 nulls, the first in z\.{ending}; leave these ro",
        ("n",): r"'n' \(int64\) holds 1 null, .*DataConfig\.filter, .*DataConfig\.columns",
    }.items():
        refused(config(tmp_path, columns=list(columns)), rf"^column {said}")
    read_index(config(tmp_path, columns=["b", "t"]))


def test_null_lists_are_counted_with_those_of_the_struct_around_them(tmp_path):
    write_arrow(tmp_path / "a.arrow", ROWS, stream=False)
    for column, said in {"l": r"'l' \(list<int64>\) holds 2", "s": r"'s\.m' .* holds 1"}.items():
        refused(config(tmp_path, columns=[column]), said)


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("columns", [["x", "b"], ["b"]])
def test_rows_that_are_null_in_a_column_of_the_filter_are_left_out(ending, columns, tmp_path):
    WRITERS[ending](tmp_path / f"a.{ending}", ROWS)
    wanted = ROWS.filter(pc.field("x").is_valid()).select(columns).to_pylist()
    for one in (pc.field("x").is_valid(), pc.field("x") >= 0):
        assert rows_of(tmp_path, columns=columns, filter=one)[0] == wanted
    kept = read_index(config(tmp_path, columns=["x"], filter=pc.field("x").is_null()))
    with pytest.raises(
        DataError, match=r"column 'x' of row group \d of a.* holds \d nulls?; leave"
    ):
        opened(config(tmp_path, columns=["x"], filter=pc.field("x").is_null()), kept).read(0)


def test_samples_of_tar_without_a_class_are_counted(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(6):
            for ending in ("txt", "cls", "bin")[: 1 + number % 3]:
                add(tar, f"{number}.{ending}", b"7")
    refused(config(tmp_path), r"'cls' \(int64\) holds 2 nulls, the first in a\.tar")
    columns, _ = opened(config(tmp_path, filter=pc.field("cls").is_valid())).read(0)
    assert columns["cls"].tolist() == [7, 7, 7, 7]


def test_nulls_that_no_statistics_count_are_refused_with_shard_and_row_group(tmp_path):
    """Also those in lists, of which Parquet's count includes empty ones."""
    table = pa.table(
        {"x": [1.0] * 20 + [None], "l": [[1], []] * 10 + [[None]], "m": [[1]] * 20 + [None]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8, write_statistics=False)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=8)
    for file, column in (("a", "x"), ("b", "l"), ("b", "m")):
        groups = opened(config(tmp_path / f"{file}.parquet", columns=[column]))
        groups.read(1)
        where = rf"column '{column}' of row group 2 of {file}\.parquet holds 1 null; leave these"
        with pytest.raises(DataError, match=where):
            groups.read(2)
