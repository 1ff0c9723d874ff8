"""Snapshots of the state in reused host memory: the part of a checkpoint that may block training.

- A snapshot holds the whole state, on every member. Any survivor can therefore finish a checkpoint,
  and each computes the digest of the whole state. It costs host memory for one more state per
  worker.
- The memory has the layout of the parts in the store (layout.py), so a write needs no further copy.
- `take` launches copies; `manifest` waits for them, hashes, and runs in the background. Consecutive
  snapshots of the same tensors allocate nothing.
- Copies of a device's state are slow, and the host waits for them, until the memory is registered
  with the device. `prepare` and `memory.register` do that in the background, before the first
  snapshot. See device/host_copies.py.
- Of a sharded optimizer's state a worker copies the units that it holds and nothing else
  (`UnitSnapshot`). Two workers that hold the same units have the same files of them in memory, and
  either can write them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from elastic_dp.checkpoint.codec import NamedTensor, encode
from elastic_dp.checkpoint.commit_record import Manifest, block_digest, block_digester
from elastic_dp.checkpoint.layout import (
    ROOM_ALIGNED_TO,
    Layout,
    Part,
    Piece,
    TensorSpec,
    flat_bytes,
)
from elastic_dp.checkpoint.state_units import StateUnit, UnitFile, UnitKind, UnitPlace
from elastic_dp.device.host_copies import HostCopies

MAX_FILE_BYTES = 64 << 20


class SnapshotMemory:
    """One thread makes room and launches `copies`; another one may call `register`."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.copies = HostCopies() if copies is None else copies
        self.content = torch.empty(0, dtype=torch.uint8)
        self._on_device = self._registered = False  # of the present memory
        self._changing = threading.Lock()  # held while the memory is replaced or registered

    def make_room(self, nbytes: int, *, on_device: bool) -> None:
        """Replaces the memory unless it is large enough. `on_device`: a device holds some of what
        is copied."""
        if nbytes > self.content.numel():
            with self._changing:
                self.copies.unregister()
                self.content = torch.empty(0, dtype=torch.uint8)  # not two of them at once
                self.content = _aligned(nbytes)
                self._registered = False
        self._on_device = on_device

    def register(self) -> None:
        """Registers the memory with the device, which makes later copies of its state faster."""
        with self._changing:
            if self._on_device and not self._registered:
                self._registered = True
                self.copies.register(self.content)

    def close(self) -> None:
        """Unregisters the memory. Nothing may be copied or read afterwards."""
        with self._changing:
            self.copies.unregister()


