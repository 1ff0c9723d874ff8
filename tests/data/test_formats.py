"""Every format against pyarrow reading the whole shard."""

import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator

from elastic_dp.data.discovery.index import Index, read_index
from elastic_dp.data.formats import text
from elastic_dp.data.formats.format import Place, ShardAt
from elastic_dp.data.formats.format_registry import FORMATS
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.data.pipeline.row_groups import ShardRowGroups
from elastic_dp.dataprep.inspection.inspect_dataset import inspect
from elastic_dp.errors import BadShard, DataError, StorageError
from elastic_dp.storage import Store
from tests.data.test_index import config, opened

any_content = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rows_of(folder: Path | str, **changes) -> tuple[list[dict], list[int]]:
    """All rows as plain values, in file order, and the rows of each row group."""
    wanted = config(folder, **changes)
    index = read_index(wanted)
    groups = opened(wanted, index)
    rows: list[dict] = []
    for number, count in enumerate(index.rows.tolist()):
        columns, nbytes = groups.read(number)
        assert nbytes <= index.nbytes[number]
        plain = {name: plain_values(column) for name, column in columns.items()}
        assert {len(values) for values in plain.values()} == {count}
        rows += [
            dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)
        ]
    groups.close()
    return rows, index.rows.tolist()


def plain_values(column) -> list:
    if isinstance(column, pa.Array):
        return column.to_pylist()
    if isinstance(column, np.ndarray):
        return column.tolist()
    pieces = zip(column.offsets[:-1], column.offsets[1:], strict=True)
    return [column.values[start:end].tolist() for start, end in pieces]


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


def nested(first: int, rows: int) -> pa.Table:
    """A column of every kind that has a tensor or is text."""
    ids = np.arange(first, first + rows)
    pixels = (ids[:, None, None] * 100 + np.arange(6).reshape(2, 3)).astype(np.int16)
    image = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pixels.ravel(), 3), 2
    )
    plain = ids.tolist()
    return pa.table(
        {
            "id": pa.array(ids),
            "even": pa.array(ids % 2 == 0),
            "image": image,
            "same": pa.array([[i, i + 1] for i in plain], pa.list_(pa.int32())),
            "grid": pa.array([[[i, 1], [2, i]] for i in plain], pa.list_(pa.list_(pa.int32()))),
            "ragged": pa.array([list(range(i % 4)) for i in plain], pa.list_(pa.int32())),
            "text": pa.array([f"row {i}" if i % 5 else None for i in plain]),
            "raw": pa.array([bytes([i % 256]) * (i % 3) for i in plain], pa.binary()),
            "fixed": pa.array([bytes([i % 256, 1, 2]) for i in plain], pa.binary(3)),
            "kind": pa.array(["cat" if i % 3 else "dog" for i in plain]).dictionary_encode(),
            "at": pa.array([{"x": i, "deep": {"y": i / 2}} for i in plain]),
        }
    )


def expected(table: pa.Table) -> list[dict]:
    rows = []
    for row in table.to_pylist():
        at = row.pop("at")
        row["fixed"] = list(row["fixed"])
        rows.append({**row, "at.x": at["x"], "at.deep.y": at["deep"]["y"]})
    return rows


def write_arrow(path: Path, content: pa.Table, stream: bool, **options) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=not stream, **options)
    with pa.OSFile(str(path), "wb") as file, make(file, content.schema, options=options) as writer:
        writer.write_table(content, max_chunksize=16)


def parquet(path: Path, content: pa.Table, **options) -> None:
    pq.write_table(content, path.with_suffix(".parquet"), row_group_size=16, **options)


BINARY = {
    "parquet": parquet,
    "parquet zstd": lambda p, t: parquet(p, t, compression="zstd", use_dictionary=False),
    "parquet small pages": lambda p, t: parquet(p, t, data_page_size=64, write_page_checksum=True),
    "arrow file": lambda p, t: write_arrow(p.with_suffix(".arrow"), t, stream=False),
    "arrow stream": lambda p, t: write_arrow(p.with_suffix(".arrow"), t, stream=True),
    "arrow file lz4": lambda p, t: write_arrow(
        p.with_suffix(".feather"), t, False, compression="lz4"
    ),
    "arrow stream zstd": lambda p, t: write_arrow(
        p.with_suffix(".ipc"), t, True, compression="zstd"
    ),
}


