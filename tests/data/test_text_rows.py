"""CSV and JSON Lines as people have them: `convert` and training read the same rows, and refuse the
same files.

Beside pyarrow on the whole file and Python's csv module.
"""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_dp.data import read_index
from elastic_dp.data.formats import csv_row_ends
from elastic_dp.data.formats import text as text_format
from elastic_dp.data.formats.csv_row_ends import RowEnds
from elastic_dp.dataprep import convert, inspect
from elastic_dp.dataprep.sources import find_source, open_rows
from elastic_dp.errors import DataError
from tests.data.shards import any_content, rows_of
from tests.data.test_formats import ends_quoted, quote
from tests.data.test_index import config


def converted(path: Path, columns: list[str] | None = None) -> list[dict]:
    """The rows that `convert` would write."""
    rows = open_rows(find_source(str(path)), columns)
    return pa.Table.from_batches(rows.batches(), rows.schema).to_pylist()


def read_whole(path: Path, types: pa.Schema) -> list[dict]:
    return pa.csv.read_csv(
        path,
        pa.csv.ReadOptions(use_threads=False, block_size=1 << 20),
        pa.csv.ParseOptions(newlines_in_values=True),
        pa.csv.ConvertOptions(column_types=types),
    ).to_pylist()


# --- CSV: where rows end


def test_convert_csv_with_a_quote_within_a_field_keeps_all_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a\n5" pipe\n' + b'"a\nb"\n' * 30_000)
    assert convert(str(tmp_path / "a.csv"), str(tmp_path / "out")).rows == 30_001
    assert converted(tmp_path / "a.csv") == [{"a": '5" pipe'}] + [{"a": "a\nb"}] * 30_000


texts = st.lists(
    st.sampled_from(['"', '""', '"""', ",", "\n", "\r", "\r\n", "x", " ", "é", "\n\n"]), max_size=25
).map("".join)


@settings(max_examples=120, deadline=None)
@given(content=texts, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9))
@example(content='"""', sizes=[1])
@example(content='x"y\n"a\nb"\n', sizes=[2])
def test_row_ends_of_any_text_and_cut_lie_outside_of_quotes(content, sizes):
    """Each cut is at a row end for a reader that goes character by character, and none is missed
    for ever."""
    encoded, ends, cuts, at = content.encode(), RowEnds(), [], 0

    def is_quoted(upto: int) -> bool:
        return ends_quoted(encoded[:upto].decode("latin-1"))

    while at < len(encoded):
        chunk = encoded[at : at + sizes[len(cuts) % len(sizes)]]
        end = ends.last(chunk)
        if end:
            cuts.append(at + end)
        newlines = [at + place + 1 for place in range(end, len(chunk)) if chunk[place] == ord("\n")]
        assert all(is_quoted(upto) for upto in newlines)
        at += len(chunk)
    for cut in cuts:
        assert encoded[cut - 1 : cut] in (b"\n", b"\r") and not is_quoted(cut)
        assert encoded[cut - 1 : cut + 1] != b"\r\n"
    assert ends.is_quoted == ends_quoted(content)


@settings(max_examples=120, deadline=None)
@given(chunks=st.lists(texts, min_size=1, max_size=4), at_once=st.integers(1, 6))
@example(chunks=["x\ry\r", "z"], at_once=2)
@example(chunks=['a"\n"\r', '\n"b\n'], at_once=3)
def test_row_ends_do_not_depend_on_how_many_bytes_are_looked_at_together(chunks, at_once):
    def found() -> list[tuple[int, bool]]:
        ends = RowEnds()
        return [(ends.last(chunk.encode()), ends.is_quoted) for chunk in chunks]

    expected = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_row_ends, "_AT_ONCE", at_once)
        assert found() == expected


