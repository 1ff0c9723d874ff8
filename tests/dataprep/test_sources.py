"""Which files of a source are read, and which sources are refused by name."""

import json

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.columns import column_types as kinds
from elastic_dp.data.discovery.skipped_files import skipped_message
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError
from tests.data.values import in_place
from tests.dataprep.conversions import by_convert, read, write_saved_dataset


@pytest.fixture
def sources(tmp_path):
    """A folder of programs with some text beside them."""
    files = {
        "a.py": "a = 1\n",
        "deep/b.py": "b = 2\n",
        "deep/__init__.py": "",
        "deep/.git/c.py": "no",
        "LICENSE.txt": "text",
        "lib.so": "x",
        "Makefile": "x",
        "_old.csv": "x",
    }
    for name, content in files.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(tmp_path / "source")


def counted(skipped):
    return {one.ending: (one.files, *one.examples) for one in skipped}


def test_convert_of_text_beside_other_files_says_what_it_did_not_read(sources, tmp_path):
    made = convert(sources, str(tmp_path / "out"), tokenizer="bytes", pack=5)
    assert made.rows == 1
    hidden = ("_old.csv", "deep/.git/c.py", "deep/__init__.py")
    assert counted(made.skipped) == {
        "hidden": (3, *hidden),
        ".py": (2, "a.py", "deep/b.py"),
        "": (1, "Makefile"),
        ".so": (1, "lib.so"),
    }
    assert counted(inspect(sources).skipped) == counted(made.skipped)


def test_text_glob_reads_files_of_any_name_as_text_and_no_others(sources, tmp_path):
    made = convert(
        sources, str(tmp_path / "out"), tokenizer="bytes", pack=1, text_glob=["*.py", "Make*"]
    )
    tokens = read(tmp_path / "out")["tokens"].to_pylist()
    end = [256]
    expected = [*b"x", *end, *b"a = 1\n", *end, *end, *b"b = 2\n", *end]
    assert [token for row in tokens for token in row] == expected
    assert counted(made.skipped) == {
        "hidden": (2, "_old.csv", "deep/.git/c.py"),
        ".so": (1, "lib.so"),
        ".txt": (1, "LICENSE.txt"),
    }
    only = convert(
        sources, str(tmp_path / "deep"), tokenizer="bytes", pack=1, text_glob=["deep/*.py"]
    )
    assert only.rows == len("b = 2\n") + 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tokenizer": "bytes", "pack": 1, "text_glob": ["*.md"]}, r"matches '\*.md'.*2 \.py"),
        ({"tokenizer": "bytes", "pack": 1, "text_glob": "*.py"}, r"must be a list.*\['\*\.py'\]"),
        ({"text_glob": ["*.py"]}, "text_glob goes with tokenizer and pack"),
    ],
)
def test_text_glob_that_cannot_be_is_refused(sources, tmp_path, asked, words):
    with pytest.raises(DataError, match=words):
        convert(sources, str(tmp_path / "out"), **asked)
    assert not (tmp_path / "out").exists()


def test_opening_a_folder_for_training_says_what_is_not_read_in_it(tmp_path, caplog):
    pq.write_table(pa.table({"a": range(9)}), tmp_path / "a.parquet")
    for name in ("b.py", "c.py", "README.txt", "_hidden.py"):
        (tmp_path / name).write_text("")
    read_index(DataConfig(str(tmp_path), micro_batch_size=1))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    told = (
        f"not read at {tmp_path}, since these are no shards: 4 files: 2 .py (such as b.py), "
        "1 .txt (such as README.txt), 1 hidden"
    )
    assert told in record.message
    caplog.clear()
    read_index(DataConfig(f"{tmp_path}/*.parquet", micro_batch_size=1))
    assert not caplog.records


@pytest.mark.parametrize(
    ("files", "asked", "words"),
    [
        ({}, {}, "no file at"),
        ({"a.csv": "a\n1\n", "b.jsonl": "{}"}, {}, r"several formats \(1 csv, 1 jsonl\).*glob"),
        ({"a.bin": "?"}, {}, "no file at .* has an ending that is known: parquet"),
        ({"a.txt": "text"}, {}, "plain text.*tokenizer"),
        ({"a.csv": "a\n"}, {}, "holds no rows"),
        ({"a.csv": "a\n1\n"}, {"columns": ["b"]}, "no column 'b' in a.csv, which has 'a'"),
        ({"a.csv": "a,b\n1\n"}, {}, "cannot read a.csv: row 1 has 1 .* header line has 2"),
        ({"a.parquet": "PAR1"}, {}, "cannot read a.parquet"),
        ({"a.jsonl": '{"a": 1}\n{"a": "x"}\n'}, {}, "cannot read a.jsonl: .*from number to string"),
        (
            {"a.jsonl": '{"a": 1}\n', "b.jsonl": '{"a": "x"}\n'},
            {},
            "'a' is string in b.jsonl and int64",
        ),
        ({"a.jpg": ""}, {}, "a.jpg is not in a subfolder"),
        ({"dataset_dict.json": "{}", "test/state.json": "{}"}, {}, r"several splits \(test\)"),
        ({"a.tar": ""}, {}, "tar shards, which convert does not read"),
        ({"a.txt": "ab"}, {"tokenizer": "bytes", "pack": 9}, "3 tokens, too few"),
        ({"a.txt": "ab"}, {"tokenizer": "bytes"}, "tokenizer and pack go together"),
        ({"a.csv": "a\n1\n"}, {"tokenizer": "bytes", "pack": 9}, "one column of text"),
        ({"a.csv": "a\n1\n"}, {"rows_per_group": 0}, "rows_per_group is 0"),
        ({"a.csv": "a\n1\n"}, {"format": "arrow", "compression": "snappy"}, "none, lz4, zstd"),
    ],
)
def test_convert_of_an_unreadable_source_says_why_and_leaves_nothing(tmp_path, files, asked, words):
    source = tmp_path / "source"
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    with pytest.raises(DataError, match=words):
        convert(str(source), str(tmp_path / "out"), **asked)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_schemas_that_differ_name_both_files(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1.5]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"'a' is int64 in a\.parquet and double in b\.parquet"):
        convert(str(tmp_path), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.array([1], pa.int32()), pa.array([2**40], pa.int64()), pa.int64()),
        (pa.array([2**40], pa.int64()), pa.array([1], pa.int8()), pa.int64()),
        (pa.array([0.5], pa.float32()), pa.array([0.1], pa.float64()), pa.float64()),
        (pa.array([0.5], pa.float16()), pa.array([0.5], pa.float32()), pa.float32()),
        (pa.nulls(1), pa.array(["a"]), pa.string()),
        (pa.array(["a"]), pa.nulls(1), pa.string()),
        (pa.array(["a"], pa.large_string()), pa.array(["b"]), pa.large_string()),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[2**40, 3]]), pa.list_(pa.int64())),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.array([[3]]), pa.list_(pa.int64())),
    ],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_types_that_training_reads_as_one_column_are_converted_to_it(
    one, other, both, ending, tmp_path
):
    for name, values in (("a", one), ("b", other)):
        table = pa.table({"x": values})
        if ending == "parquet":
            pq.write_table(table, tmp_path / f"{name}.parquet")
        else:
            with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as file:
                file.write_table(table)
    schema, done, read = by_convert(tmp_path)
    assert kinds.type_name(schema.field("x").type) == kinds.type_name(both)
    assert done == read == {"x": one.to_pylist() + other.to_pylist()}


