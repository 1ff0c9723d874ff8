"""Packing while training beside plain rows: the same tokens from local Parquet, as documents of 400
tokens on average that are packed into rows of 1,024, and as rows of 1,024 that were packed before,
alone ("plain") and with the two columns that packing adds ("stored"). Packed rows have these two
columns ("packed"), or have them left out by `pack_columns` ("packed_alone"). In turn, in one
process; in rows per second, and
in microseconds of processor time for a row, which other work on the machine disturbs less."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import token_rows
from benchmarks.report import median_interval
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index

VIRTUAL_WORKERS = 8
MEAN_TOKENS = 400
_COLUMNS = ("position_ids", "document_ids")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    return token_rows.alone("benchmarks.data_packing", folder, rounds)


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    write(folder)
    found: dict[str, Any] = {}
    for shuffle in ("none", "rows"):
        names = ("plain", "stored", "packed", "packed_alone")
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name, each in speeds.items():
                each.append(epoch(folder / "packing", name, shuffle))
        for each in speeds.values():
            del each[0]  # it warmed up
        for number, unit in enumerate(("rows_per_s", "cpu_us_per_row")):
            of_unit = {n: [pair[number] for pair in each] for n, each in speeds.items()}
            report = {n: round(median_interval(each)[0], 1) for n, each in of_unit.items()}
            beside = (("packed", "stored"), ("packed_alone", "plain"), ("packed", "plain"))
            for one, other in beside:
                pairs = zip(of_unit[one], of_unit[other], strict=True)
                ratio = median_interval([a / b if number == 0 else b / a for a, b in pairs])
                report[f"speed of {one} beside {other}"] = round(ratio[0], 3)
            found[f"shuffle={shuffle}, {unit}"] = report
    return found


def epoch(folder: Path, name: str, shuffle: Any) -> tuple[float, float]:
    packing: dict[str, Any] = {}
    if name.startswith("packed"):
        packing = {"pack": token_rows.LENGTH}
        packing["pack_columns"] = () if name == "packed_alone" else _COLUMNS
    config = DataConfig(
        str(folder / ("packed" if packing else name)),
        micro_batch_size=token_rows.BATCH,
        **packing,
        shuffle=shuffle,
        epochs=1,
    )
    data = open_data(config, virtual_workers=VIRTUAL_WORKERS, index=read_index(config))
    wall, cpu, rows = time.perf_counter(), time.process_time(), 0
    data.read_ahead(1, range(VIRTUAL_WORKERS))
    for step in range(1, data.steps_per_epoch + 1):
        for v in range(VIRTUAL_WORKERS):
            rows += len(data.batch(step, v)["input_ids"])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    data.close()
    return rows / wall, 1e6 * cpu / rows


def write(folder: Path) -> None:
    """What is there already stays. Row groups of 4 MiB, as token_rows.py has them."""
    token_rows.write(folder)
    if (folder / "packing").exists():
        return
    tokens = np.load(folder / "tokens.npy")
    drawn = np.random.default_rng(1).exponential(MEAN_TOKENS, 2 * tokens.size // MEAN_TOKENS)
    lengths = np.maximum(1, drawn).astype(np.int64)
    ends = np.minimum(np.cumsum(lengths), tokens.size)
    aside = folder / "packing.part"
    for name in ("plain", "stored", "packed"):
        (aside / name).mkdir(parents=True, exist_ok=True)
    ids = np.zeros_like(tokens[: len(tokens) // token_rows.SHARDS])
    for number, rows in enumerate(np.split(tokens, token_rows.SHARDS)):
        first = number * rows.size
        inside = np.unique(np.clip(ends - first, 0, rows.size))
        bounds = np.unique(np.concatenate([[0], inside, [rows.size]]))
        regular = np.arange(0, rows.size + 1, token_rows.LENGTH)
        plain = {"input_ids": _lists(regular, rows)}
        stored = plain | {name: _lists(regular, ids) for name in _COLUMNS}
        documents = {"input_ids": _lists(bounds, rows)}
        group = token_rows.GROUP_ROWS
        per_group = {"plain": group, "stored": group // 3}
        per_group["packed"] = group * token_rows.LENGTH // MEAN_TOKENS
        for name, columns in (("plain", plain), ("stored", stored), ("packed", documents)):
            pq.write_table(
                pa.table(columns),
                aside / name / f"part-{number}.parquet",
                row_group_size=per_group[name],
                compression="none",
                use_dictionary=False,
            )
    aside.rename(folder / "packing")


def _lists(bounds: Any, rows: Any) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(rows.reshape(-1)))


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]), int(sys.argv[2]))))
