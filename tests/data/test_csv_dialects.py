"""CSV by other rules than those of RFC 4180, as Spark, MySQL and pandas can write it: what would
cut, join or lose rows is refused by name, or said."""

import csv
import gzip
import io

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import text as text_format
from elastic_dp.data.formats.csv_escapes import escaped_quote
from elastic_dp.data.formats.csv_headers import has_numbers
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError
from tests.data.shards import any_content, rows_of
from tests.data.test_index import config
from tests.data.test_text_rows import converted, refused_by_all

QUOTED = ['x "y"', 'x "y"\nz', 'x"', '"', 'a, "b"', "c:\\", "plain"]
SAID = (
    r'a quoted field of row {} holds a quote behind a backslash \(\\"\).*option\("escape", "\\""\)'
)


# --- quotes that a backslash escapes


@pytest.mark.parametrize("columns", [1, 2])
def test_csv_that_escapes_quotes_is_refused_by_convert_training_and_inspect(columns, tmp_path):
    """With one column no row is ragged, so nothing else tells."""
    frame = pd.DataFrame({"a": ["one", *QUOTED], "b": range(len(QUOTED) + 1)})
    options = {"doublequote": False, "escapechar": "\\", "quoting": csv.QUOTE_ALL}
    frame[["a", "b"][:columns]].to_csv(tmp_path / "a.csv", index=False, **options)
    with pytest.raises(DataError, match=SAID.format(2)):
        raise DataError(refused_by_all(tmp_path / "a.csv"))


@pytest.mark.parametrize("group_bytes", [4, 4 << 20])
@pytest.mark.parametrize(
    ("content", "row"),
    [
        (b'a\nx\n\n"y"\n"say \\"hi\nthere\\""\n', 3),
        (b'a\n"say \\""\n"other"\n', 1),
        (b'a,b\n1,"c"d\n2,"say \\"hi\\""\n', 2),
        (b'a,b\n"5\\" pipe",1\n', 1),
    ],
)
def test_row_of_an_escaped_quote_is_named_wherever_the_file_is_cut(
    content, row, group_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_format, "GROUP_BYTES", group_bytes)
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz/a.csv.gz").write_bytes(gzip.compress(content))
    for act in (
        lambda: read_index(config(tmp_path)),
        lambda: read_index(config(tmp_path / "gz")),
        lambda: converted(tmp_path / "a.csv"),
    ):
        with pytest.raises(DataError, match=SAID.format(row)):
            act()


texts = st.lists(
    st.sampled_from(["\\", '"', '\\"', '""', ",", ";", "\n", "\r\n", "x", "{", " "]), max_size=10
).map("".join)


@any_content
@given(
    rows=st.lists(st.tuples(texts, texts), min_size=1, max_size=6), delimiter=st.sampled_from(",;")
)
def test_backslashes_in_csv_that_doubles_quotes_are_no_escapes(rows, delimiter):
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter).writerows(rows)
    assert escaped_quote(sink.getvalue().encode(), delimiter.encode()) == -1


@any_content
@given(
    before=st.lists(texts.map(lambda text: text.replace("\\", "")), max_size=4),
    ends=st.sampled_from([("x", "y"), ("", "y"), ("x", "y\n"), ("x,", " ")]),
)
def test_escaped_quote_is_found_behind_any_fields(before, ends):
    sink = io.StringIO()
    csv.writer(sink, quoting=csv.QUOTE_ALL).writerows([[text] for text in before])
    whole = sink.getvalue().encode()
    field = f'"{ends[0]}\\"{ends[1]}"\n'.encode()
    assert escaped_quote(whole + field, b",") == len(whole)


# --- files without a header line


@pytest.mark.parametrize("columns", [None, ["x"]])
def test_csv_files_without_a_header_line_are_refused_if_they_share_no_name(columns, tmp_path):
    """Spark writes parts so. Each first row would be lost."""
    (tmp_path / "in").mkdir()
    for number, content in enumerate(("x,y\nz,w\n", "p,q\nr,s\n", "u,v\n")):
        (tmp_path / f"in/part-{number}.csv").write_text(content)
    said = (
        r"part-1.csv has no column that another file has: it has 'p', 'q', and part-0.csv has "
        r"'x', 'y'.*option\(\"header\", True\)"
    )
    for act in (
        lambda: read_index(config(tmp_path / "in", columns=columns)),
        lambda: convert(str(tmp_path / "in"), str(tmp_path / "out"), columns=columns),
    ):
        with pytest.raises(DataError, match=said):
            act()
    assert "part-1.csv has no column that another" in str(inspect(str(tmp_path / "in")).findings)


