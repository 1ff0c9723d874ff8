"""The rows and bytes of the first micro-batches of thirty data sets, as recorded.

`python -m tests.data.test_recorded_batches` records them again. Do so only where something is meant
to change, and say why in the commit. Each data set is written by arithmetic, so that it is the same
on every machine. A digest must not depend on the number of workers.
"""

import hashlib
import io
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
from tests.imported_when_used import ImportedWhenUsed

datasets, duckdb, pandas, polars, image, deltalake, webdataset = map(
    ImportedWhenUsed,
    ("datasets", "duckdb", "pandas", "polars", "PIL.Image", "deltalake", "webdataset"),
)

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


DATA_SETS: dict[str, Recorded] = {}


def data_set(name: str = "", *, quick: bool = False, grows: bool = False, **options: Any) -> Any:
    def add(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
        DATA_SETS[name or make.__name__.replace("_", " ")] = Recorded(
            make, {"micro_batch_size": 3, **options}, quick, grows
        )
        return make

    return add


def rows_from(first: int, rows: int) -> pa.Table:
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


def ragged(table: pa.Table) -> pa.Table:
    lists = [[i, *range(i % 11)] for i in table["id"].to_pylist()]
    return table.append_column("tokens", pa.array(lists, pa.list_(pa.int32())))


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    longest = max(map(len, batch["tokens"]))
    rows = [np.pad(row, (0, longest - len(row))) for row in batch["tokens"]]
    return {"tokens": torch.from_numpy(np.stack(rows)), "id": torch.from_numpy(batch["id"])}


def shards(folder: Path, count: int, write: Callable[[Path, pa.Table], Any]) -> None:
    """Shards of different sizes, with all rows together."""
    bounds = [ROWS * n * (n + 1) // (count * (count + 1)) for n in range(count + 1)]
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        write(folder / f"part-{number:03}", rows_from(first, end - first))


def to_parquet(path: Path, table: pa.Table, rows_per_group: int = 64, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, f"{path}.parquet", row_group_size=rows_per_group, **options)


def with_noise(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "noise": rng.random(len(batch["id"]))}


def parquet(count: int, **how: Any) -> Callable[[Path], None]:
    return lambda folder: shards(folder, count, lambda p, t: to_parquet(p, t, **how))


def arrow(count: int, **how: Any) -> Callable[[Path], None]:
    how |= {"chunk": 48}
    return lambda folder: shards(folder, count, lambda p, t: write_arrow(f"{p}.arrow", t, **how))


def lists(folder: Path) -> None:
    how = {"compression": "zstd", "use_dictionary": False}
    shards(folder, 4, lambda p, t: to_parquet(p, ragged(t), **how))


def by_polars(folder: Path) -> None:
    shards(
        folder,
        3,
        lambda p, t: polars.from_arrow(t).write_parquet(f"{p}.parquet", row_group_size=100),
    )


def by_pandas(folder: Path) -> None:
    shards(folder, 3, lambda p, t: t.to_pandas().to_parquet(f"{p}.parquet", index=True))


OF_VERSION_ONE = {"version": "1.0", "use_dictionary": False, "compression": "gzip"}
OF_VERSION_ONE |= {"write_statistics": False, "store_schema": False}
OF_PAGE_TWO = {"data_page_version": "2.0", "data_page_size": 512, "compression": "brotli"}
OF_PAGE_TWO |= {"write_page_checksum": True}
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
    (
        "parquet with columns",
        lists,
        {"seed": 7, "columns": ["tokens", "id"], "collate_fn": padded},
    ),
    ("parquet of version one", parquet(4, **OF_VERSION_ONE), {}),
    ("parquet of data page two", parquet(4, **OF_PAGE_TWO), {}),
    ("parquet of polars", by_polars, {}),
    ("parquet of pandas", by_pandas, {"columns": ["id", "half", "text", "even"]}),
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
def parquet_with_one_large_row_group(folder: Path) -> None:
    to_parquet(folder / "one", rows_from(0, ROWS), ROWS)


@data_set()
def parquet_of_duckdb(folder: Path) -> None:
    duckdb.sql("set threads = 1")
    duckdb.sql(
        f"copy (select range as id, range / 2 as half, 'row ' || range as text, "
        f"[range, range + 1] as pair from range({ROWS})) "
        f"to '{folder / 'rows.parquet'}' (format parquet, row_group_size 2048)"
    )


@data_set()
def arrow_with_dictionaries(folder: Path) -> None:
    def write(path: Path, table: pa.Table) -> None:
        table = table.set_column(4, "text", pc.dictionary_encode(table["text"]))
        write_arrow(f"{path}.feather", table, chunk=48, compression="lz4")

    shards(folder, 3, write)


@data_set()
def saved_by_hugging_face(folder: Path) -> None:
    saved = datasets.Dataset(rows_from(0, ROWS))
    saved.save_to_disk(str(folder), num_shards=3)


def to_tar(path: Path, first: int, samples: int) -> None:
    with tarfile.open(f"{path}.tar", "w") as tar:
        for number in range(first, first + samples):
            parts = {"jpg": bytes([number % 256]) * (number * 37 % 90), "cls": b"%d" % number}
            parts |= {"json": b'{"n": %d}' % number, "txt": f"ü {number}".encode()}
            for name, content in parts.items():
                add(tar, f"folder/{number:06}.{name}", content)


@data_set(quick=True)
def tar(folder: Path) -> None:
    for number in range(4):
        to_tar(folder / f"{number:03}", number * 200, 200 - 30 * number)


@data_set(shuffle="none", tail="short", epochs=1, columns=["cls", "__key__"])
def tar_in_order(folder: Path) -> str:
    for number in range(3):
        to_tar(folder / f"{number:03}", number * 200, 150)
    return [str(folder / f"{n:03}.tar") for n in range(3)]


@data_set()
def tar_of_webdataset(folder: Path) -> None:
    for shard in range(3):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(shard * 300, shard * 300 + 250):
                writer.write(
                    {"__key__": f"{number:05}", "txt": f"text {number}", "cls": number % 10}
                )


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.arange(4) * index, "noise": torch.rand(2)}


@data_set(quick=True)
def map_style(folder: Path) -> MapStyleData:
    return MapStyleData(Squares(), micro_batch_size=3, tail="short", epochs=2)


@data_set()
def map_style_in_order(folder: Path) -> MapStyleData:
    return MapStyleData(Squares(), micro_batch_size=5, shuffle=False, seed=3)


@data_set(quick=True)
def mixture(folder: Path) -> dict[str, float]:
    for number, name in enumerate("abc"):
        to_parquet(folder / name / "rows", rows_from(number * 10_000, 300 + 200 * number))
    return {str(folder / "a"): 0.2, str(folder / "b"): 0.5, str(folder / "c"): 0.3}


@data_set(shuffle="none")
def mixture_of_formats(folder: Path) -> dict[int, dict[str, float]]:
    to_parquet(folder / "a" / "rows", rows_from(0, 400))
    (folder / "b").mkdir()
    write_arrow(folder / "b" / "rows.arrow", rows_from(10_000, 700), chunk=48)
    a, b = str(folder / "a"), str(folder / "b")
    return {0: {a: 1, b: 3}, 9: {a: 2, b: 1}}


def documents(folder: Path) -> None:
    for shard in range(3):
        ids = range(shard * 400, shard * 400 + 350)
        tokens = [[i * 7 + j for j in range(i * 13 % 37)] for i in ids]
        labels = [[token + 1 for token in row] for row in tokens]
        table = pa.table({"input_ids": tokens, "labels": labels, "text": [str(i) for i in ids]})
        to_parquet(folder / f"part-{shard}", table)


@data_set(quick=True, pack=32, columns=["input_ids", "labels"])
def packed(folder: Path) -> None:
    documents(folder)


@data_set(
    pack=50,
    pack_columns=["document_ids"],
    columns=["input_ids"],
    shuffle="none",
    tail="short",
    epochs=1,
)
def packed_in_order(folder: Path) -> None:
    documents(folder)


@data_set(pack=24, shuffle="full", columns=["labels"], filter=pc.field("text") >= "3")
def packed_and_filtered(folder: Path) -> None:
    documents(folder)


@data_set(shuffle="rows")
def partitions(folder: Path) -> str:
    for year in (2023, 2024, 2025):
        for kind in ("a", "b c"):
            table = rows_from(year * 100, 150 + year % 5 * 20)
            to_parquet(folder / f"year={year}" / f"kind={kind}" / "rows", table)
    return f"{folder}/**/*.parquet"


@data_set(grows=True)
def growing_mixture(folder: Path) -> dict[str, float]:
    return mixture(folder)


@data_set(grows=True, pack=32, columns=["input_ids"])
def growing_packed(folder: Path) -> None:
    documents(folder)


@data_set(decode={"picture": "rgb"})
def pictures(folder: Path) -> None:
    found = []
    for number in range(200):
        pixels = np.full((3, 5, 3), number, np.uint8) + np.arange(5, dtype=np.uint8)[:, None]
        into = io.BytesIO()
        image.fromarray(pixels).save(into, "png")
        found.append(into.getvalue())
    to_parquet(folder / "rows", pa.table({"id": range(200), "picture": found}))


@data_set(shuffle="rows", columns=["at.x", "at.deep.y", "when", "price", "day"])
def nested_and_times(folder: Path) -> None:
    ids = range(600)
    to_parquet(
        folder / "rows",
        pa.table(
            {
                "at": [{"x": i, "deep": {"y": i / 4}, "unread": str(i)} for i in ids],
                "when": pa.array([i * 10**9 for i in ids], pa.timestamp("us")),
                "day": pa.array([*ids], pa.int32()).cast(pa.date32()),
                "price": pa.array([i / 8 for i in ids]).cast(pa.decimal128(12, 3)),
            }
        ),
    )


@data_set(shuffle="none", epochs=2, tail="short")
def files_by_delta_lake(folder: Path) -> list[str]:
    for first in (0, 500, 900):
        table = rows_from(first, 400).drop_columns("small")
        deltalake.write_deltalake(str(folder), table, mode="append")
    table = deltalake.DeltaTable(str(folder))
    by_first = sorted(
        table.file_uris(), key=lambda f: pq.read_table(f, columns=["id"])["id"][0].as_py()
    )
    return [str(f) for f in by_first]


# ------------------------------------------------------------------------------------ the digests


def digest_of(value: Any, into: Any) -> None:
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


def digest(config: Any, virtual_workers: int, workers: int, grows: bool) -> str:
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


def evaluation_digest(config: Any) -> str:
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


def config_of(name: str, folder: Path) -> Any:
    chosen = DATA_SETS[name]
    what = chosen.make(folder)
    if isinstance(what, MapStyleData):
        return what
    return DataConfig(str(folder) if what is None else what, **chosen.options)


def digests(name: str, folder: Path, workers: int) -> dict[str, str]:
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
def test_batches_equal_those_recorded(name: str, workers: int, tmp_path: Path) -> None:
    expected = json.loads(RECORDED.read_text())[name]
    found = digests(name, tmp_path, workers)
    assert found == {key: expected[key] for key in found}


def record() -> None:
    found = {}
    for name in DATA_SETS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digests(name, Path(folder), 1)
        print(name, found[name], flush=True)
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