class Snapshot:
    """The newest copy of the state. One thread calls `take`; others may read in between."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.step = -1
        self.memory = SnapshotMemory(copies)
        self._layout = Layout.of([])
        self._kinds: list[tuple[Any, ...]] = []
        # For each piece of a tensor: a view of the memory, and its source (end = -1: the whole
        # tensor).
        self._targets: list[torch.Tensor] = []
        self._sources: list[Piece] = []
        self._tree: Any = None
        self._manifest: Manifest | None = None
        self._hashing = threading.Lock()

    def prepare(self, tree: Any) -> bool:
        """Allocates memory for snapshots of a tree like this, if a device holds some of it. Returns
        whether it did; then `memory.register` can run. Raises StateError."""
        _, tensors = encode(tree)
        if all(TensorSpec.of(name, tensor).device == "cpu" for name, tensor in tensors):
            return False
        self._make_room(tensors)
        self._kinds = _kinds_of(tensors)
        return True

    @torch.no_grad()
    def take(self, step: int, tree: Any) -> None:
        """Copies the tree. The caller may change the tree again when this returns.

        Raises StateError if it cannot be encoded, and then keeps the previous snapshot.
        """
        encoded, tensors = encode(tree)
        self._manifest = None
        kinds = _kinds_of(tensors)
        if kinds != self._kinds:
            self._make_room(tensors)
            self._kinds = kinds
        self.step, self._tree = step, encoded
        self._copy([tensor for _, tensor in tensors])

    @property
    def copied_s(self) -> float:
        """The seconds that the device copied besides the time of `take`.

        It is known when the manifest is.
        """
        return self.memory.copies.copied_s

    def manifest(self, executor: Executor | None = None) -> Manifest:
        """Returns the manifest of the snapshot, with the digests of its blocks.

        The digests are computed once, in parallel if `executor` is given.
        """
        with self._hashing:
            if self._manifest is None:
                self.memory.copies.wait()
                blocks = range(self._layout.blocks)
                digests = (executor.map if executor else map)(self._digest, blocks)
                self._manifest = Manifest(self.step, self._tree, self._layout, tuple(digests))
            return self._manifest

    def part(self, part: Part) -> memoryview:
        """Returns the content of the part's file, header included, without copying it."""
        content: Any = self.memory.content.numpy()
        return memoryview(content)[part.at : part.at + part.nbytes]

    def tensor_digests(self) -> tuple[str, ...]:
        """Returns the digest of each tensor, by slot. Members whose states differ compare them."""
        self.memory.copies.wait()
        digests = [block_digester() for _ in self._layout.specs]
        for slot, start, end, at in self._layout.pieces:
            begin = self._layout.host_at(at)
            digests[slot].update(self.memory.content.numpy()[begin : begin + end - start].data)
        return tuple(digest.hexdigest() for digest in digests)

    def _digest(self, block: int) -> str:
        start, end = self._layout.block_span(block)
        at = self._layout.host_at(start)
        return block_digest(self.memory.content.numpy()[at : at + end - start])

    def _make_room(self, tensors: Sequence[NamedTensor]) -> None:
        self._kinds, self._targets, self._sources = [], [], []
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
        layout = Layout.of(specs)
        on_device = any(spec.device != "cpu" for spec in specs)
        self.memory.make_room(layout.host_bytes, on_device=on_device)
        self._layout = layout
        content = self.memory.content
        memory = content.numpy()
        for part in layout.parts:
            memory[part.at : part.data_at] = memoryview(part.header)
        for piece in layout.pieces:
            spec, at = specs[piece.slot], layout.host_at(piece.at)
            room = content[at : at + piece.end - piece.start]
            same = tensors[piece.slot].tensor.is_contiguous() or spec.stride is not None
            whole = piece.end - piece.start == spec.nbytes and same
            self._targets.append(spec.view(room) if whole else room)
            self._sources.append(piece._replace(end=-1) if whole else piece)

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        sources = [
            tensors[slot] if end == -1 else flat_bytes(tensors[slot])[start:end]
            for slot, start, end, _ in self._sources
        ]
        self.memory.copies.copy(self._targets, sources)


def _kinds_of(tensors: Sequence[NamedTensor]) -> list[tuple[Any, ...]]:
    return [(name, t.dtype, t.shape, t.stride(), t.device) for name, t in tensors]


@dataclass(frozen=True)
class HeldUnit:
    """A unit that this worker holds. `shape` and `stride`: see `UnitKind`."""

    place: UnitPlace
    state: dict[str, Any]
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class UnitGroup:
    """Units that the same workers hold. `writer` is the one that is to write them."""

    writer: str
    units: Sequence[HeldUnit]


@dataclass
class _CopiedFile:
    """A file in memory, header included, and the bytes that are copied there."""

    writer: str
    file: UnitFile
    flats: list[torch.Tensor]
    content: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    has_digests: bool = False

    def lay_out(self, content: torch.Tensor) -> list[torch.Tensor]:
        """Takes this memory and writes the header. Returns where each of `flats` is to be
        copied."""
        self.content = content
        written: Any = content.numpy()
        written[: len(self.file.header)] = memoryview(self.file.header)
        return list(content[len(self.file.header) :].split([flat.numel() for flat in self.flats]))


