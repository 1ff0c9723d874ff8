"""Decodes the columns of images that `DataConfig.decode` names: bytes of a file become pixels.

Pillow decodes; it is imported when it is needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.pipeline.array_memory import aligned
from elastic_dp.errors import DataError

Pixels = npt.NDArray[np.uint8]
_DEEP = ("I", "F")  # 16 and 32 bits, integers and floats: Pillow would make all above 255 white


def check_decoded(decode: Mapping[str, str] | None, leaves: Iterable[pa.Field]) -> None:
    """Raises DataError if a column that is to be decoded is not there, or not of bytes, or Pillow
    cannot be imported."""
    types = {leaf.name: leaf.type for leaf in leaves}
    for name in decode or ():
        if name not in types:
            raise DataError(
                f"DataConfig.decode: the job reads no column {name!r}, only "
                f"{', '.join(map(repr, types))}"
            )
        found = types[name]
        if not (pa.types.is_binary(found) or pa.types.is_large_binary(found)):
            raise DataError(
                f"DataConfig.decode: column {name!r} is {found}, and must hold the bytes of images"
            )
        _pillow()


def images(name: str, contents: list[bytes | None]) -> Pixels | list[Pixels]:
    """The pixels, uint8 [rows, height, width, 3]; a list of [height, width, 3] if the sizes
    differ."""
    return _stacked([_rgb(name, content) for content in contents])


def _rgb(name: str, content: bytes | None) -> Pixels:
    if content is None:
        raise ValueError(f"column {name!r} is null; leave such rows out by DataConfig.filter")
    with _pillow().open(io.BytesIO(content)) as image:
        if image.mode.startswith(_DEEP):
            raise ValueError(
                f"an image in column {name!r} has pixels of Pillow's mode {image.mode!r}, which "
                "uint8 does not hold; write it with 8 bits a channel, or decode it in transform"
            )
        return np.array(image.convert("RGB"))


def _stacked(images: Sequence[Pixels]) -> Pixels | list[Pixels]:
    if len({image.shape for image in images}) == 1:
        return aligned(np.stack(images))
    return [aligned(image) for image in images]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "DataConfig.decode needs Pillow: pip install 'elastic_dp[images]'"
        ) from error
    return Image
