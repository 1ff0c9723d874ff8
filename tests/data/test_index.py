"""What the index says of a data set, and what it refuses."""

import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.data import open_data
from elastic_dp.data.columns.schema import Columns
from elastic_dp.data.discovery.index import Builder, read_index
from elastic_dp.data.discovery.index_difference import difference
from elastic_dp.data.discovery.listing import list_files
from elastic_dp.data.discovery.shard_index import Index, path_of, prefix_of
from elastic_dp.data.formats.file_format import Scan
from elastic_dp.errors import DataError
from elastic_dp.storage import Entry, Store
from elastic_dp.storage.obstore_backend import memory_store
from tests.data.row_groups import resident_bytes
from tests.data.shards import ROWS, config, opened, refused, three_shards
from tests.patience import PATIENCE_S

# Of this program; ru_maxrss would start with that of the process which started it.
PEAK = """
def peak_kib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
"""


def table(first, rows):
    ids = np.arange(first, first + rows)
    return pa.table({"id": pa.array(ids), "half": pa.array(ids / 2, pa.float32())})


def printed_by(script, *arguments):
    """In a process of its own, in which Arrow's allocator gives nothing back by itself."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK + script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MIMALLOC_PURGE_DELAY": "100000"},
    )
    return [int(word) for word in done.stdout.split()]


@pytest.fixture
def folder(tmp_path):
    return three_shards(tmp_path, table)


def test_index_says_shards_row_groups_and_rows(folder):
    index = read_index(config(folder))
    assert [index.name(n) for n in range(3)] == [f"part-{n}.parquet" for n in range(3)]
    assert index.rows.tolist() == [16, 16, 16, 16, 6, 16, 16, 13, 1]
    assert index.group_bounds.tolist() == [0, 5, 8, 9]
    assert index.columns == (("id", "int64"), ("half", "float"))
    assert (index.ends - index.starts > 0).all() and (index.nbytes >= 12 * index.rows).all()
    groups = opened(config(folder), index)
    assert groups.name(6) == ("part-1.parquet", 1, 16)
    ids = [groups.read(n)[0]["id"] for n in range(9)]
    assert np.concatenate(ids).tolist() == list(range(sum(ROWS)))


@pytest.mark.parametrize("shipped", [pickle.loads, None], ids=["pickle", "bytes"])
def test_index_travels_whole(folder, shipped):
    index = read_index(config(folder))
    again = shipped(pickle.dumps(index)) if shipped else Index.from_bytes(index.to_bytes())
    assert again.digest == index.digest and again.sources == index.sources
    assert again.shards.equals(index.shards) and again.groups.equals(index.groups)
    assert again.schema.equals(index.schema) and again.columns == index.columns
    with pytest.raises(DataError, match="index cannot be read"):
        Index.from_bytes(index.to_bytes()[:-100])


def copied(folder, to):
    to.mkdir()
    for shard in folder.glob("part-*"):
        (to / shard.name).write_bytes(shard.read_bytes())
    return to


def changed(folder, to, change):
    copy = copied(folder, to)
    change(copy)
    return read_index(config(folder)), read_index(config(copy))


def test_index_of_another_version_is_refused_by_name(tmp_path, monkeypatch):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    index = read_index(config(tmp_path))
    monkeypatch.setattr("elastic_dp.data.discovery.shard_index.VERSION", 3)
    written = index.to_bytes()
    monkeypatch.undo()
    with pytest.raises(DataError, match="version 3, and this elastic_dp reads 4; go on with"):
        Index.from_bytes(written)


def test_digest_is_of_the_content_not_of_the_place(folder, tmp_path_factory):
    copy = copied(folder, tmp_path_factory.mktemp("a") / "copy")
    here, there = read_index(config(folder)), read_index(config(copy))
    by_glob = read_index(config(f"{copy}/*.parquet"))
    assert here.digest == there.digest == by_glob.digest
    assert difference(here, there) is None
    others = [
        read_index(config(copy, columns=["id"])),
        read_index(config(copy / "part-0.parquet")),
        read_index(config([str(copy), str(folder)])),
        read_index(config({str(copy): 1, str(folder): 2})),
    ]
    assert len({here.digest, *(other.digest for other in others)}) == 5
    for other in others:
        assert difference(here, other)


def of_sources(count):
    """One shard in each, as a list of files is."""
    columns, build, one = Columns(None), Builder(), np.array([1], np.int64)
    scan = Scan(pa.schema({"id": pa.int64()}), one, one, one, one, one, 0)
    columns.add("0.parquet", scan.schema)
    for number in range(count):
        build.begin("parquet", None, True)
        build.add(f"{number}.parquet", 1, "", scan)
    return build.finish(columns)


def test_index_of_more_urls_than_int16_numbers():
    index = of_sources(33_000)
    assert index.shards["source"].to_numpy().tolist() == list(range(33_000))
    again = Index.from_bytes(index.to_bytes())
    assert again.digest == index.digest and len(again.sources) == 33_000


def test_digest_of_few_urls_is_that_of_version_0_1():
    assert (
        of_sources(3).digest == "bec3715f0ea859c35d6e7fda79e725228d226c425695948a1362b21ace76a78d"
    )


def rewritten_at_equal_size(folder):
    path = folder / "part-1.parquet"
    content = bytearray(path.read_bytes())
    at = content.rfind(b"parquet-cpp")  # in the footer, where statistics are too
    content[at : at + 7] = b"PARQUET"
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "part-1.parquet").unlink(), "shard part-1.parquet is gone"),
        (lambda f: pq.write_table(table(0, 3), f / "x.parquet"), "shard x.parquet is new"),
        (
            lambda f: (f / "part-1.parquet").rename(f / "p.parquet"),
            "shard part-1.parquet is gone, shard p.parquet is new",
        ),
        (
            lambda f: pq.write_table(table(0, 9), f / "part-2.parquet"),
            r"shard part-2.parquet was rewritten: it had \d+ bytes, and has \d+",
        ),
        (rewritten_at_equal_size, r"shard part-1.parquet was rewritten: it had \d+ as"),
    ],
)
def test_difference_names_the_shard(folder, tmp_path_factory, change, said):
    old, new = changed(folder, tmp_path_factory.mktemp("a") / "copy", change)
    assert re.match(said, difference(old, new) or "")


def test_difference_names_the_number_of_sources(folder):
    old = read_index(config(folder))
    files = [str(folder / name) for name in old.shards["name"].to_pylist()]
    new = read_index(config(files))
    assert difference(old, new) == f"DataConfig.url named 1 sources, and names {len(files)}"


def test_difference_names_the_column(folder):
    old, new = read_index(config(folder)), read_index(config(folder, columns=["id"]))
    assert difference(old, new) == "column 'half' was float, and is not read"


def test_read_index_of_several_sources_keeps_weights_and_ranges(folder, tmp_path_factory):
    copy = copied(folder, tmp_path_factory.mktemp("a") / "copy")
    wanted = config({str(folder): 3, f"{copy}/part-[01].parquet": 1})
    index = read_index(wanted)
    assert index.weights == (3, 1) and read_index(config([str(copy), str(folder)])).weights is None
    assert [(s.first_group, s.end_group) for s in index.sources] == [(0, 9), (9, 17)]
    groups = opened(wanted, index)
    assert groups.name(9) == (f"{copy}/part-0.parquet", 0, 0)
    assert groups.read(14)[0]["id"].tolist() == list(range(70, 86))


@pytest.mark.parametrize("how", ["a folder", "a list of files"])
def test_the_index_is_read_in_parallel(how, tmp_path, monkeypatch):
    """A footer's read returns when 16 of them have begun; one after the other, the first would wait
    for ever."""
    for number in range(32):
        pq.write_table(table(number, 1), tmp_path / f"{number:02}.parquet")
    together, read = threading.Barrier(16), Store.read

    def read_together(self, *where):
        together.wait(timeout=PATIENCE_S)
        return read(self, *where)

    monkeypatch.setattr(Store, "read", read_together)
    files = [str(tmp_path / f"{number:02}.parquet") for number in range(32)]
    index = read_index(config(tmp_path if how == "a folder" else files))
    assert index.num_shards == 32
    if how == "a folder":
        assert [index.name(shard) for shard in range(32)] == [Path(f).name for f in files]
    else:
        assert [s.first_group for s in index.sources] == list(range(32))


def test_only_shards_directly_in_a_folder(folder):
    deep = folder / "deep" / "_hidden"
    deep.mkdir(parents=True)
    pq.write_table(table(0, 5), folder / "deep" / "a.parquet")
    pq.write_table(table(0, 5), deep / "b.parquet")
    assert read_index(config(folder)).num_shards == 3
    everywhere = read_index(config(f"{folder}/**/*.parquet"))
    assert everywhere.name(0) == "deep/a.parquet"
    assert everywhere.num_shards == 4


def marked(folder):
    """Mark a folder as a conversion to an object store does that is still running."""
    for name in ("a.parquet", "b.parquet", "_incomplete"):
        obstore.put(memory_store(), f"{folder}/{name}", b"whatever")


def nine_rows(path):
    sink = pa.BufferOutputStream()
    pq.write_table(table(0, 9), sink)
    obstore.put(memory_store(), path, sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    "url",
    [
        "memory://half/set",
        "memory://half/set/",
        "memory://half/set/*.parquet",
        "memory://half/*/*.parquet",
        "memory://half/**",
        "memory://half/set/**/a.parquet",
        ["memory://other/*.parquet", "memory://half/set"],
        {"memory://other": 1, "memory://half/set/a*": 2},
    ],
    ids=str,
)
def test_a_conversion_that_has_not_finished_is_no_data_set(url):
    marked("half/set")
    nine_rows("other/a.parquet")
    refused(config(url), r"memory://half/.* is not complete.*remove the folder")


def test_a_conversion_elsewhere_is_nobodys_concern():
    marked("whole/half")
    nine_rows("whole/a.parquet")
    for url in ("memory://whole", "memory://whole/*", "memory://w*/*.parquet"):
        assert read_index(config(url)).num_rows == 9
    obstore.delete(memory_store(), "whole/half/a.parquet")
    refused(config("memory://whole/half"), "is not complete")  # before the first shard, too


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_many_shards_fit():
    """40,000 shards of 2 row groups and a copy, in a process of their own: arrays, not objects.

    It grows by 43 to 73 MB; an object for each shard and row group would take some 200.
    """
    script = """