def test_csv_files_without_a_header_line_are_refused_beside_folders_that_hold_a_column(tmp_path):
    for day, content in enumerate(("x,y\nz,w\n", "p,q\nr,s\n")):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}/a.csv").write_text(content)
    with pytest.raises(DataError, match="no column that another file has"):
        read_index(DataConfig(f"{tmp_path}/**", micro_batch_size=1))


def test_csv_files_that_share_some_name_are_read_and_sources_with_columns_of_their_own(tmp_path):
    for name, content in (("a", "x,y\n1,2\n"), ("b", "x\n3\n"), ("c", "z,x\nw,4\n"), ("d", "q\n")):
        (tmp_path / f"{name}.csv").write_text(content)
    assert [row["x"] for row in rows_of(tmp_path, fill_nulls={"y": 0})[0]] == [1, 3, 4]
    (tmp_path / "e.csv").write_text("text\nword\n")
    one, other = str(tmp_path / "a.csv"), str(tmp_path / "e.csv")
    read_index(
        DataConfig(
            {one: 0.5, other: 0.5},
            source_options={one: {"columns": ["x"]}, other: {"columns": ["text"]}},
            micro_batch_size=1,
            fill_nulls={"x": 0},
        )
    )


@pytest.mark.parametrize(
    ("header", "is_said"),
    [
        ("5.1,3.5,setosa", True),
        ("7,3,12", True),
        ("17", True),
        ("1,2", True),
        ("-3,x", False),
        ("0,1,2", False),
        ("0", False),
        ("country,2019,2020", False),
        ("2010,2015,2020", False),
        ("nan,inf,1_0", False),
        ("x,y", False),
    ],
)
def test_header_line_that_holds_numbers_is_said(header, is_said, tmp_path, caplog):
    assert has_numbers(header.split(",")) == is_said
    (tmp_path / "a.csv").write_text(f"{header}\n{'1,' * header.count(',')}1\n")
    for act in (lambda: read_index(config(tmp_path)), lambda: converted(tmp_path / "a.csv")):
        caplog.clear()
        act()
        assert ("hold numbers, as rows do" in caplog.text) == is_said
        assert (f"such as {header!r} of a.csv" in caplog.text) == is_said


# --- carriage returns


@pytest.mark.parametrize("group_bytes", [8, 4 << 20])
def test_lone_carriage_returns_among_other_line_ends_are_said(
    group_bytes, tmp_path, monkeypatch, caplog
):
    """Before Python 3.13 pandas wrote one without quotes, and reads two rows, as all do. In a
    file of several columns such a row is ragged."""
    monkeypatch.setattr(text_format, "GROUP_BYTES", group_bytes)
    (tmp_path / "a.csv").write_bytes(b'a\nx\none\rtwo\ny\n"quoted ""\r"""\nz\n')
    assert len(pd.read_csv(tmp_path / "a.csv")) == 6
    expected = [{"a": value} for value in ("x", "one", "two", "y", 'quoted "\r"', "z")]
    for act in (lambda: rows_of(tmp_path)[0], lambda: converted(tmp_path / "a.csv")):
        caplog.clear()
        assert act() == expected
        assert "lone carriage returns" in caplog.text
        assert ": 1, such as behind row 2 of a.csv" in caplog.text
    caplog.clear()
    (tmp_path / "a.csv").write_bytes(b'a\rx\r"y\nz"\r')
    assert len(rows_of(tmp_path)[0]) == 2
    assert "carriage" not in caplog.text


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_convert_refuses_names_that_differ_only_in_case_as_training_does(ending, tmp_path):
    for name, column in (("a", "Id"), ("b", "id")):
        content = {"csv": f"{column},n\nx,1\n", "jsonl": f'{{"{column}": "x", "n": 1}}\n'}
        (tmp_path / f"{name}.{ending}").write_text(content[ending])
    for act in (
        lambda: read_index(config(tmp_path)),
        lambda: convert(str(tmp_path), str(tmp_path / "out")),
    ):
        with pytest.raises(
            DataError, match=rf"'Id' \(in a\.{ending}\) and 'id' \(in b\.{ending}\)"
        ):
            act()
    convert(str(tmp_path), str(tmp_path / "out"), columns=["n"])


def test_convert_of_csv_has_no_column_of_a_file_without_rows(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x,y\n")
    convert(f"{tmp_path}/*.csv", str(tmp_path / "out"))
    assert rows_of(tmp_path / "out")[0] == rows_of(tmp_path)[0] == [{"x": 1}]


def test_csv_of_blank_lines_alone_has_no_rows_to_convert(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x\n\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        convert(str(tmp_path / "a.csv"), str(tmp_path / "out"))
