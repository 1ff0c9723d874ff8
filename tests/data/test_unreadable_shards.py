"""Shards that cannot be read are refused by name, when they are opened or when they are read."""

import os

import pyarrow.parquet as pq
import pytest

from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import BadShard, DataError, StorageError
from elastic_dp.storage import Store
from tests.data.shards import ONE, SHARDS, config, in_memory, opened, refused, write_arrow


def scribbled(path):
    """The second half of the second row group is other bytes; size, footer and time stay."""
    index = read_index(config(path.parent))
    before, content = path.stat(), bytearray(path.read_bytes())
    middle, end = int(index.starts[1] + index.ends[1]) // 2, int(index.ends[1])
    content[middle:end] = (b'"\xff\x00{' * end)[: end - middle]
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def small_groups(monkeypatch):
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
    (tmp_path / f"b{name}").write_bytes(b"")
    refused(config(tmp_path), rf"b{name} is empty \(0 bytes\), .* was lost; write")
    (tmp_path / f"b{name}").write_bytes(b'\x00"{broken')
    refused(config(tmp_path), rf"b{name}")


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_cut_short(name, tmp_path):
    SHARDS[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    refused(config(tmp_path), rf"cannot (read the footer of|scan|read) {name}")


@pytest.mark.parametrize(
    ("shards", "changes", "said"),
    [
        ({}, {}, r"no shard \(\*\.parquet.*\*\.tar\) at '.*': no file of that name or below it"),
        ({"a": ONE[:0], "b": ONE[:0]}, {}, r"no shard at '.*' holds a row: a\.parquet, b\.parquet"),
        ({"a": ONE}, {"columns": ["t"]}, r"no column 't' in a\.parquet, which has 'x', 's'"),
        ({"a": ONE.select(["s"]), "b": ONE}, {}, r"'x' \(int64\) is not in a\.parquet; write"),
        ({"a": ONE.rename_columns(["x", "x"])}, {}, r"several columns named 'x'"),
    ],
)
def test_read_index_of_unreadable_shards_is_refused(shards, changes, said, tmp_path):
    for name, content in shards.items():
        pq.write_table(content, tmp_path / f"{name}.parquet")
    refused(config(tmp_path, **changes), said)


def test_mixed_formats_need_a_choice(tmp_path):
    pq.write_table(ONE, tmp_path / "a.parquet")
    write_arrow(tmp_path / "b.arrow", ONE, stream=False)
    words = r"several formats: 1 parquet \(such as a\.parquet\) and 1 arrow"
    refused(config(tmp_path), words)
    assert read_index(config(tmp_path / "*.arrow")).num_rows == 2


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