import numpy as np, pyarrow as pa
from elastic_dp.data.formats.file_format import Scan
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import Builder
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.columns.schema import Columns
def made(shards):
    schema = pa.schema([("tokens", pa.list_(pa.int32()))])
    build, columns = Builder(), Columns(None)
    build.begin("parquet", None, False)
    for n in range(shards):
        ints = np.array([1000, 1000], dtype=np.int64)
        columns.add("a", schema)
        scan = Scan(schema, ints, ints, ints, ints, ints, n, 900, bytes(900))
        build.add(f"part-{n:08d}-of-01000000.parquet", 1 << 27, f"{n:032x}", scan)
    index = build.finish(columns)
    content = index.to_bytes()
    return index, Index.from_bytes(content), len(content)
made(4000)  # what the libraries take by themselves
before = peak_kib()
index, again, nbytes = made(40_000)
assert again.digest == index.digest and again.num_rows == 80_000_000
assert again.shard_of(79_999) == 39_999 and again.first_row(79_999) == 1000
print(peak_kib() - before, nbytes)
"""
    grown_kib, nbytes = printed_by(script)
    assert grown_kib < 96 * 1024 and nbytes < 10 << 20


def test_a_signed_url_names_its_shard_without_the_signature():
    class Signed:
        lists = False
        path = "https://host/a/b.parquet?X-Signature=c/d"

        def find(self, path):
            return [Entry(path, 10, "")]

    listed = list_files(Signed.path, Signed())
    assert listed.is_file and listed.name(listed.entries[0]) == "b.parquet"
    assert path_of(Signed.path, "b.parquet", True) == Signed.path
    assert prefix_of(Signed.path, True) == "https://host/a/"
    assert prefix_of("s3://bucket/a/*.parquet", False) == prefix_of("s3://bucket/a", False)


def test_large_row_group_gives_back_the_memory_beside_its_columns(tmp_path):
    numbers = np.arange(8 << 20)
    path = tmp_path / "part-0.parquet"
    pq.write_table(
        pa.table({"n": numbers}), path, use_dictionary=False, row_group_size=len(numbers)
    )
    groups = opened(config(tmp_path))
    pa.default_memory_pool().release_unused()  # what writing left would be used again
    before = resident_bytes()
    columns, nbytes = groups.read(0)
    assert nbytes == columns["n"].nbytes == numbers.nbytes
    assert resident_bytes() - before < 1.4 * nbytes


def tokens(nbytes):
    numbers = np.random.default_rng(0).integers(0, 50_000, nbytes // 4, dtype=np.int32)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers), 64)


def texts(nbytes):
    offsets = pa.py_buffer(np.arange(0, nbytes + 1, 64, dtype=np.int32))
    content = pa.py_buffer(np.random.default_rng(0).bytes(nbytes))
    return pa.Array.from_buffers(pa.binary(), nbytes // 64, [None, offsets, content])


def numbers(nbytes):
    return pa.array(np.arange(nbytes // 8))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("made", "codec"),
    [
        (tokens, "none"),
        (texts, "zstd"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((tokens, "zstd"), (texts, "none"), (numbers, "none"), (numbers, "zstd"))
        ),
    ],
)
def test_a_row_group_takes_no_more_than_is_said(made, codec, tmp_path):
    """Each just longer than a power of two: buffers that grow by doubling are then the largest."""
    for name, nbytes in ("small", 1 << 10), ("large", 34 << 20):
        (tmp_path / name).mkdir()
        content = pa.table({"x": made(nbytes)})
        path = tmp_path / name / "part-0.parquet"
        pq.write_table(
            content, path, row_group_size=nbytes, compression=codec, use_dictionary=False
        )
    script = """
