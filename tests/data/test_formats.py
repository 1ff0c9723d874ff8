"""Every format against pyarrow reading the whole shard."""

import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.formats import text
from elastic_dp.errors import DataError
from tests.data.shards import BINARY, any_content, expected, in_memory, nested, rows_of
from tests.data.test_index import config

numbers = st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9, width=32)


words = st.text(st.sampled_from('a é\n\r",{}[]\\\t1.')) | st.text(max_size=5)


objects = st.fixed_dictionaries({"n": numbers, "s": words, "t": st.lists(st.integers(0, 9))})


@any_content
@given(
    rows=st.lists(objects, min_size=1, max_size=30),
    group_bytes=st.integers(1, 400),
    end=st.sampled_from(["\n", "\r\n", "\n\n \n"]),
    last=st.booleans(),
)
def test_json_lines_of_any_content_and_cut(rows, group_bytes, end, last, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "GROUP_BYTES", group_bytes)
    lines = [json.dumps(row, ensure_ascii=len(row["s"]) % 2 == 0) for row in rows]
    path = tmp_path / "a.jsonl"
    path.write_bytes((end.join(lines) + (end if last else "")).encode("utf-8", "replace"))
    whole = pa.json.read_json(path).to_pylist()
    if not any(row["t"] for row in rows):
        whole, changes = [{"n": w["n"], "s": w["s"]} for w in whole], {"columns": ["n", "s"]}
    else:
        changes = {}
    found, counts = rows_of(tmp_path, **changes)
    assert found == whole
    assert len(counts) > 1 or len(rows) == 1 or path.stat().st_size < 2 * group_bytes + 60


fields = st.text(st.sampled_from('ab1,"\n\r é'), max_size=6).map(lambda field: field + "z")


def quote(field: str) -> str:
    doubled = field.replace('"', '""')
    return f'"{doubled}"' if any(mark in field for mark in ',"\n\r') else field


@any_content
@given(
    rows=st.lists(
        st.tuples(fields, st.integers(-(2**63), 2**63 - 1), fields), min_size=1, max_size=30
    ),
    group_bytes=st.integers(1, 200),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    mark=st.booleans(),
)
def test_csv_of_any_content_and_cut(rows, group_bytes, end, last, mark, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "GROUP_BYTES", group_bytes)
    lines = ['"na\nme",n,"x"'] + [f"{quote(a)},{n},{quote(b)}" for a, n, b in rows]
    content = end.join(lines) + (end if last else "")
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" * mark + content.encode())
    kinds = read_index(config(tmp_path)).schema
    whole = pa.csv.read_csv(
        tmp_path / "a.csv",
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(column_types=kinds),
    )
    found, counts = rows_of(tmp_path)
    assert found == whole.to_pylist()
    assert len(counts) > 1 or len(rows) == 1 or len(content) < 3 * group_bytes + 40


odd_fields = st.lists(st.sampled_from(['"', '""', "b", "\n3,", "\r", " "]), max_size=5).map("".join)


@any_content
@given(odd=st.lists(odd_fields, min_size=1, max_size=8), group_bytes=st.integers(1, 20))
def test_csv_is_cut_where_pyarrow_ends_rows(odd, group_bytes, tmp_path, monkeypatch):
    """Also where quotes stand in odd places: in the middle of a field, after a closing quote. One
    without end is refused."""
    content = "".join(f"r{number},{field}\n" for number, field in enumerate(odd))
    monkeypatch.setattr(text, "GROUP_BYTES", group_bytes)
    (tmp_path / "a.csv").write_bytes(b"x,y\n" + content.encode())
    try:
        whole = pa.csv.read_csv(
            tmp_path / "a.csv",
            parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(column_types={"x": "string", "y": "string"}),
        )
    except pa.ArrowException:
        whole = None
    try:
        found, _ = rows_of(tmp_path)
    except DataError:
        refused = whole is None or not whole.num_rows or has_only_nulls(whole)
        assert refused or ends_quoted(content)
        return
    assert whole is not None and found == whole.to_pylist() and not ends_quoted(content)


def ends_quoted(content: str) -> bool:
    """RFC 4180, character by character: whether a quoted field is still open at the end."""
    state = "start"
    for mark in content:
        if state == "quoted":
            state = "quote" if mark == '"' else "quoted"
        elif mark == '"' and state in ("start", "quote"):
            state = "quoted"
        else:
            state = "start" if mark in ",\r\n" else "field"
    return state == "quoted"


def has_only_nulls(table: pa.Table) -> bool:
    return any(not any(column.to_pylist()) for column in table.columns)


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_every_column_of_binary_shards(kind, where, dictionary, tmp_path):
    tables = [nested(0, 37), nested(37, 16)]
    if not dictionary:
        tables = [t.set_column(9, "kind", t["kind"].cast(pa.string())) for t in tables]
    for number, content in enumerate(tables):
        BINARY[kind](tmp_path / f"part-{number}", content)
    rows, counts = rows_of(where(tmp_path))
    assert counts == [16, 16, 5, 16]
    assert rows == expected(pa.concat_tables(tables))
    some, _ = rows_of(where(tmp_path), columns=["at.deep", "ragged"])
    assert some == [{"at.deep.y": row["at.deep.y"], "ragged": row["ragged"]} for row in rows]


@pytest.mark.parametrize("codec", ["gz", "zst", "bz2"])
def test_compressed_text_is_one_row_group(codec, tmp_path):
    lines = "".join(
        f'{{"a": {n}, "b": {{"c": [{n}], "when": "2026-01-0{n}"}}}}\n' for n in range(1, 9)
    )
    with pa.CompressedOutputStream(
        str(tmp_path / f"a.jsonl.{codec}"), {"gz": "gzip", "zst": "zstd"}.get(codec, codec)
    ) as file:
        file.write(lines.encode())
    expected = [{"a": n, "b.c": [n], "b.when": f"2026-01-0{n}"} for n in range(1, 9)]
    assert rows_of(tmp_path) == (expected, [8])
    with pa.CompressedOutputStream(
        str(tmp_path / f"a.csv.{codec}"), {"gz": "gzip", "zst": "zstd"}.get(codec, codec)
    ) as file:
        file.write(b"x,y\n1,a\n2,b\n")
    assert rows_of(f"{tmp_path}/*.csv.*") == ([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}], [2])


def test_types_are_those_that_hold_for_all_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "GROUP_BYTES", 30)
    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": [], "s": null}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"x": 1.5, "y": [1], "s": "t"}\n' * 9)
    rows, _ = rows_of(tmp_path)
    assert rows == [{"x": 1.0, "y": [], "s": None}] * 9 + [{"x": 1.5, "y": [1], "s": "t"}] * 9
    (tmp_path / "c.jsonl").write_text('{"x": "word", "y": [1], "s": "t"}\n')
    with pytest.raises(DataError, match=r"'x' is double in b\.jsonl and string in c\.jsonl"):
        read_index(config(tmp_path))


def test_a_scan_is_said_first(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("x\n" + "1\n" * (1 << 19))
    said: list[str] = []
    read_index(config(tmp_path), say=said.append)
    assert said == ["scanning 2 csv shard(s), 2 MiB, once"]
