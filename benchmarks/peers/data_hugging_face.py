"""Hugging Face datasets streaming the Parquet shards of `benchmarks.token_rows`.

    python data_hugging_face.py RESULT.json FOLDER

Rows per second of each epoch, as Arrow batches of 64 copied into a fixed buffer: in order, and
through a shuffle buffer of 10,000 rows with the shards permuted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

BATCH, EPOCHS, SHUFFLE_ROWS = 64, 2, 10_000


def main(result: str, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(folder / "hugging_face")
    from datasets import load_dataset

    count, length = np.load(folder / "tokens.npy", mmap_mode="r").shape
    files = sorted(str(path) for path in (folder / "parquet").iterdir())
    plain = load_dataset("parquet", data_files=files, split="train", streaming=True)
    plain = plain.with_format("arrow")
    buffer = np.empty((BATCH, length), dtype=np.int32)
    speeds: dict[str, list[float]] = {}
    for kind in ("in order", "shuffled"):
        for epoch in range(1 + EPOCHS):
            dataset = plain
            if kind == "shuffled":
                dataset = plain.shuffle(seed=epoch, buffer_size=SHUFFLE_ROWS)
            begun_at, seen = time.perf_counter(), 0
            for batch in dataset.iter(batch_size=BATCH):
                column = batch.column("tokens").combine_chunks()
                rows = column.flatten().to_numpy().reshape(len(column), length)
                buffer[: len(rows)] = rows
                seen += len(rows)
            assert seen == count, f"{seen} rows came"
            if epoch:
                speeds.setdefault(kind, []).append(count / (time.perf_counter() - begun_at))
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
