"""Snapshots of the state in reused host memory: the part of a checkpoint that may block training.

- A snapshot holds all that a member has of the state: of a divided optimizer state some pieces,
  which another member has, too, and of all else the whole. Any survivor can therefore finish a
  checkpoint. It costs host memory for one more state per worker.
- The memory has the blobs as the store does (layout.py), so a write needs no further copy. Members
  that hold the same pieces have the same blobs of them.
- `take` launches copies; `manifest` waits for them, hashes, and runs in the background. Consecutive
  snapshots of the same tensors allocate nothing.
- New memory is slow: the system finds each page when it is written for the first time, and copies
  of a device's state keep the host waiting until the memory is registered with the device. So
  memory is taken before the first snapshot, and `memory.make_ready` does the rest in the
  background, piece by piece. See device/host_copies.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from elastic_dp.checkpoint.codec import NamedTensor, encode
from elastic_dp.checkpoint.commit_record import Manifest, StateTree, unit_digest
from elastic_dp.checkpoint.layout import (
    ROOM_ALIGNED_TO,
    Blob,
    TensorSpec,
    Unit,
    cut,
    flat_bytes,
    pack,
)
from elastic_dp.device.host_copies import HostCopies, host_memory
from elastic_dp.errors import ClusterError, StateError

PIECE_BYTES = 64 << 20  # of memory that is made ready at once; no copy goes to two of them
# Each launch may wait while a piece is registered. So a step beside it takes a twentieth longer.
REST = 19.0  # after a piece, relative to the time that registering it took


class SnapshotMemory:
    """One thread makes room and launches `copies`; another one may call `make_ready`."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.copies = HostCopies() if copies is None else copies
        self.content = torch.empty(0, dtype=torch.uint8)
        self._pieces: list[torch.Tensor] = []  # those that are not ready
        self._on_device = self._is_used = False
        self._changing = threading.Lock()  # held while this changes, or a piece is made ready
        self._hurried = threading.Event()

    def make_room(self, nbytes: int, *, on_device: bool) -> int:
        """Replaces the memory unless it is large enough. Returns how many bytes are new.
        `on_device`: a device holds some of what is copied. Raises ClusterError if the container has
        less than that: the system would end this process."""
        if nbytes > (limit := host_memory()):
            raise ClusterError(
                f"a checkpoint needs {nbytes / 1e9:.1f} GB of the host's memory for a copy of the "
                f"state, and this worker's container has {limit / 1e9:.1f} GB. Give it more, or "
                "use sharding='optimizer'"
            )
        with self._changing:
            grows = nbytes > self.content.numel()
            if grows:
                self.copies.unregister()
                self.content = torch.empty(0, dtype=torch.uint8)  # not two of them at once
                self.content = _aligned(nbytes)
                self._pieces, self._is_used = list(self.content.split(PIECE_BYTES)), False
                self._hurried.clear()
            self._on_device = on_device
            return nbytes if grows else 0

    def make_ready(self) -> None:
        """Has the pages of new memory found, and registers the memory with the device. Each piece
        keeps those who wait for the memory, and the launches of a step, for some milliseconds, and
        there is time between the pieces."""
        rest_s = 0.0
        while self._pieces:
            self._hurried.wait(rest_s)
            with self._changing:
                if not self._pieces:
                    return
                piece = self._pieces.pop()
                if not self._is_used:
                    piece.zero_()
                begun_at = time.perf_counter()
                if self._on_device:
                    self.copies.register(piece)
                rest_s = REST * (time.perf_counter() - begun_at)

    def hurry(self) -> None:
        """Somebody waits for `make_ready`: no rest from now on."""
        self._hurried.set()

    def use(self) -> None:
        """The memory gets content: its pages are found when they are written."""
        with self._changing:
            self._is_used = True

    def close(self) -> None:
        """Unregisters the memory, and ends `make_ready`. Nothing may be copied into it
        afterwards."""
        self.hurry()
        with self._changing:
            self._pieces = []
            self.copies.unregister()


@dataclass(frozen=True)
class HeldPiece:
    """The optimizer state of some elements of a parameter, which `holders` have.

    `parameter` is its number in the order of the optimizer's groups; `first` and `last` are the
    elements, in the order in which they lie in memory. `shape` and `stride` are the parameter's;
    without a shape, the piece is all of its state.
    """

    parameter: int
    first: int
    last: int
    state: dict[str, Any]
    holders: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HeldState:
    """What a member holds of a divided optimizer state. `parameters`: how many there are, on
    whatever member."""

    parameters: int
    pieces: Sequence[HeldPiece]


@dataclass
class _CopiedBlob:
    """A blob in memory, header included. `holders`: None for all members."""

    blob: Blob
    holders: tuple[str, ...] | None
    content: torch.Tensor


