"""CSV with other delimiters, encodings and words for null: training and `convert` read the same
rows, by any number of workers."""

from __future__ import annotations

import csv
import dataclasses
import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.config import DataConfig
from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data import read_index
from elastic_dp.data.discovery.index import Index
from elastic_dp.data.discovery.index_difference import difference
from elastic_dp.data.formats import text as text_format
from elastic_dp.data.formats.csv_dialect import Dialect
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError, SpecError
from tests.data.shards import any_content, rows_of
from tests.data.test_rows_in_rows_out import dealt, evaluated
from tests.data.values import in_place

ROWS = [
    {"id": i, "x": i / 4, "s": ('5" pipe', "a\nb", "a;b|c,d\te", "é", "", "plain")[i % 6] + str(i)}
    for i in range(96)
]
WRITTEN: dict[str, tuple[str, dict[str, Any] | None, str, str]] = {
    "semicolons": ("a.csv", {"delimiter": ";"}, ";", "utf-8"),
    "tsv": ("a.tsv", None, "\t", "utf-8"),
    "tsv.gz in Latin-1": ("a.tsv.gz", {"encoding": "latin-1"}, "\t", "latin-1"),
    "bars in cp1252": ("a.csv", {"delimiter": "|", "encoding": "cp1252"}, "|", "cp1252"),
    "UTF-16 by Excel": ("a.tsv", {"encoding": "utf-16"}, "\t", "utf-16"),
    "GB18030": ("a.csv", {"encoding": "gb18030"}, ",", "gb18030"),
}


def write(path: Path, rows: list[dict[str, Any]], delimiter: str, encoding: str) -> None:
    open_file: Any = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "wt", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def converted(source: Path, options: dict[str, Any] | None) -> DataConfig:
    out = source.parent / "out"
    convert(str(source), str(out), csv_options=options, rows_per_group=10)
    return DataConfig(str(out), micro_batch_size=3)


SHORT = ("semicolons", "UTF-16 by Excel")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.slow) for kind in WRITTEN],
)
def test_csv_with_options_has_the_same_rows_for_any_number_of_workers_and_converted(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 300)
    name, options, delimiter, encoding = WRITTEN[kind]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / name, ROWS, delimiter, encoding)
    config = DataConfig(str(tmp_path / "in"), csv_options=options, micro_batch_size=3)
    alone = dealt(config, 1)
    assert alone == dealt(config, 3)
    assert sorted((r for step in alone for r in step), key=lambda r: r["id"]) == ROWS
    assert evaluated(config, 3) == evaluated(converted(tmp_path / "in", options), 1) == ROWS
    groups = len(read_index(config).rows)
    assert (groups == 1) == (name.endswith(".gz") or encoding in ("utf-16", "gb18030"))
    found = inspect(str(tmp_path / "in"), csv_options=options, deep=True).findings
    assert not [one for one in found if one.kind == "refused"]


texts = st.lists(
    st.sampled_from(['"', '""', ",", ";", "|", "\t", "\n", "\r\n", "x", " ", "é", "007"]),
    max_size=12,
).map("".join)


@any_content
@given(
    fields=st.lists(st.tuples(texts, texts), min_size=1, max_size=8),
    delimiter=st.sampled_from([";", "|", "\t", ":", "~", "\x01"]),
    group_bytes=st.integers(1, 60),
)
def test_csv_of_any_fields_and_delimiter_has_the_rows_of_pythons_reader(
    fields, delimiter, group_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_format, "GROUP_BYTES", group_bytes)
    expected = [{"a": f"{one}z", "b": f"{two}z"} for one, two in fields]
    write(tmp_path / "a.csv", expected, delimiter, "latin-1")
    options = {"delimiter": delimiter, "encoding": "latin-1"}
    assert rows_of(tmp_path, csv_options=options)[0] == expected


