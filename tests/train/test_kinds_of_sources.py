"""Each kind of source and each way to make rows of it, on one worker, on three with a kill, and
over a restart: every row (of a packed one every token) exactly once an epoch, with the values that
were written, and the bits of the undisturbed run. Its checkpoints have nothing that those of plain
rows have not: the step."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load_newest
from elastic_dp.config import DataConfig, ScalingConfig
from elastic_dp.storage import Store
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local
from tests.train.test_exactly_once import given, job, train

SHARDS, ROWS, EPOCHS, V, B = 4, 24, 2, 8, 3  # 24 rows in a step
STEPS = 8
PACK = 4
TOKENS = SHARDS * ROWS * PACK


def ids_of(shard):
    return list(range(shard * ROWS, (shard + 1) * ROWS))


@dataclasses.dataclass
class IdBlocks:
    """A block source of ids, five in a block."""

    identity = "ids"
    rows = (5,) * (SHARDS * ROWS // 5) + (SHARDS * ROWS % 5,)
    stored_bytes = tuple(8 * rows for rows in rows)
    schema = pa.schema({"id": pa.int64()})

    def read(self, block, columns):
        ids = range(5 * block, 5 * block + self.rows[block])
        return pa.table({"id": pa.array(ids, pa.int64())}).select(columns)


def block_source(folder):
    return {"url": IdBlocks()}, lambda batch: None


def packing(folder):
    """Documents of 1 to 7 tokens; each token is a number of its own."""
    lengths = [1 + 3 * i % 7 for i in range(SHARDS * ROWS)]
    lengths[-1] += TOKENS - sum(lengths)
    documents = np.split(np.arange(TOKENS), np.cumsum(lengths)[:-1])
    for shard in range(SHARDS):
        made = pa.table({"input_ids": [documents[i] for i in ids_of(shard)]})
        pq.write_table(made, folder / f"{shard}.parquet", row_group_size=5)

    def check(batch):
        tokens, positions = batch["input_ids"], batch["position_ids"]
        assert tokens.shape == (B, PACK)
        inside = positions[:, 1:] > 0
        assert (np.diff(tokens)[inside] == 1).all() and (np.diff(positions)[inside] == 1).all()
        assert ((np.diff(batch["document_ids"]) == 1) == ~inside).all()
        batch["id"] = tokens.reshape(-1)

    return {"url": str(folder), "pack": PACK}, check


def packing_with_filter(folder):
    """The documents of `packing` in shards of a language, each beside one that is left out by its
    score; and those of a language that is left out."""
    options, check = packing(folder)
    for shard in range(SHARDS):
        path = folder / f"{shard}.parquet"
        kept = pq.read_table(path).column("input_ids").to_pylist()
        path.unlink()
        rows = [{"input_ids": one, "score": s} for one in kept for s in (0.1, 0.9)]
        for language in ("de", "en"):
            table = pa.Table.from_pylist([{**one, "language": language} for one in rows])
            pq.write_table(table, folder / f"{language}-{path.name}", row_group_size=10)
    good = (pc.field("language") == "en") & (pc.field("score") > 0.8)
    return {**options, "columns": ["input_ids"], "filter": good}, check


def weights_by_step(folder):
    a, b = (str(folder / name) for name in "ab")
    for shard in range(SHARDS):
        (place := Path((a, b)[shard // 2])).mkdir(exist_ok=True)
        made = pa.table({"id": ids_of(shard)})
        pq.write_table(made, place / f"{shard}.parquet", row_group_size=5)

    def check(batch):
        assert all(0 <= i < SHARDS * ROWS for i in batch["id"].tolist())

    url = {0: {a: 1.0}, 2: {a: 0.5, b: 0.5}, 5: {a: 1, b: 3}}
    return {"url": url}, check


def plain(folder):
    pq.write_table(pa.table({"id": range(SHARDS * ROWS)}), folder / "a.parquet", row_group_size=5)
    return {"url": str(folder)}, lambda batch: None


def structure(tree):
    """What a checkpoint has: names and types, and the types and shapes of tensors."""
    if isinstance(tree, Mapping):
        return {key: structure(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [structure(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape
    return type(tree)


def checkpoint(url):
    _, tree = load_newest(Catalog(Store(str(url))), on_damage=lambda e: pytest.fail(str(e)))
    return structure(tree)


def job_of(kind, folder, log):
    folder.mkdir(exist_ok=True)
    options, check = kind(folder)

    def only_ids(batch, rng):
        check(batch)
        return {"id": batch["id"]}

    epochs = None if isinstance(options["url"], dict) else EPOCHS
    data = DataConfig(micro_batch_size=B, epochs=epochs, transform=only_ids, **options)
    return job(data, log, 0.0, max_steps=None if epochs else STEPS)


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory):
    place = tmp_path_factory.mktemp("plain")
    local(job_of(plain, place / "data", place / "log"), train, url=str(place / "run"))
    return checkpoint(place / "run")


@pytest.mark.parametrize(
    "kind",
    [block_source, packing_with_filter, pytest.param(weights_by_step, marks=pytest.mark.slow)],
)
def test_rows_of_a_source_are_trained_on_exactly_once_under_a_kill(
    kind, tmp_path, plain_checkpoint
):
    spec = job_of(kind, tmp_path / "data", tmp_path / "calm")
    calm = local(spec, train)
    batches, _ = given(tmp_path / "calm")
    times = Counter(itertools.chain(*batches.values()))
    if kind is weights_by_step:
        for ids in (range(2 * ROWS), range(2 * ROWS, 4 * ROWS)):
            assert {times[i] for i in ids} in ({1, 2}, {2, 3})
    else:
        ids = range(TOKENS if kind is packing_with_filter else SHARDS * ROWS)
        assert times == dict.fromkeys(ids, EPOCHS)

    scaling = ScalingConfig(max_workers=3, min_workers=3, virtual_workers=V, threads_per_worker=1)
    killed = dataclasses.replace(moved(spec, tmp_path / "killed"), scaling=scaling)
    fault = WorkerFault("before_forward", step=3, rank=1, once=str(tmp_path / "dead"))
    outcome, _ = group(killed, train, faults=(fault,))
    assert outcome.workers_lost == 1
    assert outcome.digest == calm.digest
    assert given(tmp_path / "killed")[0] == batches

    url = str(tmp_path / "run")
    half = dataclasses.replace(moved(spec, tmp_path / "half"), max_steps=3)
    local(half, train, url=url)
    assert checkpoint(tmp_path / "run") == plain_checkpoint
    resumed = local(moved(spec, tmp_path / "resumed"), train, url=url)
    assert resumed.digest == calm.digest
    rest = {place: ids for place, ids in batches.items() if place[0] > 3}
    found = given(tmp_path / "resumed")[0]  # with one of step 1, by which the loop is tried
    assert rest.items() <= found.items() <= batches.items()


def moved(spec, folder):
    """The job with another folder for what its workers write down."""
    folder.mkdir()
    return dataclasses.replace(spec, config={**spec.config, "folder": str(folder)})
