"""litdata's StreamingDataset over the rows of `benchmarks.token_rows`, as its own chunks of tokens.

    python data_litdata.py RESULT.json FOLDER

Rows per second of each epoch, in order and shuffled; each batch of 64 rows is copied into a fixed
buffer.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH, EPOCHS = 64, 3


def rows_between(bounds: tuple[int, int], path: str) -> Iterator[torch.Tensor]:
    rows = np.load(path, mmap_mode="r")
    for row in rows[bounds[0] : bounds[1]]:
        yield torch.from_numpy(row.copy())


def write(folder: Path, loader: Any, rows: int) -> None:
    import litdata

    litdata.optimize(
        fn=functools.partial(rows_between, path=str(folder / "tokens.npy")),
        inputs=[(start, start + rows // 2) for start in range(0, rows, rows // 2)],
        output_dir=str(folder / "litdata"),
        chunk_bytes="32MB",
        num_workers=2,
        item_loader=loader,
    )


def main(result: str, folder: Path) -> None:
    import litdata

    count, length = np.load(folder / "tokens.npy", mmap_mode="r").shape
    if not (folder / "litdata" / "index.json").exists():
        write(folder, litdata.TokensLoader(), count)
    buffer = torch.empty((BATCH, length), dtype=torch.int32)
    speeds: dict[str, list[float]] = {}
    for kind, shuffle in (("in order", False), ("shuffled", True)):
        for epoch in range(1 + EPOCHS):
            dataset = litdata.StreamingDataset(
                str(folder / "litdata"),
                item_loader=litdata.TokensLoader(block_size=length),
                shuffle=shuffle,
                drop_last=False,
                seed=epoch,
            )
            begun_at, seen = time.perf_counter(), 0
            for row in dataset:
                buffer[seen % BATCH] = row
                seen += 1
            assert seen == count, f"{seen} rows came"
            if epoch:
                speeds.setdefault(kind, []).append(count / (time.perf_counter() - begun_at))
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