def test_null_words_are_null_in_numbers_and_text_in_place_and_converted(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("x,s,n\n1,-,NA\n-,b,c\n3,NA,d\n")
    options = {"null_values": ["-"]}
    config = DataConfig(
        str(tmp_path / "in"), csv_options=options, fill_nulls={"x": 9}, micro_batch_size=1
    )
    wanted = {"x": [1, 9, 3], "s": [None, "b", "NA"], "n": ["NA", "c", "d"]}
    assert in_place(config) == wanted
    parts = converted(tmp_path / "in", options)
    assert in_place(dataclasses.replace(parts, fill_nulls={"x": 9})) == wanted
    plain = dataclasses.replace(config, csv_options=None, fill_nulls=None)
    assert in_place(plain)["x"] == ["1", "-", "3"]


def test_leading_zeros_are_named_with_any_delimiter(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("a;b\nx y;1\nz; 007\n")
    read_index(DataConfig(str(tmp_path), csv_options={"delimiter": ";"}, micro_batch_size=1))
    assert "' 007' (row 2 of a.csv)" in caplog.text


def test_csv_options_are_part_of_what_a_run_remembers(tmp_path):
    (tmp_path / "a.csv").write_text("x;y\n1;2\n3;4\n")
    config = DataConfig(str(tmp_path), csv_options={"delimiter": ";"}, micro_batch_size=1)
    index = read_index(config)
    other = read_index(
        dataclasses.replace(config, csv_options={"delimiter": ";", "null_values": ["-"]})
    )
    assert index.digest != other.digest
    message = difference(index, other)
    assert message is not None and message.startswith("csv_options were {")
    again = Index.from_bytes(index.to_bytes())
    assert again.csv == index.csv and again.digest == index.digest
    named = {"delimiter": None, "encoding": "utf8", "null_values": None}
    assert CsvOptions.of(named).identity == CsvOptions.of(None).identity == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sep": ";"}, "has no 'sep', only delimiter, encoding, null_values"),
        ({"delimiter": "||"}, r"\['delimiter'\] is '\|\|', must be one ASCII character"),
        ({"delimiter": "é"}, "must be one ASCII character"),
        ({"delimiter": "."}, "part of a number"),
        ({"encoding": "latin-9000"}, "must be an encoding of text that Python knows"),
        ({"encoding": "base64"}, "must be an encoding of text that Python knows"),
        ({"null_values": "NA"}, "must be a list of texts"),
        (";", "must be a dict"),
    ],
)
def test_csv_option_that_is_wrong_is_refused_by_name(options, message):
    with pytest.raises(SpecError, match=r"DataConfig\.csv_options.*" + message):
        DataConfig("a.csv", csv_options=options, micro_batch_size=1)


def test_csv_options_that_do_not_fit_the_files_are_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"x": 1}\n')
    options = {"delimiter": ";"}
    with pytest.raises(DataError, match="csv_options is set, and no file is CSV"):
        read_index(DataConfig(str(folder), csv_options=options, micro_batch_size=1))
    with pytest.raises(DataError, match=r"csv_options are set, and .* holds no CSV"):
        converted(folder, options)
    with pytest.raises(DataError, match=r"csv_options are set, and .* holds no CSV"):
        inspect(str(folder), csv_options=options)
    csv_folder = tmp_path / "csv"
    csv_folder.mkdir()
    (csv_folder / "a.csv").write_bytes(b"\xef\xbb\xbfx,y\n1,2\n")
    config = DataConfig(str(csv_folder), csv_options={"encoding": "latin-1"}, micro_batch_size=1)
    with pytest.raises(DataError, match="begins with the byte-order mark of UTF-8"):
        read_index(config)
    (csv_folder / "a.csv").write_bytes(b"x,y\n1,2\n3,\x81\n")
    config = dataclasses.replace(config, csv_options={"encoding": "cp1252"})
    with pytest.raises(DataError, match=r"after row 0, is not cp1252 .*0x81"):
        read_index(config)


def test_encodings_whose_characters_hold_ascii_bytes_are_not_cut():
    cut = ("utf-8", "latin-1", "cp1252", "iso8859-15", "koi8-r", "cp850", "mac-roman")
    whole = (
        "utf-16",
        "utf-32-le",
        "shift_jis",
        "gbk",
        "big5",
        "utf-7",
        "iso2022_jp",
        "cp037",
        "hz",
    )
    for name in cut + whole:
        dialect = Dialect.of("a.csv", CsvOptions.of({"encoding": name}))
        assert dialect.can_be_cut == (name in cut), name
