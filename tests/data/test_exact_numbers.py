"""Numbers of CSV and JSON Lines are what the file says, or are refused by column, row and way out:
never rounded."""

from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import csv_numbers
from elastic_dp.data.formats.csv_dialect import Dialect
from elastic_dp.dataprep import convert
from elastic_dp.errors import DataError
from tests.data.values import columns_of, in_place

BIG, BETWEEN, INT64 = 2**63 + 5, 2**53 + 1, 2**63 - 1
HALF = 0.5


def written(folder: Path, ending: str, *files: list[Any]) -> DataConfig:
    """Each file has a column `id`, which is 7, and a column `x` with these values."""
    for number, values in enumerate(files):
        if ending.startswith("csv"):
            content = "id,x\n" + "".join(f"7,{value}\n" for value in values)
        else:
            content = "".join(json.dumps({"id": 7, "x": value}) + "\n" for value in values)
        packed = gzip.compress(content.encode()) if ending.endswith("gz") else content.encode()
        (folder / f"{number}.{ending}").write_bytes(packed)
    return DataConfig(str(folder), micro_batch_size=1)


def read(config: DataConfig, **options: Any) -> list[Any]:
    """Also by `convert`, with the same outcome."""
    found = in_place(DataConfig(str(config.url), micro_batch_size=1, **options))
    to = Path(str(config.url)) / "to"
    convert(str(config.url), str(to), **options)
    assert columns_of(pq.read_table(to)) == found
    return found.get("x", found["id"])


def refused(config: DataConfig, *words: str) -> None:
    for act in in_place, lambda c: convert(str(c.url), str(Path(str(c.url)) / "to")):
        with pytest.raises(DataError) as error:
            act(config)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "csv.gz", "jsonl.gz"])
@pytest.mark.parametrize(
    ("files", "number", "row"),
    [
        ([[3, BIG]], BIG, "row 2 of 0"),
        ([[3], [4, -BIG]], -BIG, "row 2 of 1"),
        ([[HALF, BETWEEN]], BETWEEN, "row 2 of 0"),
        ([[BETWEEN], [HALF]], BETWEEN, "row 1 of 0"),
        ([[HALF], [3, INT64]], INT64, "row 2 of 1"),
        ([[10**30]], 10**30, "row 1 of 0"),
    ],
)
def test_whole_number_that_the_column_would_round_is_refused(ending, files, number, row, tmp_path):
    refused(
        written(tmp_path, ending, *files),
        "column 'x' is double",
        f"{number} ({row}.{ending})",
        "text",
    )


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(
    "files",
    [
        [[INT64, -INT64 - 1, BETWEEN]],
        [[HALF, 2**53, -(2**53)]],
        [[HALF, 10**20], [2**62]],
        [[1e300, 1.2345678901234567e20, 3]],
    ],
)
def test_whole_number_that_the_column_holds_is_read(ending, files, tmp_path):
    wanted = [value for file in files for value in file]
    found = read(written(tmp_path, ending, *files))
    assert [type(wanted[0])(value) for value in wanted] == found
    assert [int(value) for value in found] == [int(value) for value in wanted]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_whole_number_that_is_rounded_is_left_out_with_its_column(ending, tmp_path):
    assert read(written(tmp_path, ending, [BIG, HALF]), columns=["id"]) == [7, 7]


def test_whole_number_in_a_column_of_text_is_text(tmp_path):
    assert read(written(tmp_path, "csv", [BIG, "word"])) == [str(BIG), "word"]
    for file in tmp_path.glob("to/*"):
        file.unlink()
    (tmp_path / "to").rmdir()
    (tmp_path / "0.csv").unlink()
    assert read(written(tmp_path, "jsonl", [str(BIG)])) == [str(BIG)]


@pytest.mark.parametrize(
    ("value", "name"),
    [([1, BIG], "x"), ({"a": BIG}, "x.a"), ([{"a": [[HALF, BETWEEN]]}, {"b": 1}], "x.a")],
)
def test_whole_number_within_a_value_of_json_is_refused(value, name, tmp_path):
    simple = json.loads(json.dumps(value).replace(str(BIG), "1").replace(str(BETWEEN), "1"))
    refused(written(tmp_path, "jsonl", [simple, value]), f"column '{name}' is double", "row 2 of 0")


def test_row_of_a_whole_number_counts_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.text.GROUP_BYTES", 64)
    values = [*range(50), BIG, *range(50)]
    refused(written(tmp_path, "csv", values), f"{BIG} (row 51 of 0.csv)")
    (tmp_path / "0.csv").unlink()
    refused(written(tmp_path, "jsonl", values), f"{BIG} (row 51 of 0.jsonl)")


def test_hexadecimal_number_that_wraps_around_is_refused(tmp_path):
    refused(written(tmp_path, "csv", ["0xFFFFFFFFFFFFFFFF"]), "column 'x' of row 1", "int64")
    assert read(written(tmp_path, "csv", ["0x7FFFFFFFFFFFFFFF", "-3"])) == [INT64, -3]


