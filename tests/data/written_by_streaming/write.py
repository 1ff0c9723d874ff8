"""Writes the files beside it: pip install mosaicml-streaming==0.13.0; python write.py"""

import numpy as np
from PIL import Image
from streaming import MDSWriter

ROWS = 96
KINDS = {
    "id": "int",
    "text": "str",
    "raw": "bytes",
    "u8": "uint8",
    "u64": "uint64",
    "i16": "int16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "digits": "str_int",
    "decimal": "str_float",
    "json": "json",
    "tokens": "ndarray:int32",
    "grid": "ndarray:int16:2,3",
    "ragged": "ndarray",
    "square": "ndarray:float32",
    "pixels": "pil",
    "gray": "pil",
    "png": "png",
    "jpeg": "jpeg",
}


def kinds(i):
    rng = np.random.default_rng(i)
    image = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    return {
        "id": i,
        "text": "é" * i,
        "raw": bytes([i]) * i,
        "u8": 255 - i,
        "u64": 2**64 - 1 - i,
        "i16": -i,
        "f16": i / 8,
        "f32": i / 3,
        "f64": i / 7,
        "digits": 10**i,
        "decimal": i / 10,
        "json": {"a": [i, None], "b": "é"},
        "tokens": np.arange(i + 1, dtype=np.int32),
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3) + i,
        "ragged": np.arange(3 * i + 1, dtype=np.float64),
        "square": np.full((2, 2), i, np.float32),
        "pixels": image,
        "gray": image.convert("L"),
        "png": image,
        "jpeg": image,
    }


def row(i):
    return {"id": i, "text": "x" * (i % 7), "tokens": np.arange(i % 5 + 1, dtype=np.int32)}


def main():
    plain = {"id": "int", "text": "str", "tokens": "ndarray:int32"}
    codecs = (None, "zstd:7", "gz", "bz2", "br", "snappy")
    for compression in codecs:
        out = "plain" if compression is None else compression.split(":")[0]
        rows = ROWS if out in ("plain", "zstd") else 12
        options = {"compression": compression, "size_limit": 1400, "hashes": ["sha1"]}
        with MDSWriter(out=out, columns=plain, **options) as writer:
            for i in range(rows):
                writer.write(row(i))
    with MDSWriter(out="kinds", columns=KINDS) as writer:
        for i in range(6):
            writer.write(kinds(i))
    with MDSWriter(out="pickled", columns={"id": "int", "x": "pkl", "y": "str_decimal"}) as writer:
        from decimal import Decimal

        for i in range(3):
            writer.write({"id": i, "x": {"a": i}, "y": Decimal(i)})


if __name__ == "__main__":
    main()
