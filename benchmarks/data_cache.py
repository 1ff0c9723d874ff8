"""The cache on the disk beside local shards.

    python -m benchmarks.data_cache [--rounds 9] [--folder F] [--quick]

`token_rows` from an S3-like server with 20 ms before each answer, in the second epoch of a run that
keeps what it read, and the same shards from the disk. In turn, in one process; in rows per second,
from the first read of the epoch to its last: a run opens the store once, before. In order and
shuffled, Parquet and Arrow. Ends with 1, and says so, if a target was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import token_rows
from benchmarks.data_local import VIRTUAL_WORKERS, take_all
from benchmarks.recovery import outside_load
from benchmarks.report import add_quick, exit_code, median_interval, write
from benchmarks.slow_store import BUCKET, serving
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index

LATENCY_S, TARGET = 0.02, 0.9
QUICK_ROWS = 8 * token_rows.GROUP_ROWS  # one row group in each shard


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_cache")
    parser.add_argument("--rounds", type=int, default=9)
    default = Path(tempfile.gettempdir()) / "elastic_dp_benchmark_data"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    add_quick(parser)
    given = parser.parse_args(arguments)
    if given.alone:
        print(json.dumps(compare(given.folder, given.rounds)))
        return 0
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), rounds=1, rows=QUICK_ROWS)
        return 0
    busy = outside_load()
    found = measure(given.folder, given.rounds)
    print(write("data_cache", {"cores_busy_with_other_work": busy, **found}))
    return exit_code(targets(found))


def measure(folder: Path, rounds: int, rows: int = token_rows.ROWS) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    token_rows.write(folder, rows)
    options = ("--alone", "--rounds", rounds, "--folder", folder)
    found = token_rows.alone("benchmarks.data_cache", *options)
    print(json.dumps(found, indent=2))
    return found


def targets(found: dict[str, Any]) -> dict[str, bool]:
    return {
        f"{name}: {TARGET} of local shards": case["ratio"] >= TARGET
        for name, case in found.items()
        if isinstance(case, dict)
    }


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    many = token_rows.many(folder)
    found: dict[str, Any] = {"target": TARGET}
    with serving(many, latency_s=LATENCY_S, bytes_per_s=None) as url:
        for name in ("parquet", "arrow"):
            for shuffle in ("none", "rows"):
                cache = Path(tempfile.mkdtemp(dir=folder))  # the same disk as that of the shards
                try:
                    case = f"{name}, shuffle={shuffle}"
                    found[case] = beside_local(many / name, url, cache, shuffle, rounds)
                finally:
                    shutil.rmtree(cache)
    return found


def beside_local(shards: Path, url: str, cache: Path, shuffle: Any, rounds: int) -> dict[str, Any]:
    local = DataConfig(
        str(shards), micro_batch_size=token_rows.BATCH, shuffle=shuffle, epochs=1, seed=1
    )
    cached = dataclasses.replace(
        local,
        url=f"s3://{BUCKET}/{shards.name}",
        cache_dir=str(cache),
        cache_bytes=4 << 30,
        storage_options={"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": url}},
    )
    speeds: dict[str, list[float]] = {"local": [], "cached": []}
    indices = {"local": read_index(local), "cached": read_index(cached)}
    for round_ in range(rounds + 1):
        for name, config in (("local", local), ("cached", cached)):
            data = open_data(config, virtual_workers=VIRTUAL_WORKERS, index=indices[name])
            try:
                began = time.perf_counter()
                count = take_all(data)
                seconds = time.perf_counter() - began
                from_store = data.counts["bytes_read"]
            finally:
                data.close()
            speeds[name].append(count / seconds)
            if name == "cached" and round_:
                assert from_store == 0, f"{from_store:,} bytes were read from the store again"
    first = speeds["cached"][0]
    for each in speeds.values():
        del each[0]  # the first epoch, which fills the cache
    pairs = zip(speeds["cached"], speeds["local"], strict=True)
    middle, low, high = median_interval([a / b for a, b in pairs])
    return {
        **{f"{name}, rows_per_s": round(median_interval(each)[0]) for name, each in speeds.items()},
        "first epoch, rows_per_s": round(first),
        "ratio": round(middle, 3),
        "interval": [round(low, 3), round(high, 3)],
    }


if __name__ == "__main__":
    sys.exit(main())
