"""The rows and bytes of the first micro-batches of data sets of each kind, as recorded.

`python -m tests.data.test_recorded_batches` records them again. Do so only where something is meant
to change, and say why in the commit. Each data set is written by arithmetic, so that it is the same
on every machine. A digest must not depend on the number of workers.
"""

import hashlib
import itertools
import json
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.data import open_data, open_evaluation
from tests.data.shards import add, write_arrow

RECORDED = Path(__file__).parent / "recorded_batches.json"
ROWS = 1_700
MICRO_BATCHES = 160
VIRTUAL_WORKERS = (4, 16)


@dataclass(frozen=True)
class Recorded:
    """`make` writes the data set into an empty folder and may return what to open."""

    make: Callable[[Path], Any]
    options: dict[str, Any]
    quick: bool
    grows: bool


DATA_SETS = {}


def data_set(name="", *, quick=False, grows=False, **options):
    def add(make):
        DATA_SETS[name or make.__name__.replace("_", " ")] = Recorded(
            make, {"micro_batch_size": 3, **options}, quick, grows
        )
        return make

    return add


def rows_from(first, rows):
    ids = np.arange(first, first + rows)
    plain = ids.tolist()
    return pa.table(
        {
            "id": pa.array(ids),
            "half": pa.array(ids / 2),
            "small": pa.array((ids % 251).astype(np.uint8)),
            "even": pa.array(ids % 2 == 0),
            "text": pa.array([f"row {i} " + "é" * (i % 7) for i in plain]),
            "same": pa.array([[i, i + 1, i * i % 7] for i in plain], pa.list_(pa.float32())),
        }
    )


def ragged(table):
    lists = [[i, *range(i % 11)] for i in table["id"].to_pylist()]
    return table.append_column("tokens", pa.array(lists, pa.list_(pa.int32())))


def padded(batch):
    longest = max(map(len, batch["tokens"]))
    rows = [np.pad(row, (0, longest - len(row))) for row in batch["tokens"]]
    return {"tokens": torch.from_numpy(np.stack(rows)), "id": torch.from_numpy(batch["id"])}


def shards(folder, count, write):
    """Shards of different sizes, with all rows together."""
    bounds = [ROWS * n * (n + 1) // (count * (count + 1)) for n in range(count + 1)]
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        write(folder / f"part-{number:03}", rows_from(first, end - first))


def to_parquet(path, table, rows_per_group=64, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, f"{path}.parquet", row_group_size=rows_per_group, **options)


def with_noise(batch, rng):
    return {**batch, "noise": rng.random(len(batch["id"]))}


def parquet(count, **how):
    return lambda folder: shards(folder, count, lambda p, t: to_parquet(p, t, **how))


def arrow(count, **how):
    how |= {"chunk": 48}
    return lambda folder: shards(folder, count, lambda p, t: write_arrow(f"{p}.arrow", t, **how))


def lists(folder):
    how = {"compression": "zstd", "use_dictionary": False}
    shards(folder, 4, lambda p, t: to_parquet(p, ragged(t), **how))


IN_ORDER = {"shuffle": "none", "tail": "short"}
EVEN = (pc.field("text") > "row 2") & pc.field("even")
LATE = (pc.field("small") != 3) & (pc.field("half") > 50)
for name, make, options in (
    ("parquet of pyarrow", parquet(5), {"quick": True}),
    ("parquet in order", parquet(5), {**IN_ORDER, "epochs": 1}),
    (
        "parquet fully shuffled",
        parquet(3),
        {"shuffle": "full", "tail": "short", "epochs": 2, "micro_batch_size": 7},
    ),
    ("parquet with columns", lists, {"seed": 7, "columns": ["tokens", "id"], "collate_fn": padded}),
    ("arrow file", arrow(4), {"quick": True, "shuffle": "rows"}),
    (
        "arrow stream compressed",
        arrow(4, stream=True, compression="zstd"),
        {"shuffle": "none", "columns": ["text", "id"]},
    ),
    ("filtered", parquet(4), {"quick": True, "filter": LATE}),
    ("filtered arrow", arrow(4), {"columns": ["id", "text"], "filter": EVEN}),
    ("growing", parquet(5), {"grows": True}),
    ("with generators", parquet(4), {"transform": with_noise}),
):
    data_set(name, **options)(make)


@data_set(quick=True, epochs=3)
def parquet_with_one_large_row_group(folder):
    to_parquet(folder / "one", rows_from(0, ROWS), ROWS)


def to_tar(path, first, samples):
    with tarfile.open(f"{path}.tar", "w") as tar:
        for number in range(first, first + samples):
            parts = {"jpg": bytes([number % 256]) * (number * 37 % 90), "cls": b"%d" % number}
            parts |= {"json": b'{"n": %d}' % number, "txt": f"ü {number}".encode()}
            for name, content in parts.items():
                add(tar, f"folder/{number:06}.{name}", content)


@data_set(quick=True)
def tar(folder):
    for number in range(4):
        to_tar(folder / f"{number:03}", number * 200, 200 - 30 * number)


@data_set(shuffle="none", tail="short", epochs=1, columns=["cls", "__key__"])
def tar_in_order(folder):
    for number in range(3):
        to_tar(folder / f"{number:03}", number * 200, 150)
    return [str(folder / f"{n:03}.tar") for n in range(3)]


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": torch.arange(4) * index, "noise": torch.rand(2)}


@data_set(quick=True)
def map_style(folder):
    return MapStyleData(Squares(), micro_batch_size=3, tail="short", epochs=2)


@data_set()
def map_style_in_order(folder):
    return MapStyleData(Squares(), micro_batch_size=5, shuffle=False, seed=3)


@data_set(quick=True)
def mixture(folder):
    for number, name in enumerate("abc"):
        to_parquet(folder / name / "rows", rows_from(number * 10_000, 300 + 200 * number))
    return {str(folder / "a"): 0.2, str(folder / "b"): 0.5, str(folder / "c"): 0.3}


@data_set(shuffle="none")
def mixture_of_formats(folder):
    to_parquet(folder / "a" / "rows", rows_from(0, 400))
    (folder / "b").mkdir()
    write_arrow(folder / "b" / "rows.arrow", rows_from(10_000, 700), chunk=48)
    a, b = str(folder / "a"), str(folder / "b")
    return {0: {a: 1, b: 3}, 9: {a: 2, b: 1}}


def documents(folder):
    for shard in range(3):
        ids = range(shard * 400, shard * 400 + 350)
        tokens = [[i * 7 + j for j in range(i * 13 % 37)] for i in ids]
        labels = [[token + 1 for token in row] for row in tokens]
        table = pa.table({"input_ids": tokens, "labels": labels, "text": [str(i) for i in ids]})
        to_parquet(folder / f"part-{shard}", table)


@data_set(quick=True, pack=32, columns=["input_ids", "labels"])
def packed(folder):
    documents(folder)


@data_set(
    pack=50,
    pack_columns=["document_ids"],
    columns=["input_ids"],
    shuffle="none",
    tail="short",
    epochs=1,
)
def packed_in_order(folder):
    documents(folder)


@data_set(pack=24, shuffle="full", columns=["labels"], filter=pc.field("text") >= "3")
def packed_and_filtered(folder):
    documents(folder)


@data_set(shuffle="rows")
def partitions(folder):
    for year in (2023, 2024, 2025):
        for kind in ("a", "b c"):
            table = rows_from(year * 100, 150 + year % 5 * 20)
            to_parquet(folder / f"year={year}" / f"kind={kind}" / "rows", table)
    return f"{folder}/**/*.parquet"


@data_set(grows=True)
def growing_mixture(folder):
    return mixture(folder)


@data_set(grows=True, pack=32, columns=["input_ids"])
def growing_packed(folder):
    documents(folder)


def digest_of(value, into):
    if isinstance(value, dict):
        for name in value:
            into.update(f"{name}:".encode())
            digest_of(value[name], into)
    elif isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)}".encode())
        into.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, list | tuple):
        into.update(f"[{len(value)}".encode())
        for item in value:
            digest_of(item, into)
    elif isinstance(value, bytes):
        into.update(b"b%d" % len(value) + value)
    else:
        into.update(repr(value).encode())


