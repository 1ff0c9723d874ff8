"""The command line: seconds of a whole process, for every call that needs no Ray.

    python -m benchmarks.command_line [--runs 5]

A short run on a local Ray, with checkpoints, and a small data set are made first. Then each call is
started by itself, one round of all calls after the other; the median of the rounds counts, against
the target of 1.5 s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from benchmarks.recovery import Points, train

TARGET_S = 1.5
# Each with the exit code that it ends with. "{n}" is another number for each call.
CALLS = {
    "--help": 0,
    "--version": 0,
    "status --help": 0,
    "data inspect data": 0,
    "data convert data converted-{n}": 0,
    "checkpoints list runs/mine": 0,
    "checkpoints verify runs/mine": 0,
    "status mine --storage-path runs": 0,
    "events mine --storage-path runs": 0,
    "logs mine --storage-path runs": 0,
    "list --storage-path runs": 0,
    "status nobody --storage-path runs --json": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        results = measure(Path(folder), runs)
    for call, found in results.items():
        print(f"{found['median_s']:.2f} s  elastic-dp {call}")
    report.write("command_line", results)
    return report.exit_code(targets(results))


def targets(results: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"elastic-dp {call}: {TARGET_S} s": found["median_s"] <= TARGET_S
        for call, found in results.items()
    }


def make(folder: Path) -> None:
    """A data set, and a run that has ended, in a folder."""
    import ray

    import elastic_dp as edp

    (folder / "data").mkdir()
    pq.write_table(pa.table({"id": range(10_000)}), folder / "data" / "a.parquet")
    edp.ElasticTrainer(
        train,
        name="mine",
        storage_path=folder / "runs",
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        config={"folder": None},
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=2),
        checkpoint=edp.CheckpointConfig(every_steps=10),
        max_steps=30,
    ).fit()
    ray.shutdown()


def measure(folder: Path, runs: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {call: [] for call in CALLS}
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    number = itertools.count()
    for _ in range(runs):
        for call, code in CALLS.items():
            words = call.replace("{n}", str(next(number))).split()
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "elastic_dp.cli", *words],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
            )
            taken[call].append(round(time.perf_counter() - began, 3))
            assert done.returncode == code, (call, done.stdout, done.stderr)
    return {call: {"median_s": statistics.median(s), "s": s} for call, s in taken.items()}


if __name__ == "__main__":
    sys.exit(main())
