"""Whether a training loop waits for its data, and whether the data keeps within its memory.

waiting: a step of 50 ms with rows that take half of that to read and decode, on one of two workers'
shares. The share of the time spent in `batch`, over the whole run and in the first seconds after
`read_ahead` was called with another share, as when a generation changes: half of its virtual
workers are new to this worker. It is called when a generation begins to form, the first one too,
which takes `FORMING_S` (recovery.json has what it does take). The step is either a sleep, as of a
host that waits for its GPU, or computes on one core.

memory: how far the resident set of a fresh process grows while one worker reads row groups of 1 MB
to 1 GB, beside `DataConfig.memory_bytes`; counted from when another, small data set was read, since
the code for it takes some 40 MB. The loop pauses after its first batch, so that reading ahead fills
what it may.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks import token_rows
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index

STEP_S, BUSY_PART = 0.05, 0.5
VIRTUAL_WORKERS, CHANGES, CHANGE_EVERY_S, FIRST_S = 8, 6, 4.0, 2.0
SHARES = (range(0, 4), range(2, 6))
FORMING_S = 0.02
MIB = 1 << 20
# Row group: memory_bytes, number of row groups, shuffle; in MiB. The data is larger than what may
# be held. A row group just above a power of two takes the most memory in which to decode it.
CASES = {
    1: (256, 512, "rows"),
    5: (256, 104, "rows"),
    17: (1024, 92, "rows"),
    66: (1024, 24, "none"),
    264: (2048, 10, "none"),
    1040: (8192, 6, "none"),
}
PAUSE_S = 3.0


def waiting(folder: Path) -> dict[str, Any]:
    rows = int(_rows_per_s(folder) * STEP_S * BUSY_PART)
    steps: dict[str, Callable[[float], object]] = {"sleep": time.sleep, "compute": _compute}
    found = {name: _wait_of(folder, rows // len(SHARES[0]), step) for name, step in steps.items()}
    return {"step_ms": 1e3 * STEP_S, "rows_per_step": rows, "target_share": 0.01, **found}


def _rows_per_s(folder: Path) -> float:
    """Return the rows per second that are read and decoded when nothing else is done: of the better
    half of several epochs."""
    speeds = []
    for _ in range(8):
        data = open_data(_config(folder, 512), virtual_workers=VIRTUAL_WORKERS)
        begun_at = time.perf_counter()
        data.read_ahead(1, range(VIRTUAL_WORKERS))
        steps = 2 * data.steps_per_epoch
        for step in range(1, steps + 1):
            for v in range(VIRTUAL_WORKERS):
                data.batch(step, v)
        speeds.append(steps * VIRTUAL_WORKERS * 512 / (time.perf_counter() - begun_at))
        data.close()
    return statistics.median(sorted(speeds)[len(speeds) // 2 :])


def _wait_of(folder: Path, micro_batch_size: int, work: Callable[[float], object]) -> dict:
    data = open_data(_config(folder, micro_batch_size), virtual_workers=VIRTUAL_WORKERS)
    step, begun_at, steps_s, after_changes = 1, time.perf_counter(), [], []
    for change in range(1 + CHANGES):
        share = SHARES[change % 2]
        changed_at, waited_s = time.perf_counter(), data.counts["waited_s"]
        data.read_ahead(step, share)
        time.sleep(FORMING_S)
        first_s = None
        while (now := time.perf_counter()) < changed_at + CHANGE_EVERY_S:
            for v in share:
                data.batch(step, v)
                work(STEP_S / len(share))
            step += 1
            steps_s.append(time.perf_counter() - now)
            if first_s is None and time.perf_counter() >= changed_at + FIRST_S:
                first_s = time.perf_counter() - changed_at
                after_changes.append((data.counts["waited_s"] - waited_s) / first_s)
    found = {
        "waited_share": round(data.counts["waited_s"] / (time.perf_counter() - begun_at), 4),
        "seconds": round(time.perf_counter() - begun_at, 1),
        "median_step_ms": round(1e3 * statistics.median(steps_s), 1),
        f"waited_share_in_first_{FIRST_S:.0f}_s": round(after_changes[0], 4),
        f"waited_share_in_{FIRST_S:.0f}_s_after_changes": [round(a, 4) for a in after_changes[1:]],
    }
    data.close()
    return found


def _config(folder: Path, micro_batch_size: int) -> DataConfig:
    return DataConfig(str(folder / "parquet"), micro_batch_size=micro_batch_size, seed=1)


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    x = torch.ones(256, 256)
    while time.perf_counter() < until:
        x @ x


# ------------------------------------------------------------------------------------------------
# memory


def memory(folder: Path) -> dict[str, Any]:
    """Each case in a process of its own; its shards are written before and removed behind it."""
    found = {}
    for size, (budget, count, shuffle) in CASES.items():
        shards = folder / f"row-groups-of-{size}-MiB"
        _write(shards, size, count)
        arguments = [str(shards), str(budget * MIB), shuffle]
        command = [sys.executable, "-m", "benchmarks.data_budget", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        shutil.rmtree(shards)
        said = json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1:]
        found[f"row groups of {size} MiB"] = said
    return {"target_growth_to_budget": 1.1, **found}


def _write(folder: Path, size_mib: int, count: int) -> None:
    (folder / "small").mkdir(parents=True, exist_ok=True)
    (folder / "large").mkdir(exist_ok=True)
    few = np.zeros((token_rows.BATCH, token_rows.LENGTH), dtype=np.int32)
    token_rows.write_parquet(folder / "small/part-0.parquet", few, len(few))
    shape = (size_mib * MIB // (4 * token_rows.LENGTH), token_rows.LENGTH)
    table = token_rows.as_table(np.random.default_rng(0).integers(0, 50_000, shape, dtype=np.int32))
    path = folder / "large/part-0.parquet"
    with pq.ParquetWriter(
        path, table.schema, compression="none", use_dictionary=False, write_statistics=False
    ) as file:
        for _ in range(count):
            file.write_table(table, row_group_size=len(table))


class ResidentPeak:
    """The peak of this process, sampled each 2 ms."""

    def __init__(self) -> None:
        self.before = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def growth(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        with open("/proc/self/status", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("VmRSS"))
        return int(line.split()[1]) << 10


def read_within(url: str, budget: int, shuffle: str) -> dict[str, Any]:
    config = DataConfig(
        f"{url}/large",
        micro_batch_size=token_rows.BATCH,
        shuffle=shuffle,
        memory_bytes=budget,
        epochs=1,
    )
    small = open_data(replace(config, url=f"{url}/small"), virtual_workers=1)
    small.batch(1, 0)
    small.close()
    data = open_data(config, index=read_index(config), virtual_workers=1)
    resident = ResidentPeak()
    data.read_ahead(1, range(1))
    for step in range(1, data.steps_per_epoch + 1):
        data.batch(step, 0)
        if step == 1:
            time.sleep(PAUSE_S)
    growth = resident.growth()
    data.close()
    return {
        "memory_mib": budget // MIB,
        "growth_mib": round(growth / MIB, 1),
        "growth_to_budget": round(growth / budget, 3),
        "shuffle": shuffle,
    }


if __name__ == "__main__":
    print(json.dumps(read_within(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
