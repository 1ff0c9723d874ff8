"""What was converted is what was there: every format, in order, in bounded memory, whole or not at
all."""

import csv
import hashlib
import json
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import fsspec
import hypothesis.strategies as st
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import tokenizers
from hypothesis import given, settings

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index
from elastic_dp.data.columns import column_types as kinds
from elastic_dp.data.discovery.skipped_files import skipped_message
from elastic_dp.data.formats import text as text_format
from elastic_dp.dataprep import convert, inspect
from elastic_dp.dataprep.sources import documents
from elastic_dp.dataprep.token_packing import ByteTokenizer, HuggingFaceTokenizer, Packing
from elastic_dp.errors import DataError, StorageError
from tests.data.values import in_place

ROWS = [
    {
        "id": i,
        "text": f'row "{i}", in\ntwo lines' if i % 3 else "",
        "x": i / 4,
        "when": "2026-01-02",
    }
    for i in range(1000)
]


def read(folder: Path) -> pa.Table:
    shards = sorted(folder.glob("part-*"))
    if shards[0].suffix == ".parquet":
        return pa.concat_tables([pq.read_table(shard) for shard in shards])
    return pa.concat_tables([pa.ipc.open_file(shard.read_bytes()).read_all() for shard in shards])


def group_rows(folder: Path) -> list[int]:
    footers = [pq.read_metadata(shard) for shard in sorted(folder.glob("part-*"))]
    return [f.row_group(i).num_rows for f in footers for i in range(f.num_row_groups)]


def write_parquet(folder: Path) -> None:
    for number in (0, 1):
        table = pa.Table.from_pylist(ROWS[number * 500 : number * 500 + 500])
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=333)
    (folder / "README.txt").write_text("no shard")
    (folder / "_old.csv").write_text("hidden")


def write_arrow(folder: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table.slice(0, 700), max_chunksize=300)
    with pa.ipc.new_stream(folder / "b.arrow", table.schema) as stream:
        stream.write_table(table.slice(700))


def write_saved_dataset(folder: Path) -> None:
    """As `datasets.save_to_disk`: streams, in an order that is not that of their names."""
    table = pa.Table.from_pylist(ROWS)
    for name, part in (("data-b.arrow", table.slice(0, 600)), ("data-a.arrow", table.slice(600))):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(part)
    files = [{"filename": "data-b.arrow"}, {"filename": "data-a.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def write_jsonl(folder: Path) -> None:
    said = [json.dumps(row) + "\n" for row in ROWS]
    (folder / "a.jsonl").write_text("".join(said[:400]))
    with fsspec.open(str(folder / "b.jsonl.gz"), "wt", compression="gzip") as file:
        file.write("".join(said[400:]))


def write_csv(folder: Path) -> None:
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


WRITERS = [write_parquet, write_arrow, write_saved_dataset, write_jsonl, write_csv]


@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_rows_are_equal_and_in_order(tmp_path, monkeypatch, write, format):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 5000)
    (source := tmp_path / "source").mkdir()
    write(source)
    made = convert(
        str(source), str(tmp_path / "out"), rows_per_group=64, shard_bytes=7000, format=format
    )
    assert read(tmp_path / "out").to_pylist() == ROWS
    assert (made.rows, made.row_groups, made.rows_per_group) == (1000, 16, 64)
    shards = sorted((tmp_path / "out").iterdir())
    assert [shard.name for shard in shards] == [
        f"part-{i:05d}.{format}" for i in range(made.shards)
    ]
    assert made.shards > 2 and made.nbytes == sum(shard.stat().st_size for shard in shards)
    if format == "parquet":
        assert group_rows(tmp_path / "out") == [64] * 15 + [40]


def test_convert_output_can_be_trained_on(tmp_path):
    write_jsonl(tmp_path)
    convert(str(tmp_path), str(tmp_path / "out"), rows_per_group=64, columns=["x", "id"])
    data = open_data(DataConfig(str(tmp_path / "out"), micro_batch_size=10), virtual_workers=4)
    seen = [
        n for step in range(1, 26) for v in range(4) for n in data.batch(step, v)["id"].tolist()
    ]
    data.close()
    assert sorted(seen) == list(range(1000))
    assert read(tmp_path / "out").column_names == ["x", "id"]


def test_the_same_source_gives_the_same_bytes(tmp_path):
    write_csv(tmp_path)
    digests = set()
    for name in ("one", "two"):
        convert(
            str(tmp_path / "a.csv"), str(tmp_path / name), shard_bytes=20_000, rows_per_group=100
        )
        shards = sorted((tmp_path / name).iterdir())
        digests.add(tuple(hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards))
    assert len(digests) == 1


def test_row_groups_have_2_mib_where_nothing_is_said(tmp_path):
    tokens = pa.FixedSizeListArray.from_arrays(np.arange(2048 * 4000, dtype=np.int32), 2048)
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "a.parquet", row_group_size=1 << 20)
    made = convert(str(tmp_path / "a.parquet"), str(tmp_path / "out"))
    whole = made.rows_per_group  # a little less than 256, as validity bits are counted
    assert 240 <= whole <= 256 and set(group_rows(tmp_path / "out")) == {whole, 4000 % whole}


