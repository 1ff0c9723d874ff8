"""Columns that only the names of folders hold: `convert` writes them, and training says that it
does not read them."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.dataprep import convert
from elastic_dp.errors import DataError
from tests.data.values import in_place


def converted(url: str | Path, to: Path, **options) -> list[dict]:
    convert(str(url), str(to), **options)
    return pq.read_table(to).to_pylist()


def by_duckdb(folder: Path) -> list[dict]:
    """Four rows in three folders; "zip" begins with a zero, and one "city" is null."""
    query = (
        "SELECT * FROM (VALUES (0, 2024, '01234', 'a b/ü'), (1, 2024, '01234', 'a b/ü'), (2, "
        "2025, '12345', 'x=y'), "
        "(3, 2025, '12345', NULL)) t(id, year, zip, city)"
    )
    with duckdb.connect() as connection:
        connection.sql(
            f"COPY ({query}) TO '{folder}' (FORMAT parquet, PARTITION_BY (year, zip, city))"
        )
        return connection.sql(query).to_arrow_table().to_pylist()


@pytest.mark.parametrize("glob", ["", "/**", "/**/*.parquet", "/*/*/*/*.parquet"])
def test_convert_writes_the_columns_that_duckdb_has_in_names_of_folders(glob, tmp_path):
    rows = by_duckdb(tmp_path / "in")
    found = converted(f"{tmp_path / 'in'}{glob}", tmp_path / "out")
    assert sorted(found, key=lambda row: row["id"]) == rows
    kinds = pq.read_schema(next((tmp_path / "out").glob("*")))
    assert kinds.field("year").type == pa.int64() and kinds.field("zip").type == pa.string()


def test_convert_writes_the_columns_that_polars_has_in_names_of_folders(tmp_path):
    days = [datetime.date(2024, 1, 1 + i // 2) for i in range(4)]
    frame = pl.DataFrame({"id": range(4), "day": days})
    frame.write_parquet(pl.PartitionBy(tmp_path / "in", key="day", include_key=False), mkdir=True)
    found = converted(tmp_path / "in", tmp_path / "out")
    wanted = [{"id": i, "day": str(day)} for i, day in enumerate(days)]
    assert sorted(found, key=lambda row: row["id"]) == wanted


@pytest.mark.parametrize("ending", ["csv", "jsonl", "arrow"])
def test_convert_writes_columns_in_names_of_folders_of_any_format(ending, tmp_path):
    for year in (2024, 2025):
        folder = tmp_path / "in" / f"year={year}"
        folder.mkdir(parents=True)
        frame = pl.DataFrame({"id": [year, 1]})
        write = {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "arrow": frame.write_ipc}
        write[ending](folder / f"a.{ending}")
    rows = converted(tmp_path / "in", tmp_path / "out")
    assert rows == [{"id": i, "year": y} for y in (2024, 2025) for i in (y, 1)]
    rows = converted(tmp_path / "in", tmp_path / "2", columns=["year", "id"])
    assert list(rows[0]) == ["year", "id"]
    assert converted(tmp_path / "in", tmp_path / "3", columns=["id"])[0] == {"id": 2024}


def test_column_of_the_files_is_used_where_folders_hold_it_too(tmp_path):
    folder = tmp_path / "in" / "k=7"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"k": [1, 2]}), folder / "a.parquet")
    assert converted(tmp_path / "in", tmp_path / "out") == [{"k": 1}, {"k": 2}]


def test_column_only_in_names_of_folders_is_said_in_training(tmp_path, caplog):
    by_duckdb(tmp_path / "in")
    assert sorted(in_place(DataConfig(f"{tmp_path}/in/**", micro_batch_size=1))) == ["id"]
    assert "only the names of folders hold the columns 'year', 'zip', 'city'" in caplog.text
    caplog.clear()
    in_place(DataConfig(f"{tmp_path}/in/**", micro_batch_size=1, columns=["id"]))
    assert not caplog.records


def test_column_only_in_names_of_listed_files_is_said_in_training(tmp_path, caplog):
    by_duckdb(tmp_path / "day=1")
    files = [str(file) for file in sorted((tmp_path / "day=1").rglob("*.parquet"))]
    read_index(DataConfig(files, micro_batch_size=1))
    assert "only the names of folders hold the columns 'year', 'zip', 'city'" in caplog.text
    assert "'day'" not in caplog.text


def test_column_only_in_names_of_folders_that_is_asked_for_is_refused(tmp_path):
    by_duckdb(tmp_path / "in")
    with pytest.raises(
        DataError, match=r"only the names of folders hold the column 'year'.*data convert"
    ):
        read_index(DataConfig(f"{tmp_path}/in/**", micro_batch_size=1, columns=["id", "year"]))


def test_shards_of_a_folder_with_a_sign_in_its_name_have_no_such_columns(tmp_path, caplog):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    caplog.set_level(logging.WARNING)
    assert in_place(DataConfig(str(folder), micro_batch_size=1)) == {"id": [1]}
    assert not caplog.records
    assert converted(folder, tmp_path / "out") == [{"id": 1}]
