"""Other loaders over the JPEG images of `benchmarks.data_images`.

    python images.py RESULT.json SYSTEM FOLDER

Images per second of each epoch, in order and shuffled, as batches of 32 uint8 images. Each system
reads the format that its own writer makes of the images, decoded by Pillow in two worker processes
of torch's DataLoader; Ray Data has its own processes. Shuffled as each does it by default, with a
buffer of 1,000 images where it asks for a size.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH, SIZE, EPOCHS, WORKERS, BUFFER = 32, 224, 2, 2, 1_000
Batches = Iterable[Any]


def pixels(file: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def files_of(folder: Path) -> Iterator[bytes]:
    import pyarrow.parquet as pq

    for path in sorted((folder / "parquet").iterdir()):
        for file in pq.read_table(path, columns=["image"]).column(0):
            yield file.as_py()


def litdata(folder: Path, shuffle: bool, seed: int) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    class Decoded(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return torch.from_numpy(pixels(super().__getitem__(index)["image"]).copy())

    chunks = folder / "litdata"
    if not (chunks / "index.json").exists():
        writer = BinaryWriter(str(chunks), chunk_bytes="16MB")
        for number, file in enumerate(files_of(folder)):
            writer[number] = {"image": file}
        writer.done()
        writer.merge()
    dataset = Decoded(str(chunks), shuffle=shuffle, drop_last=False, seed=seed)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


def mosaicml(folder: Path, shuffle: bool, seed: int) -> Batches:
    from data_mosaicml import stand_in_for_torchvision

    stand_in_for_torchvision()
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Decoded(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return torch.from_numpy(pixels(super().__getitem__(index)["image"]).copy())

    shards = folder / "mds"
    if not (shards / "index.json").exists():
        with MDSWriter(out=str(shards), columns={"image": "bytes"}, size_limit=16 << 20) as out:
            for file in files_of(folder):
                out.write({"image": file})
    clean_stale_shared_memory()
    options = {"batch_size": BATCH, "shuffle_seed": seed}
    dataset = Decoded(local=str(shards), shuffle=shuffle, **options)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


def hugging_face(folder: Path, shuffle: bool, seed: int) -> Batches:
    os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "1", str(folder / "hugging_face")
    from datasets import Image, load_dataset

    files = sorted(str(path) for path in (folder / "parquet").iterdir())
    dataset = load_dataset("parquet", data_files=files, split="train", streaming=True)
    dataset = dataset.cast_column("image", Image(mode="RGB")).with_format("torch")
    if shuffle:
        dataset = dataset.shuffle(seed=seed, buffer_size=BUFFER)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
    return (batch["image"].permute(0, 2, 3, 1) for batch in loader)


def webdataset(folder: Path, shuffle: bool, seed: int) -> Batches:
    import webdataset as wds

    tars = sorted(str(path) for path in (folder / "tar").iterdir())
    dataset = wds.WebDataset(tars, shardshuffle=len(tars) if shuffle else False, seed=seed)
    if shuffle:
        dataset = dataset.shuffle(BUFFER)
    dataset = dataset.to_tuple("jpg").map_tuple(pixels).batched(BATCH)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS)
    return (batch[0] for batch in loader)


def ray_data(folder: Path, shuffle: bool, seed: int) -> Batches:
    import ray

    if not ray.is_initialized():
        environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        ray.init(
            address="local",
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env=environment,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False

    def decoded(batch: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.stack([pixels(file) for file in batch["image"]])}

    dataset = ray.data.read_parquet(str(folder / "parquet"), columns=["image"])
    dataset = dataset.map_batches(decoded, batch_size=BATCH)
    options = {"local_shuffle_buffer_size": BUFFER, "local_shuffle_seed": seed} if shuffle else {}
    batches = dataset.iter_torch_batches(batch_size=BATCH, **options)
    return (batch["image"] for batch in batches)


SYSTEMS: dict[str, Callable[[Path, bool, int], Batches]] = {
    "litdata": litdata,
    "mosaicml": mosaicml,
    "hugging_face": hugging_face,
    "webdataset": webdataset,
    "ray_data": ray_data,
}


def main(result: str, system: str, folder: Path) -> None:
    speeds: dict[str, list[float]] = {}
    count = sum(1 for _ in files_of(folder))
    for kind, shuffle in (("in order", False), ("shuffled", True)):
        for epoch in range(1 + EPOCHS):
            batches = SYSTEMS[system](folder, shuffle, epoch)
            begun_at, seen = time.perf_counter(), 0
            for batch in batches:
                assert batch.shape[1:] == (SIZE, SIZE, 3) and str(batch.dtype).endswith("uint8")
                seen += len(batch)
            took = time.perf_counter() - begun_at
            assert seen == count, f"{seen} images came"
            if epoch:
                speeds.setdefault(kind, []).append(count / took)
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
