"""mosaicml's StreamingDataset over the rows of `benchmarks.token_rows`, as MDS shards.

    python data_mosaicml.py RESULT.json FOLDER

Rows per second of each epoch, in order and shuffled (py1e); each batch of 64 rows is copied into a
fixed buffer.

Its package imports torchvision, for image data sets that are not used here. Empty modules stand in
for that, since a torchvision that was built for another torch cannot be imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np

BATCH, EPOCHS = 64, 2
IMPORTED = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}


def stand_in_for_torchvision() -> None:
    for name, members in IMPORTED.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for member in members:
            setattr(module, member, type(member, (), {}))


def write(folder: Path) -> None:
    from streaming import MDSWriter

    rows = np.load(folder / "tokens.npy", mmap_mode="r")
    columns = {"tokens": f"ndarray:int32:{rows.shape[1]}"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=32 << 20) as out:
        for row in rows:
            out.write({"tokens": np.ascontiguousarray(row)})


def main(result: str, folder: Path) -> None:
    stand_in_for_torchvision()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    count, length = np.load(folder / "tokens.npy", mmap_mode="r").shape
    if not (folder / "mds" / "index.json").exists():
        write(folder)
    buffer = np.empty((BATCH, length), dtype=np.int32)
    speeds: dict[str, list[float]] = {}
    for kind, shuffle in (("in order", False), ("shuffled", True)):
        clean_stale_shared_memory()
        dataset = StreamingDataset(
            local=str(folder / "mds"), shuffle=shuffle, shuffle_algo="py1e", batch_size=BATCH
        )
        for epoch in range(1 + EPOCHS):
            begun_at, seen = time.perf_counter(), 0
            for row in dataset:
                buffer[seen % BATCH] = row["tokens"]
                seen += 1
            assert seen == count, f"{seen} rows came"
            if epoch:
                speeds.setdefault(kind, []).append(count / (time.perf_counter() - begun_at))
        del dataset
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
