"""Buffers of the model within a step: every virtual worker starts from the same ones.

A copy of all buffers as of the last commit is kept. What a leaf wrote (seen by identity, by tensor version, and, for
small buffers, by value, since batch normalisation writes without raising the version) is put aside and undone before the next leaf, and undone for good when the step is aborted. At the end, a float
buffer that some leaf changed becomes the mean over all leaves that contributed, added up along the tree of
virtual workers; a buffer of integers or booleans must be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elastic_dp.distributed.tree import Node, middle
from elastic_dp.errors import ModelError

_COMPARED_NUMEL = 1 << 16  # up to this size a buffer is compared by value


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a buffer lives, so that one that was assigned anew is seen and put back."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        return self.module._buffers[self.key]  # type: ignore[return-value]


class StepBuffers:
    """The buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        seen: set[torch.Tensor] = set()
        self._places: list[_Place] = []
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer not in seen:
                    seen.add(buffer)
                    self._places.append(_Place(f"{prefix}.{key}" if prefix else key, module, key))
        self._own = [place.tensor for place in self._places]
        self._committed = [tensor.detach().clone() for tensor in self._own]
        self._versions = [tensor._version for tensor in self._own]
        self._leaves: dict[int, dict[int, torch.Tensor]] = {}  # virtual worker -> changed buffers

    def __len__(self) -> int:
        return len(self._places)

    def reload(self) -> None:
        """After other code (a hand-over) wrote the buffers: these are the committed ones now."""
        for tensor, committed in zip(self._own, self._committed, strict=True):
            committed.copy_(tensor)
        self._leaves.clear()
        self._versions = [tensor._version for tensor in self._own]

    def after_leaf(self, virtual_worker: int, contributes: bool) -> None:
        """Put aside what this leaf wrote, and undo it."""
        changed = self._undo()
        if contributes:
            self._leaves[virtual_worker] = changed

    def undo(self) -> None:
        """Back to the committed buffers; nothing of the step remains."""
        self._undo()
        self._leaves.clear()

    def changed(self) -> bytes:
        """One byte per buffer: whether some leaf of mine wrote it."""
        flags = bytearray(len(self._places))
        for leaf in self._leaves.values():
            for i in leaf:
                flags[i] = 1
        return bytes(flags)

    def payload(self, changed: Sequence[int]) -> bytes:
        """My leaves' values of the buffers that any leaf changed: [virtual worker, bytes of each]…"""
        parts = []
        for v, leaf in self._leaves.items():
            parts.append(v.to_bytes(4, "little"))
            for i in changed:
                tensor = leaf.get(i, self._committed[i])
                flat = tensor.detach().cpu().contiguous().view(-1)
                parts.append(flat.view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def combine(
        self, payloads: Sequence[bytes], changed: Sequence[int], virtual_workers: int
    ) -> dict[int, torch.Tensor]:
        """The new value of every changed buffer, from the payloads of all ranks. Raises ModelError."""
        leaves: dict[int, dict[int, torch.Tensor]] = {}
        for payload in payloads:
            at = 0
            while at < len(payload):
                v = int.from_bytes(payload[at : at + 4], "little")
                at += 4
                leaves[v] = {}
                for i in changed:
                    like = self._committed[i]
                    size = like.numel() * like.element_size()
                    raw = bytearray(payload[at : at + size])
                    flat = torch.frombuffer(raw, dtype=like.dtype) if size else torch.empty(0)
                    leaves[v][i] = flat.view(like.shape)
                    at += size
        return {i: self._combined(i, leaves, virtual_workers) for i in changed}

    @torch.no_grad()
    def commit(self, values: Mapping[int, torch.Tensor]) -> None:
        """The step is committed: these are the new buffers."""
        for i, value in values.items():
            self._own[i].copy_(value)
            self._committed[i].copy_(value)
            self._versions[i] = self._own[i]._version
        self._leaves.clear()

    def written_outside(self) -> str | None:
        """The name of a buffer that differs from the committed one before a step has begun."""
        for i, place in enumerate(self._places):
            if place.tensor is not self._own[i] or self._written(i):
                return place.name
        return None

    # ------------------------------------------------------------------------------ private

    def _written(self, i: int) -> bool:
        own = self._own[i]
        if own._version != self._versions[i]:
            return True
        return own.numel() <= _COMPARED_NUMEL and not torch.equal(own, self._committed[i])

    @torch.no_grad()
    def _undo(self) -> dict[int, torch.Tensor]:
        changed: dict[int, torch.Tensor] = {}
        for i, (place, own) in enumerate(zip(self._places, self._own, strict=True)):
            present = place.tensor
            if present is own and not self._written(i):
                continue
            if present.shape != own.shape or present.dtype != own.dtype:
                raise ModelError(f"buffer {place.name!r} changed its shape or dtype in a step")
            changed[i] = present.detach().clone()
            place.module._buffers[place.key] = own
            own.copy_(self._committed[i])
            self._versions[i] = own._version
        return changed

    def _combined(
        self, i: int, leaves: Mapping[int, Mapping[int, torch.Tensor]], virtual_workers: int
    ) -> torch.Tensor:
        copies = {v: leaf[i] for v, leaf in leaves.items()}
        first = next(iter(copies.values()))
        if not (first.is_floating_point() or first.is_complex()):
            for v, copy in copies.items():
                if not torch.equal(copy, first):
                    raise ModelError(
                        f"buffer {self._places[i].name!r} ({first.dtype}) differs between virtual workers "
                        f"after a step ({first.flatten()[:4].tolist()} and, on virtual worker {v}, "
                        f"{copy.flatten()[:4].tolist()}); only float buffers are averaged"
                    )
            return first

        def total(node: Node) -> torch.Tensor | None:
            if node[1] - node[0] == 1:
                return copies.get(node[0])
            split = middle(node)
            left, right = total((node[0], split)), total((split, node[1]))
            if left is None or right is None:
                return right if left is None else left
            return left + right

        summed = total((0, virtual_workers))
        assert summed is not None
        return summed / len(copies)
