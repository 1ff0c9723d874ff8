"""`.json` files: one array of objects, or JSON Lines."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError
from tests.data.values import in_place

ROWS = [{"id": i, "s": f'"]}},[{{ \\ \n é {i}', "at": {"x": [i, i + 1]}} for i in range(5)]
WANTED = {
    "id": [r["id"] for r in ROWS],
    "s": [r["s"] for r in ROWS],
    "at.x": [r["at"]["x"] for r in ROWS],
}


def of(url: Path | str) -> DataConfig:
    return DataConfig(str(url), micro_batch_size=1)


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_has_the_rows_that_python_reads(indent, tmp_path, caplog):
    content = "\ufeff \n" + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\r\n"
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(content.encode()))
    assert in_place(of(tmp_path / "a.json")) == WANTED
    assert "files that are one JSON array, each of which is read as one row group" in caplog.text
    assert in_place(of(tmp_path / "b.json.gz")) == WANTED
    convert(str(tmp_path / "a.json"), str(tmp_path / "out"))
    assert pq.read_table(tmp_path / "out").to_pylist() == ROWS


def test_json_file_of_lines_is_read_as_json_lines(tmp_path, caplog):
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, ROWS)))
    assert in_place(of(tmp_path / "a.json")) == WANTED
    assert not caplog.records


def test_json_array_keeps_the_digits_of_numbers_or_refuses_them(tmp_path):
    (tmp_path / "a.json").write_text('[{"x": 9007199254740993}, {"x": 1.5}]')
    with pytest.raises(DataError, match="9007199254740993"):
        read_index(of(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"a": 1}, {"a": 2}', "row 2: the array must go on"),
        ('[{"a": 1}, {"a": ', "row 2"),
        ('[{"a": 1}, 7]', "row 2: it is another value than an object"),
        ('[{"a": 1}] [{"a": 2}]', "nothing behind it"),
        ('[{"a": 1},]', "row 2"),
        ('[{"a": 1, "a": 2}]', "row 1: the key 'a' is there twice"),
    ],
)
def test_json_array_that_is_damaged_is_refused_by_row(content, said, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=f"a.json is a JSON array, .*{said}"):
        read_index(of(tmp_path / "a.json"))


def test_json_array_without_objects_holds_no_row(tmp_path):
    (tmp_path / "a.json").write_text("[ ]")
    with pytest.raises(DataError, match="holds a row"):
        read_index(of(tmp_path / "a.json"))


def test_json_file_beside_shards_is_a_note_unless_the_url_names_it(tmp_path, caplog):
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    (tmp_path / "dataset_info.json").write_text('{"id": 7}')
    assert in_place(of(tmp_path)) == {"id": [1]}
    assert "1 .json (such as dataset_info.json)" in caplog.text
    assert in_place(of(f"{tmp_path}/*.json")) == {"id": [7]}


ORIENTS = ({}, {"orient": "index"}, {"orient": "split"}, {"orient": "table"})


@pytest.mark.parametrize("options", ORIENTS, ids=lambda o: o.get("orient", "default"))
@pytest.mark.parametrize("indent", [None, 2])
def test_table_of_pandas_that_is_one_object_is_refused(options, indent, tmp_path):
    """Read as JSON Lines, it is one row of as many columns as it has values."""
    frame = pd.DataFrame({'a "b"': [1, 2], "s": ["x", "y}"]}, index=[5, 7])
    frame.to_json(tmp_path / "a.json", indent=indent, **options)
    for act in (
        lambda: in_place(of(tmp_path / "a.json")),
        lambda: in_place(dataclasses.replace(of(tmp_path / "a.json"), columns=["s"])),
        lambda: convert(str(tmp_path / "a.json"), str(tmp_path / "out")),
    ):
        with pytest.raises(DataError, match=r"a\.json is one JSON object .* orient=\"records\""):
            act()
    assert "looks like a whole table" in str(inspect(str(tmp_path / "a.json")).findings)


def test_rows_with_numbers_as_keys_are_no_table(tmp_path):
    rows = [{"votes": {"0": 3, "1": i}} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert in_place(of(tmp_path)) == {"votes.0": [3, 3, 3], "votes.1": [0, 1, 2]}


def test_json_file_of_a_single_row_is_said(tmp_path, caplog):
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"x": 1}, {"x": 2}]}))
    for act in (
        lambda: in_place(of(tmp_path / "a.json")),
        lambda: convert(str(tmp_path / "a.json"), str(tmp_path / "out")),
    ):
        caplog.clear()
        act()
        assert "single row" in caplog.text and "row 1 of a.json" in caplog.text
