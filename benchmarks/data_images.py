"""JPEG images decoded while training: ours from Parquet and from tar files, beside other loaders.

Ours is measured as training has it: `read_ahead`, then `batch` for every (step, virtual worker) of
an epoch, decoded in its two threads. Peers have two worker processes of torch's DataLoader, except
for Ray Data, which has its own. Each reads the format that its users write, and gives batches of 32
uint8 images (peers/images.py).
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks import peers, token_rows
from benchmarks.data_local import median
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index

IMAGES, SHARDS, SIZE, BATCH = 2_048, 8, 224, 32
VIRTUAL_WORKERS = 8
PEERS = ("litdata", "mosaicml", "hugging_face", "webdataset", "ray_data")
KINDS = {"in order": "none", "shuffled": "rows"}


def measure(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    return token_rows.alone("benchmarks.data_images", folder, rounds, int(with_peers))


def compare(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    """Images per second of each, and ours over the fastest peer's of the same kind."""
    write(folder)
    formats = {"parquet": "image", "tar": "jpg"}
    systems = {
        f"ours, {name}, {kind}": ours(folder / "images" / name, column, shuffle)
        for name, column in formats.items()
        for kind, shuffle in KINDS.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    failed: dict[str, str] = {}
    for system in systems.values():
        system()
    for _ in range(rounds):
        for name, system in systems.items():
            speeds[name].append(system())
        for peer in PEERS if with_peers else ():
            measure_peer(peer, folder, speeds, failed)
    report = {name: median(values) for name, values in speeds.items()}
    ratios = {}
    for kind in KINDS:
        others = [n for n in speeds if n.endswith(kind) and not n.startswith("ours")]
        for name in formats if others else ():
            best = max(others, key=lambda other: report[other]["median"])
            ours_of_kind = report[f"ours, {name}, {kind}"]["median"]
            ratios[f"{name}, {kind} / {best}"] = round(ours_of_kind / report[best]["median"], 3)
    return {"images_per_s": report | failed, "ratios": ratios}


def measure_peer(
    peer: str, folder: Path, speeds: dict[str, list[float]], failed: dict[str, str]
) -> None:
    """Adds the epochs of one process. The interpreter that has them all: `DATA_PEERS_PYTHON`."""
    python = os.environ.get("DATA_PEERS_PYTHON", sys.executable)
    answer = peers.run(python, "images.py", peer, str(folder / "images"), timeout_s=300.0)
    if not isinstance(answer, dict):
        failed[peer] = answer
        return
    for kind, values in answer.items():
        speeds.setdefault(f"{peer}, {kind}", []).extend(values)


def ours(path: Path, column: str, shuffle: Any) -> Callable[[], float]:
    config = DataConfig(
        str(path),
        micro_batch_size=BATCH,
        columns=[column],
        decode={column: "rgb"},
        shuffle=shuffle,
        epochs=1,
        seed=1,
    )
    index = read_index(config)

    def epoch() -> float:
        data = open_data(config, virtual_workers=VIRTUAL_WORKERS, index=index)
        begun_at, count = time.perf_counter(), 0
        data.read_ahead(1, range(VIRTUAL_WORKERS))
        for step in range(1, data.steps_per_epoch + 1):
            for v in range(VIRTUAL_WORKERS):
                images = data.batch(step, v)[column]
                assert images.shape == (BATCH, SIZE, SIZE, 3), images.shape
                count += len(images)
        took = time.perf_counter() - begun_at
        data.close()
        assert count == IMAGES, f"{count} images came"
        return count / took

    return epoch


def write(folder: Path) -> None:
    """What is there already stays."""
    images = folder / "images"
    if images.exists():
        return
    aside = folder / "images.part"
    for name in ("parquet", "tar"):
        (aside / name).mkdir(parents=True, exist_ok=True)
    drawn, each = drawn_images(), IMAGES // SHARDS
    for shard in range(SHARDS):
        rows = [next(drawn) for _ in range(each)]
        ids = range(shard * each, (shard + 1) * each)
        table = pa.table({"id": pa.array(ids), "image": pa.array(rows, pa.binary())})
        path = aside / "parquet" / f"part-{shard}.parquet"
        pq.write_table(table, path, row_group_size=64, compression="none")
        with tarfile.open(aside / "tar" / f"part-{shard}.tar", "w") as tar:
            for number, row in zip(ids, rows, strict=True):
                member = tarfile.TarInfo(f"{number:06}.jpg")
                member.size = len(row)
                tar.addfile(member, io.BytesIO(row))
    aside.rename(images)


def drawn_images() -> Iterator[bytes]:
    """JPEG files of some 15 KB: smooth shapes with a little noise, as photos have it."""
    generator = np.random.default_rng(0)
    while True:
        coarse = generator.integers(0, 256, (14, 14, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        noise = generator.normal(0.0, 8.0, (SIZE, SIZE, 3))
        pixels = np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=85)
        yield file.getvalue()


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")))
