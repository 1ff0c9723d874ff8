"""Where the bytes of a state's tensors lie: one line of bytes, cut into parts, each part a
safetensors file.

    line   the tensors end to end, those of large elements first, so that each is aligned without a
           gap
    part   an equal piece of the line and one object in the store: 1 to 64 MiB, about 32 of them
    block  an equal piece of a part, at most 8 MiB: what one digest covers and one request reads

- All of it follows from the tensors' names, types and shapes: it does not depend on how many
  workers write or read.
- A worker's share is some whole parts. Cuts fall between elements, so every part opens with any
  safetensors reader.
- In host memory the parts lie as they will in the store, headers included: nothing is assembled to
  be written.

A layout is read without torch, which takes seconds to import, since the command line lists and
verifies checkpoints.
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
_ALIGNED_TO = 64  # bytes, of every part's data in its file
ROOM_ALIGNED_TO = 4096  # bytes, of every part in host memory: a disk takes pages without a copy

METADATA = {"format": "pt"}  # as safetensors.torch writes it
# What safetensors calls a dtype of torch, and the bytes of an element. It has no complex numbers of
# 16 bytes and some others: those are told as bytes.
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
    """`stride`: only of a dense tensor that is not contiguous (channels_last). `device`: its type,
    "cpu", "cuda"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    device: str = "cpu"

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        kept = None if tensor.is_contiguous() or not is_dense(tensor) else tuple(tensor.stride())
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), kept, tensor.device.type)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        known = WORDS.get(self.dtype)
        return self.torch_dtype.itemsize if known is None else known[1]

    @property
    def nbytes(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count * self.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this kind on the bytes of `flat`."""
        typed = flat.view(self.torch_dtype)
        if self.stride is None:
            return typed.view(self.shape)
        return typed.as_strided(self.shape, self.stride)


class Piece(NamedTuple):
    """The bytes `start` ≤ i < `end` of tensor `slot` lie at `at` of the line."""

    slot: int
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class Part:
    """The bytes `start` ≤ i < `end` of the line. `at`: of its header, in host memory; the data
    follows."""

    number: int
    start: int
    end: int
    header: bytes
    at: int

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.end - self.start

    @property
    def data_at(self) -> int:
        return self.at + len(self.header)


@dataclass(frozen=True)
class Layout:
    specs: tuple[TensorSpec, ...]
    part_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        part = _MIN_PART_BYTES
        while part < _MAX_PART_BYTES and part * _PARTS < sum(spec.nbytes for spec in specs):
            part *= 2
        return cls(tuple(specs), part, min(part, _MAX_BLOCK_BYTES))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in the line, by slot."""
        order = sorted(range(len(self.specs)), key=lambda i: -self.specs[i].itemsize)
        offsets, at = [0] * len(self.specs), 0
        for slot in order:
            offsets[slot] = at
            at += self.specs[slot].nbytes
        return tuple(offsets)

    @cached_property
    def total(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def blocks(self) -> int:
        return -(-self.total // self.block_bytes)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
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
        """Of a snapshot: the line and the headers in it."""
        return self.parts[-1].at + self.parts[-1].nbytes if self.parts else 0

    def share(self, rank: int, world_size: int) -> range:
        """The numbers of the parts of one of several writers or readers."""
        assert 0 <= rank < world_size, (rank, world_size)
        count = len(self.parts)
        return range(count * rank // world_size, count * (rank + 1) // world_size)

    def blocks_of(self, parts: range) -> range:
        each = self.part_bytes // self.block_bytes
        return range(parts.start * each, min(parts.stop * each, self.blocks))

    def span(self, parts: range) -> tuple[int, int]:
        """Of the line: where those parts begin and end."""
        if not parts:
            return 0, 0
        return self.parts[parts.start].start, self.parts[parts.stop - 1].end

    def block_span(self, block: int) -> tuple[int, int]:
        """Of the line."""
        start = block * self.block_bytes
        return start, min(start + self.block_bytes, self.total)

    def part_of(self, at: int) -> Part:
        return self.parts[at // self.part_bytes]

    def host_at(self, at: int) -> int:
        """Where a byte of the line lies in host memory."""
        part = self.part_of(at)
        return part.data_at + at - part.start

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All tensors in the line's order, cut where a part ends."""
        return tuple(piece for pieces in self._pieces_by_part() for piece in pieces)

    def views(self, line: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, by slot, on the bytes of the whole line. Copies nothing."""
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
        """A whole tensor as it is, a piece of one as `name[first:last]` of its elements in
        memory."""
        spec = self.specs[piece.slot]
        word, size = WORDS.get(spec.dtype, ("", 1))
        first, last = piece.start // size, piece.end // size
        if piece.end - piece.start == spec.nbytes and spec.stride is None and word:
            return spec.name, word, list(spec.shape)
        return f"{spec.name}[{first}:{last}]", word or "U8", [last - first]


def header(table: dict[str, Any]) -> bytes:
    """Of a safetensors file, padded so that what follows is aligned."""
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text + b" " * (-(8 + len(text)) % _ALIGNED_TO)
    return len(padded).to_bytes(8, "little") + padded


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order."""
    if tensor.numel() == 0:
        return tensor.is_contiguous()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    dense = reach == tensor.numel()
    return dense and all(s > 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, without a copy; of another one, a copy's."""
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    import torch

    return flat.view(torch.uint8)
