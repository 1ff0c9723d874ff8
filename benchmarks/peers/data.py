"""Other loaders over the rows of `benchmarks.token_rows`.

    python data.py RESULT.json NAME FOLDER

Rows per second of each epoch after the first, in order and shuffled; each batch of 64 rows is
copied into a fixed buffer. litdata and mosaicml (py1e) shuffle by themselves, the others through a
buffer of 10,000 rows, with the shards permuted where they can. Ray Data and Hugging Face datasets
read the Parquet shards. The others read their own format, which is written once.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

BATCH, SHUFFLE_ROWS = 64, 10_000
EPOCHS = {"litdata": 3}  # of the others two

Epoch = Callable[[bool, int], Iterable[Any]]  # (shuffle, epoch): rows, or Arrow tables of them


def rows_between(bounds: tuple[int, int], path: str) -> Iterator[Any]:
    import torch

    rows = np.load(path, mmap_mode="r")
    for row in rows[bounds[0] : bounds[1]]:
        yield torch.from_numpy(row.copy())


def litdata(folder: Path, count: int, length: int) -> Epoch:
    import litdata

    chunks = folder / "litdata"
    if not (chunks / "index.json").exists():
        litdata.optimize(
            fn=functools.partial(rows_between, path=str(folder / "tokens.npy")),
            inputs=[(start, start + count // 2) for start in range(0, count, count // 2)],
            output_dir=str(chunks),
            chunk_bytes="32MB",
            num_workers=2,
            item_loader=litdata.TokensLoader(),
        )
    return lambda shuffle, epoch: litdata.StreamingDataset(
        str(chunks),
        item_loader=litdata.TokensLoader(block_size=length),
        shuffle=shuffle,
        drop_last=False,
        seed=epoch,
    )


def stand_in_for_torchvision() -> None:
    """Streaming imports it for image data sets that are not used here. One that was built for
    another torch cannot be imported."""
    members = {"torchvision.datasets": "VisionDataset"}
    members["torchvision.transforms.functional"] = "to_tensor"
    for name in ("torchvision", "torchvision.transforms", *members):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        if name in members:
            setattr(module, members[name], type(members[name], (), {}))


def mosaicml(folder: Path, count: int, length: int) -> Epoch:
    stand_in_for_torchvision()
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    if not (folder / "mds" / "index.json").exists():
        columns = {"tokens": f"ndarray:int32:{length}"}
        with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=32 << 20) as out:
            for row in np.load(folder / "tokens.npy", mmap_mode="r"):
                out.write({"tokens": np.ascontiguousarray(row)})
    opened: dict[bool, Any] = {}

    def open_epoch(shuffle: bool, epoch: int) -> Iterable[Any]:
        if shuffle not in opened:
            opened.clear()
            clean_stale_shared_memory()
            opened[shuffle] = StreamingDataset(
                local=str(folder / "mds"), shuffle=shuffle, shuffle_algo="py1e", batch_size=BATCH
            )
        return (row["tokens"] for row in opened[shuffle])

    return open_epoch


def hugging_face(folder: Path, count: int, length: int) -> Epoch:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(folder / "hugging_face")
    from datasets import load_dataset

    files = sorted(str(path) for path in (folder / "parquet").iterdir())
    plain = load_dataset("parquet", data_files=files, split="train", streaming=True)
    plain = plain.with_format("arrow")

    def open_epoch(shuffle: bool, epoch: int) -> Iterable[Any]:
        dataset = plain.shuffle(seed=epoch, buffer_size=SHUFFLE_ROWS) if shuffle else plain
        return dataset.iter(batch_size=BATCH)

    return open_epoch


def ray_data(folder: Path, count: int, length: int) -> Epoch:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def open_epoch(shuffle: bool, epoch: int) -> Iterable[Any]:
        return ray.data.read_parquet(str(folder / "parquet")).iter_batches(
            batch_size=BATCH,
            batch_format="pyarrow",
            local_shuffle_buffer_size=SHUFFLE_ROWS if shuffle else None,
        )

    return open_epoch


PEERS = {f.__name__: f for f in (litdata, mosaicml, hugging_face, ray_data)}
OF_TABLES = ("hugging_face", "ray_data")


def copy_rows(rows: Iterable[Any], buffer: Any) -> int:
    """How many there were."""
    seen = 0
    for row in rows:
        buffer[seen % BATCH] = row
        seen += 1
    return seen


def copy_tables(tables: Iterable[Any], buffer: Any) -> int:
    seen = 0
    for table in tables:
        column = table.column("tokens").combine_chunks()
        buffer[: len(column)] = column.flatten().to_numpy().reshape(len(column), -1)
        seen += len(column)
    return seen


def main(result: str, name: str, folder: Path) -> None:
    count, length = np.load(folder / "tokens.npy", mmap_mode="r").shape
    open_epoch = PEERS[name](folder, count, length)
    buffer: Any = np.empty((BATCH, length), dtype=np.int32)
    if name == "litdata":  # whose rows are tensors
        import torch

        buffer = torch.from_numpy(buffer)
    copy = copy_tables if name in OF_TABLES else copy_rows
    speeds: dict[str, list[float]] = {"in order": [], "shuffled": []}
    for kind, measured in speeds.items():
        for epoch in range(1 + EPOCHS.get(name, 2)):
            rows = open_epoch(kind == "shuffled", epoch)
            begun_at = time.perf_counter()
            seen = copy(rows, buffer)
            assert seen == count, f"{seen} rows came"
            if epoch:
                measured.append(count / (time.perf_counter() - begun_at))
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # threads of a loader need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
