"""Data sets on disk against pyarrow's own reader, and what is said of those that cannot be used."""

import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import DataError
from tests.data.shards import write_arrow

ROWS = (70, 45, 1)


def table(first: int, rows: int) -> pa.Table:
    ids = np.arange(first, first + rows)
    pixels = (ids[:, None, None] * 100 + np.arange(6).reshape(2, 3)).astype(np.int16)
    image = pa.FixedSizeListArray.from_arrays(pixels.reshape(-1), 3)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "weight": pa.array(ids / 7, pa.float32()),
            "even": pa.array(ids % 2 == 0),
            "image": pa.FixedSizeListArray.from_arrays(image, 2),
            "same": pa.array([[i, i + 1] for i in ids.tolist()], pa.list_(pa.int32())),
            "ragged": pa.array([list(range(i % 4)) for i in ids.tolist()], pa.list_(pa.int32())),
            "text": pa.array([f"row {i}" if i % 5 else None for i in ids.tolist()], pa.string()),
            "raw": pa.array([bytes([i % 256]) for i in ids.tolist()], pa.binary()),
        }
    )


REGULAR = ("id", "weight", "even", "image", "same", "text", "raw")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first = 0
    for number, rows in enumerate(ROWS):
        pq.write_table(table(first, rows), tmp_path / f"part-{number}.parquet", row_group_size=16)
        first += rows
    (tmp_path / "README.txt").write_text("not a shard")
    (tmp_path / "._part-9.parquet").write_text("not a shard either")
    return tmp_path


def config(folder: Path | str, **changes) -> DataConfig:
    return DataConfig(
        str(folder), **({"micro_batch_size": 8, "columns": REGULAR, "seed": 5} | changes)
    )


def test_rows_are_what_pyarrow_reads(folder):
    data = open_data(config(folder, tail="short"), virtual_workers=3)
    shards = sorted(folder.glob("part-*"))
    tables = [pq.read_table(shard, columns=list(REGULAR)) for shard in shards]
    reference = pa.concat_tables(tables).to_pylist()
    seen = []
    for step in range(1, data.steps_per_epoch + 1):
        for virtual_worker in range(3):
            if rows := data.rows(step, virtual_worker):
                batch = data.batch(step, virtual_worker)
                assert {len(value) for value in batch.values()} == {rows}
                for number, row in enumerate(batch["id"].tolist()):
                    for name in REGULAR:
                        value = batch[name][number]
                        plain = value.tolist() if isinstance(value, torch.Tensor) else value
                        assert plain == reference[row][name], name
                    seen.append(row)
    assert sorted(seen) == list(range(sum(ROWS)))
    assert seen != sorted(seen)
    kinds = {n: (v.dtype, v.shape[1:]) for n, v in batch.items() if isinstance(v, torch.Tensor)}
    assert kinds == {
        "id": (torch.int64, ()),
        "weight": (torch.float32, ()),
        "even": (torch.bool, ()),
        "image": (torch.int16, (2, 3)),
        "same": (torch.int32, (2,)),
    }
    data.close()


def test_tensors_own_their_memory(folder):
    data = open_data(config(folder), virtual_workers=2)
    first = data.batch(1, 0)
    kept = {n: v.clone() for n, v in first.items() if isinstance(v, torch.Tensor)}
    for value in first.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    again = data.batch(1, 0)
    assert all(torch.equal(again[name], value) for name, value in kept.items())
    data.close()


def test_a_worker_needs_only_the_index(folder, monkeypatch):
    driver = open_data(config(folder), virtual_workers=2)
    shipped = pickle.loads(pickle.dumps(driver.index))
    monkeypatch.setattr(
        "elastic_dp.data.discovery.index.read_index", lambda *_, **__: pytest.fail("listed")
    )
    worker = open_data(config(folder), virtual_workers=2, index=shipped)
    assert worker.fingerprint == driver.fingerprint
    assert torch.equal(worker.batch(3, 1)["id"], driver.batch(3, 1)["id"])
    worker.close()
    driver.close()