@any_content
@given(
    fields=st.lists(st.tuples(texts, texts), min_size=1, max_size=8),
    quoted=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
    last=st.booleans(),
    group_bytes=st.integers(1, 60),
)
def test_csv_of_any_fields_is_the_same_to_convert_training_pyarrow_and_python(
    fields, quoted, end, last, group_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_format, "GROUP_BYTES", group_bytes)
    expected = [{"a": f"{one}z", "b": f"{two}z"} for one, two in fields]

    def written(field: str) -> str:  # Python's writer leaves a "\r" unquoted
        return '"' + field.replace('"', '""') + '"' if quoted else quote(field)

    rows = [["a", "b"], *(list(row.values()) for row in expected)]
    content = "".join(",".join(map(written, row)) + end for row in rows)
    path = tmp_path / "a.csv"
    path.write_bytes((content if last else content.removesuffix(end)).encode())
    types = pa.schema([("a", pa.string()), ("b", pa.string())])
    assert read_whole(path, types) == expected
    with open(path, newline="") as file:
        assert [dict(zip("ab", row, strict=True)) for row in csv.reader(file) if row][
            1:
        ] == expected
    assert rows_of(tmp_path)[0] == expected
    assert converted(path) == expected


@any_content
@given(
    rows=st.lists(texts, min_size=1, max_size=8),
    end=st.sampled_from(["", "\n", "\r\n", '"\n', '\n"\n']),
    group_bytes=st.integers(1, 30),
)
def test_csv_of_any_text_is_the_same_to_convert_training_and_pyarrow(
    rows, end, group_bytes, tmp_path, monkeypatch
):
    """One column, so no row is ragged but by a comma; such files, and open quotes, all refuse."""
    monkeypatch.setattr(text_format, "GROUP_BYTES", group_bytes)
    content = "a\n" + "\n".join(f"{row}z" for row in rows) + end
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode())
    try:
        expected = read_whole(path, pa.schema([("a", pa.string())]))
    except pa.ArrowException:
        expected = None
    if expected is None or ends_quoted(content):
        with pytest.raises(DataError):
            rows_of(tmp_path)
        with pytest.raises(DataError):
            converted(path)
        return
    assert rows_of(tmp_path)[0] == expected
    assert converted(path) == expected


def test_csv_value_that_begins_with_a_byte_order_mark_keeps_it(tmp_path, monkeypatch):
    """pyarrow takes a mark away from the start of all that it is given, and convert gives it a file
    in pieces."""
    monkeypatch.setattr(text_format, "GROUP_BYTES", 8)
    content = "\ufeffa,b\n" + "\ufeff1,2\n" * 6
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    expected = [{"a": "\ufeff1", "b": 2}] * 6
    assert converted(tmp_path / "a.csv") == rows_of(tmp_path)[0] == expected


def test_csv_lines_of_spaces_are_rows_and_blank_lines_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 2)
    (tmp_path / "a.csv").write_bytes(b'a\n  \n\nx\n""\n \n\n')
    expected = [{"a": "  "}, {"a": "x"}, {"a": ""}, {"a": " "}]
    assert rows_of(tmp_path)[0] == converted(tmp_path / "a.csv") == expected


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_in_csv_of_one_column_are_said(end, tmp_path, monkeypatch, caplog):
    """Polars writes nulls so; blank lines in quotes are text."""
    monkeypatch.setattr(text_format, "GROUP_BYTES", 8)
    lines = ["x", "1", "", "3", '"4', "", '5"', "", "", "6", ""]
    (tmp_path / "a.csv").write_text(end.join(lines), newline="")
    expected = [{"x": "1"}, {"x": "3"}, {"x": f"4{end}{end}5"}, {"x": "6"}]
    for read in lambda: rows_of(tmp_path)[0], lambda: converted(tmp_path / "a.csv"):
        caplog.clear()
        assert read() == expected
        assert "blank lines of CSV files with one column are not rows" in caplog.text
        assert ": 3, such as behind row 1 of a.csv" in caplog.text
    caplog.clear()
    (tmp_path / "a.csv").write_text("x,y\n1,2\n\n3,4\n")
    rows_of(tmp_path)
    assert "blank" not in caplog.text


values = st.sampled_from(["1", "2.5", "true", "0", "NA", "", "2026-01-02", "word", "-7", "False"])