def in_memory(folder: Path) -> str:
    """A copy in a store whose objects are no files of this machine."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for shard in folder.iterdir():
        memory.pipe(f"/{folder.name}/{shard.name}", shard.read_bytes())
    return f"memory://{folder.name}"


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


def write_tar(path: Path, first: int, samples: int, **ending: bytes) -> list[dict]:
    rows = []
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("._hidden"))
        for number in range(first, first + samples):
            key = f"{'long/' * 30 * (number % 2)}img-{number}"
            parts = {"jpg": bytes([number % 256]) * (number * 37 % 900), "cls": b" %d\n" % number}
            parts |= {"json": b'{"n": %d}' % number, "seg.png": b"x", **ending}
            for name, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            rows.append({"__key__": key, **parts, "cls": number, "json": parts["json"].decode()})
    return rows


@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_samples_of_tar_shards(where, tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.tar.GROUP_BYTES", 20_000)
    rows = write_tar(tmp_path / "a.tar", 0, 40) + write_tar(tmp_path / "b.tar", 40, 3)
    found, counts = rows_of(where(tmp_path))
    assert found == rows
    assert len(counts) > 5
    some, _ = rows_of(where(tmp_path), columns=["seg.png", "cls"])
    assert some == [{"seg.png": row["seg.png"], "cls": row["cls"]} for row in rows]


def put_tar(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, content = member
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "a.jpg"
    return member


@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_notes_and_links_in_a_tar_are_no_samples_and_are_said(where, tmp_path, caplog):
    sample = [("a.jpg", b"1"), ("a.cls", b"7")]
    notes = [("LICENSE", b"free"), ("docs/README.md", b"read"), ("Makefile", b"all:")]
    put_tar(tmp_path / "a.tar", notes[0], *sample, notes[1], notes[2], link("LATEST"))
    put_tar(tmp_path / "b.tar", notes[0], ("license.jpg", b"2"), ("license.cls", b"8"))
    rows, _ = rows_of(where(tmp_path))
    assert rows == [
        {"__key__": "a", "jpg": b"1", "cls": 7},
        {"__key__": "license", "jpg": b"2", "cls": 8},
    ]
    assert (
        "members that are no samples, since they have no ending or are notes: 4, such as "
        "LICENSE of a.tar"
    ) in caplog.text
    assert (
        "members that are links or devices, and are not read: 1, such as LATEST of a" in caplog.text
    )


def test_samples_of_tar_shards_are_those_that_webdataset_finds(tmp_path):
    members = [
        ("LICENSE", b"free"),
        ("x/a.b.jpg", b"1"),
        ("x/a.txt", b"one"),
        ("c.b.jpg", b"2"),
        ("c.txt", b"2"),
    ]
    put_tar(tmp_path / "a.tar", *members)
    with open(tmp_path / "a.tar", "rb") as file:
        found = list(group_by_keys({**m, "__url__": ""} for m in tar_file_iterator(file)))
    rows, _ = rows_of(tmp_path)
    assert [row["__key__"] for row in rows] == [sample["__key__"] for sample in found]
    assert [row["txt"] for row in rows] == [sample["txt"].decode() for sample in found]


@pytest.mark.parametrize("again", ["a.jpg", "a.JPG"])
def test_member_of_a_tar_that_comes_twice_is_refused(again, tmp_path):
    put_tar(tmp_path / "a.tar", ("a.jpg", b"1"), ("a.cls", b"7"), (again, b"2"))
    with pytest.raises(
        DataError, match=rf"a\.tar has '{again}' twice \(the sample 'a' has two col"
    ):
        read_index(config(tmp_path))


def test_key_of_a_tar_that_comes_again_later_is_said(tmp_path, caplog):
    put_tar(tmp_path / "a.tar", ("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3"))
    rows, _ = rows_of(tmp_path)
    assert [row["jpg"] for row in rows] == [b"1", b"2", b"3"]
    assert (
        "keys that come again later in their shard, and are another sample there: 1, such as "
        "a of a.tar"
    ) in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "k.cls",
            b"cat\n",
            r"'k\.cls' of a\.tar holds 'cat\\n', and '\.cls' must be a whole number",
        ),
        ("k.cls", b"9" * 30, r"'k\.cls' of a\.tar holds a number of more than 64 bits"),
        ("k.txt", b"caf\xe9", r"'k\.txt' of a\.tar is no text in UTF-8 \(.* at byte 3\)"),
    ],
)
def test_value_of_a_tar_that_cannot_be_read_names_the_member(name, content, said, tmp_path):
    put_tar(tmp_path / "a.tar", ("j." + name.partition(".")[2], b"1"), (name, content))
    with pytest.raises(DataError, match=said) as error:
        rows_of(tmp_path)
    assert not isinstance(error.value, BadShard), "it is not damaged, so it is not to be skipped"


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
    with pytest.raises(DataError, match=r"'x' is double in a\.jsonl and string in c\.jsonl"):
        read_index(config(tmp_path))


def test_a_scan_is_said_first(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("x\n" + "1\n" * (1 << 19))
    said: list[str] = []
    read_index(config(tmp_path), say=said.append)
    assert said == ["scanning 2 csv shard(s), 2 MiB, once"]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def scribbled(path: Path) -> None:
    """The second half of the second row group is other bytes; size, footer and time stay."""
    index = read_index(config(path.parent))
    before, content = path.stat(), bytearray(path.read_bytes())
    middle, end = int(index.starts[1] + index.ends[1]) // 2, int(index.ends[1])
    content[middle:end] = (b'"\xff\x00{' * end)[: end - middle]
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def lines_of(path: Path, line: str, header: str = "") -> None:
    path.write_text(header + "".join(line % n for n in range(90)))


SHARDS = {
    "a.parquet": lambda p: parquet(p, nested(0, 90), compression="zstd", use_dictionary=False),
    "a.arrow": lambda p: write_arrow(p, nested(0, 90), False),
    "a.jsonl": lambda p: lines_of(p, '{"x": %d}\n'),
    "a.csv": lambda p: lines_of(p, "%d,5\n", "x,y\n"),
    "a.tar": lambda p: write_tar(p, 0, 40),
}


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(text, "GROUP_BYTES", 200)
    monkeypatch.setattr("elastic_dp.data.formats.tar.GROUP_BYTES", 20_000)


@pytest.mark.parametrize("name", SHARDS)
def test_a_row_group_that_cannot_be_decoded(name, tmp_path, small_groups):
    SHARDS[name](tmp_path / name)
    index = read_index(config(tmp_path))
    scribbled(tmp_path / name)
    groups = opened(config(tmp_path), index)
    groups.read(0)
    with pytest.raises(BadShard) as caught:
        groups.read(1)
    assert (caught.value.shard, caught.value.row_group) == (name, 1) and caught.value.reason
    groups.close()


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_a_shard_that_was_rewritten(name, where, tmp_path, small_groups, monkeypatch):
    """Before it was opened, and after."""
    monkeypatch.setattr("elastic_dp.storage.retry.FIRST_PAUSE_S", 0.001)
    SHARDS[name](tmp_path / name)
    wanted = config(where(tmp_path))
    fresh, used = (opened(wanted, read_index(wanted)) for _ in range(2))
    used.read(0)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(
        content[: len(content) // 2] + b"{}" + content[len(content) // 2 :]
    )
    where(tmp_path)
    for groups in (fresh, used):
        with pytest.raises(DataError, match=rf"{name} was rewritten"):
            groups.read(1)
        groups.close()


@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_cannot_be_indexed(name, tmp_path):
    SHARDS[name](tmp_path / name)
    if name in ("a.parquet", "a.arrow", "a.tar"):
        (tmp_path / f"b{name}").write_bytes(b"")
        with pytest.raises(DataError, match=rf"b{name} is empty \(0 bytes\), .* was lost; write"):
            read_index(config(tmp_path))
    (tmp_path / f"b{name}").write_bytes(b'\x00"{broken')
    with pytest.raises(DataError, match=rf"b{name}"):
        read_index(config(tmp_path))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.tar", "a.jsonl"])
def test_a_shard_that_is_cut_short(name, tmp_path):
    SHARDS[name](tmp_path / name)
    cut_short(tmp_path / name)
    with pytest.raises(DataError, match=rf"cannot (read the footer of|scan|read) {name}"):
        read_index(config(tmp_path))


ONE = pa.table({"x": [1, 2], "s": ["a", "b"]})


@pytest.mark.parametrize(
    ("shards", "changes", "said"),
    [
        ({}, {}, r"no shard \(\*\.parquet.*\*\.tar\) at '.*': the folder is empty"),
        ({"a": ONE[:0], "b": ONE[:0]}, {}, r"no shard at '.*' holds a row: a\.parquet, b\.parquet"),
        ({"a": ONE}, {"columns": ["t"]}, r"no column 't' in a\.parquet, which has 'x', 's'"),
        (
            {"a": ONE, "b": ONE.select(["s"])},
            {},
            r"'x' \(int64\) holds 2 nulls.* \(b\.parquet has none of its values\)",
        ),
        (
            {"a": ONE.select(["s"]), "b": ONE},
            {},
            r"'x' \(int64\) holds 2 nulls.* \(a\.parquet has none of its values\)",
        ),
        (
            {"a": ONE, "b": ONE},
            {"columns": ["t"]},
            r"no column 't' in a\.parquet",
        ),
        (
            {"a": ONE, "b": ONE.set_column(0, "x", [pa.array([1.0, 2.0])])},
            {},
            r"'x' is int64 in a\.parquet and double in b\.parquet; rewrite one of them",
        ),
        (
            {"a": pa.table({"t": pa.nulls(2)})},
            {},
            r"'t' is null \(every value is null\), which has no tensor",
        ),
        ({"a": ONE.rename_columns(["x", "x"])}, {}, r"several columns named 'x'"),
    ],
)
def test_read_index_of_unreadable_shards_is_refused(shards, changes, said, tmp_path):
    for name, content in shards.items():
        pq.write_table(content, tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=said):
        read_index(config(tmp_path, **changes))


DOTTED = pa.table({"id": [1, 2], "a.b": [3, 4], "a.b.c": [5, 6]})
STRUCT = pa.array([{"b": 7, "c": 8}] * 2)


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "jsonl"])
def test_a_column_with_a_dot_in_its_name_is_read_by_exactly_that_name(kind, tmp_path):
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in DOTTED.to_pylist()))
    else:
        BINARY[kind](tmp_path / "a", DOTTED)
    assert rows_of(tmp_path)[0] == DOTTED.to_pylist()
    for some in (["a.b"], ["a.b.c", "id"], ["id", "a.b"]):
        assert rows_of(tmp_path, columns=some)[0] == DOTTED.select(some).to_pylist()
    for name in ("a", "a.b.c.d", "b"):
        with pytest.raises(
            DataError, match=rf"no column '{name}' in .*a\.\w+, which ha(s|ve) 'id', 'a\.b'"
        ):
            read_index(config(tmp_path, columns=["id", name]))


def test_inspect_does_not_count_a_column_with_a_dot_in_its_name_as_part_of_another(tmp_path):
    wide = pa.table({"a": [1] * 64, "a.b": ["long" * 1000] * 64})
    parquet(tmp_path / "a", wide)
    (column,) = inspect(str(tmp_path), columns=["a"]).columns
    assert column.name == "a" and column.stored.max < 1000


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_a_name_that_means_a_column_and_a_field_of_a_struct_is_refused(kind, tmp_path):
    """Only where it is asked for: the struct's other fields, and other columns, can be read."""
    BINARY[kind](tmp_path / "a", DOTTED.append_column("a", STRUCT))
    for wanted in (None, ["a.b"], ["a"]):
        with pytest.raises(DataError, match=r"'a\.b' names 2 things in a\.\w+: columns with a dot"):
            read_index(config(tmp_path, columns=wanted))
    rows, _ = rows_of(tmp_path, columns=["a.c", "id", "a.b.c"])
    assert rows == [{"a.c": 8, "id": 1, "a.b.c": 5}, {"a.c": 8, "id": 2, "a.b.c": 6}]