class UnitSnapshot:
    """The newest copy. One thread calls `take`; others may read in between."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.total = 0  # units that the whole checkpoint has
        self.memory = SnapshotMemory(copies)
        self._files: list[_CopiedFile] = []
        self._hashing = threading.Lock()

    @torch.no_grad()
    def take(self, total: int, groups: Iterable[UnitGroup]) -> None:
        """Copies the units in `groups`. `total` is the number of all units, on whatever worker.
        The caller may change them again when this returns. Raises StateError if a state cannot be
        stored."""
        self.total, self._files = total, []
        kinds: dict[str, UnitKind] = {}
        files = [
            _file_of(group.writer, held, kinds) for group in groups for held in _cut(group.units)
        ]
        starts = list(accumulate((_in_pages(one.file.nbytes) for one in files), initial=0))
        specs = (spec for kind in kinds.values() for spec in kind.specs)
        self.memory.make_room(starts[-1], on_device=any(spec.device != "cpu" for spec in specs))
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for one, start in zip(files, starts, strict=False):
            targets += one.lay_out(self.memory.content[start : start + one.file.nbytes])
            sources += one.flats
            one.flats = []
        self.memory.copies.copy(targets, sources)
        self._files = files

    def files(self, executor: Executor | None = None) -> list[tuple[str, UnitFile]]:
        """Returns each file, with its digests, and who is to write it."""
        with self._hashing:
            self.memory.copies.wait()
            waiting = [copied for copied in self._files if not copied.has_digests]
            hashed = (executor.map if executor else map)(_hashed, waiting)
            for copied, file in zip(waiting, hashed, strict=True):
                copied.file, copied.has_digests = file, True
            return [(copied.writer, copied.file) for copied in self._files]

    def content(self, file: UnitFile) -> memoryview:
        """Returns the content of a file, header included, without copying it."""
        content: Any = next(c.content for c in self._files if c.file is file).numpy()
        return memoryview(content)


def _cut(units: Sequence[HeldUnit]) -> Iterable[list[HeldUnit]]:
    """Yields the units in lists of limited size, in order."""
    some, size = list[HeldUnit](), 0
    for held in units:
        nbytes = sum(x.nbytes for x in held.state.values() if isinstance(x, torch.Tensor))
        if some and size + nbytes > MAX_FILE_BYTES:
            yield some
            some, size = [], 0
        some.append(held)
        size += nbytes
    if some:
        yield some


def _file_of(writer: str, units: Sequence[HeldUnit], kinds: dict[str, UnitKind]) -> _CopiedFile:
    """Returns the file of these units, which are not copied yet."""
    made, flats = [], list[torch.Tensor]()
    for held in units:
        tree, tensors = encode(held.state)
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in tensors)
        kind = UnitKind(tree, specs, held.shape, held.stride)
        made.append(StateUnit(held.place, kinds.setdefault(kind.text, kind), ""))
        flats += [flat_bytes(tensor) for _, tensor in tensors]
    return _CopiedFile(writer, UnitFile(tuple(made)), flats)


def _in_pages(nbytes: int) -> int:
    """Returns the size of the pages that this many bytes need."""
    return -(-nbytes // ROOM_ALIGNED_TO) * ROOM_ALIGNED_TO


def _hashed(copied: _CopiedFile) -> UnitFile:
    content: Any = copied.content.numpy()
    units = [
        replace(unit, digest=block_digest(content[at : at + unit.kind.nbytes]))
        for unit, at in zip(copied.file.units, copied.file.offsets, strict=False)
    ]
    return UnitFile(tuple(units))


def _aligned(nbytes: int) -> torch.Tensor:
    """Returns new memory that begins at a page."""
    room = torch.empty(nbytes + ROOM_ALIGNED_TO, dtype=torch.uint8)
    first = -room.data_ptr() % ROOM_ALIGNED_TO
    return room[first : first + nbytes]
