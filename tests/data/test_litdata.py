"""Optimized data sets of litdata: the rows that its own reader gives, and what is refused. The
files in written_by_litdata/ are from BinaryWriter itself, and read.json from StreamingDataset."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation, read_index
from elastic_dp.data.discovery import index as index_module
from elastic_dp.data.formats import litdata, litdata_chunk
from elastic_dp.errors import BadShard, DataError, ElasticError
from tests.data.values import in_place

WRITTEN = Path(__file__).parent / "written_by_litdata"
READ = json.loads((WRITTEN / "read.json").read_text())
ROWS = 96


def row(i: int) -> dict[str, Any]:
    return {"id": i, "text": "x" * (i % 7), "tokens": list(range(i % 5 + 1))}


def config(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(str(folder), **{"micro_batch_size": 2} | changes)


def rows_of(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    found = in_place(config(folder, **changes))
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def columns_of(sample: Any, prefix: str = "") -> dict[str, Any]:
    """The columns that the sample should become. Lists of arrays, texts and numbers are values."""
    if isinstance(sample, dict):
        found = {}
        for name, value in sample.items():
            is_leaf = not isinstance(value, dict)
            found |= {prefix + name: value} if is_leaf else columns_of(value, f"{prefix}{name}.")
        return found
    return {"value": sample}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "plain", tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize(
    "name",
    ["plain", "batch", "sample", "chunk", "nested", "nested_zstd", "flat", "one", "listed"],
)
def test_rows_are_those_that_the_reader_of_litdata_gives(name):
    assert rows_of(WRITTEN / name) == [columns_of(sample) for sample in READ[name]]


@pytest.mark.parametrize("name", ["tuples", "lists", "tree"])
def test_the_places_of_lists_and_tuples_are_the_names_of_columns(name):
    wanted = [columns_of(dict(zip("01", sample, strict=True))) for sample in READ[name]]
    assert rows_of(WRITTEN / name) == wanted


@pytest.mark.parametrize("name", ["old", "old_chunk"])
def test_chunks_of_an_older_version_have_the_rows_that_were_written(name):
    assert rows_of(WRITTEN / name) == [row(i) for i in range(ROWS)]


@pytest.mark.parametrize("name", ["tokens", "old_tokens"])
def test_documents_of_tokens_are_rows_and_packed_into_blocks(name):
    documents = [[i + t for t in range(i % 5 + 1)] for i in range(ROWS)]
    assert in_place(config(WRITTEN / name)) == {"input_ids": documents}
    flat = [token for document in documents for token in document]
    assert flat == [token for block in READ["tokens"] for token in block]
    wanted = config(WRITTEN / name, pack=16, shuffle="none", epochs=1)
    data = open_data(wanted, virtual_workers=1)
    blocks = [data.batch(step, 0)["input_ids"].tolist() for step in range(1, 9)]
    data.close()
    assert [token for block in blocks for one in block for token in one] == flat[: 8 * 2 * 16]


@pytest.mark.parametrize("name", ["plain", "batch", "sample", "nested", "tokens"])
def test_a_chunk_is_cut_into_row_groups_with_the_same_rows(monkeypatch, name):
    whole = rows_of(WRITTEN / name)
    monkeypatch.setattr(litdata, "GROUP_BYTES", 200)
    monkeypatch.setattr(litdata_chunk, "_HEAD_BYTES", 32)
    index = read_index(config(WRITTEN / name))
    assert len(index.rows) > index.num_shards
    assert rows_of(WRITTEN / name) == whole


@pytest.mark.parametrize("name", ["plain", "nested", "chunk"])
def test_a_worker_reads_the_index_again_if_it_was_not_kept(monkeypatch, name, tmp_path):
    monkeypatch.setattr(index_module, "FOOTER_BYTES_KEPT", 0)
    shutil.copytree(WRITTEN / name, folder := tmp_path / "data")
    assert rows_of(folder) == rows_of(WRITTEN / name)


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


def test_values_of_each_serializer_are_those_that_were_written():
    found = in_place(config(WRITTEN / "kinds"))
    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        gray = np.array(Image.fromarray(pixels).convert("L"))
        wanted = {
            "id": i,
            "text": "é" * i,
            "raw": bytes([i]) * i,
            "half": i / 2,
            "even": i % 2 == 0,
            "tokens": list(range(i + 1)),
            "flags": [i % 2 == 0, True],
            "f16": [i / 8, i / 8],
            "u64": [2**64 - 1 - i],
            "ragged": list(range(3 * i)),
            "square": np.full((2, 2), i / 3, np.float32).tolist(),
            "grid": (np.arange(6).reshape(2, 3) + i).tolist(),
            "scalar": i,
            "pixels": b"P6 4 3 255\n" + pixels.tobytes(),
            "gray": b"P5 4 3 255\n" + gray.tobytes(),
        }
        assert {name: found[name][i] for name in wanted} == wanted
    assert all(content.startswith(b"\x89PNG") for content in found["png"])
    assert all(content.startswith(b"\xff\xd8") for content in found["jpeg"])


def test_tensors_have_the_types_and_shapes_of_the_serializers_and_images_are_decoded():
    types = {"even": "bool", "square": "float32", "grid": "int16", "scalar": "int64"}
    columns = [*types, "pixels"]
    wanted = config(
        WRITTEN / "kinds", micro_batch_size=6, columns=columns, decode={"pixels": "rgb"}
    )
    data = open_evaluation(wanted)
    batch = data.batch(0)
    data.close()
    found = {name: str(batch[name].dtype) for name in types}
    assert found == {name: f"torch.{kind}" for name, kind in types.items()}
    assert batch["grid"].shape == (6, 2, 3) and batch["pixels"].shape == (6, 3, 4, 3)


def test_lists_and_objects_beside_media_have_the_types_that_litdata_noted():
    found = in_place(config(WRITTEN / "images"))
    for i in range(6):
        assert found["labels"][i] == [i] * (i % 3)
        assert found["boxes"][i] == [{"x": i, "name": "é" * i}] * (i % 2)
        assert json.loads(found["mixed"][i]) == [i, "é", None, {"a": [1.5, True]}]
        assert (found["of.names"][i], found["of.n"][i]) == (["é"] * i, i)
        assert found["sound"][i] == b"RIFF" + bytes([i])
        assert len(found["pictures"][i]) == i % 3 + 1
        assert all(one.startswith(b"\xff\xd8") for one in found["pictures"][i])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pickled", "column 'x' is by litdata's serializer 'pickle'"),
        ("complex", "column 'y' is by litdata's serializer 'no_header_tensor:5'"),
        ("encrypted_chunk", "the chunks are encrypted"),
        ("encrypted_sample", "the chunks are encrypted"),
    ],
)
def test_leaf_that_is_not_read_is_refused_by_name(name, said):
    with pytest.raises(DataError, match=said):
        read_index(config(WRITTEN / name))


def test_a_column_that_is_not_read_may_be_left_out():
    assert in_place(config(WRITTEN / "pickled", columns=["id"])) == {"id": [0, 1, 2]}


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def of_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda index: index["config"].update(changes))


def of_chunk(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda index: index["chunks"][1].update(changes))


def cut(folder: Path) -> None:
    file = folder / "chunk-0-1.bin"
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "chunk-0-2.bin").unlink(), "names chunk-0-2.bin, which is not there"),
        (lambda f: (f / "index.json").unlink(), "chunks of litdata without index.json"),
        (lambda f: (f / "index.json").write_text("{"), "is not an index of litdata's chunks"),
        (lambda f: edit(f, lambda i: i["chunks"].pop()), "does not name .*chunk-0-3.bin"),
        (lambda f: shutil.copy(f / "chunk-0-0.bin", f / "chunk-9-9.bin"), "does not name .*9-9"),
        (cut, "chunk-0-1.bin has .* bytes, and .*index.json says .*cut off"),
        (of_chunk(chunk_size=23), "it has 24 items, and index.json says 23|bytes"),
        (of_config(item_loader="TemporalArrayLoader"), "item loader 'TemporalArrayLoader'"),
        (of_config(compression="lz4"), "compressed by 'lz4'"),
        (of_config(compression="zstd", compression_level="batch"), "frames of zstd, and it has no"),
        (of_config(data_format=["int"]), "different numbers of leaves"),
        (of_config(data_spec='[2, {"type": null}]'), "data_spec has version 2"),
        (
            of_config(data_spec='[1, {"type": "m.Row", "context": "", "children_spec": []}]'),
            "samples hold a m.Row",
        ),
    ],
)
def test_a_folder_that_is_not_what_its_index_says_is_refused_by_name(copied, damage, said):
    damage(copied)
    with pytest.raises(DataError, match=said):
        read_index(config(copied))


def test_a_single_chunk_is_read_with_the_index_beside_it_and_refused_without(copied):
    wanted = config(copied / "chunk-0-1.bin")
    assert in_place(wanted)["id"] == list(range(24, 48))
    (copied / "index.json").unlink()
    with pytest.raises(DataError, match=r"there is no index\.json beside it"):
        read_index(wanted)


def test_bin_file_of_another_name_is_no_chunk(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="no shard"):
        read_index(config(tmp_path))


def test_a_changed_length_of_a_leaf_is_a_bad_shard_with_its_name(copied):
    file = copied / "chunk-0-1.bin"
    raw = bytearray(file.read_bytes())
    at = int.from_bytes(raw[8:12], "little")
    raw[at : at + 4] = b"\xff\x00\x00\x00"
    file.write_bytes(raw)
    with pytest.raises(BadShard, match=r"chunk-0-1.bin.*leaves of item 1 do not add up"):
        in_place(config(copied))


@pytest.mark.parametrize(
    "name", ["plain", "batch", "sample", "chunk", "nested_zstd", "kinds", "images", "tokens"]
)
def test_damaged_chunks_are_rows_or_an_error_of_this_package(name, tmp_path):
    shutil.copytree(WRITTEN / name, folder := tmp_path / "data")
    files = sorted(folder.glob("chunk-*"))
    for number in range(10):
        rng = random.Random(f"{name} {number}")
        file = rng.choice(files)
        raw = file.read_bytes()
        changed = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            near = 120 if rng.randrange(2) else len(raw)
            at, width = rng.randrange(min(near, len(raw))), rng.choice((1, 4, 8))
            new = rng.choice(
                (b"\0", b"\xff", b"\x7f", bytes([changed[at] ^ 1 << rng.randrange(8)]))
            )
            changed[at : at + width] = (new * width)[: len(raw) - at]
        file.write_bytes(changed)
        try:
            rows_of(folder)
        except ElasticError:
            pass
        finally:
            file.write_bytes(raw)
