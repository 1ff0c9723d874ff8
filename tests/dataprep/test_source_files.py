"""Which files `convert` and `inspect` read: on object stores the same as training, and files with
several names."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.dataprep.convert import convert
from elastic_dp.dataprep.inspection.inspect_dataset import inspect
from elastic_dp.errors import DataError
from elastic_dp.storage.backend import ODD_KEYS
from tests.storage.conftest import send
from tests.storage.servers import s3_options

_numbers = itertools.count()


def parquet(start: int) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [start, start + 1]}), buffer)
    return buffer.getvalue().to_pybytes()


@pytest.fixture
def s3(moto):
    """put(key, content); url(key); options."""
    bucket = f"sources-{next(_numbers)}"
    send("PUT", f"{moto}/{bucket}")

    class S3:
        options = s3_options(moto)

        def put(self, key: str, content: bytes) -> None:
            send("PUT", f"{moto}/{bucket}/{key}", content)

        def url(self, key: str) -> str:
            return f"s3://{bucket}/{key}"

    return S3()


def ids(folder: Path) -> list[int]:
    return sorted(pq.read_table(folder)["id"].to_pylist())


@pytest.mark.parametrize("name", ["a%5B1%5D.parquet", "a%2A.parquet", "what%3F.parquet"])
def test_object_whose_name_has_marks_of_a_pattern_is_converted(name, s3, tmp_path):
    plain = name.replace("%5B", "[").replace("%5D", "]").replace("%2A", "*").replace("%3F", "?")
    s3.put(f"set/{name}", parquet(0))
    s3.put("set/z.parquet", parquet(10))
    url = s3.url(f"set/{plain}")
    assert convert(url, str(tmp_path / "out"), storage_options=s3.options).rows == 2
    assert ids(tmp_path / "out") == [0, 1]
    assert inspect(url, storage_options=s3.options).rows == 2
    config = DataConfig(url, micro_batch_size=1, storage_options=s3.options)
    assert read_index(config).num_rows == 2
    assert inspect(s3.url("set"), storage_options=s3.options).rows == 4


def test_object_whose_name_also_matches_another_as_a_pattern_is_refused(s3, tmp_path):
    s3.put("set/a%5B1%5D.parquet", parquet(0))
    s3.put("set/a1.parquet", parquet(10))
    with pytest.raises(DataError, match=r"also a pattern that matches \S+/a1\.parquet"):
        convert(s3.url("set/a[1].parquet"), str(tmp_path / "out"), storage_options=s3.options)
    assert inspect(s3.url("set/a[[]1].parquet"), storage_options=s3.options).rows == 2


def test_images_whose_names_have_marks_of_a_pattern_are_converted(s3, tmp_path):
    s3.put("set/cat/a%5B1%5D.jpg", b"first")
    s3.put("set/cat/a1.jpg", b"second")
    convert(s3.url("set"), str(tmp_path / "out"), storage_options=s3.options)
    made = pq.read_table(tmp_path / "out")
    assert dict(zip(made["path"].to_pylist(), made["image"].to_pylist(), strict=True)) == {
        "cat/a1.jpg": b"second",
        "cat/a[1].jpg": b"first",
    }


@pytest.mark.parametrize("url", ["set", "set/**/*.parquet"])
def test_keys_with_an_empty_part_are_counted_and_replace_no_other(url, s3, tmp_path):
    s3.put("set/b.parquet", parquet(0))
    s3.put("set//b.parquet", parquet(10))
    s3.put("set//c.parquet", parquet(20))
    s3.put("set/deep/", b"")
    s3.put("set/deep/d.parquet", parquet(30))
    made = convert(s3.url(url), str(tmp_path / "out"), storage_options=s3.options)
    assert ids(tmp_path / "out") == [0, 1, 30, 31]
    (skipped,) = made.skipped
    assert skipped.ending == ODD_KEYS and skipped.files == 2
    config = DataConfig(s3.url("set/**/*.parquet"), micro_batch_size=1, storage_options=s3.options)
    assert read_index(config).num_rows == made.rows


@pytest.mark.parametrize("how", ["link", "hard link", "folder"])
def test_file_by_two_names_in_a_source_is_said(how, tmp_path, caplog):
    source = tmp_path / "set"
    (source / "x").mkdir(parents=True)
    (source / "x" / "a.parquet").write_bytes(parquet(0))
    (source / "b.parquet").write_bytes(parquet(10))
    os.utime(source / "b.parquet", ns=(os.stat(source / "x" / "a.parquet").st_mtime_ns,) * 2)
    inspect(str(source))
    assert not caplog.records
    if how == "link":
        (source / "c.parquet").symlink_to("x/a.parquet")
    elif how == "hard link":
        os.link(source / "x" / "a.parquet", source / "c.parquet")
    else:
        (source / "c").symlink_to("x")
    other = "c/a.parquet" if how == "folder" else "c.parquet"
    for read in (lambda: inspect(str(source)), lambda: convert(str(source), str(tmp_path / "out"))):
        caplog.clear()
        read()
        (record,) = caplog.records
        assert f"'{source}': 1 file is read several times, and the rows count as often" in (
            record.message
        )
        assert other in record.message and "x/a.parquet" in record.message


def test_text_by_two_names_in_a_source_is_said(tmp_path, caplog):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("text")
    (tmp_path / "set" / "b.txt").symlink_to("a.txt")
    convert(str(tmp_path / "set"), str(tmp_path / "out"), tokenizer="bytes", pack=2)
    (record,) = caplog.records
    assert "a.txt and b.txt" in record.message
