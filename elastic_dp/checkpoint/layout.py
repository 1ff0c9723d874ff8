"""How a state's bytes lie in blobs, the files of a checkpoint.

    unit   some bytes of one tensor, at most 8 MiB, with a digest
    blob   units one after another: a safetensors file, named by its content, of at most 64 MiB

- The blobs of what all members hold follow from the tensors' names, dtypes and shapes alone: about
  32 of them, of 1 to 64 MiB. The number of members that write or read them does not change them.
- Blobs of a state that is divided among the members have the pieces that the same members hold.
- Cuts fall between elements, so any safetensors reader opens every blob.
- Host memory holds the blobs as the store does, headers included, so a write needs no further copy.

Computing a layout does not import torch, which takes seconds: the command line lists and verifies
checkpoints without it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_MIN_BLOB_BYTES, MAX_BLOB_BYTES = 1 << 20, 64 << 20
MAX_UNIT_BYTES = 8 << 20
_BLOBS = 32
_ALIGNED_TO = 64  # bytes: alignment of a blob's data in its file
ROOM_ALIGNED_TO = 4096  # bytes: a disk takes page-aligned blobs from host memory without a copy

_METADATA = {"format": "pt"}  # as safetensors.torch writes it
# The safetensors name of each torch dtype and the size of an element in bytes. safetensors lacks
# complex128 and some others: their tensors are stored as bytes.
WORDS = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
}


@dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of a tensor.

    `stride` is set only for a dense tensor that is not contiguous (channels_last). `device` is the
    device's type, such as "cpu".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    device: str = "cpu"

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Returns the spec of `tensor`."""
        kept = None if tensor.is_contiguous() or not is_dense(tensor) else tuple(tensor.stride())
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), kept, tensor.device.type)

    def to_json(self) -> list[Any]:
        """Returns the spec as JSON values."""
        stride = None if self.stride is None else list(self.stride)
        return [self.name, self.dtype, list(self.shape), stride, self.device]

    @classmethod
    def from_json(cls, stored: list[Any]) -> TensorSpec:
        """Reverses `to_json`. Raises ValueError unless it is a spec of a tensor."""
        name, dtype, shape, stride, device = stored
        for n in (*shape, *(stride or ())):
            whole_number(n)
        if not isinstance(name, str) or not _is_dtype(dtype):
            raise ValueError(f"{name!r} of {dtype!r} is not a tensor")
        return cls(name, dtype, tuple(shape), None if stride is None else tuple(stride), device)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        known = WORDS.get(self.dtype)
        return self.torch_dtype.itemsize if known is None else known[1]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with this dtype and shape that shares the memory of `flat`, a uint8
        tensor."""
        typed = flat.view(self.torch_dtype)
        if self.stride is None:
            return typed.view(self.shape)
        return typed.as_strided(self.shape, self.stride)


class Unit(NamedTuple):
    """The bytes `start` ≤ i < `end` of a tensor, by its name. `digest` is theirs (`unit_digest`),
    or empty if it is not known yet."""

    tensor: str
    start: int
    end: int
    digest: str = ""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Blob:
    """A file: a safetensors header and units in this order."""

    units: tuple[Unit, ...]
    header: bytes

    @classmethod
    def of(cls, units: Sequence[Unit], specs: Mapping[str, TensorSpec]) -> Blob:
        """`specs`: those of the tensors, by name."""
        table: dict[str, Any] = {"__metadata__": _METADATA}
        at = 0
        for unit in units:
            name, word, shape = _described(unit, specs[unit.tensor])
            span = [at, at + unit.nbytes]
            table[name] = {"dtype": word, "shape": shape, "data_offsets": span}
            at += unit.nbytes
        return cls(tuple(units), _header(table))

    @cached_property
    def name(self) -> str:
        """The name of the file, which follows from its content."""
        facts = [self.header.decode("latin-1"), *(unit.digest for unit in self.units)]
        return hashlib.sha256(canonical(facts)).hexdigest()[:32]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each unit begins in the file, and where the last one ends."""
        return tuple(accumulate((unit.nbytes for unit in self.units), initial=len(self.header)))

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes, header included."""
        return self.offsets[-1]

    @cached_property
    def ranges(self) -> frozenset[tuple[str, int, int]]:
        """The tensor and the bytes of each unit."""
        return frozenset((unit.tensor, unit.start, unit.end) for unit in self.units)


def cut(specs: Sequence[TensorSpec]) -> list[list[Unit]]:
    """Returns the units of each blob that has what all members hold. Tensors with large elements
    are first, so that each tensor is aligned without padding."""
    limit = _MIN_BLOB_BYTES
    while limit < MAX_BLOB_BYTES and limit * _BLOBS < sum(spec.nbytes for spec in specs):
        limit *= 2
    found: list[list[Unit]] = []
    room = 0
    for spec in sorted(specs, key=lambda spec: -spec.itemsize):
        at = 0
        while at < spec.nbytes:
            if not room:
                found.append([])
                room = limit
            end = min(spec.nbytes, at + min(room, MAX_UNIT_BYTES))
            found[-1].append(Unit(spec.name, at, end))
            room -= end - at
            at = end
    return found


def pack(units: Iterable[Unit]) -> list[list[Unit]]:
    """Returns these units, of a divided state, in lists for blobs of a limited size."""
    found: list[list[Unit]] = []
    size = MAX_BLOB_BYTES
    for unit in units:
        if size + unit.nbytes > MAX_BLOB_BYTES:
            found.append([])
            size = 0
        found[-1].append(unit)
        size += unit.nbytes
    return found


def _described(unit: Unit, spec: TensorSpec) -> tuple[str, str, list[int]]:
    """Returns the name, safetensors dtype and shape of a unit.

    A whole tensor keeps its own. Some bytes of one are a vector named `name[first:last]` by its
    elements in memory order.
    """
    word, size = WORDS.get(spec.dtype, ("", 1))
    if unit.nbytes == spec.nbytes and spec.stride is None and word:
        return spec.name, word, list(spec.shape)
    first, last = unit.start // size, unit.end // size
    return f"{spec.name}[{first}:{last}]", word or "U8", [last - first]


def canonical(value: Any) -> bytes:
    """Returns the JSON of a value. Keys keep their order, which is part of a state_dict."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def whole_number(value: Any) -> int:
    """Returns the value. Raises ValueError unless it is a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _is_dtype(word: Any) -> bool:
    if word in WORDS:
        return True
    import torch

    return isinstance(getattr(torch, word, None), torch.dtype)


def _header(table: dict[str, Any]) -> bytes:
    """Returns a safetensors header for `table`, padded so that the data after it is aligned."""
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text + b" " * (-(8 + len(text)) % _ALIGNED_TO)
    return len(padded).to_bytes(8, "little") + padded


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill one range of memory without gaps, in any order."""
    if tensor.numel() == 0:
        return tensor.is_contiguous()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    dense = reach == tensor.numel()
    return dense and all(s > 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as uint8: a view of a dense tensor's memory, a copy for any other."""
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    import torch

    return flat.view(torch.uint8)
