"""Requests, footers and open files: what is read once, and what is kept."""

import os
import weakref
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.formats import open_format
from elastic_dp.data.formats.file_format import RowGroupLocation, ShardAt
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.storage import Store
from tests.data.shards import config, in_memory, nested, opened, parquet, write_arrow


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_row_group_is_one_request(kept, tmp_path, monkeypatch):
    """The footer comes with the first one where it is near; columns that lie far apart are asked
    for apart."""
    monkeypatch.setattr("elastic_dp.data.discovery.index.FOOTER_BYTES_KEPT", kept)
    wide = pa.table({name: np.random.default_rng(0).random(1 << 17) for name in "abc"})
    pq.write_table(wide, tmp_path / "a.parquet", row_group_size=1 << 16, compression="none")
    wanted = config(in_memory(tmp_path), columns=["a", "c"])
    index = read_index(wanted)
    groups = RowGroups(wanted, index)
    (store,) = groups._stores
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


def test_reader_of_a_shard_is_kept_without_the_bytes_that_it_read(tmp_path, monkeypatch):
    class Content(bytearray):
        """Can be referred to weakly."""

    readers, fetched, read = [], [], ShardAt.read

    def reading(shard, start, end):
        content = Content(read(shard, start, end))
        fetched.append(weakref.ref(content))
        return content

    def opening(*args, **options):
        readers.append(args)
        return make(*args, **options)

    make = pq.ParquetFile
    table = pa.table({"x": np.random.default_rng(0).random(1 << 12)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1 << 10, compression="none")
    wanted = config(in_memory(tmp_path))
    groups = RowGroups(wanted, read_index(wanted))
    monkeypatch.setattr(ShardAt, "read", reading)
    monkeypatch.setattr(pq, "ParquetFile", opening)
    for number in (0, 3, 1):
        rows = groups.read(number)[0]["x"]
        assert np.array_equal(rows, table["x"][number << 10 : (number + 1) << 10].to_numpy())
    assert len(readers) == 1 and len(fetched) == 3
    assert not [content for content in fetched if content() is not None]


def test_a_footer_that_the_index_kept_is_not_asked_for_again(tmp_path, monkeypatch):
    """An index keeps the footers of the first shards, as many as fit."""
    monkeypatch.setattr("elastic_dp.data.formats.parquet.TOGETHER_BYTES", 0)
    for number in range(3):
        parquet(tmp_path / f"{number}", nested(0, 20))
    wanted = config(in_memory(tmp_path))
    size = int(read_index(wanted).shards["tail"][0].as_py())
    monkeypatch.setattr("elastic_dp.data.discovery.index.FOOTER_BYTES_KEPT", 2 * size)
    index = Index.from_bytes(read_index(wanted).to_bytes())
    groups_of_shard = int(index.group_bounds[1])
    groups = RowGroups(wanted, index)
    (store,) = groups._stores
    requests = []
    for shard in range(3):
        before = store.counts.requests
        groups.read(shard * groups_of_shard)
        requests.append(store.counts.requests - before)
    assert requests == [1, 1, 2]


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


class Bucket:
    """A store with one object."""

    def __init__(self, content):
        self.content = content

    def local_path(self, path):
        return None

    def read(self, path, start, end, version=""):
        return self.content[start:end]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_buckets_with_objects_of_one_path(kind, tmp_path):
    """A footer or header that is kept of one object is not used for the other."""
    both = []
    for columns in (("a", "b"), ("b", "a")):
        written = pa.table({name: [ord(name)] * 20 for name in columns})
        path = tmp_path / columns[0]
        if kind == "parquet":
            pq.write_table(written, path, compression="none", write_statistics=False)
        else:
            write_arrow(path, written, stream=False)
        content = path.read_bytes()
        both.append(ShardAt(Bucket(content), "x", len(content), "", "x"))
    chosen = open_format(kind)
    for shard in both:
        scan = chosen.scan(shard, None)
        known = replace(shard, check=scan.check, tail=scan.tail, head=int(scan.starts[0]))
        place = RowGroupLocation(0, int(scan.starts[0]), int(scan.ends[0]))
        read = chosen.read(known, place, scan.schema, scan.schema.names)
        assert {name: set(read[name].to_pylist()) for name in "ab"} == {"a": {97}, "b": {98}}
