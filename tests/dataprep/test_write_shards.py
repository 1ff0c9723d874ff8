"""`write_shards`: any Arrow stream becomes shards, all of them or none, of one writer alone."""

import threading

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.dataprep import write_shards
from elastic_dp.errors import DataError
from elastic_dp.storage import Store
from tests.data.values import in_place
from tests.storage.conftest import send
from tests.storage.proxy import FaultProxy
from tests.storage.servers import s3_options

TABLE = pa.table({"id": range(1000), "text": [f"é {i}" if i % 3 else "" for i in range(1000)]})
BATCHES = TABLE.to_batches(max_chunksize=300)


def of_datasets():
    import datasets  # takes seconds

    return datasets.Dataset(TABLE).with_format("arrow").iter(100)


STREAMS = {
    "table": lambda: TABLE,
    "reader": lambda: pa.RecordBatchReader.from_batches(TABLE.schema, iter(BATCHES)),
    "batches": lambda: iter(BATCHES),
    "tables": lambda: [TABLE.slice(0, 0), TABLE],
    "duckdb": lambda: duckdb.connect().from_arrow(TABLE),
    "polars": lambda: polars.from_arrow(TABLE),
    "datasets": of_datasets,
    "dictionary": lambda: TABLE.set_column(1, "text", TABLE["text"].dictionary_encode()),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("format", "shard_bytes"), [("parquet", 4000), ("arrow", 6000)])
def test_every_row_of_a_stream_is_read_back_in_order(tmp_path, stream, format, shard_bytes):
    seen = []
    done = write_shards(
        STREAMS[stream](),
        str(tmp_path / "out"),
        shard_bytes=shard_bytes,
        row_group_bytes=2000,
        format=format,
        on_progress=seen.append,
    )
    there = sorted((tmp_path / "out").iterdir())
    assert [f.name for f in there] == [f"part-{i:05d}.{format}" for i in range(done.shards)]
    assert done.shards > 1 and done.nbytes == sum(f.stat().st_size for f in there)
    assert (done.rows, done.row_groups) == (1000, len(seen)) and done.row_groups > done.shards
    assert in_place(DataConfig(str(tmp_path / "out"), micro_batch_size=1)) == TABLE.to_pydict()


def test_deleted_rows_of_a_delta_table_are_not_written(tmp_path):
    write_deltalake(str(tmp_path / "table"), TABLE)
    DeltaTable(str(tmp_path / "table")).delete("id < 10")
    rows = DeltaTable(str(tmp_path / "table")).to_pyarrow_dataset().scanner().to_reader()
    assert write_shards(rows, str(tmp_path / "out")).rows == 990


def test_row_groups_have_2_mib_in_the_widest_column(tmp_path):
    tokens = pa.FixedSizeListArray.from_arrays(np.arange(2048 * 2000, dtype=np.int32), 2048)
    write_shards(pa.table({"tokens": tokens, "id": range(2000)}), str(tmp_path / "out"))
    footer = pq.read_metadata(tmp_path / "out" / "part-00000.parquet")
    rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    assert sum(rows) == 2000 and all(240 <= n <= 256 for n in rows[:-1])


def test_a_page_that_was_changed_is_noticed(tmp_path):
    write_shards(pa.table({"x": np.arange(5000)}), str(tmp_path / "out"))
    shard = tmp_path / "out" / "part-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[2000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum"):
        pq.read_table(shard, page_checksum_verification=True)


def test_dictionaries_and_statistics_are_written_only_where_they_help(tmp_path):
    table = pa.table({"word": ["a"] * 100, "n": range(100)})
    for name, made, codec in (
        ("words", table, "SNAPPY"),
        ("lists", table.append_column("list", [[[1, 2]] * 100]), "UNCOMPRESSED"),
    ):
        write_shards(made, str(tmp_path / name))
        group = pq.read_metadata(tmp_path / name / "part-00000.parquet").row_group(0)
        chunks = [group.column(i) for i in range(group.num_columns)]
        assert {chunk.compression for chunk in chunks} == {codec}
        dictionary = [any("DICTIONARY" in e for e in chunk.encodings) for chunk in chunks]
        assert dictionary == [True, False, False][: len(chunks)]
        assert [chunk.is_stats_set for chunk in chunks] == [False, True, False][: len(chunks)]


def test_images_of_hugging_face_become_their_bytes(tmp_path):
    image = pa.array([{"bytes": b"one", "path": "1.png"}, {"bytes": b"two", "path": None}])
    write_shards(pa.table({"image": image}), str(tmp_path / "out"))
    assert pq.read_table(tmp_path / "out")["image"].to_pylist() == [b"one", b"two"]
    outside = pa.array([{"bytes": None, "path": "1.png"}], image.type)
    with pytest.raises(DataError, match=r"'image' names image files instead of holding them"):
        write_shards(pa.table({"image": outside}), str(tmp_path / "out2"))


