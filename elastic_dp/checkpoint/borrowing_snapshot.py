"""Snapshots of a state most of which nobody will change: it is not copied, but referred to.

Where the optimizer's state is sharded, it is put together for a checkpoint in memory that serves
nothing else. A copy of it would double that memory. So the snapshot keeps such tensors as they are,
copies the others, and puts a part or a block together when it is written or hashed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

from elastic_dp.checkpoint.commit_record import block_digest
from elastic_dp.checkpoint.encoding import encode
from elastic_dp.checkpoint.layout import Layout, Part, TensorSpec, flat_bytes
from elastic_dp.checkpoint.snapshot import Snapshot, aligned


class BorrowingSnapshot(Snapshot):
    """A snapshot that does not copy the tensors for which `is_lent` is true: they must not change.
    It is for states on the host."""

    def __init__(self, is_lent: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_lent = is_lent
        self._tensors: list[torch.Tensor] = []  # by slot
        self._starts: list[int] = []  # of the layout's pieces, in the line
        self._copied: dict[str, torch.Tensor] = {}  # by name: memory of its own

    def prepare(self, tree: Any) -> bool:
        """Allocates nothing."""
        return False

    @torch.no_grad()
    def take(self, step: int, tree: Any) -> None:
        """Copies what is not lent. Raises StateError if the tree cannot be encoded, and then keeps
        the previous snapshot."""
        encoded, tensors = encode(tree)
        self._manifest = None
        before, self._copied = self._copied, {}
        self._tensors = []
        for name, tensor in tensors:
            if not self._is_lent(tensor):
                tensor = self._copied[name] = _copy_into(before.pop(name, None), tensor)
            self._tensors.append(tensor)
        self._layout = Layout.of([TensorSpec.of(name, tensor) for name, tensor in tensors])
        self._starts = [piece.at for piece in self._layout.pieces]
        self.step, self._tree = step, encoded

    def forget(self) -> None:
        """Lets go of the snapshot, so that what was lent is free."""
        self.step, self._tree, self._manifest = -1, None, None
        self._tensors = []

    def part(self, part: Part) -> memoryview:
        """Returns the content of the part's file, header included, in new memory."""
        room = aligned(part.nbytes)
        content: Any = room.numpy()
        content[: len(part.header)] = memoryview(part.header)
        self._fill(room[len(part.header) :], part.start)
        return memoryview(content)

    def _digest(self, block: int) -> str:
        start, end = self._layout.block_span(block)
        room = torch.empty(end - start, dtype=torch.uint8)
        self._fill(room, start)
        return block_digest(room.numpy())

    @torch.no_grad()
    def _fill(self, room: torch.Tensor, start: int) -> None:
        """Writes the bytes of the line from `start` on into `room`."""
        pieces, end = self._layout.pieces, start + len(room)
        at = bisect_right(self._starts, start) - 1
        while at < len(pieces) and pieces[at].at < end:
            piece = pieces[at]
            first = max(start, piece.at)
            last = min(end, piece.at + piece.end - piece.start)
            offset = piece.start + first - piece.at
            source = flat_bytes(self._tensors[piece.slot])[offset : offset + last - first]
            room[first - start : last - start] = source
            at += 1


def _copy_into(memory: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    fits = memory is not None and (
        (memory.dtype, memory.shape, memory.stride())
        == (tensor.dtype, tensor.shape, tensor.stride())
    )
    return memory.copy_(tensor) if memory is not None and fits else tensor.detach().clone()
