"""Columns that only the names of folders hold: training reads them, and `convert` writes them."""

import dataclasses
import logging

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.shard_index import Index
from tests.data.shards import refused
from tests.data.values import in_place


def by_duckdb(folder):
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


def years(folder, ending):
    for year in (2024, 2025):
        inside = folder / f"year={year}"
        inside.mkdir(parents=True)
        frame = pl.DataFrame({"id": [year, 1]})
        write = {"arrow": frame.write_ipc, "parquet": frame.write_parquet}
        write[ending](inside / f"a.{ending}")


def test_column_of_the_files_is_used_where_folders_hold_it_too(tmp_path):
    folder = tmp_path / "in" / "k=7"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"k": [1, 2]}), folder / "a.parquet")
    assert in_place(DataConfig(f"{tmp_path}/in/**", micro_batch_size=1)) == {"k": [1, 2]}


@pytest.mark.parametrize("columns", [None, ["id", "year", "zip", "city"]])
def test_training_reads_the_columns_that_duckdb_has_in_names_of_folders(columns, tmp_path, caplog):
    rows = by_duckdb(tmp_path / "in")
    found = in_place(DataConfig(f"{tmp_path}/in/**", micro_batch_size=1, columns=columns))
    rows_found = [
        dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)
    ]
    assert sorted(rows_found, key=lambda row: row["id"]) == rows
    assert not caplog.records


def test_column_in_names_of_folders_can_be_left_out_or_read_alone(tmp_path):
    by_duckdb(tmp_path / "in")
    url = f"{tmp_path}/in/**"
    assert list(in_place(DataConfig(url, micro_batch_size=1, columns=["id"]))) == ["id"]
    found = in_place(DataConfig(url, micro_batch_size=1, columns=["year"]))
    assert {name: sorted(values) for name, values in found.items()} == {
        "year": [2024, 2024, 2025, 2025]
    }


def test_columns_in_names_of_listed_files_are_those_below_what_they_share(tmp_path):
    by_duckdb(tmp_path / "day=1")
    files = [str(file) for file in sorted((tmp_path / "day=1").rglob("*.parquet"))]
    found = in_place(DataConfig(files, micro_batch_size=1))
    assert set(found) == {"id", "year", "zip", "city"}
    assert sorted(found["year"]) == [2024, 2024, 2025, 2025]


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_training_reads_columns_in_names_of_folders_of_any_format(ending, tmp_path):
    years(tmp_path / "in", ending)
    url = f"{tmp_path}/in/**"
    found = in_place(DataConfig(url, micro_batch_size=1))
    assert found == {"id": [2024, 1, 2025, 1], "year": [2024, 2024, 2025, 2025]}
    assert in_place(DataConfig(url, micro_batch_size=1, columns=["year", "id"])) == found


def test_null_number_in_names_of_folders_is_refused_or_left_out(tmp_path):
    years(tmp_path / "in", "parquet")
    (tmp_path / "in/year=2025").rename(tmp_path / "in/year=__HIVE_DEFAULT_PARTITION__")
    config = DataConfig(f"{tmp_path}/in/**", micro_batch_size=1)
    refused(config, r"column 'year' \(int64\) holds 2 nulls")
    some = in_place(dataclasses.replace(config, filter=pc.field("year").is_valid()))
    assert sorted(some["year"]) == [2024, 2024]


@pytest.mark.parametrize("beside", ["a.parquet", "month=1/a.parquet", "year=1/a.parquet"])
def test_column_that_only_a_part_of_the_folders_has_is_refused_by_name(beside, tmp_path):
    years(tmp_path / "in", "parquet")
    (tmp_path / "in" / beside).parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": [7], "year": [7]}), tmp_path / "in" / beside)
    config = DataConfig(f"{tmp_path}/in/**", micro_batch_size=1)
    refused(config, r"the column '(year|month)' of .* is in the name of its f")
    assert 7 in in_place(dataclasses.replace(config, columns=["id"]))["id"]


def test_digest_changes_with_the_names_of_partition_folders(tmp_path):
    """Also where the index has no names of folders, as for a list of files."""
    for name in ("one", "other"):
        years(tmp_path / name, "parquet")
    (tmp_path / "other/year=2025").rename(tmp_path / "other/year=2026")
    digests = set()
    for name in ("one", "other"):
        files = [str(file) for file in sorted((tmp_path / name).rglob("*.parquet"))]
        index = read_index(DataConfig(files, micro_batch_size=1))
        assert Index.from_bytes(index.to_bytes()).digest == index.digest
        digests.add(index.digest)
    assert len(digests) == 2


def test_shards_of_a_folder_with_a_sign_in_its_name_have_no_such_columns(tmp_path, caplog):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    caplog.set_level(logging.WARNING)
    assert in_place(DataConfig(str(folder), micro_batch_size=1)) == {"id": [1]}
    assert not caplog.records
