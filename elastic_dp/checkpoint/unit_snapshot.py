"""A copy of the units of an optimizer's state that this worker holds, as files.

A worker copies what it holds and nothing else. Two workers that hold the same units have the same
file of them in memory, and either can write it. As with the rest of the state (snapshot.py), copies
of what is on a device have arrived once they were waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from elastic_dp.checkpoint.codec import encode
from elastic_dp.checkpoint.commit_record import block_digest
from elastic_dp.checkpoint.layout import ROOM_ALIGNED_TO, TensorSpec, flat_bytes
from elastic_dp.checkpoint.snapshot_memory import SnapshotMemory
from elastic_dp.checkpoint.state_units import StateUnit, UnitFile, UnitKind, UnitPlace
from elastic_dp.device.host_copies import HostCopies

MAX_FILE_BYTES = 64 << 20


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
