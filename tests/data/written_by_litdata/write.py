"""Writes the files beside it, and read.json with what litdata's own reader makes of them:

pip install litdata==0.2.76 cryptography zstd; python write.py
pip install litdata==0.2.20 zstd; python write.py old
"""

import io
import json
import shutil
import sys
import tempfile
from decimal import Decimal

import numpy as np
import torch
from litdata import StreamingDataset
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
from PIL import Image

ROWS = 96


def kinds(i):
    from litdata.types import File

    rng = np.random.default_rng(i)
    image = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    image.save(png := io.BytesIO(), "PNG")
    image.save(jpeg := io.BytesIO(), "JPEG")
    jpeg.seek(0)
    return {
        "id": i,
        "text": "é" * i,
        "raw": bytes([i]) * i,
        "half": i / 2,
        "even": i % 2 == 0,
        "tokens": torch.arange(i + 1, dtype=torch.int32),
        "flags": torch.tensor([i % 2 == 0, True]),
        "f16": np.full(2, i / 8, np.float16),
        "u64": np.array([2**64 - 1 - i], np.uint64),
        "ragged": np.arange(3 * i, dtype=np.float64),
        "square": torch.full((2, 2), i / 3),
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3) + np.int16(i),
        "scalar": torch.tensor(i),
        "pixels": image,
        "gray": image.convert("L"),
        "jpeg": Image.open(jpeg),
        "png": File(bytes=png.getvalue()),
    }


def row(i):
    return {"id": i, "text": "x" * (i % 7), "tokens": np.arange(i % 5 + 1, dtype=np.int32)}


def nested(i):
    return {"id": i, "words": ["é"] * (i % 3), "of": {"a": i / 2, "b": i % 2 == 0}}


def write(out, rows, **options):
    options = {"chunk_size": 24, **options}
    writer = BinaryWriter(out, **options)
    for i, sample in enumerate(rows):
        writer[i] = sample
    writer.done()
    writer.merge()


def plain(value):
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Image.Image):
        return [value.mode, *value.size, value.tobytes().hex()]
    return value.hex() if isinstance(value, (bytes, bytearray, memoryview)) else value


def read(folders, to):
    """The rows as litdata reads them. Of tokens it reads blocks, here of one token."""
    found = {}
    for out in folders:
        loader = TokensLoader(block_size=1) if out.endswith("tokens") else None
        with tempfile.TemporaryDirectory() as copy:  # it replaces compressed chunks
            shutil.copytree(out, copy, dirs_exist_ok=True)
            dataset = StreamingDataset(copy, item_loader=loader)
            found[out] = [plain(dataset[i]) for i in range(len(dataset))]
    with open(to, "w") as file:
        json.dump(found, file)


def images(i):
    from litdata.types import Audio, JpegArray

    array = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    pictures = []
    for _ in range(i % 3 + 1):
        Image.fromarray(array).save(jpeg := io.BytesIO(), "JPEG")
        pictures.append(jpeg.getvalue())
    return {
        "id": i,
        "pictures": JpegArray(images=pictures),
        "sound": Audio(bytes=b"RIFF" + bytes([i])),
        "labels": [i] * (i % 3),
        "boxes": [{"x": i, "name": "é" * i}] * (i % 2),
        "mixed": [i, "é", None, {"a": [1.5, True]}],
        "of": {"names": ["é"] * i, "n": i},
    }


def old():
    ids = range(ROWS)
    write("old", map(row, ids))
    write("old_chunk", map(row, ids), compression="zstd")
    documents = (torch.arange(i % 5 + 1, dtype=torch.int32) + i for i in ids)
    write("old_tokens", documents, chunk_size=64)


def main():
    from litdata.utilities.encryption import FernetEncryption

    ids = range(ROWS)
    write("plain", map(row, ids))
    write("batch", map(row, ids), compression="zstd", compression_batch_size=10)
    write("sample", map(row, ids), compression="zstd:7", compression_level="sample")
    write("chunk", map(row, ids), compression="zstd", compression_level="chunk")
    write("nested", map(nested, range(600)), chunk_size=300)
    write("nested_zstd", map(nested, range(600)), chunk_size=300, compression="zstd")
    write("flat", ({"id": i, "text": "x" * (i % 7)} for i in ids))
    write("kinds", map(kinds, range(6)))
    write("tuples", ((torch.tensor([i, i]), i) for i in range(6)))
    write("lists", ([i, str(i)] for i in range(6)))
    write("one", range(6))
    write("tree", ((i, {"a": torch.zeros(i)}) for i in range(6)))
    documents = (torch.arange(i % 5 + 1, dtype=torch.int32) + i for i in ids)
    write("tokens", documents, chunk_size=64, item_loader=TokensLoader())
    write("pickled", ({"id": i, "x": Decimal(i)} for i in range(3)))
    write("listed", ({"id": i, "x": [i], "y": torch.zeros(1)} for i in range(3)))
    write("complex", ({"id": i, "y": torch.zeros(1).to(torch.complex64)} for i in range(3)))
    for level in ("chunk", "sample"):
        cipher = FernetEncryption(password="x", level=level)
        write(f"encrypted_{level}", map(row, range(3)), encryption=cipher)

    write("images", map(images, range(6)))
    folders = ("plain", "batch", "sample", "chunk", "nested", "nested_zstd", "flat", "tuples")
    read((*folders, "lists", "one", "tree", "tokens", "listed"), "read.json")


if __name__ == "__main__":
    old() if sys.argv[1:] == ["old"] else main()
