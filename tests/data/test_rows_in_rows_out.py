"""Rows in are rows out, for every kind of file, by id and value: in training's order and in an
evaluation, dealt to one worker and to three."""

import tarfile
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_evaluation
from tests.data.shards import add, batches_of, write_arrow

ROWS, SHARDS, B = 96, 3, 3  # 24 rows in a step: four steps an epoch
Row = dict[str, Any]


def row(i):
    text = ('5" pipe', "a\nb", "a,b", "é", "", "plain")[i % 6]
    return {"id": i, "x": i / 4, "s": f"{text} {i}"}


def table(ids):
    return pa.Table.from_pylist([row(i) for i in ids])


def parquet(path, ids):
    pq.write_table(table(ids), path.with_suffix(".parquet"), row_group_size=7)


def parquet_by_pandas(path, ids):
    pd.DataFrame([row(i) for i in ids]).to_parquet(path.with_suffix(".parquet"), row_group_size=5)


def arrow_by_polars(path, ids):
    pl.DataFrame([row(i) for i in ids]).write_ipc(path.with_suffix(".arrow"), record_batch_size=6)


def arrow_stream(path, ids):
    write_arrow(path.with_suffix(".arrow"), table(ids), stream=True, chunk=9)


def tar(path, ids):
    """`x` is text there, and the id a class."""
    with tarfile.open(path.with_suffix(".tar"), "w") as made:
        for i in ids:
            one = row(i)
            for ending, content in (("cls", str(i)), ("x.txt", str(one["x"])), ("txt", one["s"])):
                add(made, f"{i:04}.{ending}", content.encode())


def of_tar(batch):
    return {
        "id": batch["cls"],
        "x": np.array([float(bytes(x)) for x in batch["x.txt"]]),
        "s": batch["txt"],
    }


KINDS = {
    write.__name__: write
    for write in (parquet, parquet_by_pandas, arrow_by_polars, arrow_stream, tar)
}


def written(kind, folder, ids=range(ROWS)):
    folder.mkdir()
    for shard in range(SHARDS):
        first, end = len(ids) * shard // SHARDS, len(ids) * (shard + 1) // SHARDS
        KINDS[kind](folder / f"part-{shard}", ids[first:end])
    return DataConfig(str(folder), micro_batch_size=B, transform=of_tar if kind == "tar" else None)


def rows_of(batch):
    columns = {name: list(values) for name, values in batch.items()}
    plain = {
        name: [v.tolist() if isinstance(v, torch.Tensor) else v for v in values]
        for name, values in columns.items()
    }
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


def dealt(config, workers):
    """The rows of each step of an epoch."""
    steps = {}
    for step, batch in batches_of(config, workers):
        steps.setdefault(step, []).extend(rows_of(batch))
    return list(steps.values())


def evaluated(config, workers):
    data = [open_evaluation(config) for _ in range(workers)]
    found = []
    for number in range(data[0].num_batches):
        found += rows_of(data[number % workers].batch(number))
    return found


WANTED = [row(i) for i in range(ROWS)]


def check(config):
    alone, three = dealt(config, 1), dealt(config, 3)
    assert alone == three
    epoch = [one for step in alone for one in step]
    assert sorted(epoch, key=lambda one: one["id"]) == WANTED
    assert evaluated(config, 1) == evaluated(config, 3) == WANTED


def some(kind, *more):
    """Others of the same reader take the long run."""
    every = kind in ("parquet", "arrow_by_polars", "tar")
    return pytest.param(kind, *more, marks=() if every else pytest.mark.slow)


@pytest.mark.parametrize("kind", [some(kind) for kind in KINDS])
def test_rows_in_are_rows_out_of_files_read_in_place(kind, tmp_path):
    check(written(kind, tmp_path / "in"))