@any_content
@given(
    rows=st.lists(st.tuples(values, st.just("x")), min_size=1, max_size=6),
    group_bytes=st.integers(1, 30),
)
def test_csv_types_do_not_depend_on_where_it_is_cut(rows, group_bytes, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "".join(f"{one},{two}\n" for one, two in rows))
    types = []
    for size in (4 << 20, group_bytes):
        monkeypatch.setattr(text_format, "GROUP_BYTES", size)
        types.append(open_rows(find_source(str(path))).schema)
        try:
            types.append(read_index(config(path)).schema)
        except DataError:  # every value is null
            types.append(None)
    assert types[0] == types[2] and types[1] == types[3]


@pytest.mark.parametrize(
    "row",
    [
        '"' + "a\n" * 40_000 + '"',
        '"' + '""' * 40_000 + '"',
        'x"' * 40_000,
        '"a\n"' * 20_000,
        '"' * 80_000,
    ],
    ids=["newlines", "doubled quotes", "quotes in a field", "odd quotes", "only quotes"],
)
def test_csv_of_one_long_row_is_looked_at_once(row, tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 1 << 10)
    seen = []
    last = RowEnds.last
    monkeypatch.setattr(
        RowEnds, "last", lambda ends, content: seen.append(len(content)) or last(ends, content)
    )
    path = tmp_path / "a.csv"
    path.write_text(f"a\n{row}\nlast\n")
    found = converted(path)
    assert [found[-1], len(found)] == [
        {"a": "last"},
        rows_of(tmp_path)[1] and sum(rows_of(tmp_path)[1]),
    ]
    assert sum(seen) < 6 * path.stat().st_size  # two passes of `convert`, two scans by `rows_of`


def test_csv_row_longer_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 100)
    monkeypatch.setattr(text_format, "ROW_BYTES", 1 << 20)
    (tmp_path / "a.csv").write_bytes(b'a\nx\n"' + b"y\n" * (1 << 20))
    for read in (rows_of, lambda folder: converted(folder / "a.csv")):
        with pytest.raises(DataError, match=r"a\.csv has a row of more than 1 MiB, or a quote"):
            read(tmp_path)


def test_csv_with_carriage_returns_alone_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 100)
    (tmp_path / "a.csv").write_bytes(b"a,b\r" + b'1,"x\r\ny"\r' * 100)
    rows, counts = rows_of(tmp_path)
    assert rows == converted(tmp_path / "a.csv") == [{"a": 1, "b": "x\r\ny"}] * 100
    assert len(counts) > 5


# --- what is refused, by training, `convert` and `inspect` alike


def refused_by_all(path: Path, **changes) -> str:
    """What they say, which is one text."""
    with pytest.raises(DataError) as in_training:
        read_index(config(path, **changes))
    with pytest.raises(DataError) as by_convert:
        convert(str(path), str(path.parent / "out"), **changes)
    assert str(in_training.value) == str(by_convert.value)
    (finding,) = (f for f in inspect(str(path), **changes).findings if f.name == "unreadable")
    assert finding.kind == "refused" and f"{finding.message}; {finding.fix}" == str(
        by_convert.value
    )
    return str(by_convert.value)


