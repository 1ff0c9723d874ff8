"""A run whose workers keep what they read from the store on their disk."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local, spec_of
from tests.storage.servers import s3_options
from tests.train.jobs import loop
from tests.train.test_exactly_once import send

ROWS, SHARDS, STEPS = 96, 6, 12  # 24 rows in a step: three epochs of four steps


def train(ctx):
    model = torch.nn.Linear(1, 1)

    def loss_fn(m, batch):
        return m(batch["x"].float()[:, None] / 100).square().mean()

    loop(ctx, model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn)


def test_workers_that_are_killed_share_a_cache_and_its_limit(moto, tmp_path):
    send(moto, "cached", b"")
    for number in range(SHARDS):
        sink = pa.BufferOutputStream()
        ids = np.arange(number * ROWS // SHARDS, (number + 1) * ROWS // SHARDS)
        pq.write_table(pa.table({"x": ids}), sink, row_group_size=4)
        send(moto, f"cached/data/{number}.parquet", sink.getvalue().to_pybytes())
    plain = DataConfig("s3://cached/data", micro_batch_size=3, storage_options=s3_options(moto))
    folder = tmp_path / "cache"
    data = dataclasses.replace(plain, cache_dir=str(folder), cache_bytes=1 << 20)
    scaling = {"workers": 3, "min_workers": 3}
    fault = WorkerFault("before_forward", step=3, rank=1, once=str(tmp_path / "dead"))
    outcome, _ = group(spec_of(steps=STEPS, data=data, **scaling), train, faults=(fault,))
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec_of(steps=STEPS, data=plain, **scaling), train).digest

    opened = open_data(data, virtual_workers=8)  # the next run on this machine
    try:
        for step in range(1, 5):
            for virtual_worker in range(8):
                opened.batch(step, virtual_worker)
        assert opened.counts["bytes_from_cache"] > 0
        assert opened.counts["bytes_read"] == 0
    finally:
        opened.close()
