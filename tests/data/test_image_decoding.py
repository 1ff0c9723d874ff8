"""Images decoded to pixels: the same ones for any number of workers, in threads and in
processes."""

import dataclasses
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.errors import DataError, SpecError, UserCodeError
from tests.data.shards import batches_of

ROWS, V, B = 24, 4, 2


def pixels(i):
    return np.random.default_rng(i).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def encoded(array, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind)
    return out.getvalue()


def images(folder, contents, **changes):
    made = pa.table({"id": range(len(contents)), "image": pa.array(contents, pa.binary())})
    pq.write_table(made, folder / "a.parquet", row_group_size=5)
    options = {"decode": {"image": "rgb"}, "micro_batch_size": B}
    return DataConfig(str(folder), **options | changes)


def dealt(config, workers):
    batches = [batch for _, batch in batches_of(config, workers, V)]
    return [pair for b in batches for pair in zip(b["id"].tolist(), b["image"], strict=True)]


def test_images_are_the_pixels_that_were_written_for_one_worker_and_for_three(tmp_path):
    config = images(tmp_path, [encoded(pixels(i)) for i in range(ROWS)], epochs=1)
    alone, three = dealt(config, 1), dealt(config, 3)
    assert [i for i, _ in alone] == [i for i, _ in three]
    assert sorted(i for i, _ in alone) == list(range(ROWS))
    for found in (alone, three):
        for i, image in found:
            assert image.dtype == torch.uint8 and np.array_equal(image, pixels(i))
    data = open_evaluation(config)
    assert np.array_equal(data.batch(0)["image"], [pixels(0), pixels(1)])


@pytest.mark.parametrize("kind", [("PNG", np.uint16), ("TIFF", np.int32), ("TIFF", np.float32)])
def test_images_of_more_than_8_bits_are_refused_and_not_made_white(kind, tmp_path):
    """X-rays and maps of depths: Pillow's `convert("RGB")` makes 255 of all that is above it."""
    deep = encoded(np.arange(0, 60_000, 3_000).reshape(4, 5).astype(kind[1]), kind[0])
    data = open_data(images(tmp_path, [deep] * 8), virtual_workers=1)
    with pytest.raises((DataError, UserCodeError), match=r"'image' has pixels of .* mode '[IF]"):
        data.batch(1, 0)


def test_gray_images_become_rgb_and_sizes_that_differ_reach_the_transform(tmp_path):
    gray = encoded(pixels(0)[:, :, 0])
    contents = [gray, encoded(pixels(1)[:3])] * 4

    def crop(batch):
        return batch | {"image": np.stack([image[:3] for image in batch["image"]])}

    config = images(tmp_path, contents, shuffle="none", transform=crop)
    data = open_data(config, virtual_workers=1)
    batch = data.batch(1, 0)
    assert np.array_equal(batch["image"][0], np.repeat(pixels(0)[:3, :, :1], 3, axis=2))
    data = open_data(dataclasses.replace(config, transform=None), virtual_workers=1)
    with pytest.raises(DataError, match=r"images of different sizes \(5 x 7, …\)"):
        data.batch(1, 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [(b"no image", "cannot identify image file"), (None, "column 'image' is null")],
)
def test_image_that_cannot_be_decoded_is_named_by_its_row(bad, message, tmp_path):
    config = images(tmp_path, [encoded(pixels(0)), bad] * 4, shuffle="none")
    data = open_data(config, virtual_workers=1)
    with pytest.raises(UserCodeError, match=rf"DataConfig\.decode .*{message}.*rows 0, 1 of a\."):
        data.batch(1, 0)


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_skip_leaves_out_and_reports_the_row_of_an_image_that_cannot_be_decoded(
    processes, tmp_path
):
    contents = [encoded(pixels(i)) for i in range(ROWS)]
    contents[3], contents[4], contents[9] = b"no image", None, contents[9][:40]
    options = {"max_bad_fraction": 0.1}
    config = images(tmp_path, contents, epochs=1, workers=processes, shuffle="none", **options)
    data = open_data(config, virtual_workers=V)
    found, bad, left_out = list[int](), set[int](), 0
    for step in range(1, data.steps_per_epoch + 1):
        for v in range(V):
            batch = data.batch(step, v)
            rows = [] if batch is None else zip(batch["id"].tolist(), batch["image"], strict=True)
            for i, image in rows:
                assert np.array_equal(image, pixels(i))
                found.append(i)
            bad |= data.bad_row_groups(step, v)
            left_out += data.masked(step, v)
    assert sorted(found) == [i for i in range(ROWS) if i not in (3, 4, 9)] and left_out == 3
    names = [data.describe_row_group(number) for number in sorted(bad)]
    assert names == [f"row {i} of a.parquet" for i in (3, 4, 9)]
    with pytest.raises(DataError, match=r"3 of the 24 rows of the data set, 0\.12 of them, cannot"):
        data.check_bad(bad)
    data.check_bad(sorted(bad)[:2])


def test_columns_that_hold_no_images_are_refused_when_data_is_opened(tmp_path):
    config = images(tmp_path, [encoded(pixels(0))] * 8)
    for name, message in (("id", "'id' is int64, and must hold the bytes"), ("x", "no column 'x'")):
        with pytest.raises(DataError, match=rf"DataConfig\.decode: .*{message}"):
            open_data(dataclasses.replace(config, decode={name: "rgb"}), virtual_workers=1)
    with pytest.raises(SpecError, match=r"DataConfig\.decode is \{'image': 'bgr'\}"):
        dataclasses.replace(config, decode={"image": "bgr"})
