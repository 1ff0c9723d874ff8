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

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import data_local, data_store, token_rows
from benchmarks.recovery import outside_load
from benchmarks.report import each, parser_of


def main() -> None:
    parts = ("local", "store")
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--peers", action="store_true")
    default = Path(tempfile.gettempdir()) / "elastic_dp_benchmark_data"
    parser.add_argument("--folder", type=Path, default=default)
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.no_write = 1, True
    given.folder.mkdir(parents=True, exist_ok=True)
    token_rows.write(given.folder)

    def measured() -> Iterator[tuple[str, Any]]:
        for part in given.part:
            busy = {"cores_busy_with_other_work": outside_load()}
            if part == "local":
                yield part, busy | data_local.measure(given.folder, given.rounds, given.peers)
            else:
                yield part, busy | data_store.measure(given.folder, given.rounds)

    each("data", measured(), keep=not given.no_write)


if __name__ == "__main__":
    main()
