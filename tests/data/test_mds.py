"""MDS shards: the rows that MosaicML Streaming wrote, and what is refused. The files in
written_by_streaming/ are from MDSWriter itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from PIL import Image

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation, read_index
from elastic_dp.data.formats import mds
from elastic_dp.errors import BadShard, DataError
from tests.data.shards import rows_of
from tests.data.values import in_place

WRITTEN = Path(__file__).parent / "written_by_streaming"
ROWS = 96


def row(i: int) -> dict[str, Any]:
    return {"id": i, "text": "x" * (i % 7), "tokens": list(range(i % 5 + 1))}


def config(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(str(folder), **{"micro_batch_size": 2} | changes)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "plain", tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("name", "rows"), [("plain", ROWS), ("zstd", ROWS), ("gz", 12), ("bz2", 12), ("br", 12)]
)
def test_shards_have_the_rows_that_were_written(name, rows):
    assert rows_of(WRITTEN / name)[0] == [row(i) for i in range(rows)]


def test_a_shard_is_cut_into_row_groups_with_the_same_rows(monkeypatch):
    monkeypatch.setattr(mds, "GROUP_BYTES", 200)
    monkeypatch.setattr(mds, "_HEAD_BYTES", 16)
    rows, counts = rows_of(WRITTEN / "plain")
    assert rows == [row(i) for i in range(ROWS)]
    assert len(counts) > 12 and max(counts) < 12


def test_every_row_is_dealt_once_to_one_worker_and_to_three_in_one_order(copied):
    wanted = config(copied, epochs=1, columns=["id", "text"])

    def dealt(workers: int) -> list[int]:
        data = [open_data(wanted, virtual_workers=4) for _ in range(workers)]
        for number, one in enumerate(data):
            one.read_ahead(1, range(number, 4, workers))
        found = []
        for step in range(1, data[0].steps_per_epoch + 1):
            for v in range(4):
                found += data[v % workers].batch(step, v)["id"].tolist()
        for one in data:
            one.close()
        return found

    alone = dealt(1)
    assert alone == dealt(3) and sorted(alone) == list(range(ROWS)) != alone


def test_values_of_each_encoding_are_those_that_were_written():
    found = in_place(config(WRITTEN / "kinds"))
    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        gray = np.array(Image.fromarray(pixels).convert("L"))
        wanted = {
            "id": i,
            "text": "é" * i,
            "raw": bytes([i]) * i,
            "u8": 255 - i,
            "u64": 2**64 - 1 - i,
            "i16": -i,
            "f16": i / 8,
            "f32": float(np.float32(i / 3)),
            "f64": i / 7,
            "digits": 10**i,
            "decimal": i / 10,
            "json": json.dumps({"a": [i, None], "b": "é"}),
            "tokens": list(range(i + 1)),
            "grid": (np.arange(6).reshape(2, 3) + i).tolist(),
            "ragged": list(range(3 * i + 1)),
            "square": [[i, i], [i, i]],
            "pixels": b"P6 4 3 255\n" + pixels.tobytes(),
            "gray": b"P5 4 3 255\n" + gray.tobytes(),
        }
        assert {name: found[name][i] for name in wanted} == wanted
    assert all(content.startswith(b"\x89PNG") for content in found["png"])
    assert all(content.startswith(b"\xff\xd8") for content in found["jpeg"])


def test_tensors_have_the_types_and_shapes_of_the_encodings_and_images_are_decoded():
    decode = dict.fromkeys(("pixels", "gray", "png", "jpeg"), "rgb")
    types = {"u8": "uint8", "i16": "int16", "f16": "float16", "f32": "float32", "grid": "int16"}
    columns = [*types, "square", *decode]
    wanted = config(WRITTEN / "kinds", micro_batch_size=6, decode=decode, columns=columns)
    data = open_evaluation(wanted)
    batch = data.batch(0)
    data.close()
    assert {name: str(batch[name].dtype) for name in types} == {
        name: f"torch.{kind}" for name, kind in types.items()
    }
    assert batch["grid"].shape == (6, 2, 3) and batch["square"].shape == (6, 2, 2)
    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        gray = np.array(Image.fromarray(pixels).convert("L").convert("RGB"))
        assert np.array_equal(batch["pixels"][i], pixels)
        assert np.array_equal(batch["png"][i], pixels)
        assert np.array_equal(batch["gray"][i], gray)
        assert batch["jpeg"][i].shape == (3, 4, 3)


@pytest.mark.parametrize("column", ["x", "y"])
def test_an_encoding_that_is_not_read_is_refused_by_name_unless_it_is_left_out(column):
    encoding = {"x": "pkl", "y": "str_decimal"}[column]
    with pytest.raises(DataError, match=f"column '{column}' has the MDS encoding '{encoding}'"):
        read_index(config(WRITTEN / "pickled", columns=["id", column]))
    only = config(WRITTEN / "pickled", columns=["id"])
    assert in_place(only) == {"id": [0, 1, 2]}


def edit(folder: Path, change: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def rename_first(index: dict[str, Any]) -> None:
    index["shards"][0]["raw_data"]["basename"] = "shard.00009.mds"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "shard.00002.mds").unlink(), "names shard.00002.mds, which is not there"),
        (lambda f: (f / "index.json").unlink(), "without index.json"),
        (lambda f: (f / "index.json").write_text("{"), "is not an index of MDS shards"),
        (lambda f: edit(f, lambda i: i["shards"].pop()), "does not name .*shard.00003.mds"),
        (lambda f: edit(f, rename_first), "names shard.00009.mds, which is not there"),
        (lambda f: edit(f, lambda i: i.update(version=3)), "version 3"),
        (
            lambda f: (f / "shard.00001.mds").write_bytes(
                (f / "shard.00001.mds").read_bytes()[:-5]
            ),
            "shard.00001.mds has 1,376 bytes, and .*index.json says 1,381",
        ),
        (
            lambda f: shutil.copy(WRITTEN / "zstd" / "shard.00000.mds.zstd", f),
            "does not name .*shard.00000.mds.zstd",
        ),
    ],
)
def test_a_folder_that_is_not_what_its_index_says_is_refused_by_name(copied, damage, said):
    damage(copied)
    with pytest.raises(DataError, match=f"DataConfig.url: .*{said}"):
        read_index(config(copied))


def test_a_shard_and_its_compressed_copy_are_refused_and_a_glob_names_one_of_them(tmp_path):
    shutil.copytree(WRITTEN / "zstd", folder := tmp_path / "data")
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        raw = shard["raw_data"]["basename"]
        shutil.copy(WRITTEN / "plain" / raw, folder)
        edit(
            folder,
            lambda i, raw=raw: [
                s["raw_data"].update(bytes=(folder / raw).stat().st_size)
                for s in i["shards"]
                if s["raw_data"]["basename"] == raw
            ],
        )
    with pytest.raises(DataError, match="are the same rows"):
        read_index(config(folder))
    for glob in ("*.mds", "*.mds.zstd"):
        assert read_index(config(folder / glob)).num_rows == ROWS


def test_shards_in_folders_below_a_merged_index_are_read_by_a_glob(tmp_path):
    shards = []
    for part in ("0", "1"):
        shutil.copytree(WRITTEN / "plain", tmp_path / "data" / part)
        for shard in json.loads((WRITTEN / "plain" / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{part}/{shard['raw_data']['basename']}"
            shards.append(shard)
    merged = tmp_path / "data" / "index.json"
    merged.write_text(json.dumps({"version": 2, "shards": shards}))
    assert read_index(config(tmp_path / "data" / "**")).num_rows == 2 * ROWS
    with pytest.raises(DataError, match="the shards lie in its subfolders"):
        read_index(config(tmp_path / "data"))
    (tmp_path / "data" / "1" / "shard.00000.mds").unlink()
    with pytest.raises(DataError, match=r"names .*shard.00000.mds, which is not there"):
        read_index(config(tmp_path / "data" / "**"))


def changed(path: Path, at: int, content: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + content + old[at + len(content) :])


@pytest.mark.parametrize(
    ("at", "content", "said"),
    [
        (0, b"\xff\xff\xff\x7f", "cut off"),
        (0, b"\x01\x00\x00\x00", "cannot read the header of shard.00000.mds"),
        (8, b"\xff\xff\xff\x7f", "do not increase"),
        (4 * 33, b"\x00\x00\x00\x00", "its header says 0"),
        (4 * 34 + 2, b"?", "cannot read the header of shard.00000.mds"),
    ],
)
def test_a_damaged_header_is_refused_when_the_data_set_is_opened(copied, at, content, said):
    changed(copied / "shard.00000.mds", at, content)
    with pytest.raises(DataError, match=said):
        read_index(config(copied))


@pytest.mark.parametrize(
    ("column", "content", "said"),
    [
        (0, b"\xff\x00\x00\x00", "do not add up to its length"),
        (None, b"\xff", "column 'text' .*UTF8"),
    ],
)
def test_damaged_samples_are_a_bad_shard_with_their_name(copied, column, content, said):
    file = copied / "shard.00001.mds"
    raw = file.read_bytes()
    first = int.from_bytes(raw[8:12], "little")  # the second sample: the first one is looked at
    at = raw.index(b"x", first) if column is None else first
    changed(file, at, content)
    with pytest.raises(BadShard, match=f"shard.00001.mds.*{said}"):
        in_place(config(copied))


def test_a_compressed_shard_that_was_cut_off_is_refused_by_name(tmp_path):
    shutil.copytree(WRITTEN / "zstd", folder := tmp_path / "data")
    file = folder / "shard.00002.mds.zstd"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"shard\.00002\.mds\.zstd"):
        read_index(config(folder / "*.mds.zstd"))


def test_arrays_of_other_shapes_than_the_first_sample_are_refused_by_column(tmp_path):
    shutil.copytree(WRITTEN / "kinds", folder := tmp_path / "data")
    file = folder / "shard.00000.mds"
    raw = file.read_bytes()
    shape = bytes([2 << 2, 2, 2])  # two dimensions of one byte
    second = raw.index(shape, raw.index(shape) + 1)
    changed(file, second, bytes([2 << 2, 1, 4]))
    with pytest.raises(BadShard, match=r"column 'square' .*list<list<float>\[2\]>\[2\]"):
        in_place(config(folder))
    changed(file, second, bytes([2 << 2, 2, 2]))
    in_place(config(folder))


def test_a_filter_keeps_rows_of_mds_shards(copied):
    few = dataclasses.replace(config(copied), filter=pc.field("id") >= 90)
    assert in_place(few)["id"] == list(range(90, 96))
