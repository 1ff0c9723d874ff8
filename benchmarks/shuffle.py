"""What each shuffle gives up in randomness, and how much memory it takes.

    python -m benchmarks.shuffle

The worst data there is: rows sorted by label. Of some global batches in an epoch, the
total-variation distance between the batch's labels and the data set's, on average, divided by that
of a full shuffle: 1.0 is as good as random, and reading in order gives about 3.7 here. "Held" is
what one worker that ran the whole job would hold of row groups; W workers hold a W-th each, where
there are as many streams. Arithmetic only, nothing is read. Prints a table and writes
benchmarks/results/shuffle.json.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import report
from elastic_dp.sampling import Order

ROWS, LABELS, ROW_BYTES = 1 << 22, 256, 4096
GLOBAL_BATCH = 512
BATCHES = 150
MIB = 1 << 20


def distance(order: Order, rows_per_group: int) -> float:
    """Mean over global batches that are spread evenly over the epoch."""
    found = []
    for step in np.linspace(1, order.steps_per_epoch, BATCHES, dtype=int).tolist():
        located = [order.locate(step, v) for v in range(order.virtual_workers)]
        row = np.concatenate([groups * rows_per_group + rows for groups, rows in located])
        share = np.bincount(row * LABELS // ROWS, minlength=LABELS) / GLOBAL_BATCH
        found.append(np.abs(share - 1 / LABELS).sum() / 2)
    return float(np.mean(found))


def measure(shuffle: Any, row_group_mib: int, virtual_workers: int) -> dict[str, Any]:
    rows_per_group = row_group_mib * MIB // ROW_BYTES
    groups = ROWS // rows_per_group
    order = Order(
        group_rows=np.full(groups, rows_per_group),
        group_bytes=np.full(groups, row_group_mib * MIB),
        virtual_workers=virtual_workers,
        micro_batch_size=GLOBAL_BATCH // virtual_workers,
        shuffle=shuffle,
    )
    held = order.open_row_groups(virtual_workers)
    return {
        "shuffle": shuffle,
        "virtual_workers": virtual_workers,
        "row_group_mib": row_group_mib,
        "row_groups_open": held,
        "held_mib": held * row_group_mib,
        "distance": round(distance(order, rows_per_group), 4),
    }


def main() -> None:
    cases = [("none", 4, 8), ("full", 4, 8)]
    cases += [("rows", size, v) for size in (1, 4, 16, 64, 256, 1024) for v in (8, 64)]
    results = [measure(*case) for case in cases]
    full = next(row["distance"] for row in results if row["shuffle"] == "full")
    print("shuffle  row group MiB     V  row groups open  held MiB  distance / full")
    for row in results:
        row["ratio"] = round(row["distance"] / full, 2)
        print(
            f"{row['shuffle']:7s} {row['row_group_mib']:14d} {row['virtual_workers']:5d}"
            f" {row['row_groups_open']:16d} {row['held_mib']:9d} {row['ratio']:16.2f}"
        )
    facts = {"rows": ROWS, "labels": LABELS, "row_bytes": ROW_BYTES, "global_batch": GLOBAL_BATCH}
    print(report.write("shuffle", facts | {"batches": BATCHES, "orders": results}))


if __name__ == "__main__":
    main()
