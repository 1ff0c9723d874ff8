"""WebDataset over the rows of `benchmarks.token_rows`, as .npy members of tar files.

    python data_webdataset.py RESULT.json FOLDER

Rows per second of each epoch, in order, and through a shuffle buffer of 10,000 rows with the shards
permuted; each batch of 64 rows is copied into a fixed buffer.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path

import numpy as np

BATCH, EPOCHS, SHARDS, SHUFFLE_ROWS = 64, 2, 8, 10_000


def write(folder: Path) -> None:
    tars, aside = folder / "tar", folder / "tar.part"
    if tars.exists():
        return
    aside.mkdir()
    rows = np.load(folder / "tokens.npy", mmap_mode="r")
    for shard, numbers in enumerate(np.array_split(np.arange(len(rows)), SHARDS)):
        with tarfile.open(aside / f"part-{shard}.tar", "w") as tar:
            for number in numbers:
                file = io.BytesIO()
                np.save(file, rows[number])
                member = tarfile.TarInfo(f"{number:09}.npy")
                member.size = file.tell()
                file.seek(0)
                tar.addfile(member, file)
    aside.rename(tars)


def main(result: str, folder: Path) -> None:
    import webdataset as wds

    write(folder)
    count, length = np.load(folder / "tokens.npy", mmap_mode="r").shape
    urls = sorted(str(path) for path in (folder / "tar").iterdir())
    buffer = np.empty((BATCH, length), dtype=np.int32)
    speeds: dict[str, list[float]] = {}
    for kind, shuffle in (("in order", False), ("shuffled", True)):
        for epoch in range(1 + EPOCHS):
            dataset = wds.WebDataset(urls, shardshuffle=SHARDS if shuffle else False, seed=epoch)
            if shuffle:
                dataset = dataset.shuffle(SHUFFLE_ROWS)
            begun_at, seen = time.perf_counter(), 0
            for (row,) in dataset.decode().to_tuple("npy"):
                buffer[seen % BATCH] = row
                seen += 1
            assert seen == count, f"{seen} rows came"
            if epoch:
                speeds.setdefault(kind, []).append(count / (time.perf_counter() - begun_at))
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # as the others end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