def digest(config, virtual_workers, workers, grows):
    schedule = {0: virtual_workers // 2, 6: virtual_workers} if grows else virtual_workers
    opened = [open_data(config, virtual_workers=schedule) for _ in range(workers)]
    into = hashlib.sha256()
    try:
        epochs = config.epochs
        if epochs is not None and (steps := opened[0].steps_of(epochs)):
            count = min(MICRO_BATCHES, steps * virtual_workers)
        else:
            count = MICRO_BATCHES
        for step in range(1, count // virtual_workers + 1):
            current = virtual_workers // 2 if grows and step <= 6 else virtual_workers
            bounds = [current * n // workers for n in range(workers + 1)]
            for data, (first, end) in zip(opened, itertools.pairwise(bounds), strict=True):
                if step in (1, 7):
                    data.read_ahead(step, range(first, end))
                for virtual_worker in range(first, end):
                    if data.rows(step, virtual_worker):
                        torch.manual_seed(step * 1_000 + virtual_worker)
                        digest_of(data.batch(step, virtual_worker), into)
    finally:
        for data in opened:
            data.close()
    return into.hexdigest()[:20]


def evaluation_digest(config):
    data, into = open_evaluation(config), hashlib.sha256()
    try:
        count = min(data.num_batches, 60)
        data.read_ahead(range(count))
        for number in range(count):
            torch.manual_seed(number)
            digest_of(data.batch(number), into)
    finally:
        data.close()
    return into.hexdigest()[:20]


def config_of(name, folder):
    chosen = DATA_SETS[name]
    what = chosen.make(folder)
    if isinstance(what, MapStyleData):
        return what
    return DataConfig(str(folder) if what is None else what, **chosen.options)


def digests(name, folder, workers):
    config, grows = config_of(name, folder), DATA_SETS[name].grows
    found = {str(v): digest(config, v, workers, grows) for v in VIRTUAL_WORKERS}
    if workers == 1 and not isinstance(config.url if hasattr(config, "url") else "", dict):
        found["evaluation"] = evaluation_digest(config)
    return found


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if d.quick else pytest.mark.slow, id=n.replace(" ", "-"))
        for n, d in DATA_SETS.items()
    ],
)
def test_batches_equal_those_recorded(name, workers, tmp_path):
    expected = json.loads(RECORDED.read_text())[name]
    found = digests(name, tmp_path, workers)
    assert found == {key: expected[key] for key in found}


def record():
    found = {}
    for name in DATA_SETS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digests(name, Path(folder), 1)
        print(name, found[name], flush=True)
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
