"""Each kind of source under a kill: every row exactly once an epoch, with the values that were
written, and the bits of the undisturbed run."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import shutil
import tarfile
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elastic_dp.config import DataConfig, ScalingConfig
from elastic_dp.train.fault_injection import WorkerFault
from tests.data.test_litdata import WRITTEN as WRITTEN_BY_LITDATA
from tests.data.test_mds import WRITTEN as WRITTEN_BY_STREAMING
from tests.runs import group, local
from tests.train.test_exactly_once import given, job, train

SHARDS, ROWS, EPOCHS, V, B = 4, 24, 2, 8, 3  # 24 rows in a step


def ids_of(shard: int) -> list[int]:
    return list(range(shard * ROWS, (shard + 1) * ROWS))


def word(i: int) -> str:
    return "" if i % 5 == 0 else f"é{i}; ü"


def color(i: int) -> tuple[int, int, int]:
    return i, 255 - i, i % 7


def hive(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    for shard in range(SHARDS):
        (place := folder / f"number={shard}" / f"word={shard}%20é").mkdir(parents=True)
        made = pa.table({"id": ids_of(shard)})
        pq.write_table(made, place / "a.parquet", row_group_size=5)

    def check(batch: dict[str, Any]) -> None:
        assert batch["number"].tolist() == [i // ROWS for i in batch["id"].tolist()]
        assert [*batch["word"]] == [f"{i // ROWS} é" for i in batch["id"].tolist()]

    return {"url": f"{folder}/**"}, check


def row_filter(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    for shard in range(2 * SHARDS):  # of which those with even numbers are kept
        made = pa.table({"row": ids_of(shard), "id": [i // 2 for i in ids_of(shard)]})
        pq.write_table(made, folder / f"{shard}.parquet", row_group_size=5)

    def check(batch: dict[str, Any]) -> None:
        assert batch["row"].tolist() == [2 * i for i in batch["id"].tolist()]

    even = pc.bit_wise_and(pc.field("row"), pc.scalar(1)) == 0
    return {"url": str(folder), "filter": even}, check


def images(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    for shard in range(SHARDS):
        files = []
        for i in ids_of(shard):
            Image.new("RGB", (4, 3), color(i)).save(out := io.BytesIO(), "PNG")
            files.append(out.getvalue())
        made = pa.table({"id": ids_of(shard), "image": pa.array(files, pa.binary())})
        pq.write_table(made, folder / f"{shard}.parquet", row_group_size=5)

    def check(batch: dict[str, Any]) -> None:
        assert batch["image"].shape == (len(batch["id"]), 3, 4, 3)
        colors = np.array([color(i) for i in batch["id"].tolist()])
        assert (batch["image"] == colors[:, None, None]).all()

    return {"url": str(folder), "decode": {"image": "rgb"}}, check


def audio(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Clips of one value, which is the id; those of odd ids are longer."""
    for shard in range(SHARDS):
        files = []
        for i in ids_of(shard):
            with wave.open(out := io.BytesIO(), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                file.writeframes(np.full(100 + i % 2, i, "<i2").tobytes())
            files.append(out.getvalue())
        made = pa.table({"id": ids_of(shard), "clip": pa.array(files, pa.binary())})
        pq.write_table(made, folder / f"{shard}.parquet", row_group_size=5)

    def check(batch: dict[str, Any]) -> None:
        assert batch["clip_rate"].tolist() == [16000] * len(batch["id"])
        for i, clip in zip(batch["id"].tolist(), batch["clip"], strict=True):
            assert clip.shape == (100 + i % 2,) and (clip == i / (1 << 15)).all()

    return {"url": str(folder), "decode": {"clip": "audio"}}, check


def csv_options(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    for shard in range(SHARDS):
        with open(folder / f"{shard}.csv", "w", encoding="latin-1", newline="") as file:
            rows = csv.writer(file, delimiter=";")
            rows.writerow(["id", "word", "number"])
            rows.writerows([i, word(i) or "n/a", i if i % 3 else "n/a"] for i in ids_of(shard))

    def check(batch: dict[str, Any]) -> None:
        assert [*batch["word"]] == [word(i) or None for i in batch["id"].tolist()]
        assert batch["number"].tolist() == [i if i % 3 else -1 for i in batch["id"].tolist()]

    options = {"delimiter": ";", "encoding": "latin-1", "null_values": ["n/a"]}
    return {"url": str(folder), "csv_options": options, "fill_nulls": {"number": -1}}, check


def tar_gz(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar.gz", "w:gz") as archive:
            for i in ids_of(shard):
                for ending, content in (("id.cls", str(i)), ("txt", word(i))):
                    member = tarfile.TarInfo(f"{i:04}.{ending}")
                    member.size = len(content.encode())
                    archive.addfile(member, io.BytesIO(content.encode()))

    def check(batch: dict[str, Any]) -> None:
        batch["id"] = np.array([int(content) for content in batch.pop("id.cls")])
        assert [*batch["txt"]] == [word(i) for i in batch["id"].tolist()]

    return {"url": str(folder)}, check


def json_array(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    for shard in range(SHARDS):
        rows = [{"id": i, "word": word(i), "pair": [i, -i]} for i in ids_of(shard)]
        (folder / f"{shard}.json").write_text(json.dumps(rows, indent=1))

    def check(batch: dict[str, Any]) -> None:
        assert [*batch["word"]] == [word(i) for i in batch["id"].tolist()]
        assert batch["pair"].tolist() == [[i, -i] for i in batch["id"].tolist()]

    return {"url": f"{folder}/*.json"}, check


def mds(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    """96 rows in four shards, as MosaicML Streaming wrote them, compressed."""
    shutil.copytree(WRITTEN_BY_STREAMING / "zstd", folder, dirs_exist_ok=True)

    def check(batch: dict[str, Any]) -> None:
        assert [*batch["text"]] == ["x" * (i % 7) for i in batch["id"].tolist()]

    return {"url": str(folder), "columns": ["id", "text"]}, check


def litdata(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    """The same rows in four chunks, as litdata wrote them, compressed."""
    shutil.copytree(WRITTEN_BY_LITDATA / "batch", folder, dirs_exist_ok=True)

    def check(batch: dict[str, Any]) -> None:
        assert [*batch["text"]] == ["x" * (i % 7) for i in batch["id"].tolist()]

    return {"url": str(folder), "columns": ["id", "text"]}, check


@pytest.mark.parametrize(
    "kind",
    [
        csv_options,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (hive, row_filter, images, audio, tar_gz, json_array, mds, litdata)
        ),
    ],
)
def test_rows_of_a_source_are_trained_on_exactly_once_under_a_kill(kind, tmp_path):
    (folder := tmp_path / "data").mkdir()
    options, check = kind(folder)

    def only_ids(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
        check(batch)
        return {"id": batch["id"]}

    data = DataConfig(micro_batch_size=B, epochs=EPOCHS, transform=only_ids, **options)
    calm = local(job(data, tmp_path / "calm", 0.0), train)
    batches, _ = given(tmp_path / "calm")
    all_ids = range(SHARDS * ROWS)
    assert Counter(itertools.chain(*batches.values())) == dict.fromkeys(all_ids, EPOCHS)

    scaling = ScalingConfig(max_workers=3, min_workers=3, virtual_workers=V, threads_per_worker=1)
    killed = dataclasses.replace(job(data, tmp_path / "killed", 0.0), scaling=scaling)
    fault = WorkerFault("before_forward", step=3, rank=1, once=str(tmp_path / "dead"))
    outcome, _ = group(killed, train, faults=(fault,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == calm.digest
    assert given(tmp_path / "killed")[0] == batches
