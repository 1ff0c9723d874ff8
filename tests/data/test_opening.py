"""Data sets on disk against pyarrow's own reader, and what is said of those that cannot be used."""

import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import DataError
from tests.data.shards import ROWS, nested, three_shards, write_arrow

REGULAR = ("id", "weight", "even", "image", "same", "text", "raw")


@pytest.fixture
def folder(tmp_path):
    return three_shards(tmp_path, nested)


def config(folder, **changes):
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


def test_a_worker_needs_only_the_index(folder, monkeypatch):
    driver = open_data(config(folder), virtual_workers=2)
    shipped = pickle.loads(pickle.dumps(driver.index))
    monkeypatch.setattr(
        "elastic_dp.data.discovery.index.read_index", lambda *_, **__: pytest.fail("listed")
    )
    worker = open_data(config(folder), virtual_workers=2, index=shipped)
    assert worker.fingerprint == driver.fingerprint
    assert torch.equal(worker.batch(3, 1)["id"], driver.batch(3, 1)["id"])


def test_fingerprint_is_of_the_content_and_the_order(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    for shard in folder.glob("part-*"):
        (copy / shard.name).write_bytes(shard.read_bytes())

    def fingerprint(where=folder, virtual_workers=2, **changes):
        data = open_data(config(where, **changes), virtual_workers=virtual_workers)
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


def test_describe_names_rows_of_shards(folder):
    data = open_data(config(folder, shuffle="none"), virtual_workers=2)
    assert data.describe(1, 0) == "rows 0, 1, 2, 3, 4, 5, 6, 7 of part-0.parquet"
    assert (
        data.describe(5, 0)
        == "rows 64, 65, 66, 67, 68, 69 of part-0.parquet; rows 0, 1 of part-1.parquet"
    )


def test_data_of_too_few_rows_is_refused(tmp_path):
    pq.write_table(nested(0, 15), tmp_path / "a.parquet")
    said = (
        r"15 rows, fewer than one global batch of 16 \(micro_batch_size 8 × 2 micro-batches, one "
    )
    with pytest.raises(DataError, match=said + "for each virtual worker"):
        open_data(config(tmp_path), virtual_workers=2)


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
