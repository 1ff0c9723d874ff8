"""An index that is stored with a run is used at its next start, while nothing has changed."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

import elastic_dp as edp
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.formats.tar import Tar
from tests.data.shards import config, write_tar


def test_an_index_of_an_earlier_start_is_used_while_nothing_has_changed(tmp_path, monkeypatch):
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", 10 * number, 10)
    scanned = []
    scan = Tar.scan

    def counted(self, shard, columns):
        scanned.append(shard.name)
        return scan(self, shard, columns)

    monkeypatch.setattr(Tar, "scan", counted)
    wanted = config(tmp_path)
    first = read_index(wanted)
    known = Index.from_bytes(first.to_bytes())
    assert len(scanned) == 3 and read_index(wanted, known=known) is known and len(scanned) == 3
    even = pc.bit_wise_and(pc.field("cls"), 1) == 0
    for other in (
        config(tmp_path, columns=["cls"]),
        config(tmp_path, filter=even),
        config(f"{tmp_path}/[01].tar"),
    ):
        assert read_index(other, known=known).digest != known.digest
    assert len(scanned) == 3 + 3 + 3 + 2
    write_tar(tmp_path / "1.tar", 70, 10)
    again = read_index(wanted, known=known)
    assert again.digest != known.digest and len(scanned) == 14


def test_an_index_with_a_shard_without_rows_is_used_again(tmp_path):
    for number, rows in enumerate((0, 3)):
        pq.write_table(pa.table({"x": [1.0] * rows}), tmp_path / f"{number}.parquet")
    known = read_index(config(tmp_path))
    assert known.num_shards == 1 and read_index(config(tmp_path), known=known) is known


def test_a_run_that_is_started_again_scans_no_shard(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    write_tar(tmp_path / "rows" / "a.tar", 0, 40)
    data = config(tmp_path / "rows", columns=["cls"])

    def train(ctx):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in ctx.steps(model, optimizer, lambda m, b: m(b["cls"].float()[:, None]).mean()):
            pass

    def fit(steps):
        edp.ElasticTrainer(
            train,
            data=data,
            scaling=edp.ScalingConfig(max_workers=1, virtual_workers=2),
            max_steps=steps,
            storage_path=str(tmp_path),
            name="run",
        ).fit(local=True)

    fit(2)

    def scan(self, shard, columns):
        raise AssertionError("a shard was scanned again")

    monkeypatch.setattr(Tar, "scan", scan)
    fit(3)
