"""`convert`: each row of a source with its value, or an error that names the file."""

# ruff: noqa: E501 (a case is a line)

import bz2
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.dataprep import convert
from elastic_dp.errors import DataError, StorageError
from elastic_dp.storage import Store
from tests.storage.conftest import send
from tests.storage.servers import s3_options


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def arrow(opened=pa.ipc.new_file, **columns):
    sink = pa.BufferOutputStream()
    with opened(sink, pa.table(columns).schema) as file:
        file.write_table(pa.table(columns))
    return sink.getvalue().to_pybytes()


def plant(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(content)
    return str(folder)


def converted(tmp_path, files, **options):
    """The columns that are written."""
    done = convert(plant(tmp_path / "in", files), str(tmp_path / "out"), **options)
    table = pq.read_table(tmp_path / "out", partitioning=None)
    assert table.num_rows == done.rows
    return table.to_pydict()


# name, files, options; and the columns, or what the error says.
JSON = {
    "a key that comes late": ('{"a":1}\n' * 5000 + '{"a":2,"b":"x"}\n', {"a": [1] * 5000 + [2], "b": [None] * 5000 + ["x"]}),
    "a float that comes late": ('{"a":1}\n' * 5000 + '{"a":2.5}\n', {"a": [1.0] * 5000 + [2.5]}),
    "2^53 + 1 and a float": ('{"a":9007199254740993}\n' + '{"a":1}\n' * 5000 + '{"a":2.5}\n', r"rows 0 to 1023 of a\.jsonl.*exactly"),
    "2^53 + 1": ('{"a":9007199254740993}\n', {"a": [2**53 + 1]}),
    "beyond int64": ('{"a":18446744073709551615}\n{"a":-1}\n', r"rows 0 to 1 of a\.jsonl .*too large"),
    "beyond float64": ('{"a":1e400}\n', r"row 0 of a\.jsonl is no JSON: no float64 holds 1e400"),
    "dates": ('{"a":"2026-01-02"}\n', {"a": ["2026-01-02"]}),
    "text for a number": ('{"a":1}\n{"a":"x"}\n', r"rows 0 to 1 of a\.jsonl"),
    "a bool for a number": ('{"a":1}\n' * 5000 + '{"a":true}\n', r"rows 4096 to 5000 of a\.jsonl"),
    "an object for a number": ('{"a":1}\n{"a":{"b":1}}\n', r"rows 0 to 1 of a\.jsonl"),
    "nested": ('{"a":[{"b":1}]}\n{"a":[{"c":[]}]}\n', {"a": [[{"b": 1, "c": None}], [{"b": None, "c": []}]]}),
    "a key twice": ('{"a":1,"a":2}\n', r"row 0 of a\.jsonl is no JSON: the key 'a' is there twice"),
    "keys that differ by case": ('{"a":1,"A":2}\n', "differ by more than case"),
    "nulls alone": ('{"a":null}\n', {"a": [None]}),
    "objects without keys": ("{}\n{}\n", "holds no rows with columns"),
    "blank lines and CRLF": ('\n{"a":1}\r\n\n{"a":2}\n', {"a": [1, 2]}),
    "a byte order mark": (b'\xef\xbb\xbf{"a":1}\n', {"a": [1]}),
    "text behind a row": ('{"a":1} x\n', r"row 0 of a\.jsonl is no JSON"),
    "half a row": ('{"a":1}\n{"a":2\n', r"row 1 of a\.jsonl is no JSON"),
    "two rows in a line": ('{"a":1}{"a":2}\n', r"row 0 of a\.jsonl is no JSON"),
    "a comma too many": ('{"a":1,}\n', r"row 0 of a\.jsonl is no JSON"),
    "Latin-1": (b'{"a":"\xe9"}\n', r"a\.jsonl: UnicodeDecodeError"),
    "half a pair": (rb'{"a":"\ud800"}', r"rows 0 to 0 of a\.jsonl .*surrogates"),
    "line separators of Unicode": ('{"a":"x\u2028y"}\n', {"a": ["x\u2028y"]}),
    "rows that are no objects": ("1\n", r"row 0 of a\.jsonl is no object: 1"),
    "an array": ('[{"a":1},\n{"a":2}]', {"a": [1, 2]}),
    "deep": ('{"a":' + "[" * 5000 + "]" * 5000 + "}\n", r"row 0 of a\.jsonl is no JSON"),
    "nothing": ("", "holds no rows"),
}  # fmt: skip
FOLDERS = {
    "Parquet and its description": ({"a.parquet": parquet(x=[1]), "config.json": "{}", "README.txt": "x"}, {"x": [1]}),
    "JSON Lines and its description": ({"a.jsonl": '{"x":1}\n', "config.json": "{}"}, {"x": [1]}),
    "hidden files": ({"a.jsonl": '{"x":1}\n', "_b.jsonl": '{"x":2}\n', ".c/d.jsonl": '{"x":3}\n'}, {"x": [1]}),
    "folders": ({"b/c.jsonl": '{"x":2}\n', "a.jsonl": '{"x":1}\n'}, {"x": [1, 2]}),
    "folders with a value": ({"y=1/a.jsonl": '{"x":2}\n', "y=2/a.jsonl": '{"x":3}\n'}, {"x": [2, 3], "y": [1, 2]}),
    "columns in another order": ({"a.jsonl": '{"x":1,"y":2}\n', "b.jsonl": '{"y":3,"x":4}\n'}, {"x": [1, 4], "y": [2, 3]}),
    "a column of nulls in one file": ({"a.jsonl": '{"x":null,"y":1}\n', "b.jsonl": '{"x":1,"y":2}\n'}, {"x": [None, 1], "y": [1, 2]}),
    "types of all files": ({"a.jsonl": '{"x":1}\n', "b.jsonl": '{"x":0.5}\n', "c.jsonl": ""}, {"x": [1.0, 0.5]}),
    "types of Parquet": ({"a.parquet": parquet(x=pa.array([1], pa.int32())), "b.parquet": parquet(x=[2**40])}, {"x": [1, 2**40]}),
    "a column that a file lacks": ({"a.parquet": parquet(x=[1]), "b.parquet": parquet(x=[2], y=["q"])}, {"x": [1, 2], "y": [None, "q"]}),
    "a value that would change": ({"a.parquet": parquet(x=[2**53 + 1]), "b.parquet": parquet(x=[2.5])}, "a.parquet: ArrowInvalid"),
    "types without a common one": ({"a.parquet": parquet(x=[1]), "b.parquet": parquet(x=["q"])}, "b.parquet has other types"),
    "names that differ by case": ({"a.parquet": parquet(x=[1]), "b.parquet": parquet(X=[1])}, "differ by more than case"),
    "Arrow files and streams": ({"a.arrow": arrow(x=[1]), "b.arrow": arrow(pa.ipc.new_stream, x=[2])}, {"x": [1, 2]}),
    "lines of text": ({"a.txt": "x\n\ny\r\nz"}, {"text": ["x", "", "y", "z"]}),
    "CSV": ({"a.csv": "x\n1\n"}, r"holds csv files, which convert does not read; write MapStyleData.*write_shards\("),
    "tar": ({"a.tgz": "x"}, "does not read; write them without compression, which training reads"),
    "MDS": ({"a.mds": "x"}, r"does not read; write MapStyleData\(streaming"),
    "images": ({"dog/1.png": b"1", "cat/a/2.JPG": b"2"}, {"image": [b"2", b"1"], "label": [0, 1], "path": ["cat/a/2.JPG", "dog/1.png"]}),
    "images without a class": ({"1.png": b"1"}, "1.png is not in a subfolder"),
    "gzip": ({"a.jsonl.gz": gzip.compress(b'{"x":1}\n')}, {"x": [1]}),
    "gzip without its ending": ({"a.jsonl": gzip.compress(b'{"x":1}\n')}, {"x": [1]}),
    "bz2": ({"a.jsonl.bz2": bz2.compress(b'{"x":1}')}, {"x": [1]}),
    "xz": ({"a.txt.xz": lzma.compress(b"x")}, {"text": ["x"]}),
    "zstd": ({"a.jsonl.zst": pa.compress(b'{"x":1}\n', "zstd", asbytes=True)}, {"x": [1]}),
    "half of gzip": ({"a.jsonl.gz": gzip.compress(b'{"x":1}\n' * 1000)[:-20]}, "a.jsonl.gz: EOFError"),
    "zip": ({"a.jsonl": b"PK\x03\x04"}, "a.jsonl is a zip archive"),
    "Parquet by another name": ({"a.jsonl": parquet(x=[1])}, "a.jsonl is a Parquet file; give it the ending"),
    "damaged Parquet": ({"a.parquet": b"PAR1 cut"}, "cannot read a.parquet"),
    "several formats": ({"a.jsonl": '{"x":1}\n', "a.parquet": parquet(x=[1])}, "several formats .1 jsonl, 1 parquet.*name one by a glob"),
    "no format": ({"a.xyz": "x"}, "has an ending that is known.*It has 1 files, such as a.xyz"),
    "a conversion that was killed": ({"a.parquet": parquet(x=[1]), "_incomplete": "x"}, "is not complete"),
    "a job of Spark": ({"a.parquet": parquet(x=[1]), "_temporary/0/b.parquet": "x"}, "has not finished"),
    "a Delta table": ({"a.parquet": parquet(x=[1]), "_delta_log/0.json": "{}"}, r"the Delta table .* deleted and replaced rows.*write_shards\(DeltaTable"),
    "results of datasets": ({"a.arrow": arrow(x=[1]), "dataset_info.json": "{}", "cache-0123456789abcdef.arrow": arrow(x=[1])}, {"x": [1]}),
    "an Iceberg table": ({"data/a.parquet": parquet(x=[1]), "metadata/1.metadata.json": "{}"}, "the Iceberg table"),
    "two splits of datasets": ({"train/a.arrow": arrow(x=[1]), "dataset_dict.json": "{}"}, {"x": [1]}),
}  # fmt: skip


def _judge(tmp_path, files, expected, **options):
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            converted(tmp_path, files, **options)
        assert not (tmp_path / "out").exists()
    else:
        assert repr(converted(tmp_path, files, **options)) == repr(expected)


@pytest.mark.parametrize("case", JSON)
def test_a_value_of_json_is_its_value_or_a_named_error(case, tmp_path):
    content, expected = JSON[case]
    _judge(tmp_path, {"a.jsonl": content}, expected)


@pytest.mark.parametrize("case", FOLDERS)
def test_files_of_a_folder_are_read_or_named(case, tmp_path):
    files, expected = FOLDERS[case]
    _judge(tmp_path, files, expected)


def test_a_partition_of_a_delta_table_is_refused(tmp_path):
    plant(tmp_path, {"_delta_log/0.json": "{}", "y=1/z=2/a.parquet": parquet(x=[1])})
    for url in ("y=1/z=2", "y=1", "y=1/z=2/a.parquet", "y=1/**/*.parquet"):
        with pytest.raises(DataError, match="belongs to the Delta table"):
            convert(f"{tmp_path}/{url}", str(tmp_path / "out"))


def test_what_is_not_read_is_counted(tmp_path):
    files = {"a.jsonl": '{"x":1}\n', "b.py": "", "c.py": "", "_d.jsonl": "", "README.txt": ""}
    done = convert(plant(tmp_path / "in", files), str(tmp_path / "out"))
    assert done.skipped == {".py": 2, ".txt": 1, "hidden": 1} and done.files == 1
    assert (done.rows_in, done.rows, done.row_groups, done.shards) == (1, 1, 1, 1)


def test_a_folder_that_links_elsewhere_is_read(tmp_path):
    plant(tmp_path / "elsewhere", {"a.jsonl": '{"x":2}\n'})
    plant(tmp_path / "in", {"a.jsonl": '{"x":1}\n'})
    (tmp_path / "in" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "lost.jsonl").symlink_to("nowhere")
    done = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert done.rows == 2 and done.skipped == {"links to nothing": 1}


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_name_of_a_column_that_is_no_text_is_refused_by_one_sentence(ending, tmp_path):
    content = {"arrow": arrow, "parquet": parquet}[ending](name=[1])
    source = plant(tmp_path / "in", {f"a.{ending}": content.replace(b"name", b"na\xffe")})
    for read in (
        lambda: read_index(DataConfig(source, micro_batch_size=1)),
        lambda: convert(source, str(tmp_path / "out")),
    ):
        with pytest.raises(DataError, match=rf"^a\.{ending} has a column whose name is not UTF-8"):
            read()


@pytest.mark.parametrize("name", ["a[1].jsonl", "it's.jsonl", "a*.jsonl", "é ü.jsonl"])
def test_names_with_marks_of_patterns_are_escaped(name, tmp_path):
    plant(tmp_path / "in", {name: '{"x":1}\n'})
    plant(tmp_path / name, {"b/a.jsonl": '{"x":1}\n'})
    escaped = re.sub(r"([*?[])", r"[\1]", name)
    assert convert(str(tmp_path / "in" / escaped), str(tmp_path / "out")).rows == 1
    assert convert(f"{tmp_path / escaped}/**/*", str(tmp_path / "of-folder")).rows == 1


def test_name_that_is_also_a_pattern_of_another_file_is_refused_as_by_training(tmp_path):
    plant(tmp_path / "in", {"a[1].jsonl": '{"x":1}\n', "a1.jsonl": '{"x":2}\n'})
    with pytest.raises(
        DataError, match=r"^'.*a\[1\]\.jsonl' is the name of a file, and also a pattern"
    ):
        convert(f"{tmp_path}/in/a[1].jsonl", str(tmp_path / "out"))


def test_a_glob_reads_what_it_names(tmp_path):
    files = {
        "a/x.jsonl": '{"x":1}\n',
        "b/x.jsonl": '{"x":2}\n',
        "b/y.txt": "z",
        "x.jsonl": '{"x":4}\n',
    }
    plant(tmp_path / "in", files)
    assert convert(f"{tmp_path}/in/*/x.jsonl", str(tmp_path / "one")).rows == 2
    assert convert(f"{tmp_path}/in/**/*.jsonl", str(tmp_path / "two")).rows == 3
    plant(tmp_path / "in" / "b", {"_incomplete": ""})
    with pytest.raises(DataError, match="is not complete"):
        convert(f"{tmp_path}/in/*/x.jsonl", str(tmp_path / "three"))


def test_a_saved_data_set_of_hugging_face_keeps_its_order(tmp_path):
    import datasets  # takes seconds

    datasets.Dataset.from_dict({"id": [*range(100)]}).save_to_disk(tmp_path / "in", num_shards=3)
    state = json.loads((tmp_path / "in" / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "in" / "state.json").write_text(json.dumps(state))
    plant(tmp_path / "in", {"cache-0.arrow": arrow(id=[7])})
    done = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    ids = pq.read_table(tmp_path / "out")["id"].to_pylist()
    assert (
        ids == [*range(67, 100), *range(34, 67), *range(34)]
        and done.skipped["cached results of Hugging Face datasets"] == 1
    )
    state["_data_files"][0]["filename"] = "../elsewhere.arrow"
    (tmp_path / "in" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"/\.\./elsewhere\.arrow', which is no file of"):
        convert(str(tmp_path / "in"), str(tmp_path / "no"))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT x + y AS s FROM rows WHERE x > 1 ORDER BY s DESC", {"s": [12, 7]}),
        ("SELECT coalesce(z, 0) AS z FROM rows", {"z": [0, 1, 0]}),
        ("FROM rows LIMIT 1", {"x": [1], "y": [2], "z": [None]}),
        ("SELEC", "the query failed: Parser Error"),
        ("SELECT q FROM rows", "the query failed: Binder Error"),
        ("CREATE TABLE t AS SELECT 1", "must be one SELECT"),
        ("SELECT 1; SELECT 2", "must be one SELECT"),
        ("SELECT * FROM rows WHERE x > 9", "has 3 rows; nothing was written"),
    ],
)
def test_a_query_makes_the_rows(query, expected, tmp_path):
    _judge(
        tmp_path,
        {"a.jsonl": '{"x":1,"y":2,"z":null}\n{"x":3,"y":4,"z":1}\n{"x":5,"y":7,"z":null}\n'},
        expected,
        query=query,
    )


