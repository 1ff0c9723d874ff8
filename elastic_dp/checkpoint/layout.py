"""The layout of a state's tensors in a checkpoint: one range of bytes, the line, cut into parts.

    line   the tensors end to end, those with large elements first, so that each is aligned
           without padding
    part   an equal piece of the line and one safetensors file in the store: 1 to 64 MiB, about 32
           parts in all
    block  an equal piece of a part, at most 8 MiB: the unit of a digest and of a read request

- A layout follows from the tensors' names, dtypes and shapes alone. The number of workers that
  write or read a checkpoint does not change it.
- The share of a worker is a range of whole parts. Cuts fall between elements, so any safetensors
  reader opens every part.
- Host memory holds the parts as the store does, headers included, so a write needs no further copy.

Computing a layout does not import torch, which takes seconds: the command line lists and verifies
checkpoints without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_MIN_PART_BYTES, _MAX_PART_BYTES = 1 << 20, 64 << 20
_MAX_BLOCK_BYTES = 8 << 20
_PARTS = 32
_ALIGNED_TO = 64  # bytes: alignment of a part's data in its file
ROOM_ALIGNED_TO = 4096  # bytes: a disk takes page-aligned parts from host memory without a copy

METADATA = {"format": "pt"}  # as safetensors.torch writes it
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
        count = 1
        for n in self.shape:
            count *= n
        return count * self.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with this dtype and shape that shares the memory of `flat`, a uint8
        tensor."""
        typed = flat.view(self.torch_dtype)
        if self.stride is None:
            return typed.view(self.shape)
        return typed.as_strided(self.shape, self.stride)


class Piece(NamedTuple):
    """The bytes `start` ≤ i < `end` of tensor `slot`, which lie at offset `at` of the line."""

    slot: int
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class Part:
    """The bytes `start` ≤ i < `end` of the line.

    `at` is the offset of the part's header in host memory. The data follows the header.
    """

    number: int
    start: int
    end: int
    header: bytes
    at: int

    @property
    def nbytes(self) -> int:
        """The size of the part's file in bytes, header included."""
        return len(self.header) + self.end - self.start

    @property
    def data_at(self) -> int:
        """The offset of the part's data in host memory."""
        return self.at + len(self.header)


@dataclass(frozen=True)
class Layout:
    """The arrangement of tensors in parts and blocks, sizes in bytes."""

    specs: tuple[TensorSpec, ...]
    part_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """Returns the layout for these tensors, with a part size that gives about 32 parts."""
        part = _MIN_PART_BYTES
        while part < _MAX_PART_BYTES and part * _PARTS < sum(spec.nbytes for spec in specs):
            part *= 2
        return cls(tuple(specs), part, min(part, _MAX_BLOCK_BYTES))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor in the line, by slot."""
        order = sorted(range(len(self.specs)), key=lambda i: -self.specs[i].itemsize)
        offsets, at = [0] * len(self.specs), 0
        for slot in order:
            offsets[slot] = at
            at += self.specs[slot].nbytes
        return tuple(offsets)

    @cached_property
    def total(self) -> int:
        """The length of the line in bytes."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.total // self.block_bytes)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts, by number."""
        parts: list[Part] = []
        at = 0
        for number, pieces in enumerate(self._pieces_by_part()):
            start = number * self.part_bytes
            end = min(start + self.part_bytes, self.total)
            part = Part(number, start, end, self._header(pieces, start), at)
            at += -(-part.nbytes // ROOM_ALIGNED_TO) * ROOM_ALIGNED_TO
            parts.append(part)
        return tuple(parts)

    @cached_property
    def host_bytes(self) -> int:
        """The host memory that a snapshot needs, in bytes: the line and the parts' headers."""
        return self.parts[-1].at + self.parts[-1].nbytes if self.parts else 0

    def share(self, rank: int, world_size: int) -> range:
        """Returns the numbers of the parts that worker `rank` of `world_size` writes or reads."""
        assert 0 <= rank < world_size, (rank, world_size)
        count = len(self.parts)
        return range(count * rank // world_size, count * (rank + 1) // world_size)

    def blocks_of(self, parts: range) -> range:
        """Returns the numbers of the blocks in these parts."""
        each = self.part_bytes // self.block_bytes
        return range(parts.start * each, min(parts.stop * each, self.blocks))

    def span(self, parts: range) -> tuple[int, int]:
        """Returns where these parts start and end in the line."""
        if not parts:
            return 0, 0
        return self.parts[parts.start].start, self.parts[parts.stop - 1].end

    def block_span(self, block: int) -> tuple[int, int]:
        """Returns where the block starts and ends in the line."""
        start = block * self.block_bytes
        return start, min(start + self.block_bytes, self.total)

    def part_of(self, at: int) -> Part:
        """Returns the part that holds the byte at this offset of the line."""
        return self.parts[at // self.part_bytes]

    def host_at(self, at: int) -> int:
        """Returns the offset in host memory of the byte at this offset of the line."""
        part = self.part_of(at)
        return part.data_at + at - part.start

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All tensors in the order of the line, cut where a part ends."""
        return tuple(piece for pieces in self._pieces_by_part() for piece in pieces)

    def views(self, line: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors, by slot, as views of `line`, which holds all its bytes. Copies
        nothing."""
        return [
            spec.view(line[at : at + spec.nbytes])
            for spec, at in zip(self.specs, self.offsets, strict=True)
        ]

    def _pieces_by_part(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in range(-(-self.total // self.part_bytes))]
        for slot in sorted(range(len(self.specs)), key=lambda i: self.offsets[i]):
            at, size = self.offsets[slot], self.specs[slot].nbytes
            start = 0
            while start < size:
                number, within = divmod(at + start, self.part_bytes)
                end = min(size, start + self.part_bytes - within)
                found[number].append(Piece(slot, start, end, at + start))
                start = end
        return found

    def _header(self, pieces: Sequence[Piece], start: int) -> bytes:
        table: dict[str, Any] = {"__metadata__": METADATA}
        for piece in pieces:
            name, word, shape = self._described(piece)
            span = [piece.at - start, piece.at - start + piece.end - piece.start]
            table[name] = {"dtype": word, "shape": shape, "data_offsets": span}
        return header(table)

    def _described(self, piece: Piece) -> tuple[str, str, list[int]]:
        """Returns the name, safetensors dtype and shape of a piece.

        A whole tensor keeps its own. A piece of one is a vector named `name[first:last]` by its
        elements in memory order.
        """
        spec = self.specs[piece.slot]
        word, size = WORDS.get(spec.dtype, ("", 1))
        first, last = piece.start // size, piece.end // size
        if piece.end - piece.start == spec.nbytes and spec.stride is None and word:
            return spec.name, word, list(spec.shape)
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


def header(table: dict[str, Any]) -> bytes:
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