@pytest.mark.parametrize(
    ("name", "content", "types", "values"),
    [
        (
            "a.csv",
            "a,b\n1,x\n2.5,007\n,\n",
            "a: double b: string",
            [[1, 2.5, None], ["x", "007", ""]],
        ),
        ("a.csv", "a\n007\nseven\n", "a: string", [["007", "seven"]]),
        ("a.jsonl", '{"a": 1}\n{"a": 2.5}\n{"b": [1]}\n', "a: double b: list<item: int64>", None),
        ("a.jsonl", '{"a": null}\n{"a": "2026-01-02 03:04:05"}\n', "a: string", None),
    ],
)
def test_types_are_those_of_all_rows(tmp_path, monkeypatch, name, content, types, values):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 4)  # each line is a block of its own
    (tmp_path / name).write_text(content)
    convert(str(tmp_path / name), str(tmp_path / "out"))
    table = read(tmp_path / "out")
    assert (
        " ".join(f"{field.name}: {field.type}" for field in table.schema).replace("element", "item")
        == types
    )
    if values:
        assert [column.to_pylist() for column in table.columns] == values


def test_images_are_bytes_with_labels_in_the_order_of_class_names(tmp_path):
    source = tmp_path / "source"
    for path in ("dog/1.png", "cat/a/2.JPG", "cat/1.jpg"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(path.encode())
    convert(str(source), str(tmp_path / "out"))
    table = read(tmp_path / "out")
    assert table.schema.field("label").type == pa.int32()
    assert json.loads(table.schema.metadata[b"classes"]) == ["cat", "dog"]
    assert table.to_pylist() == [
        {"image": path.encode(), "label": label, "path": path}
        for path, label in (("cat/1.jpg", 0), ("cat/a/2.JPG", 0), ("dog/1.png", 1))
    ]


def test_hugging_face_images_become_their_bytes(tmp_path):
    image = pa.array([{"bytes": b"one", "path": "1.png"}, {"bytes": b"two", "path": None}])
    pq.write_table(pa.table({"image": image, "label": [0, 1]}), tmp_path / "a.parquet")
    convert(str(tmp_path / "a.parquet"), str(tmp_path / "out"))
    assert read(tmp_path / "out")["image"].to_pylist() == [b"one", b"two"]
    outside = pa.array([{"bytes": None, "path": "1.png"}], image.type)
    pq.write_table(pa.table({"image": outside}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"'image' of b\.parquet names image files"):
        convert(str(tmp_path / "b.parquet"), str(tmp_path / "out2"))


# --- packing


def test_packing_by_hand(tmp_path):
    """ "abc", end, "de", end, "f", end: 9 tokens, rows of 4, one token over."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "abc"}\n{"text": null}\n{"text": "de"}\n{"text": "f"}\n'
    )
    made = convert(str(tmp_path / "a.jsonl"), str(tmp_path / "out"), tokenizer="bytes", pack=4)
    table = read(tmp_path / "out")
    assert table["tokens"].to_pylist() == [[97, 98, 99, 256], [100, 101, 256, 102]]
    assert table.schema.field("tokens").type == pa.list_(pa.uint16(), 4)
    assert (made.rows, made.dropped_tokens) == (2, 1)


@settings(max_examples=50)
@given(st.lists(st.text(max_size=30), min_size=1), st.integers(1, 40), st.integers(1, 7))
def test_packing_loses_and_repeats_nothing(texts, length, piece_chars):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_CHARS", piece_chars)
        pieces = [piece for text in texts for piece in documents._pieces(text)]
    packing = Packing(ByteTokenizer(), length)
    rows = [row for batch in packing.batches(iter(pieces)) for row in batch["tokens"].to_pylist()]
    line = [token for text in texts for token in (*text.encode(), 256)]
    assert packing.dropped_tokens == len(line) % length
    assert rows == [line[i : i + length] for i in range(0, len(line) - length + 1, length)]


def test_text_files_are_documents_of_any_length(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_CHARS", 10)
    texts = ["ä\r\nö" * 50, "no end of line " * 9, ""]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    convert(str(tmp_path), str(tmp_path / "out"), tokenizer="bytes", pack=3, format="parquet")
    line = [token for text in texts for token in (*text.encode(), 256)]
    assert read(tmp_path / "out")["tokens"].to_pylist() == [
        line[i : i + 3] for i in range(0, len(line) - 2, 3)
    ]


def test_the_tokenizers_library(tmp_path):
    vocabulary = {"<unk>": 0, "hello": 1, "world": 2, "</s>": 70_000}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n{"text": "world what"}\n')
    source, name = str(tmp_path / "a.jsonl"), str(tmp_path)
    convert(source, str(tmp_path / "out"), tokenizer=name, pack=3)
    table = read(tmp_path / "out")
    assert table["tokens"].to_pylist() == [[1, 2, 70_000], [2, 0, 70_000]]
    assert table.schema.field("tokens").type.value_type == pa.int32()
    with pytest.raises(DataError, match=r"no token <eos>; name the one.*--end-of-text"):
        convert(source, str(tmp_path / "no"), tokenizer=name, pack=3, end_of_text="<eos>")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'elastic_dp\[text\]'"):
        convert(str(tmp_path), str(tmp_path / "out"), tokenizer="gpt2", pack=9)


def test_how_columns_are_written(tmp_path):
    """Dictionaries and statistics only where they help; lists and images are not compressed
    again."""
    table = pa.table({"word": ["a"] * 100, "n": range(100)})
    pq.write_table(table, tmp_path / "words.parquet")
    pq.write_table(table.append_column("list", [[[1, 2]] * 100]), tmp_path / "lists.parquet")
    for name, codec in (("words", "SNAPPY"), ("lists", "UNCOMPRESSED")):
        convert(str(tmp_path / f"{name}.parquet"), str(tmp_path / name))
        group = pq.read_metadata(tmp_path / name / "part-00000.parquet").row_group(0)
        chunks = [group.column(i) for i in range(group.num_columns)]
        assert {chunk.compression for chunk in chunks} == {codec}
        dictionary = [any("DICTIONARY" in e for e in chunk.encodings) for chunk in chunks]
        assert dictionary == [True, False, False][: len(chunks)]
        assert [chunk.is_stats_set for chunk in chunks] == [False, True, False][: len(chunks)]


def test_any_object_of_that_shape_is_a_tokenizer(tmp_path):
    class Words:
        vocabulary, end_of_text = 1000, 999

        def encode(self, texts):
            return [[len(word) for word in text.split()] for text in texts]

    (tmp_path / "a.csv").write_text("id,body\n1,one three\n2,seven\n")
    convert(
        str(tmp_path / "a.csv"), str(tmp_path / "out"), tokenizer=Words(), pack=5, columns=["body"]
    )
    assert read(tmp_path / "out")["tokens"].to_pylist() == [[3, 5, 999, 5, 999]]


class _Library:
    """Of the `tokenizers` library, what the adapter uses."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        return lambda: self.called.append(name)

    def get_vocab(self, with_added_tokens):
        return {"a": 3, "<|endoftext|>": 9}

    def token_to_id(self, token):
        return self.get_vocab(True).get(token)


def test_the_adapter_turns_off_what_would_change_the_text():
    library = _Library()
    tokenizer = HuggingFaceTokenizer(library)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (10, 9)
    assert library.called == ["no_padding", "no_truncation"]


# --- memory


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
    """The growth of a process' peak over what the same takes with a small source, by sources of 60
    MiB each, one row group."""
    for name, rows in (("small", 2000), ("large", 16_000)):
        line = json.dumps({"id": 1, "text": "word " * 800}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line * rows)
        values = np.random.default_rng(0).integers(0, 1 << 30, 1024 * rows, dtype=np.int32)
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(values), 1024)})
        pq.write_table(
            table, tmp_path / f"{name}.parquet", row_group_size=rows, use_dictionary=False
        )
    for ending in ("jsonl", "parquet"):
        assert (tmp_path / f"large.{ending}").stat().st_size > 60 << 20
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks_mib = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert peaks_mib[-1] - peaks_mib[2] < 24, done.stdout  # the source has grown by 53 MiB