def test_a_query_says_what_is_wrong_with_the_source(tmp_path):
    _judge(
        tmp_path, {"a.jsonl": '{"x":1}\n{"x":"q"}\n'}, "rows 0 to 1 of a.jsonl", query="FROM rows"
    )


def test_a_query_keeps_the_order_of_many_rows(tmp_path):
    lines = "".join(f'{{"x":{i}}}\n' for i in range(300_000))
    found = converted(tmp_path, {"a.jsonl": lines}, query="SELECT x FROM rows WHERE x % 3 = 0")
    assert found["x"] == [*range(0, 300_000, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["z"]}, "no column 'z' in .*, which has 'x'"),
        ({"columns": "x"}, "columns is 'x', must be a list"),
        ({"rows_per_group": 5}, "no rows_per_group any more; set row_group_bytes"),
        ({"csv_options": {}}, "no csv_options any more; give the rows of a reader of CSV"),
        ({"fill_nulls": {}}, "no fill_nulls any more; set query="),
        ({"format": "arrow"}, "no format any more; leave it out: rows become Parquet"),
        ({"text_glob": ["*.py"]}, "no text_glob any more; name the files by a glob"),
        ({"pack": 5}, "tokenizer and pack go together"),
        ({"pack": 5, "tokenizer": "bytes", "query": "FROM rows"}, "query goes without pack"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, tmp_path):
    _judge(tmp_path, {"a.jsonl": '{"x":1}\n'}, message, **options)


