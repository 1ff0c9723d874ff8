"""Shards in the page cache: ours beside bare pyarrow loops over the row groups, and beside other
systems.

Ours is measured as training has it: `read_ahead`, then `batch` for every (step, virtual worker) of
an epoch, as tensors. The loops read the same shards, and know nothing of virtual workers. Peers
read the rows once, each in its own format.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks import peers, token_rows
from benchmarks.report import ratio, spread
from elastic_dp.config import DataConfig
from elastic_dp.data import MicroBatchStream, open_data
from elastic_dp.data.discovery.index import read_index

VIRTUAL_WORKERS = 8
TURNS = 3  # of the peers, with rounds of ours in between
TARGETS = {
    "parquet in order": ("bare parquet", 0.95),
    "parquet shuffled": ("bare parquet", 0.9),
    "arrow in order": ("bare arrow", 0.95),
}
PEERS = ("litdata", "mosaicml", "hugging_face", "ray_data")


def measure(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    """Rows per second of each, and the ratios to the bare loops."""
    return token_rows.alone("benchmarks.data_local", folder, rounds, int(with_peers))


def compare(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    many = token_rows.many(folder)
    systems: dict[str, Callable[[], float]] = {
        "bare parquet": lambda: timed(lambda: token_rows.bare_parquet(many)),
        "parquet in order": ours(many / "parquet", "none"),
        "parquet shuffled": ours(many / "parquet", "rows"),
        "bare arrow": lambda: timed(lambda: token_rows.bare_arrow(many)),
        "arrow in order": ours(many / "arrow", "none"),
        "arrow shuffled": ours(many / "arrow", "rows"),
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
    ratios = {
        f"{name} / {bare}": ratio(speeds[name], speeds[bare], target)
        for name, (bare, target) in TARGETS.items()
    }
    peers_found = {n: median(v) if isinstance(v, list) else v for n, v in sorted(found.items())}
    return {"rows_per_s": report, "ratios": ratios, "peers_rows_per_s": peers_found}


def ours(path: Path, shuffle: Literal["none", "rows"]) -> Callable[[], float]:
    """One epoch's rows per second, without opening and closing it."""
    opened = opening(str(path), shuffle)

    def measure() -> float:
        with opened() as data:
            return timed(lambda: take_all(data))

    return measure


def opening(
    url: str, shuffle: Literal["none", "rows"], **storage_options: str
) -> Callable[[], contextlib.AbstractContextManager[MicroBatchStream]]:
    """What opens the data of an epoch. The index is read before: a run does it once, in its
    driver."""
    config = DataConfig(
        url,
        micro_batch_size=token_rows.BATCH,
        shuffle=shuffle,
        epochs=1,
        seed=1,
        storage_options=storage_options,
    )
    index = read_index(config)
    return lambda: contextlib.closing(
        open_data(config, virtual_workers=VIRTUAL_WORKERS, index=index)
    )


def take_all(data: MicroBatchStream) -> int:
    """The rows of an epoch, as a worker takes them that runs all virtual workers. How many there
    were."""
    count = 0
    data.read_ahead(1, range(VIRTUAL_WORKERS))
    for step in range(1, data.steps_per_epoch + 1):
        for v in range(VIRTUAL_WORKERS):
            count += len(data.batch(step, v)["tokens"])
    return count


def timed(epoch: Callable[[], int]) -> float:
    begun_at = time.perf_counter()
    count = epoch()
    assert count == token_rows.MANY_ROWS, f"{count} rows came"
    return count / (time.perf_counter() - begun_at)


def median(values: list[float]) -> dict[str, Any]:
    return spread(values, None) | {"runs": len(values)}


def measure_peers(folder: Path, found: dict[str, Any]) -> None:
    """Adds one process's epochs of each. The interpreter that has them all: `DATA_PEERS_PYTHON`."""
    python = os.environ.get("DATA_PEERS_PYTHON", sys.executable)
    for name in PEERS:
        answer = peers.run(python, "data.py", name, str(folder), timeout_s=300.0)
        if not isinstance(answer, dict):
            found.setdefault(name, answer)
            continue
        for kind, values in answer.items():
            found.setdefault(f"{name} {kind}", []).extend(values)


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")))