def _failing():
    yield from BATCHES
    raise RuntimeError("the source broke")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "there is no row"),
        (TABLE.slice(0, 0), {}, "there is no row"),
        (5, {}, "rows is a int, must have an Arrow stream"),
        ([{"a": 1}], {}, "rows gives a dict, must give pyarrow.RecordBatch"),
        ([BATCHES[0], BATCHES[1].select(["id"])], {}, "a batch has the columns id: int64, unlike"),
        (pa.table([[1], [2]], ["a", "a"]), {}, "two columns have the name 'a'"),
        (pa.table({}), {}, "there is no column to write"),
        (TABLE, {"row_group_bytes": 0}, "row_group_bytes is 0, must be at least 1"),
        (TABLE, {"format": "csv"}, "format is 'csv', must be 'parquet' or 'arrow'"),
        (TABLE, {"compression": "none"}, "write_shards has no compression any more; leave it out"),
        (pa.table({"a": pa.array([[]], pa.list_(pa.int8(), 0))}), {}, "lists of the fixed size 0"),
        (pa.table({"a": pa.array([{}], pa.struct([]))}), {}, "cannot be written as parquet"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_and_leave_nothing(
    tmp_path, rows, options, message
):
    with pytest.raises(DataError, match=message):
        write_shards(rows, str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(params=["file", "memory", "s3"])
def destination(request, tmp_path):
    """(URL of a place where nothing is, storage options)."""
    if request.param != "s3":
        return ("memory://" if request.param == "memory" else "") + f"{tmp_path}/out", None
    send("PUT", f"{request.getfixturevalue('moto')}/{tmp_path.name.replace('_', '-')}")
    options = s3_options(request.getfixturevalue("moto"))
    return f"s3://{tmp_path.name.replace('_', '-')}/out", options


def names(url, options):
    store = Store(url, options)
    return [entry.path.rpartition("/")[2] for entry in store.find(f"{store.path}/")]


def test_a_writer_that_fails_leaves_nothing_and_can_be_repeated(destination):
    url, options = destination
    shape = {"shard_bytes": 2000, "row_group_bytes": 1000, "storage_options": options}
    with pytest.raises(RuntimeError, match="the source broke"):
        write_shards(_failing(), url, **shape)
    assert names(url, options) == []
    during = []
    done = write_shards(
        TABLE, url, on_progress=lambda _: during.append(names(url, options)), **shape
    )
    assert all("_incomplete" in there for there in during) and len(during[-1]) > 2
    assert len(names(url, options)) == done.shards


def test_a_killed_writer_leaves_no_data_set_and_its_destination_is_refused(destination):
    """A kill is an exception that nobody handles: what is there meanwhile is looked at."""
    url, options = destination
    config = DataConfig(url, micro_batch_size=1, storage_options=options)
    shape = {"shard_bytes": 2000, "row_group_bytes": 1000, "storage_options": options}
    refused = []

    def look(done):
        for again in (lambda: read_index(config), lambda: write_shards(TABLE, url, **shape)):
            with pytest.raises(DataError) as error:
                again()
            refused.append(str(error.value))

    write_shards(TABLE, url, on_progress=look, **shape)
    assert "is not complete" in refused[-2]
    assert "is not empty" in refused[-1] and "still runs or was killed" in refused[-1]


def test_two_writers_to_one_destination_never_mix(destination, monkeypatch):
    """Both see an empty destination before either claims it."""
    url, options = destination
    both, find, looks = threading.Barrier(2), Store.find, threading.local()

    def find_together(store, path):
        found = find(store, path)
        looks.count = getattr(looks, "count", 0) + 1
        if looks.count == 1:
            both.wait(60)
        return found

    monkeypatch.setattr(Store, "find", find_together)
    ended = {}

    def write(number):
        rows = TABLE.append_column("writer", [[number] * 1000])
        try:
            ended[number] = write_shards(
                rows, url, shard_bytes=2000, row_group_bytes=1000, storage_options=options
            )
        except DataError as error:
            ended[number] = str(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    refused = [said for said in ended.values() if isinstance(said, str)]
    assert refused and all("cannot write to" in said for said in refused), ended
    assert len(refused) == 1, ended
    found = in_place(DataConfig(url, micro_batch_size=1, storage_options=options))
    assert len(set(found["writer"])) == 1 and found["id"] == list(range(1000))


def test_a_writer_whose_claim_was_taken_neither_mixes_nor_deletes(tmp_path):
    """Somebody takes a writer for killed, removes its folder, and writes there."""
    other = TABLE.append_column("b", [[1] * 1000])

    def take(done):
        if done.shards == 1 and not taken:
            taken.append(True)
            for file in (tmp_path / "out").iterdir():
                file.unlink()
            write_shards(other, str(tmp_path / "out"), shard_bytes=2000, row_group_bytes=1000)

    taken = []
    with pytest.raises(DataError, match=r"cannot write to .* another attempt"):
        write_shards(
            TABLE, str(tmp_path / "out"), shard_bytes=4000, row_group_bytes=2000, on_progress=take
        )
    assert in_place(DataConfig(str(tmp_path / "out"), micro_batch_size=1)) == other.to_pydict()


def test_faults_of_the_store_that_pass_discard_nothing(moto, tmp_path):
    send("PUT", f"{moto}/faults-of-write-shards")
    rates = {"error": 0.2, "cut": 0.1, "reset": 0.1}
    with FaultProxy(moto, rates, seed=1, retry_after_s=0) as proxy:
        done = write_shards(
            TABLE,
            "s3://faults-of-write-shards/out",
            shard_bytes=2000,
            row_group_bytes=1000,
            storage_options=s3_options(proxy.url),
        )
        assert sum(proxy.faults.values()) > 3
    config = DataConfig(
        "s3://faults-of-write-shards/out", micro_batch_size=1, storage_options=s3_options(moto)
    )
    assert done.rows == 1000 and in_place(config) == TABLE.to_pydict()