def test_an_unknown_option_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'colums'"):
        convert(str(tmp_path), str(tmp_path / "out"), colums=["x"])


def test_a_missing_duckdb_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    _judge(
        tmp_path,
        {"a.jsonl": '{"x":1}\n'},
        r"pip install 'elastic_dp\[convert\]'",
        query="FROM rows",
    )


KINDS = {
    "jsonl": lambda n: "".join(f'{{"x":{i}}}\n' for i in range(n)),
    "parquet": lambda n: parquet(x=range(n)),
    "arrow": lambda n: arrow(x=range(n)),
}


@pytest.mark.parametrize("ending", KINDS)
def test_a_file_that_changes_after_it_was_listed_is_refused_by_name(ending, tmp_path):
    files = {f"{name}.{ending}": KINDS[ending](5000) for name in "ab"}

    def change(done):
        plant(tmp_path / "in", {f"b.{ending}": KINDS[ending](6000)})

    with pytest.raises((DataError, StorageError), match=rf"b\.{ending}"):
        convert(
            plant(tmp_path / "in", files),
            str(tmp_path / "out"),
            row_group_bytes=8000,
            on_progress=change,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", KINDS)
def test_the_same_source_gives_the_same_bytes_also_from_an_object_store(ending, tmp_path, moto):
    bucket = f"same-{ending}"
    send("PUT", f"{moto}/{bucket}")
    for name in "ab":
        content = KINDS[ending](20_000)
        plant(tmp_path / "in", {f"{name}.{ending}": content})
        content = content if isinstance(content, bytes) else content.encode()
        send("PUT", f"{moto}/{bucket}/in/{name}.{ending}", content)
    shape = {"row_group_bytes": 9000, "shard_bytes": 99_000}
    digests = set()
    for name in ("one", "two"):
        convert(str(tmp_path / "in"), str(tmp_path / name), **shape)
        shards = sorted((tmp_path / name).iterdir())
        digests.add(tuple(hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards))
    options = s3_options(moto)
    convert(f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options, **shape)
    store = Store(f"s3://{bucket}/out", options)
    there = [bytes(store.read_all(entry.path)) for entry in store.find(f"{store.path}/")]
    digests.add(tuple(hashlib.sha256(content).hexdigest() for content in there))
    assert len(digests) == 1 and len(there) > 1


MEASURE = textwrap.dedent("""
    import sys
    from elastic_dp.dataprep import convert

    def peak_mib():  # ru_maxrss would start with that of the process which started it
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))

    def run(folder, name):
        for how, ending in (("table", "parquet"), ("table", "jsonl"), ("pack", "jsonl")):
            options = {"tokenizer": "bytes", "pack": 2049} if how == "pack" else {}
            out = f"{folder}/{name}-{how}-{ending}"
            convert(f"{folder}/{name}.{ending}", out, shard_bytes=16 << 20, **options)
            print(name, how, ending, peak_mib())

    run(sys.argv[1], "small")
    run(sys.argv[1], "large")
""")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_the_source(tmp_path):
    """The growth of a process' peak over what the same takes with a small source, by sources of 120
    MiB each, one row group."""
    for name, rows in (("small", 2000), ("large", 32_000)):
        line = json.dumps({"id": 1, "text": "word " * 800}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line * rows)
        values = np.random.default_rng(0).integers(0, 1 << 30, 1024 * rows, dtype=np.int32)
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(values), 1024)})
        pq.write_table(
            table, tmp_path / f"{name}.parquet", row_group_size=rows, use_dictionary=False
        )
    for ending in ("jsonl", "parquet"):
        assert (tmp_path / f"large.{ending}").stat().st_size > 120 << 20
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks_mib = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert peaks_mib[-1] - peaks_mib[2] < 60, done.stdout  # the source has grown by 115 MiB
