"""A copy of the state in host memory that is used again and again: what a checkpoint costs the
training loop.

- A snapshot is the whole state, on every member. So any survivor can finish a checkpoint, and each
  computes the digest of all of it; the price is host memory for one more state per worker.
- The memory is laid out as the parts will be in the store (layout.py), so nothing is copied again
  to be written.
- `take` launches copies; `manifest` waits for them and hashes, and belongs into the background.
  Between two snapshots of the same tensors nothing is allocated.
- Of a device's state the first snapshot is a slower one, into memory that the device does not know;
  it is registered (`register`, in the background) for those that follow. See device/host_copies.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from elastic_dp.checkpoint.commit_record import Manifest, block_digest
from elastic_dp.checkpoint.encoding import NamedTensor, encode
from elastic_dp.checkpoint.layout import (
    ROOM_ALIGNED_TO,
    Layout,
    Part,
    Piece,
    TensorSpec,
    flat_bytes,
)
from elastic_dp.device.host_copies import HostCopies


class Snapshot:
    """The newest copy of the state. One thread takes; others read until it is released."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.step = -1
        self._copies = HostCopies() if copies is None else copies
        self._on_device = self._registered = False  # of the present memory
        self._room = threading.Lock()  # while that is replaced, or registered
        self._layout = Layout.of([])
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[Any, ...]] = []
        # For each piece of a tensor, a view of the memory, and what goes there (end = -1: the
        # tensor as it is).
        self._targets: list[torch.Tensor] = []
        self._sources: list[Piece] = []
        self._tree: Any = None
        self._manifest: Manifest | None = None
        self._hashing = threading.Lock()

    @torch.no_grad()
    def take(self, step: int, tree: Any) -> None:
        """Copy the tree. It may change again when this returns. Raises StateError, and then holds
        what it held."""
        encoded, tensors = encode(tree)
        self._manifest = None
        kinds = [(name, t.dtype, t.shape, t.stride(), t.device) for name, t in tensors]
        if kinds != self._kinds:
            self._make_room(tensors)
            self._kinds = kinds
        self.step, self._tree = step, encoded
        self._copy([tensor for _, tensor in tensors])

    def register(self) -> None:
        """For the snapshots after the first one, where the state is on a device."""
        with self._room:
            if self._on_device and not self._registered:
                self._registered = True
                self._copies.register(self._memory)

    @property
    def copied_s(self) -> float:
        """For how long the device copied, beside what `take` itself took; known with the
        manifest."""
        return self._copies.copied_s

    def close(self) -> None:
        """Nothing is taken or read any more."""
        with self._room:
            self._copies.unregister()

    def manifest(self, executor: Executor | None = None) -> Manifest:
        """What was taken, with the digests of its blocks; computed once, over several threads if
        there are any."""
        with self._hashing:
            if self._manifest is None:
                self._copies.wait()
                blocks = range(self._layout.blocks)
                digests = (executor.map if executor else map)(self._digest, blocks)
                self._manifest = Manifest(self.step, self._tree, self._layout, tuple(digests))
            return self._manifest

    def part(self, part: Part) -> memoryview:
        """The part as a file, header included. Copies nothing."""
        content: Any = self._memory.numpy()
        return memoryview(content)[part.at : part.at + part.nbytes]

    def _digest(self, block: int) -> str:
        start, end = self._layout.block_span(block)
        at = self._layout.host_at(start)
        return block_digest(self._memory.numpy()[at : at + end - start])

    def _make_room(self, tensors: Sequence[NamedTensor]) -> None:
        self._kinds, self._targets, self._sources = [], [], []
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
        layout = Layout.of(specs)
        if layout.host_bytes > self._memory.numel():
            with self._room:
                self._copies.unregister()
                self._memory = torch.empty(0, dtype=torch.uint8)  # not two of them at once
                self._memory = _aligned(layout.host_bytes)
                self._registered = False
        self._on_device = any(spec.device != "cpu" for spec in specs)
        self._layout = layout
        memory = self._memory.numpy()
        for part in layout.parts:
            memory[part.at : part.data_at] = memoryview(part.header)
        for piece in layout.pieces:
            spec, at = specs[piece.slot], layout.host_at(piece.at)
            room = self._memory[at : at + piece.end - piece.start]
            same = tensors[piece.slot].tensor.is_contiguous() or spec.stride is not None
            whole = piece.end - piece.start == spec.nbytes and same
            self._targets.append(spec.view(room) if whole else room)
            self._sources.append(piece._replace(end=-1) if whole else piece)

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        sources = [
            tensors[slot] if end == -1 else flat_bytes(tensors[slot])[start:end]
            for slot, start, end, _ in self._sources
        ]
        self._copies.copy(self._targets, sources)


def _aligned(nbytes: int) -> torch.Tensor:
    room = torch.empty(nbytes + ROOM_ALIGNED_TO, dtype=torch.uint8)
    first = -room.data_ptr() % ROOM_ALIGNED_TO
    return room[first : first + nbytes]
