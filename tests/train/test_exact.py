"""One digest for any group of workers: fixed sizes, a zoo of models through changing sizes, and
random histories."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from tests.runs import group, local, resize, spec_of
from tests.train.jobs import compiled, plain, seventeen

SLOW = pytest.mark.slow


def as_a_user_would(batch):
    """Nothing to see; but what it gives back begins anywhere."""
    x = np.empty(batch["x"].nbytes + 4, np.uint8)[4:].view(np.float32).reshape(batch["x"].shape)
    x[...] = batch["x"]
    return batch | {"x": x}


def tensors_of_arrays(batch):
    return {name: torch.from_numpy(array) for name, array in batch.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_a_compiled_model(backend):
    """1 → 2 → 1 workers: the joiner takes its state into the compiled model."""
    sizes = {
        2: 2,
        8: 1,
    }  # a planned end may lie as many steps ahead as were made since the last heartbeat
    spec = spec_of(steps=24, workers=1, config={"hold": sizes, "backend": backend})
    calm = local(spec, compiled)  # and compiles, for all
    outcome, _ = group(spec, compiled, script=[resize(step, size) for step, size in sizes.items()])
    assert outcome.generations >= 3
    assert outcome.digest == calm.digest


@pytest.mark.parametrize(
    ("shuffle", "more"),
    [
        pytest.param("none", {}, marks=SLOW),
        ("rows", {}),
        ("rows", {"transform": as_a_user_would}),
        pytest.param("rows", {"transform": as_a_user_would, "workers": 1}, marks=SLOW),
        pytest.param("rows", {"collate_fn": tensors_of_arrays}, marks=SLOW),
    ],
    ids=["none", "rows", "transform", "process", "collate_fn"],
)
def test_rows_of_an_odd_number_of_bytes(shuffle, more, tmp_path):
    """Where a micro-batch lies in its chunk depends on the number of workers, and a matrix product
    on the address of its input."""
    random = np.random.default_rng(0)
    for shard in range(4):
        x = pa.FixedSizeListArray.from_arrays(random.random(17 * 150, dtype=np.float32), 17)
        labels = random.integers(0, 4, 150)
        pq.write_table(
            pa.table({"x": x, "y": labels}), tmp_path / f"{shard}.parquet", row_group_size=50
        )
    data = DataConfig(str(tmp_path), micro_batch_size=3, shuffle=shuffle, **more)
    index = read_index(data)
    digests = {}
    for workers in (0, 1, 3):
        least = max(1, workers)
        spec = spec_of(steps=12, workers=least, min_workers=least, data=data)
        if workers:
            digests[workers] = group(spec, seventeen, index=index)[0].digest
        else:
            digests[workers] = local(spec, seventeen).digest
    assert len(set(digests.values())) == 1, digests


def test_digest_differs_between_steps():
    """The equalities above could not fail if all runs gave the same weights anyway."""
    assert local(spec_of(steps=3), plain).digest != local(spec_of(steps=2), plain).digest