CSV_REFUSED = {
    "duplicates": (b"a,b,a,c,b\n1,2,3,4,5\n", "has several columns named 'a', 'b'; rename"),
    "semicolons": (
        b"id;name\n1;x\n",
        'has semicolons and no comma .*pandas.*sep=";".*quote it in the file',
    ),
    "quoted semicolons": (b'"id";"name"\n1;x\n', "has semicolons and no comma"),
    "decimal commas": (b"a;b\n1,5;2,5\n", "has semicolons and no comma"),
    "tabs": (b"id\tname\n1\tx\n", r'has tabs and no comma .*sep="\\t"'),
    "bars": (b"id|name\n1|x\n", 'has vertical bars and no comma .*sep="[|]"'),
    "latin-1": (
        "a,b\n1,x\n2,caf\xe9\n".encode("latin-1"),
        "column 'b' of row 2 is not UTF-8: b'caf.xe9'; .*iconv -f LATIN1 -t UTF-8 a.csv",
    ),
    "excel": (b"sep=,\na,b\n1,2\n", "begins with 'sep=,'.*; remove the line: sed 1d a.csv"),
    "latin-1 header": (
        "a,\xe9\n1,x\n".encode("latin-1"),
        "header line that is not UTF-8; .*iconv -f LATIN1",
    ),
    "utf-16": (
        "a,b\n1,2\n".encode("utf-16"),
        "is UTF-16; write it as UTF-8: iconv -f UTF-16 -t UTF-8 a.csv",
    ),
    "utf-16 without a mark": ("a,b\n1,2\n".encode("utf-16-le"), "zero bytes in its header line"),
    "fewer fields": (b"a,b\n1,2\n\n3\n", "row 2 has 1 field.*header line has 2; .*'3'"),
    "more fields": (b"a,b\n1,2\n3,4,5\n", "row 2 has 3 field.*header line has 2; .*'3,4,5'"),
    "open quote": (b'a,b\n1,2\n3,"x\n4,5\n', r'a quote \("\) in row 2 is never closed'),
    "open quote first": (b'a,b\n1,2\n"3,x\n4,5\n', r'a quote \("\) in row 2 is never closed'),
    "open quote of a number": (b'a,b\n1,2\n3,"4\n', r'a quote \("\) in row 2 is never closed'),
    "open quote of nothing": (b'a,b\n1,2\n3,"\n', r'a quote \("\) in row 2 is never closed'),
    "open quote in one column": (b'a\n1\n"4\n', r'a quote \("\) in row 2 is never closed'),
    "no rows": (b"a,b", "no header line of column names with rows below"),
}


@pytest.mark.parametrize(("content", "words"), CSV_REFUSED.values(), ids=CSV_REFUSED)
def test_csv_that_cannot_be_read_is_refused_by_name(content, words, tmp_path):
    (tmp_path / "a.csv").write_bytes(content)
    said = refused_by_all(tmp_path / "a.csv")
    assert "a.csv" in said
    with pytest.raises(DataError, match=words):
        raise DataError(said)


def test_compressed_csv_is_refused_as_a_plain_one(tmp_path):
    for name in ("open quote", "duplicates", "latin-1", "semicolons", "utf-16"):
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(CSV_REFUSED[name][0]))
        refused_by_all(tmp_path / "a.csv.gz")


def test_csv_columns_that_are_not_wanted_may_be_doubled_or_not_utf_8(tmp_path):
    (tmp_path / "a.csv").write_bytes("a,b,b,c\n1,2,3,\xe9\n4,5,6,x\n".encode("latin-1"))
    assert converted(tmp_path / "a.csv", ["a"]) == rows_of(tmp_path, columns=["a"])[0]
    assert converted(tmp_path / "a.csv", ["a"]) == [{"a": 1}, {"a": 4}]
    assert "'b'" in refused_by_all(tmp_path / "a.csv", columns=["a", "b"])


@pytest.mark.parametrize("header", ['"a;b"', '"a\tb"', '"a ""b""|c"'])
def test_csv_of_one_column_with_a_separator_in_its_quoted_name_is_read(header, tmp_path):
    (tmp_path / "a.csv").write_text(f"{header}\nx;y\n")
    (row,) = converted(tmp_path / "a.csv")
    assert list(row.values()) == ["x;y"] and [row] == rows_of(tmp_path)[0]


def test_csv_errors_count_rows_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 20)
    good = b'1,"x\ny"\n\n' * 50
    for last in (b"2,\xe9\n", b"2\n", b'2,"\n'):
        (tmp_path / "a.csv").write_bytes(b"a,b\n" + good + last)
        with pytest.raises(DataError, match="row 51 "):
            read_index(config(tmp_path))
        with pytest.raises(DataError, match="row 51 "):
            converted(tmp_path / "a.csv")