class Snapshot:
    """The newest copy of the state. One thread calls `take`; others may read in between."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.step = -1
        self.memory = SnapshotMemory(copies)
        self._kinds: list[tuple[Any, ...]] = []
        self._blobs: list[_CopiedBlob] = []
        # For each unit: a view of the memory, and where its bytes come from (None: a whole tensor).
        self._targets: list[torch.Tensor] = []
        self._sources: list[tuple[int, slice | None]] = []
        self._common = StateTree(None, ())
        self._entries: tuple[StateTree | None, ...] = ()
        self._manifest: Manifest | None = None
        self._hashing = threading.Lock()

    @torch.no_grad()
    def take(
        self, step: int, tree: Any, held: HeldState | None = None, *, most_new: float = math.inf
    ) -> bool:
        """Copies the tree, and what this member holds of a divided optimizer state. The caller may
        change both again when this returns. If more than `most_new` bytes of new memory are needed,
        it only takes those, for `memory.make_ready`, and returns False.

        Raises StateError if it cannot be encoded, and then keeps the previous snapshot.
        """
        encoded, tensors = encode(tree)
        pieces = _encoded(held)
        entries: list[StateTree | None] = [None] * (held.parameters if held else 0)
        for piece in pieces:
            known = entries[piece.parameter]
            if known is not None and known.to_json() != piece.entry.to_json():
                raise StateError(
                    f"step.optimizer.{piece.parameter}", "not the same in all parts of a parameter"
                )
            entries[piece.parameter] = known or piece.entry
        self._manifest = None
        if self._lay_out(tensors, pieces) > most_new:
            self.step = -1
            return False
        self.step, self._entries = step, tuple(entries)
        self._common = StateTree(encoded, tuple(TensorSpec.of(*named) for named in tensors))
        self.memory.use()
        for copied in self._blobs:
            header: Any = copied.content.numpy()[: len(copied.blob.header)]
            header[:] = memoryview(copied.blob.header)
        flat = [named.tensor for named in tensors]
        flat += [tensor for piece in pieces for tensor in piece.tensors]
        sources = [
            flat[number] if part is None else flat_bytes(flat[number])[part]
            for number, part in self._sources
        ]
        self.memory.copies.copy(self._targets, sources)
        return True

    @property
    def copied_s(self) -> float:
        """The seconds that the device copied besides the time of `take`.

        It is known when the manifest is.
        """
        return self.memory.copies.copied_s

    def manifest(self, executor: Executor | None = None) -> Manifest:
        """Returns the manifest of the snapshot, with the digests of its units.

        The digests are computed once, in parallel if `executor` is given.
        """
        with self._hashing:
            if self._manifest is None:
                self.memory.copies.wait()
                hashed = (executor.map if executor else map)(_hashed, self._blobs)
                for copied, blob in zip(self._blobs, hashed, strict=True):
                    copied.blob = blob
                blobs = tuple(copied.blob for copied in self._blobs)
                self._manifest = Manifest(self.step, self._common, blobs, self._entries)
            return self._manifest

    def writers(self, members: Sequence[str]) -> dict[str, str]:
        """Returns which of `members` is to write each blob, by its name: those that hold the same
        blobs share them. All of these members return the same. Call it after `manifest`."""
        alike: dict[tuple[str, ...] | None, list[str]] = {}
        for copied in self._blobs:
            alike.setdefault(copied.holders, []).append(copied.blob.name)
        found: dict[str, str] = {}
        for holders, names in alike.items():
            holding = members if holders is None else holders
            writing = [one for one in holding if one in members] or holding
            found |= {
                name: writing[(len(writing) * (number + 1) - 1) // len(names)]
                for number, name in enumerate(names)
            }
        return found

    def content(self, name: str) -> memoryview:
        """Returns the content of a blob, header included, without copying it."""
        content: Any = next(c.content for c in self._blobs if c.blob.name == name).numpy()
        return memoryview(content)

    def _lay_out(self, tensors: Sequence[NamedTensor], pieces: Sequence[_EncodedPiece]) -> int:
        """Arranges the memory, unless it has the blobs of such tensors and pieces. Returns how many
        bytes are new."""
        kinds = [(name, t.dtype, t.shape, t.stride(), t.device) for name, t in tensors]
        kinds += [piece.kind for piece in pieces]
        if kinds == self._kinds:
            return 0
        self._kinds, self._blobs, self._targets, self._sources = [], [], [], []
        specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors}
        numbers = {name: number for number, name in enumerate(specs)}
        lists: list[tuple[tuple[str, ...] | None, list[Unit]]]
        lists = [(None, units) for units in cut([*specs.values()])]
        of_piece: dict[Unit, int] = {}  # where the pieces' tensors are
        of_holders: dict[tuple[str, ...], list[Unit]] = {}
        for piece in pieces:
            specs |= {spec.name: spec for spec in piece.entry.specs}
            for unit, tensor in zip(piece.units, piece.tensors, strict=True):
                of_piece[unit] = len(tensors) + len(of_piece)
                if tensor.numel():
                    of_holders.setdefault(piece.holders, []).append(unit)
        lists += [(holders, some) for holders, all_ in of_holders.items() for some in pack(all_)]
        blobs = [(holders, Blob.of(units, specs)) for holders, units in lists]
        starts = list(accumulate((_in_pages(blob.nbytes) for _, blob in blobs), initial=0))
        new = self.memory.make_room(
            starts[-1], on_device=any(spec.device != "cpu" for spec in specs.values())
        )
        for (holders, blob), start in zip(blobs, starts, strict=False):
            content = self.memory.content[start : start + blob.nbytes]
            self._blobs.append(_CopiedBlob(blob, holders, content))
            for unit, at in zip(blob.units, blob.offsets, strict=False):
                room, spec = content[at : at + unit.nbytes], specs[unit.tensor]
                number, first, is_whole = numbers.get(unit.tensor, 0), unit.start, False
                if unit in of_piece:
                    number, first = of_piece[unit], 0
                elif unit.nbytes == spec.nbytes:
                    contiguous = tensors[number].tensor.is_contiguous()
                    is_whole = contiguous or spec.stride is not None
                here = PIECE_BYTES - (start + at) % PIECE_BYTES  # up to the next piece of memory
                if is_whole and unit.nbytes <= here:
                    self._targets.append(spec.view(room))
                    self._sources.append((number, None))
                    continue
                for part in room.split([min(here, unit.nbytes), max(0, unit.nbytes - here)]):
                    if part.numel():
                        self._targets.append(part)
                        self._sources.append((number, slice(first, first + part.numel())))
                        first += part.numel()
        self._kinds = kinds
        return new


@dataclass(frozen=True)
class _EncodedPiece:
    """A piece whose state is encoded: the entry of its parameter, and a unit for each tensor of the
    state."""

    parameter: int
    entry: StateTree
    units: Sequence[Unit]
    tensors: Sequence[torch.Tensor]
    holders: tuple[str, ...]

    @classmethod
    def of(cls, piece: HeldPiece) -> _EncodedPiece:
        """Raises StateError."""
        tree, named = encode(piece.state)
        specs, units, tensors = [], [], []
        for key, tensor in named:
            spec = TensorSpec.of(f"step.optimizer.{piece.parameter}.{key}", tensor)
            start, end = 0, spec.nbytes
            if piece.shape is not None and tensor.dim():
                start, end = piece.first * spec.itemsize, piece.last * spec.itemsize
                spec = replace(spec, shape=piece.shape, stride=_stride_of(piece))
            specs.append(spec)
            if piece.first and (start, end) == (0, spec.nbytes):
                continue  # it has no elements: the first piece of the parameter has it
            units.append(Unit(spec.name, start, end))
            tensors.append(tensor)
        entry = StateTree(tree, tuple(specs))
        return cls(piece.parameter, entry, units, tensors, piece.holders)

    @property
    def kind(self) -> tuple[Any, ...]:
        tensors = [(t.dtype, t.stride(), t.device) for t in self.tensors]
        return self.parameter, self.entry.specs, self.units, tensors, self.holders


def _encoded(held: HeldState | None) -> list[_EncodedPiece]:
    return [_EncodedPiece.of(piece) for piece in held.pieces] if held else []


def _stride_of(piece: HeldPiece) -> tuple[int, ...] | None:
    """Returns what `TensorSpec.of` has for the whole tensor."""
    assert piece.shape is not None and piece.stride is not None
    like = torch.empty_strided(piece.shape, piece.stride, device="meta")
    return TensorSpec.of("", like).stride


def _in_pages(nbytes: int) -> int:
    """Returns the size of the pages that this many bytes need."""
    return -(-nbytes // ROOM_ALIGNED_TO) * ROOM_ALIGNED_TO


def _hashed(copied: _CopiedBlob) -> Blob:
    content: Any = copied.content.numpy()
    blob = copied.blob
    units = [
        unit._replace(digest=unit_digest(content[at : at + unit.nbytes]))
        for unit, at in zip(blob.units, blob.offsets, strict=False)
    ]
    return Blob(tuple(units), blob.header)


def _aligned(nbytes: int) -> torch.Tensor:
    """Returns new memory that begins at a page."""
    room = torch.empty(nbytes + ROOM_ALIGNED_TO, dtype=torch.uint8)
    first = -room.data_ptr() % ROOM_ALIGNED_TO
    return room[first : first + nbytes]