import sys
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.config import DataConfig
def opened(url):
    config = DataConfig(url, micro_batch_size=8)
    return RowGroups(config, read_index(config))
opened(sys.argv[1] + "/small").read(0)
groups = opened(sys.argv[1] + "/large")
before = peak_kib()
groups.read(0)
print(peak_kib() - before, groups.reading_bytes[0])
"""
    grown_kib, said = printed_by(script, str(tmp_path))
    assert grown_kib << 10 <= 1.1 * said


def test_small_columns_count_all_of_their_buffers(tmp_path):
    """The lengths of buffers are powers of two, except for offsets, which are made again."""
    numbers = np.arange(5 << 18, dtype=np.int32)
    offsets = np.arange(0, len(numbers) + 1, 20, dtype=np.int32)
    offsets[1] += 1  # or else they would be the rows of an array
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers))
    words = pa.array(["ab"] * (len(offsets) - 1))
    path = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"x": lists, "words": words}), path, use_dictionary=False)
    columns, nbytes = opened(config(tmp_path)).read(0)
    assert columns["x"].nbytes == numbers.nbytes + 2 * offsets.nbytes
    texts, ends = 1 << 17, 1 << 19  # as large as that, and a little larger than half of it
    assert nbytes == (8 << 20) + 2 * offsets.nbytes + texts + ends


def test_order_of_rows_does_not_depend_on_estimates_of_decoded_bytes(tmp_path, monkeypatch):
    """An upgrade of a decoder, which changes them, leaves a run its rows."""
    pq.write_table(table(0, 4000), tmp_path / "a.parquet", row_group_size=40, compression="zstd")
    wanted = config(tmp_path, memory_bytes=1 << 40)
    fingerprints = set()
    for nbytes in (16 << 20, 112 << 20):
        monkeypatch.setattr(
            "elastic_dp.data.formats.parquet.decoded_bytes",
            lambda leaves, rows, of, n=nbytes: np.full(len(rows), n),
        )
        data = open_data(wanted, virtual_workers=2)
        assert data.index.nbytes[0] == nbytes
        fingerprints.add(data.fingerprint)
    assert len(fingerprints) == 1
