"""Nulls: said when a data set is opened, or filled, in every format."""

import math
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.data.columns.nulls import fill
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.index_difference import difference
from elastic_dp.errors import DataError, SpecError
from tests.data.shards import plain_values, write_arrow
from tests.data.test_index import config, opened

ROWS = [
    {"x": None if i % 7 == 3 else i / 2, "n": None if i == 30 else i, "t": None, "b": i % 2 == 0}
    for i in range(40)
]


def write_parquet(folder: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / "b.parquet", row_group_size=16)


def write_stream(folder: Path, rows: list[dict]) -> None:
    write_arrow(folder / "b.arrow", pa.Table.from_pylist(rows, SCHEMA), stream=True)


def write_file(folder: Path, rows: list[dict]) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    write_arrow(folder / "b.arrow", table, stream=False, compression="lz4")


SCHEMA = pa.schema({"x": pa.float64(), "n": pa.int64(), "t": pa.string(), "b": pa.bool_()}.items())
WRITERS = [write_parquet, write_stream, write_file]
COLUMNS = ["x", "n", "b"]


@pytest.mark.parametrize("write", WRITERS)
def test_nulls_are_refused_at_open_with_column_count_and_shard(write, tmp_path):
    write(tmp_path, ROWS)
    (shard,) = tmp_path.iterdir()
    shard.rename(shard.with_name(f"z{shard.suffix}"))
    write(tmp_path, [row for row in ROWS if None not in (row["x"], row["n"])])
    with pytest.raises(DataError) as caught:
        read_index(config(tmp_path, columns=COLUMNS))
    said = str(caught.value)
    assert said.startswith(f"column 'x' (double) holds 6 nulls, the first in z{shard.suffix}, ")
    assert "DataConfig.fill_nulls, fill them in the shards, or leave the column out by" in said
    with pytest.raises(DataError, match=r"'n' \(int64\) holds 1 null"):
        read_index(config(tmp_path, columns=["n"]))
    read_index(config(tmp_path, columns=["b"]))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("missing", [-1.5, math.nan, 3])
def test_filled_nulls_are_read_in_training_and_in_evaluation(write, missing, tmp_path):
    write(tmp_path, ROWS)
    wanted = config(
        tmp_path,
        columns=COLUMNS,
        fill_nulls={"x": missing, "n": -1},
        tail="short",
        shuffle="none",
        epochs=1,
    )
    xs = np.array([missing if row["x"] is None else row["x"] for row in ROWS], np.float64)
    ns = [-1 if row["n"] is None else row["n"] for row in ROWS]
    evaluation = open_evaluation(wanted)
    found = [evaluation.batch(number) for number in range(evaluation.num_batches)]
    evaluation.close()
    training = open_data(wanted, virtual_workers=1)
    assert training.steps_per_epoch == len(found)
    again = [training.batch(step + 1, 0) for step in range(len(found))]
    training.close()
    for batches in (found, again):
        assert np.array_equal(np.concatenate([b["x"] for b in batches]), xs, equal_nan=True)
        assert np.concatenate([b["n"] for b in batches]).tolist() == ns
        assert np.concatenate([b["b"] for b in batches]).tolist() == [row["b"] for row in ROWS]


def test_samples_of_tar_without_a_class_are_counted_and_filled(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(6):
            for ending in ("txt", "cls", "bin")[: 1 + number % 3]:
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = 1
                tar.addfile(member, BytesIO(b"7"))
    with pytest.raises(DataError, match=r"'cls' \(int64\) holds 2 nulls, the first in a\.tar"):
        read_index(config(tmp_path))
    columns, _ = opened(config(tmp_path, fill_nulls={"cls": -1})).read(0)
    assert columns["cls"].tolist() == [-1, 7, 7, -1, 7, 7]


def test_nulls_that_no_statistics_count_are_refused_with_shard_and_row_group(tmp_path):
    """Also those in lists, of which Parquet's count includes empty ones."""
    table = pa.table(
        {"x": [1.0] * 20 + [None], "l": [[1], []] * 10 + [[None]], "m": [[1]] * 20 + [None]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8, write_statistics=False)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=8)
    for file, column, said in (
        (
            "a",
            "x",
            "1 null.s., which a tensor cannot; give a value for them by DataConfig.fill_nulls",
        ),
        (
            "b",
            "l",
            "1 null.s., which a tensor cannot; give a value for them by DataConfig.fill_nulls",
        ),
        ("b", "m", "1 null list; write an empty list for each of them in the shards"),
    ):
        groups = opened(config(tmp_path / f"{file}.parquet", columns=[column]))
        groups.read(1)
        where = rf"column '{column}' of row group 2 of {file}\.parquet holds "
        with pytest.raises(DataError, match=where + said):
            groups.read(2)
    filled = opened(config(tmp_path / "b.parquet", columns=["l"], fill_nulls={"l": 5}))
    assert plain_values(filled.read(2)[0]["l"]) == [[1], [], [1], [], [5]]


def test_null_lists_are_refused_at_open_also_where_their_items_are_filled(tmp_path):
    """Also where they are null because a line has no such key, or the struct around them is
    null."""
    rows = [{"l": [1, None], "s": {"m": [[2]]}}] * 9 + [{"l": None, "s": None}] * 2
    write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist(rows), stream=False)
    for column, said in (
        ("l", r"'l' \(list<int64>\) holds 2 null lists, the first in a\.\w+; write an empty list"),
        (
            "s",
            r"'s\.m' \(list<list<int64>>\) holds 2 null lists, the first in a\.\w+; write an empty",
        ),
    ):
        for fills in (None, {"l": 0}) if column == "l" else (None,):
            with pytest.raises(DataError, match=said):
                read_index(config(tmp_path, columns=[column], fill_nulls=fills))