# --- whole or not at all


@pytest.fixture(scope="module")
def bucket(moto):
    """URL of an empty bucket on a server that speaks S3."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_ENDPOINT_URL", moto)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("conversions")
        yield "s3://conversions"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def empty(request, tmp_path):
    """(URL of a place where nothing is yet, its file system, the path in it): of the store that is
    named."""
    folder = {"file": tmp_path, "memory": "memory:/"}.get(request.param)
    url = f"{folder or request.getfixturevalue('bucket')}/{uuid.uuid4()}/out"
    return (url, *fsspec.core.url_to_fs(url))


class _Broken(KeyboardInterrupt):
    pass


def _break_off(after: int):
    calls = []

    def on_progress(now):
        calls.append(now)
        if len(calls) == after:
            assert now.shards > 1
            raise _Broken

    return on_progress


@pytest.mark.parametrize("empty", ["file", "memory", "s3"], indirect=True)
def test_convert_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch, empty):
    out, system, path = empty
    monkeypatch.setattr(text_format, "GROUP_BYTES", 2000)
    write_jsonl(tmp_path)
    shape = {"rows_per_group": 10, "shard_bytes": 2000}
    while_there = []

    def look(now):
        system.invalidate_cache()
        while_there.append([f.rpartition("/")[2] for f in system.find(path)])

    with pytest.raises(_Broken):
        convert(str(tmp_path), out, on_progress=_break_off(9), **shape)
    system.invalidate_cache()
    assert system.find(path) == [] and not list(tmp_path.glob(".*"))
    made = convert(str(tmp_path), out, on_progress=look, **shape)
    assert len(while_there) > 1
    for names in while_there:
        assert names == [] if out.startswith("/") else "_incomplete" in names
    system.invalidate_cache()
    assert len(system.find(path)) == made.shards and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("empty", ["file", "memory", "s3"], indirect=True)
def test_convert_that_was_killed_leaves_no_readable_data_set(tmp_path, empty):
    """A kill is an exception that nobody handles: what lies there in the middle is looked at."""
    write_jsonl(tmp_path)
    out = empty[0]
    refused, options = [], {"anon": False} if out.startswith("s3:") else None

    def on_progress(now):
        train = DataConfig([out, f"{out}/*.parquet"], micro_batch_size=1, storage_options=options)
        for again in (
            lambda: convert(out, str(tmp_path / "again")),
            lambda: convert(f"{out}/*.parquet", str(tmp_path / "again")),
            lambda: inspect(out),
            lambda: read_index(train),
            lambda: convert(str(tmp_path), out),
        ):
            with pytest.raises(DataError) as error:
                again()
            refused.append(str(error.value))

    convert(str(tmp_path), out, rows_per_group=10, shard_bytes=2000, on_progress=on_progress)
    *as_source, as_destination = refused[:5]
    for said in as_source:
        assert ("at" if out.startswith("/") else "is not complete") in said
    assert "is not empty" in as_destination


def test_a_destination_with_something_in_it_is_refused(tmp_path):
    write_jsonl(tmp_path)
    convert(str(tmp_path), str(tmp_path / "out"))
    before = (tmp_path / "out" / "part-00000.parquet").read_bytes()
    with pytest.raises(DataError, match=r"is not empty: 1 files.*name another destination"):
        convert(str(tmp_path / "a.jsonl"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "part-00000.parquet").read_bytes() == before
    (tmp_path / "empty").mkdir()
    convert(str(tmp_path / "a.jsonl"), str(tmp_path / "empty"))


def test_a_store_that_refuses_is_a_storage_error(tmp_path):
    write_jsonl(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        convert(str(tmp_path / "a.jsonl"), str(tmp_path / "file" / "out"))


def test_a_bucket_that_is_not_there(tmp_path, bucket):
    write_jsonl(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write to 's3://not-there/out'.*does not exist"):
        convert(str(tmp_path), "s3://not-there/out")
    with pytest.raises(DataError, match=r"cannot list 's3://not-there/in'.*does not exist"):
        convert("s3://not-there/in", str(tmp_path / "out"))


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


def by_convert(folder, **options):
    """Each file's columns by name; what `convert` makes of it, and what training reads."""
    to = folder.parent / f"{folder.name}-to"
    convert(str(folder), str(to), **options)
    done = pq.read_table(to)
    read = in_place(DataConfig(str(folder), micro_batch_size=1, **options))
    return done.schema, done.to_pydict(), read


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
