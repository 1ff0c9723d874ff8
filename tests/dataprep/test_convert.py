"""What was converted is what was there: every format, in order, in bounded memory."""

import hashlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.formats import text as text_format
from elastic_dp.dataprep import convert
from elastic_dp.errors import DataError
from tests.dataprep.conversions import (
    ROWS,
    group_rows,
    read,
    write_arrow,
    write_csv,
    write_jsonl,
    write_parquet,
    write_saved_dataset,
)

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


@pytest.mark.parametrize("write", [write_csv, write_jsonl], ids=lambda w: w.__name__)
def test_convert_of_text_does_not_import_pandas(tmp_path, write):
    """That takes a third of the time that 32 MB of CSV do."""
    (source := tmp_path / "source").mkdir()
    write(source)
    run = "import sys; from elastic_dp.dataprep import convert; convert(*sys.argv[1:])"
    command = f"{run}; print('pandas' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command, str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


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
    MiB each, one row group. How many rows are under way differs with the load of the machine."""
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
