"""Packing while training beside plain rows: the same tokens from local Parquet, as documents of 400
tokens on average that are packed into rows of 1,024, and as rows of 1,024 that were packed before,
alone ("plain") and with the two columns that packing adds ("stored"). Packed rows have these two
columns ("packed"), or have them left out by `pack_columns` ("packed_alone"). In turn, in one
process; in rows per second, and in microseconds of processor time for a row, which other work on
the machine disturbs less.

Peers pack the same documents into rows of 1,024 tokens alone, each from its own format and in its
own way (peers/packing.py), and are compared with "packed_alone".
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import peers, token_rows
from benchmarks.data_local import TURNS, median
from benchmarks.report import median_interval
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index

VIRTUAL_WORKERS = 8
MEAN_TOKENS = 400
_COLUMNS = ("position_ids", "document_ids")
NAMES = ("plain", "stored", "packed", "packed_alone")
PEERS = ("litdata", "mosaicml", "hugging_face", "trl", "webdataset", "ray_data")
KINDS = {"none": "in order", "rows": "shuffled"}


def measure(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    return token_rows.alone("benchmarks.data_packing", folder, rounds, int(with_peers))


def compare(folder: Path, rounds: int, with_peers: bool) -> dict[str, Any]:
    write(folder)
    ours: dict[str, dict[str, list[tuple[float, float]]]]
    ours = {shuffle: {name: [] for name in NAMES} for shuffle in KINDS}
    of_peers: dict[str, Any] = {}
    for turn in range(TURNS):
        for shuffle, speeds in ours.items():
            count = len(range(turn, rounds, TURNS)) + (turn == 0)  # one that warms up
            for _ in range(count):
                for name, each in speeds.items():
                    each.append(epoch(folder / "packing", name, shuffle))
        if with_peers:
            measure_peers(folder / "packing", of_peers)
    found: dict[str, Any] = {}
    for shuffle, speeds in ours.items():
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
    if with_peers:
        found["peers_rows_per_s"] = {
            name: median(v) if isinstance(v, list) else v for name, v in sorted(of_peers.items())
        }
        found["ratios"] = beside_peers(found)
    return found


def beside_peers(found: dict[str, Any]) -> dict[str, float]:
    """The speed of "packed_alone" beside the fastest peer's of the same kind."""
    measured = {n: v for n, v in found["peers_rows_per_s"].items() if isinstance(v, dict)}
    ratios = {}
    for shuffle, kind in KINDS.items():
        of_kind = {name: v["median"] for name, v in measured.items() if name.endswith(f" {kind}")}
        if of_kind:
            best = max(of_kind, key=lambda name: of_kind[name])
            ours = found[f"shuffle={shuffle}, rows_per_s"]["packed_alone"]
            ratios[f"packed_alone {kind} / {best}"] = round(ours / of_kind[best], 3)
    return ratios


def measure_peers(folder: Path, found: dict[str, Any]) -> None:
    """Adds one process's epochs of each. The interpreter that has them all: `DATA_PEERS_PYTHON`."""
    python = os.environ.get("DATA_PEERS_PYTHON", sys.executable)
    for name in PEERS:
        answer = peers.run(python, "packing.py", name, str(folder), timeout_s=600.0)
        if not isinstance(answer, dict):
            found[name] = answer
            continue
        for kind, values in answer.items():
            found.setdefault(f"{name} {kind}", []).extend(values)


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
    print(json.dumps(compare(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")))
