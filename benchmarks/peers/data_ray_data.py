"""Ray Data over the Parquet shards of `benchmarks.token_rows`.

    python data_ray_data.py RESULT.json FOLDER

Rows per second of each epoch, as batches of 64 copied into a fixed buffer: in order, and with a
local shuffle buffer of 10,000 rows.
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
    import ray

    count, length = np.load(folder / "tokens.npy", mmap_mode="r").shape
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    buffer = np.empty((BATCH, length), dtype=np.int32)
    speeds: dict[str, list[float]] = {}
    for kind, shuffle in (("in order", None), ("shuffled", SHUFFLE_ROWS)):
        for epoch in range(1 + EPOCHS):
            dataset = ray.data.read_parquet(str(folder / "parquet"))
            begun_at, seen = time.perf_counter(), 0
            batches = dataset.iter_batches(
                batch_size=BATCH, batch_format="pyarrow", local_shuffle_buffer_size=shuffle
            )
            for batch in batches:
                column = batch.column("tokens").combine_chunks()
                rows = column.flatten().to_numpy().reshape(len(column), length)
                buffer[: len(rows)] = rows
                seen += len(rows)
            assert seen == count, f"{seen} rows came"
            if epoch:
                speeds.setdefault(kind, []).append(count / (time.perf_counter() - begun_at))
    Path(result).write_text(json.dumps(speeds))
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