def test_number_beyond_float64_is_refused(tmp_path):
    refused(written(tmp_path, "csv", [HALF, "1e400"]), "column 'x'", "1e400 (row 2 of 0.csv)")
    assert read(written(tmp_path, "csv", [HALF, "inf"])) == [HALF, float("inf")]


def test_whole_numbers_of_parquet_beside_floats_of_csv_are_refused(tmp_path):
    (tmp_path / "csv").mkdir()
    pq.write_table(pa.table({"id": [1], "x": [BETWEEN]}), tmp_path / "a.parquet")
    urls = [str(tmp_path / "a.parquet"), str(written(tmp_path / "csv", "csv", [HALF]).url)]
    with pytest.raises(DataError, match="'x'"):
        in_place(DataConfig(urls, micro_batch_size=1))


def test_numbers_with_an_exponent_are_not_looked_at_one_by_one(tmp_path, monkeypatch):
    """Each of them is beyond 2**53, and none is written as a whole number."""
    asked: list[Any] = []
    monkeypatch.setattr(csv_numbers, "add_written", lambda *given: asked.append(given))
    lines = "".join(f"{n},{n / 7}e18\n" for n in range(1, 1000))
    (tmp_path / "a.csv").write_text("id,x\n" + lines)
    assert read_index(DataConfig(str(tmp_path), micro_batch_size=1)).num_rows == 999
    assert not asked


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([["12", "01234"], ["0042"]], "'01234' (row 2 of 0"),
        ([["12"], ["7", '"0042"']], "'0042' (row 2 of 1"),
        ([["01234"]], "'01234' (row 1 of 0"),
        ([["5", " 007"]], "' 007' (row 2 of 0"),
        ([["5", "+007"]], "'+007' (row 2 of 0"),
        ([["5", "-012"]], "'-012' (row 2 of 0"),
        ([["5", " -012"]], "' -012' (row 2 of 0"),
        ([["-0.5", '"-012"']], "'-012' (row 2 of 0"),
        ([["0.5", "007"]], "'007' (row 2 of 0"),
    ],
)
def test_leading_zeros_that_a_column_of_numbers_loses_are_said_once(
    files, said, ending, tmp_path, caplog
):
    config = written(tmp_path, ending, *files)
    with caplog.at_level(logging.WARNING):
        read_index(config)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "column 'x' is read as" in warnings[0] and said in warnings[0]
    caplog.clear()
    convert(str(config.url), str(tmp_path / "to"))
    assert [said in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "files",
    [
        [["01234", "A-7"]],  # text
        [["0", "10", "100", "0.5", "-0.25", "0"]],
        [["2026-01-02 05:30", "00:01:07"]],
        [["2026-01-02", "2026-01-03"]],
        [['"a 0123 b"', '"0123,"']],
        [["0x0F", "10"]],
    ],
)
def test_leading_zeros_that_no_column_loses_are_not_said(files, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        read_index(written(tmp_path, "csv", *files))
    assert not caplog.records


def test_leading_zeros_of_a_column_that_is_not_read_are_not_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        read_index(
            DataConfig(written(tmp_path, "csv", ["007"]).url, micro_batch_size=1, columns=["id"])
        )
    assert not caplog.records


@pytest.mark.parametrize("code", ["051", "-051"])
@pytest.mark.parametrize("at_once", [6, 7, 8, 9, 10])
def test_row_of_leading_zeros_counts_from_the_start_of_the_file(
    code, at_once, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("elastic_dp.data.formats.text.GROUP_BYTES", 64)
    monkeypatch.setattr(csv_numbers, "_AT_ONCE", at_once)
    read_index(written(tmp_path, "csv", [*range(1, 50), code, *range(52, 99)]))
    assert f"'{code}' (row 50 of 0.csv)" in caplog.text


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.text("0017xX -+.a", max_size=5), st.booleans()), min_size=1),
        min_size=1,
        max_size=5,
    ),
    delimiter=st.sampled_from([",", ";", "|", "\t"]),
    end=st.sampled_from(["", "\n", "\r\n"]),
    at_once=st.integers(1, 9),
)
def test_a_field_that_begins_with_a_zero_is_never_missed(rows, delimiter, end, at_once):
    """The search in bytes may find too much, and then the fields are looked at one by one."""
    fields = [field for row in rows for field, _ in row]
    lines = (delimiter.join(f'"{f}"' if quoted else f for f, quoted in row) for row in rows)
    content = ("\r\n" if end == "\r\n" else "\n").join(lines) + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_numbers, "_AT_ONCE", at_once)
        hexadecimal, zeros = csv_numbers._zero_first(content.encode(), Dialect(delimiter))
    assert hexadecimal or not any(re.match("[ \t]*0[xX]", field) for field in fields)
    assert zeros or not any(re.fullmatch("[ \t]*[+-]?0[0-9]+[ \t]*", field) for field in fields)
