"""The serializers of litdata: the type of each leaf of a sample, and its values as Arrow arrays.

Numbers, arrays and tensors have the type that they were written in. Files of media are their bytes,
and `pil`, pixels with their size, become the bytes of a PPM or PGM file, as with MDS. Pickled
values (`pickle`, `graph`) would run code, and are not read; nor are serializers of the user.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.data.formats.litdata_json import parse_json
from elastic_dp.data.formats.mds_encodings import ArrayEncoding, Encoding, list_type, netpbm
from elastic_dp.data.formats.sample_values import Values

_SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}
_TEXT = ("str", "text")
_BYTES = ("bytes", "jpeg", "image", "file", "tifffile", "tiff", "tif", "pdf")
_MEDIA = ("video", "audio", "nifti", "mesh")
# By the number that litdata stores
_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "", "", "bool"),
)
_TORCH = (
    *("float32", "float32", "float64", "float64", "", "", "", "", "float16", "float16", ""),
    *("uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16"),
)
_DTYPES = {"numpy": _NUMPY, "tensor": _TORCH}
_KINDS = {
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.large_string(),
    "null": pa.null(),
}


def leaf_of(name: str, noted: Any = None) -> Encoding:
    """The leaf of this serializer; one whose `is_read` is false if it is unknown. `noted`: what the
    index says of the type of JSON."""
    serializer, _, more = name.partition(":")
    if serializer in _SCALARS:
        dtype = _SCALARS[serializer]
        return _ScalarLeaf(name, np.dtype(dtype).itemsize, dtype=dtype)
    if serializer in ("no_header_numpy", "no_header_tensor"):
        dtypes = _DTYPES[serializer.rpartition("_")[2]]
        dtype = dtypes[int(more)] if more.isdecimal() and int(more) < len(dtypes) else ""
        return _Flat(name, dtype=dtype) if dtype else Encoding(name, is_read=False)
    if serializer in _DTYPES:
        return _Array(name, needs_sample=True)
    if serializer == "json":
        kind = _noted_type(noted)
        return _Json(name, kind=kind) if kind is not None else _Json(name)
    if serializer == "jpeg_array":
        return _Images(name)
    if serializer in (*_TEXT, *_BYTES, *_MEDIA, "pil"):
        return _Plain(name)
    return Encoding(name, is_read=False)


@dataclass(frozen=True)
class _Plain(Encoding):
    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        return pa.large_string() if self.name in _TEXT else pa.large_binary()

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        if self.name == "pil":
            return pa.array((netpbm(value) for value in values), pa.large_binary())
        return values.as_arrow(self.type_of(b""))


@dataclass(frozen=True)
class _ScalarLeaf(Encoding):
    dtype: str = ""

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        return pa.from_numpy_dtype(self.dtype)

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        if (values.ends - values.starts != self.size).any():
            raise ValueError(f"a value has not {self.size} bytes")
        return pa.array(_numbers(values.joined(), self.dtype))


@dataclass(frozen=True)
class _Flat(Encoding):
    """Arrays of one dimension, without a header."""

    dtype: str = ""

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        return list_type(self.dtype, (0,))

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        nbytes, width = values.ends - values.starts, np.dtype(self.dtype).itemsize
        if (nbytes % width).any():
            raise ValueError(f"an array has no whole number of values of {width} bytes")
        ends = np.concatenate([[0], np.cumsum(nbytes // width)])
        flat = pa.array(_numbers(values.joined(), self.dtype))
        return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)


@dataclass(frozen=True)
class _Array(ArrayEncoding):
    """Arrays that say their type and shape: `numpy` in the order of bytes of x86, `tensor` in that
    of networks. Their numbers are in the order of x86."""

    def parse(self, value: memoryview) -> npt.NDArray[np.generic]:
        order = ">" if self.name == "tensor" else "<"
        number, ndim = struct.unpack_from(f"{order}II", value)
        dtypes = _DTYPES[self.name]
        dtype = dtypes[number] if number < len(dtypes) else ""
        if not dtype:
            raise ValueError(f"its arrays are of type {number} of litdata, which is not read")
        if ndim > 32:
            raise ValueError(f"an array would have {ndim} dimensions")
        shape = struct.unpack_from(f"{order}{ndim}I", value, 8)
        return _numbers(bytes(value[8 + 4 * ndim :]), dtype).reshape(shape)


@dataclass(frozen=True)
class _Json(Encoding):
    """Lists and objects. `kind`: the type that litdata noted; if it noted none, they are text of
    JSON."""

    kind: pa.DataType = field(default_factory=pa.large_string)

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        return self.kind

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        found = [parse_json(bytes(value)) for value in values]
        if pa.types.is_large_string(self.kind):
            found = [json.dumps(value, ensure_ascii=False) for value in found]
        return pa.array(found, self.kind)


@dataclass(frozen=True)
class _Images(Encoding):
    """Lists of the bytes of images, after their number and their lengths."""

    def type_of(self, sample: bytes | memoryview) -> pa.DataType:
        return pa.large_list(pa.large_binary())

    def decode(self, values: Values, kind: pa.DataType) -> pa.Array:
        return pa.array([self._parse(value) for value in values], self.type_of(b""))

    def _parse(self, value: memoryview) -> list[bytes]:
        count = int(np.frombuffer(value, "<u4", 1)[0])
        sizes = np.frombuffer(value, "<u4", count, offset=4)
        bounds = 4 * (count + 1) + np.cumsum([0, *sizes.tolist()])
        if bounds[-1] != len(value):
            raise ValueError("the lengths of images do not add up")
        pairs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        return [bytes(value[start:end]) for start, end in pairs]


def _numbers(content: bytes, dtype: str) -> npt.NDArray[np.generic]:
    if dtype == "bool" and any(content.translate(None, b"\x00\x01")):
        raise ValueError("a bool is neither 0 nor 1")
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<"))


def _noted_type(noted: Any) -> pa.DataType | None:
    """The type that `config.types` says; None if it is not one that all values have."""
    if isinstance(noted, str):
        return _KINDS.get(noted)
    if not isinstance(noted, Mapping):
        return None
    kind = noted.get("type")
    if kind == "list":
        value = _noted_type(noted.get("value"))
        return None if value is None else pa.large_list(value)
    if kind == "struct":
        fields = {name: _noted_type(one) for name, one in (noted.get("fields") or {}).items()}
        if not fields or None in fields.values():
            return None
        return pa.struct(list(fields.items()))
    return _KINDS.get(str(kind))
