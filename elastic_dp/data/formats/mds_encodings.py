"""The encodings of MDS columns: the type of each, and its values as Arrow arrays.

Numbers and arrays of numbers have the type that they were written in. `str`, `json`: text.
`bytes`, `jpeg`, `png`: bytes; `pil`, pixels with their size, become the bytes of a PPM or PGM
file, so that `DataConfig.decode` reads all of them. Pickled values (`pkl`) would run code, and are
not read; nor are other encodings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.columns.column_types import lossless, type_name
from elastic_dp.data.formats.sample_values import Values

_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_SCALARS = {"int": "int64", **{name: name for name in _DTYPES.values()}}
_TEXT = ("str", "json")
_BYTES = ("bytes", "jpeg", "png")
_FROM_TEXT = {"str_int": (pa.int64(), int), "str_float": (pa.float64(), float)}
_MAGIC = {b"RGB": (b"P6", 3), b"L": (b"P5", 1)}  # of PPM and PGM; bytes of a pixel
_ARRAY = re.compile(r"ndarray(?::(?P<dtype>\w+)(?::(?P<shape>\d+(?:,\d+)*))?)?")


@dataclass(frozen=True)
class Encoding:
    """An encoding. `size`: bytes of each value; None: they vary. `needs_sample`: the type depends
    on the first value of a shard. `is_read`: whether this package reads it."""

    name: str
    size: int | None = None
    needs_sample: bool = False
    is_read: bool = True

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        if self.name in _TEXT:
            return pa.large_string()
        return _FROM_TEXT[self.name][0] if self.name in _FROM_TEXT else pa.large_binary()

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        """The values, in the type that the shard has. `kind`: that of the data set. Raises
        ValueError or ArrowInvalid."""
        if self.name in _TEXT:
            return values.as_arrow(pa.large_string())
        if self.name in _FROM_TEXT:
            own, parse = _FROM_TEXT[self.name]
            return pa.array([parse(str(value, "ascii")) for value in values], own)
        if self.name == "pil":
            return pa.array((netpbm(value) for value in values), pa.large_binary())
        return values.as_arrow(pa.large_binary())


@dataclass(frozen=True)
class _Scalar(Encoding):
    dtype: str = ""

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        return pa.from_numpy_dtype(self.dtype)

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        return pa.array(np.frombuffer(values.joined(), np.dtype(self.dtype).newbyteorder("<")))


@dataclass(frozen=True)
class ArrayEncoding(Encoding):
    """`dtype`, `shape`: what all values have; "" and (): each value says it."""

    dtype: str = ""
    shape: tuple[int, ...] = ()

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        if not self.needs_sample:
            return _fixed_type(self.dtype, self.shape)
        if not sample:  # a shard without samples
            return pa.null()
        array = self.parse(memoryview(sample))
        return list_type(array.dtype.name, array.shape)

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        if self.shape:
            found = np.frombuffer(values.joined(), self.dtype)
            return _nested(pa.array(found), self.shape)
        return joined_arrays([self.parse(value) for value in values], kind)

    def parse(self, value: memoryview) -> npt.NDArray[np.generic]:
        dtype, at = self.dtype, 0
        if not dtype:
            dtype, at = _DTYPES[value[0]], 1
        ndim, width = value[at] >> 2, 1 << (value[at] & 3)
        end = at + 1 + ndim * width
        shape = np.frombuffer(value[at + 1 : end], f"<u{width}")
        return np.frombuffer(value[end:], dtype).reshape(tuple(map(int, shape)))


def encoding_of(name: str) -> Encoding:
    """The encoding of this name; one whose `is_read` is false if it is unknown."""
    if name in _SCALARS:
        return _Scalar(name, np.dtype(_SCALARS[name]).itemsize, dtype=_SCALARS[name])
    if (match := _ARRAY.fullmatch(name)) and match["dtype"] in (None, *_DTYPES.values()):
        dtype, shape = match["dtype"] or "", tuple(map(int, (match["shape"] or "0").split(",")))
        if not match["shape"]:
            return ArrayEncoding(name, None, needs_sample=True, dtype=dtype)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return ArrayEncoding(name, size, dtype=dtype, shape=shape)
    return Encoding(name, is_read=name in (*_TEXT, *_BYTES, *_FROM_TEXT, "pil"))


def joined_arrays(arrays: list[npt.NDArray[np.generic]], kind: pa.DataType) -> pa.Array:
    """Arrays that have the type and shape of `kind`, that of the data set. Raises ValueError for
    others; only the length of those with one dimension may vary."""
    types = dict.fromkeys(list_type(array.dtype.name, array.shape) for array in arrays)
    for own in types:
        both = lossless(kind, own)
        if both is None or type_name(both) != type_name(kind) or len(types) > 1:
            other = next((one for one in types if one != own), kind)
            raise ValueError(
                f"its arrays are {type_name(own)} and {type_name(other)}, and only the length "
                "of those with one dimension may vary; write them in one type and shape, or "
                "flat, with their shape in another column"
            )
    flat = pa.array(np.concatenate([array.ravel() for array in arrays]))
    if arrays[0].ndim != 1:
        return _nested(flat, arrays[0].shape)
    ends = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)


def list_type(dtype: str, shape: tuple[int, ...]) -> pa.DataType:
    """The type of arrays whose shape is not declared: only that of one dimension may vary."""
    return (
        pa.large_list(pa.from_numpy_dtype(dtype)) if len(shape) == 1 else _fixed_type(dtype, shape)
    )


def _fixed_type(dtype: str, shape: tuple[int, ...]) -> pa.DataType:
    kind = pa.from_numpy_dtype(dtype)
    for length in reversed(shape):
        kind = pa.list_(kind, length)
    return kind


def _nested(values: pa.Array, shape: tuple[int, ...]) -> pa.Array:
    for length in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values


def netpbm(value: memoryview) -> bytes:
    """Raw pixels with their size and mode, as the bytes of an image file."""
    width, height, mode_bytes = np.frombuffer(value[:12], "<u4").tolist()
    mode, pixels = bytes(value[12 : 12 + mode_bytes]), value[12 + mode_bytes :]
    if mode not in _MAGIC:
        shown = mode.decode(errors="replace")
        raise ValueError(f"it has images of mode {shown!r}, and only RGB and L are read")
    magic, pixel_bytes = _MAGIC[mode]
    if len(pixels) != width * height * pixel_bytes:
        raise ValueError(f"an image of {width} x {height} pixels has {len(pixels):,} bytes")
    return b"%b %d %d 255\n" % (magic, width, height) + pixels