SMALL = pa.list_(pa.list_(pa.int16(), 2), 2)


@pytest.mark.parametrize(
    ("values", "kind", "value", "filled"),
    [
        ([1, None, 3], pa.uint8(), 255, [1, 255, 3]),
        ([1.5, None], pa.float16(), -1.0, [1.5, -1.0]),
        ([True, None], pa.bool_(), False, [True, False]),
        ([b"ab", None], pa.binary(2), b"zz", [b"ab", b"zz"]),
        (["a", None], pa.string(), "", ["a", ""]),
        (["a", None], pa.string_view(), "?", ["a", "?"]),
        ([[1, None], [], [None]], pa.list_(pa.int32()), 7, [[1, 7], [], [7]]),
        ([[[None], [1]], [[]]], pa.large_list(pa.list_(pa.int64())), 0, [[[0], [1]], [[]]]),
        ([None, [1, None]], pa.list_(pa.int8(), 2), 3, [[3, 3], [1, 3]]),
        ([None, [None, [1, None]]], SMALL, 3, [[[3, 3]] * 2, [[3, 3], [1, 3]]]),
        ([None, [1]], pa.list_(pa.int8()), 3, [None, [1]]),
    ],
)
def test_fill_puts_the_value_for_each_null_and_keeps_the_type(values, kind, value, filled):
    whole = pa.array([*values[:1], *values, *values[:1]], kind)
    done = fill(whole.slice(1, len(values)), value)
    assert done.type == kind and done.to_pylist() == filled
    done.validate(full=True)


@pytest.mark.parametrize(
    ("fills", "said"),
    [
        ({"y": 0}, r"DataConfig.fill_nulls: no column 'y' is read, but 'x', 'i', 'f', 's', 'l'"),
        ({"i": 300}, r"300 does not fit column 'i', which is int8"),
        ({"i": 0.5}, r"0\.5 does not fit column 'i', which is int8"),
        ({"i": True}, r"True does not fit column 'i'"),
        ({"i": math.nan}, r"nan does not fit column 'i'"),
        ({"f": 2**24 + 1}, r"16777217 does not fit column 'f', which is float"),
        ({"f": 1e300}, r"1e\+300 does not fit column 'f', which is float"),
        ({"f": True}, r"True does not fit column 'f'"),
        ({"f": "0"}, r"'0' does not fit column 'f'"),
        ({"s": 0}, r"0 does not fit column 's', which is string"),
        ({"s": b"a"}, r"b'a' does not fit column 's', which is string"),
        ({"l": 1.5}, r"1\.5 does not fit column 'l', which is list<int64>"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_refused_at_open(fills, said, tmp_path):
    kinds = {"x": "double", "i": "int8", "f": "float", "s": "string"}
    table = pa.table({n: pa.array([None], k) for n, k in kinds.items()} | {"l": [[1]]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=said):
        read_index(config(tmp_path, fill_nulls=fills))


@pytest.mark.parametrize("fills", [["x"], {"x": None}, {"x": [1]}, "x"])
def test_fill_nulls_of_another_kind_is_refused_by_the_config(fills):
    with pytest.raises(SpecError, match=r"DataConfig\.fill_nulls is .*, must be a dict"):
        DataConfig("x", micro_batch_size=1, fill_nulls=fills)


def test_a_data_set_with_other_values_for_nulls_is_another_one(tmp_path):
    pq.write_table(pa.table({"x": [1.0, None]}), tmp_path / "a.parquet")
    indexes = [read_index(config(tmp_path, fill_nulls={"x": v})) for v in (0, 0.0, 1.0, math.nan)]
    assert len({index.digest for index in indexes}) == 3 and indexes[0].digest == indexes[1].digest
    assert difference(indexes[1], indexes[3]) == (
        "column 'x' was double, its nulls as 0.0, and is double, its nulls as nan"
    )
