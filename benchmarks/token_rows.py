"""The data set that all systems read: 76,800 rows of 1,024 int32 tokens, 300 MB, in 8 shards.

Written once, in a folder that is kept: as Parquet (list<int32>, uncompressed, row groups of 4 MiB),
as Arrow IPC files (the same row groups as record batches), and as one .npy file, from which the
peers write their own formats. The bare loops are what anybody would write by hand to read them:
each batch of 64 rows copied into a fixed buffer.

One pass over so little takes tens of milliseconds, much of that its beginning and its end; `many`
has the same shards `TIMES` over, under other names.

Systems that are compared run in one process in which Arrow keeps the memory that it has (`alone`).
It gives back what nobody used for a second, so a system that runs after others would pay for each
page again, and who holds more row groups at a time, as who shuffles does, would pay most. In a run
it is paid once: a row group takes the memory of the one that left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, LENGTH, SHARDS, BATCH = 76_800, 1_024, 8, 64
GROUP_ROWS = 1_024  # 4 MiB
TIMES = 4
MANY_ROWS = TIMES * ROWS
KEPT = {"MIMALLOC_PURGE_DELAY": "-1"}

Tokens = npt.NDArray[np.int32]


def write(folder: Path, rows: int = ROWS) -> None:
    """What is there already stays."""
    done = folder / "tokens.npy"
    if done.exists():
        return
    tokens = np.random.default_rng(0).integers(0, 50_000, (rows, LENGTH), dtype=np.int32)
    for name in ("parquet", "arrow"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(np.split(tokens, SHARDS)):
        write_parquet(folder / f"parquet/part-{number}.parquet", shard, GROUP_ROWS)
        table = as_table(shard)
        with pa.ipc.new_file(folder / f"arrow/part-{number}.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=GROUP_ROWS)
    np.save(folder / "tokens.part.npy", tokens)
    (folder / "tokens.part.npy").rename(done)


def many(folder: Path) -> Path:
    """A folder with links to the shards of both formats, each `TIMES`."""
    for name in ("parquet", "arrow"):
        shards = folder / "many" / name
        shards.mkdir(parents=True, exist_ok=True)
        for path in sorted((folder / name).iterdir()):
            for time_ in range(TIMES):
                link = shards / f"{time_}-{path.name}"
                if not link.is_symlink():
                    link.symlink_to(path.resolve())  # the folder itself may be a link
    return folder / "many"


def alone(module: str, *arguments: object) -> dict[str, Any]:
    """What the module prints as JSON when it runs with these arguments, in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | KEPT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_parquet(path: Path, rows: Tokens, group_rows: int) -> None:
    pq.write_table(
        as_table(rows),
        path,
        row_group_size=group_rows,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )


def as_table(rows: Tokens) -> pa.Table:
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(offsets, rows.reshape(-1))})


def bare_parquet(folder: Path) -> int:
    """How many rows there were."""
    return copy_batches(_parquet_row_groups(folder / "parquet"))


def bare_arrow(folder: Path) -> int:
    return copy_batches(_arrow_row_groups(folder / "arrow"))


def copy_batches(row_groups: Iterable[Tokens]) -> int:
    batch = np.empty((BATCH, LENGTH), dtype=np.int32)
    return sum(copy_rows(rows, batch) for rows in row_groups)


def copy_rows(rows: Tokens, batch: Tokens) -> int:
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        batch[: len(part)] = part
    return len(rows)


def rows_of(column: pa.Array) -> Tokens:
    return column.flatten().to_numpy().reshape(len(column), -1)


def _parquet_row_groups(folder: Path) -> Iterator[Tokens]:
    for path in sorted(folder.iterdir()):
        file = pq.ParquetFile(path)
        for number in range(file.num_row_groups):
            yield rows_of(file.read_row_group(number, use_threads=False).column(0).chunk(0))


def _arrow_row_groups(folder: Path) -> Iterator[Tokens]:
    for path in sorted(folder.iterdir()):
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        for number in range(file.num_record_batches):
            yield rows_of(file.get_batch(number).column(0))