def test_mixed_formats_need_a_choice(tmp_path):
    pq.write_table(ONE, tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(
        DataError, match=r"several formats: 1 parquet \(such as a\.parquet\) and 1 csv"
    ):
        read_index(config(tmp_path))
    assert read_index(config(tmp_path, format="csv")).num_rows == 1


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_row_group_is_one_request(kept, tmp_path, monkeypatch):
    """The footer comes with the first one where it is near; columns that lie far apart are asked
    for apart."""
    monkeypatch.setattr("elastic_dp.data.discovery.index.FOOTER_BYTES_KEPT", kept)
    wide = pa.table({name: np.random.default_rng(0).random(1 << 17) for name in "abc"})
    pq.write_table(wide, tmp_path / "a.parquet", row_group_size=1 << 16, compression="none")
    wanted = config(in_memory(tmp_path), columns=["a", "c"])
    index = read_index(wanted)
    store = Store(wanted.url)
    groups = ShardRowGroups(wanted, index, [store])
    requests, asked = [], []
    for number in (1, 0, 1):
        before = store.counts
        assert len(groups.read(number)[0]["c"]) == 1 << 16
        requests.append(store.counts.requests - before.requests)
        asked.append(store.counts.bytes_read - before.bytes_read)
    assert requests == [1, 1, 1]
    monkeypatch.setattr("elastic_dp.data.formats.parquet.GAP_BYTES", 1000)
    before = store.counts
    groups.read(0)
    assert store.counts.requests - before.requests == 2
    assert store.counts.bytes_read - before.bytes_read < 0.7 * asked[1]


def test_a_footer_that_the_index_kept_is_not_asked_for_again(tmp_path, monkeypatch):
    """Of the first shards, as many as fit; the index of an earlier release has none."""
    monkeypatch.setattr("elastic_dp.data.formats.parquet.TOGETHER_BYTES", 0)
    for number in range(3):
        parquet(tmp_path / f"{number}", nested(0, 20))
    wanted = config(in_memory(tmp_path))
    size = int(read_index(wanted).shards["tail"][0].as_py())
    monkeypatch.setattr("elastic_dp.data.discovery.index.FOOTER_BYTES_KEPT", 2 * size)
    index = Index.from_bytes(read_index(wanted).to_bytes())
    without = index.shards.select([name for name in index.shards.schema.names if name != "footer"])
    earlier = replace(index, shards=without)
    assert earlier.digest == index.digest
    groups_of_shard = int(index.group_bounds[1])
    for known, expected in ((index, [1, 1, 2]), (earlier, [2, 2, 2])):
        store = Store(wanted.url)
        groups = ShardRowGroups(wanted, known, [store])
        requests = []
        for shard in range(3):
            before = store.counts.requests
            groups.read(shard * groups_of_shard)
            requests.append(store.counts.requests - before)
        assert requests == expected


def test_footers_are_kept_where_each_read_asks_for_the_same_version(tmp_path):
    """Asking for a version takes a request."""
    parquet(tmp_path / "a", nested(0, 20))
    assert read_index(config(tmp_path)).footer(0) is None
    store = Store(in_memory(tmp_path))
    (entry,) = store.find(store.path)
    for version in (entry.version, ""):
        at = ShardAt(store, entry.path, entry.size, version, "a")
        assert bool(Parquet().scan(at, None).footer) == bool(version)


def test_open_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.parquet.SHARDS_OPEN", 3)
    monkeypatch.setattr("elastic_dp.data.formats.parquet.FOOTER_BYTES_KEPT", 5_000)
    for number in range(12):
        parquet(tmp_path / f"{number:02}", nested(0, 20))
    groups = opened(config(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for number in range(24):
        groups.read(number)
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    kept = groups._formats["parquet"]._footers
    assert sum(footer.nbytes for footer in kept.values()) <= 10_000
    groups.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_gone_is_the_stores_word(name, where, tmp_path):
    """Not a bad shard, which a run may be told to skip."""
    SHARDS[name](tmp_path / name)
    wanted = config(where(tmp_path))
    groups = opened(wanted, read_index(wanted))
    (tmp_path / name).unlink()
    Store(wanted.url).delete(Store(wanted.url).path + f"/{name}")
    with pytest.raises(StorageError, match=name):
        groups.read(0)
    groups.close()


def test_rows_without_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    with pytest.raises(DataError, match=r"no (columns|rows)"):
        read_index(config(tmp_path))


class Bucket:
    """A store with one object."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def local_path(self, path: str) -> None:
        return None

    def read(self, path: str, start: int, end: int, version: str = "") -> bytes:
        return self.content[start:end]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv"])
def test_two_buckets_with_objects_of_one_path(kind, tmp_path):
    """A footer or header that is kept of one object is not used for the other."""
    both = []
    for columns in (("a", "b"), ("b", "a")):
        written = pa.table({name: [ord(name)] * 20 for name in columns})
        path = tmp_path / columns[0]
        if kind == "parquet":
            pq.write_table(written, path, compression="none", write_statistics=False)
        elif kind == "arrow":
            write_arrow(path, written, stream=False)
        else:
            pyarrow.csv.write_csv(written, path)
        content = path.read_bytes()
        both.append(ShardAt(Bucket(content), "x", len(content), "", "x"))
    chosen = FORMATS[kind]()
    for shard in both:
        scan = chosen.scan(shard, None)
        known = replace(shard, check=scan.check, tail=scan.tail, head=int(scan.starts[0]))
        place = Place(0, int(scan.starts[0]), int(scan.ends[0]))
        read = chosen.read(known, place, scan.schema, scan.schema.names)
        assert {name: set(read[name].to_pylist()) for name in "ab"} == {"a": {97}, "b": {98}}
