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
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from elastic_dp.checkpoint.codec import NamedTensor, encode
from elastic_dp.checkpoint.commit_record import Manifest, block_digest, block_digester
from elastic_dp.checkpoint.layout import Layout, Part, Piece, TensorSpec, flat_bytes
from elastic_dp.checkpoint.snapshot_memory import SnapshotMemory
from elastic_dp.device.host_copies import HostCopies


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
