"""A copy of the units of an optimizer's state that this worker holds, as files.

A worker copies what it holds and nothing else. Two workers that hold the same units have the same
file of them in memory, and either can write it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic_dp.checkpoint.commit_record import block_digest
from elastic_dp.checkpoint.encoding import encode
from elastic_dp.checkpoint.layout import TensorSpec, flat_bytes
from elastic_dp.checkpoint.snapshot import aligned
from elastic_dp.checkpoint.state_units import StateUnit, UnitFile, UnitKind, UnitPlace

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
    """A file in memory, header included."""

    writer: str
    file: UnitFile
    memory: torch.Tensor
    has_digests: bool = False


class UnitSnapshot:
    """The newest copy. One thread calls `take`; others may read in between."""

    def __init__(self) -> None:
        self.total = 0  # units that the whole checkpoint has
        self._files: list[_CopiedFile] = []
        self._hashing = threading.Lock()

    @torch.no_grad()
    def take(self, total: int, groups: Iterable[UnitGroup]) -> None:
        """Copies the units in `groups`. `total` is the number of all units, on whatever worker.
        Raises StateError if a state cannot be stored."""
        spare: dict[int, list[torch.Tensor]] = {}
        for copied in self._files:
            spare.setdefault(copied.memory.numel(), []).append(copied.memory)
        self.total, self._files = total, []
        kinds: dict[str, UnitKind] = {}
        files = []
        for group in groups:
            for held in _cut(group.units):
                files.append(_copy(group.writer, held, spare, kinds))
        self._files = files

    def files(self, executor: Executor | None = None) -> list[tuple[str, UnitFile]]:
        """Returns each file, with its digests, and who is to write it."""
        with self._hashing:
            waiting = [copied for copied in self._files if not copied.has_digests]
            hashed = (executor.map if executor else map)(_hashed, waiting)
            for copied, file in zip(waiting, hashed, strict=True):
                copied.file, copied.has_digests = file, True
            return [(copied.writer, copied.file) for copied in self._files]

    def content(self, file: UnitFile) -> memoryview:
        """Returns the content of a file, header included, without copying it."""
        memory: Any = next(c.memory for c in self._files if c.file is file).numpy()
        return memoryview(memory)


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


def _copy(
    writer: str,
    units: Sequence[HeldUnit],
    spare: dict[int, list[torch.Tensor]],
    kinds: dict[str, UnitKind],
) -> _CopiedFile:
    made, contents = [], list[torch.Tensor]()
    for held in units:
        tree, tensors = encode(held.state)
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in tensors)
        kind = UnitKind(tree, specs, held.shape, held.stride)
        made.append(StateUnit(held.place, kinds.setdefault(kind.text, kind), ""))
        contents += [flat_bytes(tensor) for _, tensor in tensors]
    file = UnitFile(tuple(made))
    kept = spare.get(file.nbytes)
    memory = kept.pop() if kept else aligned(file.nbytes)
    at = len(file.header)
    content: Any = memory.numpy()
    content[:at] = memoryview(file.header)
    for flat in contents:
        memory[at : at + flat.numel()] = flat
        at += flat.numel()
    return _CopiedFile(writer, file, memory)


def _hashed(copied: _CopiedFile) -> UnitFile:
    content: Any = copied.memory.numpy()
    units = [
        replace(unit, digest=block_digest(content[at : at + unit.kind.nbytes]))
        for unit, at in zip(copied.file.units, copied.file.offsets, strict=False)
    ]
    return UnitFile(tuple(units))