JSON_REFUSED = {
    "array": (
        b'[\n{"a": 1},\n{"a": 2}\n]\n',
        "is a JSON array.* one object a line; rewrite it: jq -c '.\\[\\]' a.jsonl",
    ),
    "cut off": (
        b'{"a": 1}\n{"a": 2}\n{"a": ',
        "row 3 is not a JSON object on one line .*begins with b'{\"a\": '",
    ),
    "cut off in a number": (b'{"a": 1}\n{"a": 12', "row 2 is not a JSON object"),
    "duplicate keys": (
        b'{"a": 1}\n\n{"a": 1, "a": 2}\n',
        "row 2 is not a JSON object on one line .the key 'a' is there twice",
    ),
    "duplicate inner keys": (
        b'{"o": {"a": 1, "a": 2}}\n',
        "row 1 is not a JSON object on one line .the key 'a' is there twice",
    ),
    "null first": (b'null\n{"a": 1}\n', "row 1 is not a JSON object"),
    "null": (b'{"a": 1}\n \tnull\n', "row 2 is not a JSON object"),
    "null behind": (b'{"a": "null"} null\n', "row 1 is not a JSON object"),
    "number": (b'{"a": 1}\n3\n', "row 2 is not a JSON object"),
    "zeros": (b'{"a": 1}\n' + bytes(20), "row 2 is not a JSON object"),
    "utf-16": ('{"a": 1}\n'.encode("utf-16"), "is UTF-16"),
    "latin-1": (
        '{"a": "\xe9"}\n'.encode() + '{"b": "x", "a": "\xe9"}\n'.encode("latin-1"),
        "column 'a' of row 2 is not UTF-8; .*iconv",
    ),
    "two types": (
        b'{"a": 1}\n{"a": "x"}\n',
        "row 2: .*changed from number to string; make the column one type",
    ),
    "too large": (b'{"a": 1}\n{"a": 1e400}\n', "row 2: .*Number too big .*; fix the value"),
}


@pytest.mark.parametrize(("content", "words"), JSON_REFUSED.values(), ids=JSON_REFUSED)
def test_jsonl_that_cannot_be_read_is_refused_by_name(content, words, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    said = refused_by_all(tmp_path / "a.jsonl")
    assert "a.jsonl" in said
    with pytest.raises(DataError, match=words):
        raise DataError(said)


def test_jsonl_errors_count_rows_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 20)
    for last in (b"null", b'{"a": ', b'{"a": "\xe9"}'):
        (tmp_path / "a.jsonl").write_bytes(b'{"a": "x"}\n\n' * 50 + last)
        with pytest.raises(DataError, match="row 51 "):
            read_index(config(tmp_path))
        with pytest.raises(DataError, match="row 51 "):
            converted(tmp_path / "a.jsonl")


def test_jsonl_with_a_column_of_another_type_in_later_rows_is_refused_by_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 8)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: .*a has .*string.* make the column one type"):
        read_index(config(tmp_path))
    with pytest.raises(DataError, match=r"column 'a' is string in a\.jsonl .*make it one type"):
        converted(tmp_path / "a.jsonl")


def test_json_array_named_json_is_refused_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps([{"a": 1}]))
    with pytest.raises(DataError, match=r"a\.jsonl is a JSON array"):
        converted(tmp_path / "a.jsonl")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_jsonl_with_a_mark_blank_lines_and_odd_numbers_loses_no_row(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 16)
    lines = [
        b'{"a": 1, "b": "} null"}',
        b"",
        b" \t",
        b'{"a": NaN, "b": null}',
        b'{"a": -Infinity, "b": "x"}\r',
    ]
    name = "a.jsonl" if pack is bytes else "a.jsonl.gz"
    (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf" + b"\n".join(lines)))
    expected = "[{'a': 1.0, 'b': '} null'}, {'a': nan, 'b': None}, {'a': -inf, 'b': 'x'}]"
    assert str(converted(tmp_path / name)) == str(rows_of(tmp_path)[0]) == expected


def test_inspect_of_many_unreadable_files_names_three_and_counts_the_rest(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.csv").write_text("a,a\n1,2\n")
    findings = [f for f in inspect(str(tmp_path)).findings if f.name == "unreadable"]
    assert len(findings) == 4 and "2 more files" in findings[-1].message
