"""How fast data arrives, compared with bare loops and other loaders.

    python -m benchmarks.data [--part local|store] [--peers] [--rounds 15] [--folder F]

All read the same rows (token_rows.py), in turn, several times; a ratio is the median of those of
single rounds.

- local: files in the page cache, compared with a bare pyarrow loop over the row groups, and with
  `--peers` with litdata, mosaicml streaming, Hugging Face datasets, WebDataset and Ray Data
  (data_local.py, peers/).
- store: an S3-like server with 20 ms before each answer (slow_store.py), compared with hand-written
  loops (data_store.py).

Parts that are not measured keep their last results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import data_local, data_store, token_rows
from benchmarks.recovery import outside_load
from benchmarks.report import RESULTS, write


def main() -> None:
    parts = ("local", "store")
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
            yield "local", data_local.measure(given.folder, given.rounds, given.peers)
        if "store" in given.part:
            yield "store", data_store.measure(given.folder, given.rounds)

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
