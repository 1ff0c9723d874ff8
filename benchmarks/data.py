"""How fast, how steadily and in how much memory data arrives, beside bare loops and other systems.

    python -m benchmarks.data [--part local|store|waiting|memory …] [--peers] [--rounds 15] [--folder F]

All read the same rows (token_rows.py), in turn, several times; a ratio is the median of those of single rounds. Ours is
measured as training has it: `read_ahead`, then `batch` for every (step, virtual worker) of an epoch, as tensors.

- local: files in the page cache, beside a bare pyarrow loop over the row groups, and with `--peers` beside litdata,
  mosaicml streaming, Hugging Face datasets and Ray Data (see peers/).
- store: an S3-like server with 20 ms before each answer (slow_store.py), beside hand-written loops (data_store.py).
- waiting, memory: see data_budget.py.

Parts that are not measured keep their last results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import data_budget, data_store, peers, token_rows
from benchmarks.recovery import outside_load
from benchmarks.report import RESULTS, median_interval, write
from elastic_dp.data import open_data
from elastic_dp.data.index import read_index
from elastic_dp.spec import DataConfig

VIRTUAL_WORKERS = 8
TURNS = 3  # of the peers, with rounds of ours in between
TARGETS = {
    "parquet in order": ("bare parquet", 0.95),
    "parquet shuffled": ("bare parquet", 0.9),
    "arrow in order": ("bare arrow", 0.8),
}
PEERS = ("litdata", "mosaicml", "hugging_face", "ray_data")


def local(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    """Rows per second of each, and the ratios to the bare loops."""
    systems: dict[str, Callable[[], float]] = {
        "bare parquet": lambda: timed(lambda: token_rows.bare_parquet(folder)),
        "parquet in order": ours(folder / "parquet", "none"),
        "parquet shuffled": ours(folder / "parquet", "rows"),
        "bare arrow": lambda: timed(lambda: token_rows.bare_arrow(folder)),
        "arrow in order": ours(folder / "arrow", "none"),
        "arrow shuffled": ours(folder / "arrow", "rows"),
    }
    for system in systems.values():
        system()
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    found: dict[str, Any] = {}
    for turn in range(TURNS):
        for _ in range(turn, rounds, TURNS):
            for name, system in systems.items():
                speeds[name].append(system())
        if with_peers:
            measure_peers(folder, found)
    report = {name: median(values) for name, values in speeds.items()}
    ratios = {}
    for name, (bare, target) in TARGETS.items():
        each = [a / b for a, b in zip(speeds[name], speeds[bare], strict=True)]
        middle, low, high = median_interval(each)
        ratios[f"{name} / {bare}"] = {
            "median": round(middle, 3),
            "interval": [round(low, 3), round(high, 3)],
            "target": target,
        }
    peers_found = {n: median(v) if isinstance(v, list) else v for n, v in sorted(found.items())}
    return {"rows_per_s": report, "ratios": ratios, "peers_rows_per_s": peers_found}


def ours(path: Path, shuffle: str) -> Callable[[], float]:
    """One epoch's rows per second. The index is read before: a run does it once, in its driver."""
    config = DataConfig(
        str(path), micro_batch_size=token_rows.BATCH, shuffle=shuffle, epochs=1, seed=1
    )
    index = read_index(config)

    def measure() -> float:
        data = open_data(config, virtual_workers=VIRTUAL_WORKERS, index=index)

        def epoch() -> int:
            count = 0
            data.read_ahead(1, range(VIRTUAL_WORKERS))
            for step in range(1, data.steps_per_epoch + 1):
                for v in range(VIRTUAL_WORKERS):
                    count += len(data.batch(step, v)["tokens"])
            return count

        try:
            return timed(epoch)
        finally:
            data.close()

    return measure


def timed(epoch: Callable[[], int]) -> float:
    begun_at = time.perf_counter()
    count = epoch()
    assert count == token_rows.ROWS, f"{count} rows came"
    return count / (time.perf_counter() - begun_at)


def median(values: list[float]) -> dict[str, Any]:
    middle, low, high = median_interval(values)
    return {"median": round(middle), "interval": [round(low), round(high)], "runs": len(values)}


def measure_peers(folder: Path, found: dict[str, Any]) -> None:
    """Adds one process's epochs of each. The interpreter that has them all: `DATA_PEERS_PYTHON`."""
    python = os.environ.get("DATA_PEERS_PYTHON", sys.executable)
    for name in PEERS:
        answer = peers.run(python, f"data_{name}.py", str(folder), timeout_s=300.0)
        if not isinstance(answer, dict):
            found.setdefault(name, answer)
            continue
        for kind, values in answer.items():
            found.setdefault(f"{name} {kind}", []).extend(values)


def main() -> None:
    parts = ("local", "store", "waiting", "memory")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    default = Path(tempfile.gettempdir()) / "elastic_dp_benchmark_data"
    parser.add_argument("--folder", type=Path, default=default)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    token_rows.write(given.folder)

    def measured() -> Iterator[tuple[str, Any]]:
        if "local" in given.part:
            yield "local", local(given.folder, given.rounds, given.peers)
        if "store" in given.part:
            yield "store", data_store.measure(given.folder, given.rounds)
        if "waiting" in given.part:
            yield "waiting", data_budget.waiting(given.folder)
        if "memory" in given.part:
            yield "memory", data_budget.memory(given.folder)

    path = RESULTS / "data.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    busy = outside_load()
    for name, found in measured():
        results[name] = {"cores_busy_with_other_work": busy, **found}
        print(json.dumps({name: results[name]}, indent=2), flush=True)
        write("data", results)
        busy = outside_load()
    print(path)


if __name__ == "__main__":
    main()