def test_fingerprint_is_of_the_content_and_the_order(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    for shard in folder.glob("part-*"):
        (copy / shard.name).write_bytes(shard.read_bytes())

    def fingerprint(where: Path | str = folder, virtual_workers: int = 2, **changes) -> str:
        data = open_data(config(where, **changes), virtual_workers=virtual_workers)
        data.close()
        return data.fingerprint

    assert fingerprint() == fingerprint(copy) == fingerprint(f"{copy}/*.parquet")
    changed = [
        fingerprint(virtual_workers=3),
        fingerprint(seed=6),
        fingerprint(micro_batch_size=4),
        fingerprint(shuffle="none"),
        fingerprint(tail="short"),
        fingerprint(columns=["id"]),
        fingerprint(folder / "part-0.parquet"),
    ]
    assert len({fingerprint(), *changed}) == 1 + len(changed)


def test_file_system_may_be_any(folder):
    import fsspec

    memory = fsspec.filesystem("memory")
    for shard in folder.glob("part-*"):
        memory.pipe(f"/set/{shard.name}", shard.read_bytes())
    there = open_data(config("memory://set"), virtual_workers=2)
    here = open_data(config(folder), virtual_workers=2)
    assert there.fingerprint == here.fingerprint
    assert torch.equal(there.batch(2, 1)["image"], here.batch(2, 1)["image"])
    there.close()
    here.close()


def test_evaluation_is_every_row_in_file_order(folder):
    data = open_evaluation(config(folder, seed=99, epochs=3))
    assert data.num_batches == math.ceil(sum(ROWS) / 8)
    batches = [data.batch(i) for i in range(data.num_batches)]
    assert [len(batch["id"]) for batch in batches] == [data.rows(i) for i in range(len(batches))]
    assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(sum(ROWS)))
    assert data.describe(0).startswith("rows 0, 1, 2")
    data.close()


def test_transform_and_collate(folder):
    doubled = config(folder, columns=["id"], transform=lambda batch: {"twice": 2 * batch["id"]})
    data = open_data(doubled, virtual_workers=2)
    plain = open_data(config(folder), virtual_workers=2)
    assert torch.equal(data.batch(1, 1)["twice"], 2 * plain.batch(1, 1)["id"])

    def pad(batch):
        rows = [torch.from_numpy(row) for row in batch["ragged"]]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)

    padded = open_data(config(folder, columns=["ragged"], collate_fn=pad), virtual_workers=2)
    lengths = (padded.batch(1, 1) >= 0).sum(1)
    assert torch.equal(lengths, plain.batch(1, 1)["id"] % 4)
    for opened in (data, plain, padded):
        opened.close()


def test_describe_names_rows_of_shards(folder):
    data = open_data(config(folder, shuffle="none"), virtual_workers=2)
    assert data.describe(1, 0) == "rows 0, 1, 2, 3, 4, 5, 6, 7 of part-0.parquet"
    assert (
        data.describe(5, 0)
        == "rows 64, 65, 66, 67, 68, 69 of part-0.parquet; rows 0, 1 of part-1.parquet"
    )
    data.close()


def test_a_shard_that_was_rewritten(folder):
    data = open_data(config(folder), virtual_workers=2)
    pq.write_table(table(0, 70), folder / "part-0.parquet", row_group_size=32)
    steps = range(1, data.steps_per_epoch + 1)
    with pytest.raises(DataError, match=r"part-0.parquet was rewritten"):
        _ = [data.batch(step, 0) for step in steps]
    data.close()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda path: pq.write_table(table(0, 15), path),
            r"15 rows, fewer than one global batch of 16 \(micro_batch_size 8 × "
            r"2 micro-batches, one for each virtual worker",
        ),
        (lambda path: path.write_text("hello"), r"cannot read the footer of a\.parquet"),
    ],
)
def test_open_data_of_an_unreadable_source_is_refused(write, said, tmp_path):
    write(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=said):
        open_data(config(tmp_path), virtual_workers=2)


def test_lists_of_different_lengths_have_no_tensor(tmp_path: Path):
    said = r"'x' holds lists of different lengths .*collate_fn"
    pq.write_table(pa.table({"x": [[1], [1, 2]] * 20}), tmp_path / "a.parquet")
    data = open_data(config(tmp_path, columns=None), virtual_workers=2)
    with pytest.raises(DataError, match=said):
        data.batch(1, 0)
    data.close()


def test_row_groups_of_a_mapped_arrow_file_count_in_the_budget(tmp_path):
    values = pa.array(np.zeros(1 << 18, np.float32))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, 64)})
    write_arrow(tmp_path / "a.arrow", table, chunk=1024)
    config = DataConfig(tmp_path, micro_batch_size=64)
    groups = RowGroups(config, read_index(config))
    _, nbytes = groups.read(0)
    groups.close()
    assert nbytes == 1024 * 64 * 4


WORKER = """
import sys
from pathlib import Path
from elastic_dp.config import DataConfig
from elastic_dp.data import Index, open_data
config = DataConfig(sys.argv[1], micro_batch_size=4)
index = Index.from_bytes(Path(sys.argv[2]).read_bytes())
data = open_data(config, virtual_workers=1, index=index)
assert {*data.batch(1, 0)} == {"x", "is", "list", "text"}
assert "pandas" not in sys.modules
data.close()
"""


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_worker_does_not_import_pandas_which_takes_a_second(form, tmp_path):
    table = pa.table({"x": range(8), "is": [True] * 8, "list": [[1, 2]] * 8, "text": ["a"] * 8})
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        write_arrow(path, table)
    index = read_index(DataConfig(str(path), micro_batch_size=4))
    (tmp_path / "index").write_bytes(index.to_bytes())
    command = [sys.executable, "-c", WORKER, str(path), str(tmp_path / "index")]
    subprocess.run(command, check=True)