def test_column_that_some_files_lack_is_null_in_their_rows(tmp_path):
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"s": ["x"], "n": [3]}), tmp_path / "b.parquet")
    _, done, read = by_convert(tmp_path)
    assert done == read == {"n": [1, 2, 3], "s": [None, None, "x"]}
    (tmp_path / "only").mkdir()
    convert(f"{tmp_path}/*.parquet", str(tmp_path / "only"), columns=["s"])
    assert pq.read_table(tmp_path / "only").to_pydict() == {"s": [None, None, "x"]}


def test_number_that_some_files_lack_is_filled_as_in_training(tmp_path):
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [0.5], "n": [3]}), tmp_path / "b.parquet")
    _, done, read = by_convert(tmp_path, fill_nulls={"x": -1.0})
    assert done == read == {"n": [1, 2, 3], "x": [-1.0, -1.0, 0.5]}


def test_columns_that_differ_only_in_case_between_files_are_refused(tmp_path):
    pq.write_table(pa.table({"n": [1], "Id": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [1], "id": ["b"]}), tmp_path / "b.parquet")
    for act in (
        lambda: in_place(DataConfig(str(tmp_path), micro_batch_size=1)),
        lambda: convert(str(tmp_path), str(tmp_path / "to")),
    ):
        with pytest.raises(DataError, match=r"'Id' \(in a\.parquet\) and 'id' \(in b\.parquet\)"):
            act()
    convert(str(tmp_path), str(tmp_path / "to"), columns=["n"])


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow", "jsonl"])
def test_files_without_a_row_are_counted_and_their_types_do_not_matter(ending, tmp_path):
    for name, values in (("a", []), ("b", ["x"]), ("c", [])):
        frame = pl.DataFrame({"s": values}, schema={"s": pl.String if values else pl.Int64})
        write = {
            "csv": frame.write_csv,
            "parquet": frame.write_parquet,
            "jsonl": frame.write_ndjson,
        }
        {**write, "arrow": frame.write_ipc}[ending](tmp_path / f"{name}.{ending}")
    if ending == "arrow":  # Polars writes a batch without rows, whose types count
        for name in "ac":
            table = pa.table({"s": pa.array([], pa.int64())})
            with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema):
                pass
    done = convert(str(tmp_path), str(tmp_path / "to"))
    assert pq.read_table(tmp_path / "to").to_pydict() == {"s": ["x"]}
    (skipped,) = done.skipped
    assert skipped_message([skipped]) == f"2 files: 2 without a row (such as a.{ending})"


def test_files_that_are_packed_by_lz4_are_converted(tmp_path):
    for name, content in (("c/a.csv", b"id\n1\n"), ("j/a.jsonl", b'{"id": 1}\n')):
        (tmp_path / name).parent.mkdir()
        with pa.CompressedOutputStream(str(tmp_path / f"{name}.lz4"), "lz4") as stream:
            stream.write(content)
        _, done, read = by_convert((tmp_path / name).parent)
        assert done == read == {"id": [1]}


def test_text_that_is_no_utf_8_names_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read a\.txt: UnicodeDecodeError"):
        convert(str(tmp_path), str(tmp_path / "out"), tokenizer="bytes", pack=1)


@pytest.mark.parametrize(
    "state",
    [
        *(
            json.dumps({"_data_files": [{"filename": name}]})
            for name in ("../x.arrow", "/etc/passwd", "s3://b/x", "a\0b")
        ),
        *("", "[]", "{}", '{"_data_files": 5}', "[" * 100_000),
    ],
)
def test_a_saved_dataset_that_names_files_elsewhere_is_refused(tmp_path, state):
    source = tmp_path / "source"
    source.mkdir()
    write_saved_dataset(source)
    (tmp_path / "x.arrow").write_bytes((source / "data-a.arrow").read_bytes())
    (source / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json (names|is not)"):
        convert(str(source), str(tmp_path / "made"))
