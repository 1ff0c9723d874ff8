"""Compressed Arrow files of a few KiB that unpack to more memory than a machine has."""

import pyarrow as pa
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.formats import arrow_messages
from elastic_dp.dataprep import convert
from elastic_dp.errors import BadShard, DataError
from tests.data.shards import config, opened, refused, write_arrow
from tests.data.values import in_place

LIMIT_BYTES = 1 << 20
TEXT = pa.table({"s": ["x" * (2 << 20), "y"]})
NUMBERS = pa.table({"x": pa.array([0] * (1 << 18))})
DICTIONARY = pa.table({"s": pa.array(["x" * (2 << 20), "y"]).dictionary_encode()})


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    monkeypatch.setattr(arrow_messages, "DECOMPRESSED_BYTES", LIMIT_BYTES)


def write(path, table, codec, kind="file"):
    write_arrow(path, table, kind == "stream", chunk=1 << 20, compression=codec)
    assert codec is None or path.stat().st_size < LIMIT_BYTES // 10


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize(
    "table", [TEXT, NUMBERS, DICTIONARY], ids=["text", "numbers", "dictionary"]
)
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_arrow_that_decompresses_to_too_much_is_refused_by_convert(codec, table, kind, tmp_path):
    write(tmp_path / "a.arrow", table, codec, kind)
    said = r"a\.arrow has a (record batch|dictionary).* that decompresses to \d MiB.*fewer rows"
    with pytest.raises(DataError, match=said):
        convert(str(tmp_path / "a.arrow"), str(tmp_path / "to"))
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_dictionary_that_decompresses_to_too_much_is_refused_when_opened(kind, tmp_path):
    write(tmp_path / "a.arrow", DICTIONARY, "zstd", kind)
    refused(config(tmp_path), r"a\.arrow has a .* that decompresses to \d MiB")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("table", [TEXT, NUMBERS], ids=["text", "numbers"])
def test_arrow_that_decompresses_to_too_much_is_a_bad_shard(table, kind, codec, tmp_path):
    """How long its buffers are is not in the metadata, which is all that is read at open."""
    write(tmp_path / "a.arrow", table, codec, kind)
    groups = opened(config(tmp_path))
    before = pa.total_allocated_bytes()
    with pytest.raises(BadShard, match=r"record batch of .* rows that decompresses to 2 MiB"):
        groups.read(0)
    assert pa.total_allocated_bytes() - before < LIMIT_BYTES


@pytest.mark.parametrize("codec", ["lz4", "zstd", None])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_within_the_limit_is_read_converted_and_inspected(codec, kind, tmp_path):
    table = pa.table({"x": range(1000), "s": [str(i) for i in range(1000)]})
    table = table.append_column("d", table["s"].dictionary_encode())
    path = tmp_path / "a.arrow"
    write_arrow(path, table, kind == "stream", chunk=300, compression=codec)
    assert in_place(DataConfig(str(tmp_path), micro_batch_size=1))["d"] == table["d"].to_pylist()


def test_arrow_without_compression_has_no_limit(tmp_path):
    write(tmp_path / "a.arrow", NUMBERS, None)
    assert in_place(config(tmp_path))["x"] == NUMBERS["x"].to_pylist()
