"""Files and options that training does not read any more are refused with the line to write
instead."""

import gzip
import io
import lzma
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.config.removed_names import REMOVED_NAMES
from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import DataError, SpecError
from tests.data.shards import config, refused

LOADED = 'Write MapStyleData(datasets.load_dataset("{}", data_files='
CONVERTED = "elastic-dp data convert {url} DESTINATION"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.jsonl"], LOADED.format("json")),
        (["a.ndjson.gz", "b.jsonl"], LOADED.format("json")),
        (["a.json"], LOADED.format("json")),
        (["a.csv", "b.csv", "README.txt"], "2 files there are CSV"),
        (["a.TSV"], LOADED.format("csv")),
        (["a.txt"], LOADED.format("text")),
        (["index.json", "shard.00000.mds"], "MapStyleData(streaming.StreamingDataset(local="),
        (["index.json", "chunk-0-0.bin"], "MapStyleData(litdata.StreamingDataset("),
        (["a.tar.gz", "b.tgz"], "without compression, once, such as by gunzip"),
        (["a.wav"], "decode them in transform="),
        (["a.jpg"], CONVERTED),
    ],
)
@pytest.mark.parametrize("how", ["folder", "file", "glob"])
def test_files_that_are_not_read_in_place_are_refused_with_the_line_instead(
    names, words, how, tmp_path
):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    url = {"folder": tmp_path, "file": tmp_path / names[-1], "glob": f"{tmp_path}/*"}[how]
    if how == "file" and names[-1] == "README.txt":
        pytest.skip("a text")
    with pytest.raises(DataError, match=r"^DataConfig\.url: no shard at ") as refused:
        read_index(DataConfig(url, micro_batch_size=1))
    if "files there" not in words or how != "file":
        shown = f"{tmp_path}/*.{names[-1].rpartition('.')[2]}" if how == "folder" else str(url)
        assert words.replace("{url}", shown) in str(refused.value)


@pytest.mark.parametrize("name", REMOVED_NAMES)
def test_options_that_are_gone_are_refused_with_what_to_write(name):
    for make in (DataConfig, MapStyleData):
        with pytest.raises(SpecError, match=f"{name}=? does not exist"):
            make("x", micro_batch_size=1, **{name: {}})


def test_decoding_of_audio_is_refused_with_what_to_write():
    with pytest.raises(SpecError, match="torchcodec"):
        DataConfig("x", micro_batch_size=1, decode={"clip": {"audio": 16_000}})


def bytes_of(write):
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


TABLE = pa.table({"x": [1, 2, 3]})
PARQUET = bytes_of(lambda sink: pq.write_table(TABLE, sink))


def arrow(sink):
    with pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


def zipped(sink):
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.parquet", PARQUET)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(PARQUET), "compressed with gzip"),
        (lzma.compress(PARQUET), "compressed with xz"),
        (bytes_of(zipped), "a zip archive"),
        (bytes_of(arrow), "an Arrow file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html><html>", "a page in HTML"),
    ],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow", "tar"])
def test_content_that_is_not_what_its_name_says_is_named_by_its_first_bytes(
    content, words, ending, tmp_path
):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    if ending == "arrow" and words == "an Arrow file":
        assert read_index(DataConfig(path, micro_batch_size=1)).num_rows == 3
        return
    refused(config(path), rf"a\.{ending} is not {ending}, as its name says.*{words}")


def test_files_without_an_ending_that_a_url_names_are_known_by_their_first_bytes(tmp_path):
    (tmp_path / "one").write_bytes(PARQUET)
    (tmp_path / "two").write_bytes(PARQUET)
    assert read_index(DataConfig(tmp_path / "one", micro_batch_size=1)).num_rows == 3
    assert read_index(DataConfig(f"{tmp_path}/*", micro_batch_size=1)).num_rows == 6
    (tmp_path / "two").write_bytes(bytes_of(arrow))
    refused(config(f"{tmp_path}/*"), r"several formats: 1 parquet .* and 1 arrow")
