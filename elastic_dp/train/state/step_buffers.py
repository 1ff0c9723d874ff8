"""Buffers of the model within a step: every virtual worker starts from the same ones.

A copy of all buffers as of the last commit is kept. What a leaf wrote (seen by identity, by where
the memory is, by tensor version, and, for small buffers, bit by bit, since batch normalisation and
`buffer.data.copy_` write without raising the version) is saved and undone before the next leaf, and
undone for good when the step is aborted. Large buffers are compared bit by bit in the micro-batch
that is run before the first step, and always where that one wrote without raising the version. At
the end

- a float buffer that some leaf changed becomes the mean over all leaves that contributed, added up
  along the tree of virtual workers;
- `num_batches_tracked`, the count of torch's batch normalisation, becomes the largest of them: each
  leaf begins from the same count, so a step counts once where any leaf used the module, as it does
  where all of them used it. (A sum would count a step V times, and a cumulative average, which
  divides by the count, would give it a V-th of its weight.)
- any other buffer of integers or booleans, and a module's extra state (`get_extra_state`), must be
  the same on all.

Buffers that share memory (the same tensor under two names, a view of another one, an expanded one)
are one piece of memory here, so what is undone and combined is each element once. One that lies in
the memory of a parameter belongs to that parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from elastic_dp.checkpoint.extra_state import extra_states
from elastic_dp.distributed.reduction_tree import Node, middle
from elastic_dp.errors import ModelError
from elastic_dp.train.state.weight_comparison import INTEGERS

_COMPARED_NUMEL = 1 << 16  # up to this size a buffer is always compared bit by bit
_COUNT = "num_batches_tracked"
_LENGTH_BYTES = 8

# What a leaf left in a piece of memory, or in a module's extra state.
_Value = torch.Tensor | bytes


@dataclass(frozen=True, slots=True)
class _BufferSlot:
    """Where a buffer lives, so that one that was assigned anew is seen and put back."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.module._buffers[self.key]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What one or several buffers hold. `content`: each of its elements once."""

    slots: tuple[_BufferSlot, ...]
    tensors: tuple[torch.Tensor, ...]  # of these places
    homes: tuple[torch.Tensor, ...]  # they see the memory in which the tensors were at first
    content: torch.Tensor

    @property
    def replaced(self) -> bool:
        """Whether another tensor is in a slot, or a tensor is elsewhere in memory (`buffer.data =
        …`)."""
        return any(
            slot.tensor is not tensor or tensor.data_ptr() != home.data_ptr()
            for slot, tensor, home in zip(self.slots, self.tensors, self.homes, strict=True)
        )

    def put_back(self) -> None:
        for slot, tensor, home in zip(self.slots, self.tensors, self.homes, strict=True):
            if tensor.data_ptr() != home.data_ptr():
                tensor.data = home
            slot.module._buffers[slot.key] = tensor

    @property
    def names(self) -> str:
        return " and ".join(repr(slot.name) for slot in self.slots)

    @property
    def version(self) -> int:
        if len(self.tensors) == 1:
            return self.tensors[0]._version
        return sum(tensor._version for tensor in self.tensors)

    @property
    def is_count(self) -> bool:
        return all(slot.key == _COUNT for slot in self.slots)


class StepBuffers:
    """The buffers of one model. Raises ModelError for those that share memory in a way that is not
    kept."""

    def __init__(self, model: nn.Module) -> None:
        self._own = list(_memories(model))
        self._committed = [memory.content.detach().clone() for memory in self._own]
        self._bits = [_bits(memory.content) for memory in self._own]
        self._committed_bits = [_bits(committed) for committed in self._committed]
        self._compared = [memory.content.numel() <= _COMPARED_NUMEL for memory in self._own]
        self._versions = [memory.version for memory in self._own]
        self._extra = extra_states(model)
        self._committed_extra = [extra.read() for extra in self._extra]
        # virtual worker -> what it changed, by number; extra state is numbered behind the buffers
        self._leaves: dict[int, dict[int, _Value]] = {}

    def reload(self) -> None:
        """Other code (a state transfer) has written the buffers: these are the committed ones
        now."""
        for memory, committed in zip(self._own, self._committed, strict=True):
            committed.copy_(memory.content)
        self._leaves.clear()
        self._versions = [memory.version for memory in self._own]
        self.take_extra_state()

    def take_extra_state(self) -> None:
        """As the loop's body left it: that may change it, as it may what is given as `state=`."""
        self._committed_extra = [extra.read() for extra in self._extra]

    def after_leaf(self, virtual_worker: int, contributes: bool) -> None:
        """Save what this leaf wrote, and undo it."""
        changed = self._undo()
        if contributes:
            self._leaves[virtual_worker] = changed

    def undo(self, *, tried: bool = False) -> None:
        """Back to the committed buffers; nothing of the step remains. `tried`: it was the
        micro-batch before the first step, in which large buffers show how they are written."""
        if tried:
            for i in range(len(self._own)):
                self._compared[i] = self._compared[i] or (not self._written(i) and self._differs(i))
        self._undo()
        self._leaves.clear()

    def changed(self) -> bytes:
        """One byte per buffer and extra state: whether some leaf of mine wrote it."""
        flags = bytearray(len(self._own) + len(self._extra))
        for leaf in self._leaves.values():
            for i in leaf:
                flags[i] = 1
        return bytes(flags)

    def payload(self, changed: Sequence[int]) -> bytes:
        """My leaves' values of what any leaf changed: [virtual worker, bytes of each]…"""
        committed: list[_Value] = [*self._committed, *self._committed_extra]
        parts = []
        for v, leaf in self._leaves.items():
            parts.append(v.to_bytes(4, "little"))
            for i in changed:
                value = leaf.get(i, committed[i])
                if isinstance(value, bytes):
                    parts += [len(value).to_bytes(_LENGTH_BYTES, "little"), value]
                else:
                    flat = value.detach().cpu().contiguous().view(-1)
                    parts.append(flat.view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def combine(
        self, payloads: Sequence[bytes], changed: Sequence[int], virtual_workers: int
    ) -> dict[int, _Value]:
        """The new value of all that was changed, from the payloads of all ranks. Raises
        ModelError."""
        leaves: dict[int, dict[int, _Value]] = {}
        for payload in payloads:
            at = 0
            while at < len(payload):
                v = int.from_bytes(payload[at : at + 4], "little")
                at += 4
                leaves[v] = {}
                for i in changed:
                    if i >= len(self._own):
                        begin = at + _LENGTH_BYTES
                        at = begin + int.from_bytes(payload[at:begin], "little")
                        leaves[v][i] = payload[begin:at]
                        continue
                    like = self._committed[i]
                    size = like.numel() * like.element_size()
                    raw = bytearray(payload[at : at + size])
                    flat = torch.frombuffer(raw, dtype=like.dtype) if size else torch.empty(0)
                    leaves[v][i] = flat.view(like.shape)
                    at += size
        return {
            i: self._combined(i, {v: leaf[i] for v, leaf in leaves.items()}, virtual_workers)
            for i in changed
        }

    @torch.no_grad()
    def commit(self, values: Mapping[int, _Value]) -> None:
        """The step is committed: these are the new buffers."""
        for i, value in values.items():
            if isinstance(value, bytes):
                self._extra[i - len(self._own)].write(value)
                self._committed_extra[i - len(self._own)] = value
            else:
                self._own[i].content.copy_(value)
                self._committed[i].copy_(value)
                self._versions[i] = self._own[i].version
        self._leaves.clear()

    def written_outside(self) -> str | None:
        """The name of a buffer that differs from the committed one before a step has begun."""
        for i, memory in enumerate(self._own):
            if memory.replaced or self._written(i):
                return memory.slots[0].name
        return None

    # ------------------------------------------------------------------------------ private

    def _written(self, i: int) -> bool:
        if self._own[i].version != self._versions[i]:
            return True
        return self._compared[i] and self._differs(i)

    def _differs(self, i: int) -> bool:
        return not torch.equal(self._bits[i], self._committed_bits[i])

    @torch.no_grad()
    def _undo(self) -> dict[int, _Value]:
        changed: dict[int, _Value] = {}
        for i, own in enumerate(self._own):
            replaced = own.replaced
            if not replaced and not self._written(i):
                continue
            changed[i] = _assigned(own) if replaced else own.content.detach().clone()
            own.put_back()
            own.content.copy_(self._committed[i])
            self._versions[i] = own.version
        for i, extra in enumerate(self._extra):
            present = extra.read()
            if present != self._committed_extra[i]:
                changed[len(self._own) + i] = present
                extra.write(self._committed_extra[i])
        return changed

    def _combined(self, i: int, copies: Mapping[int, _Value], virtual_workers: int) -> _Value:
        if i >= len(self._own):
            return self._agreed_extra(i - len(self._own), copies)
        tensors = {v: copy for v, copy in copies.items() if isinstance(copy, torch.Tensor)}
        first = next(iter(tensors.values()))
        if not (first.is_floating_point() or first.is_complex()):
            return self._agreed(i, tensors)

        def total(node: Node) -> torch.Tensor | None:
            if node[1] - node[0] == 1:
                copy = tensors.get(node[0])
                # Of 16 or 8 bits a sum may overflow where the mean does not; and float8 is not
                # added up at all.
                return copy.float() if copy is not None and copy.element_size() < 4 else copy
            split = middle(node)
            left, right = total((node[0], split)), total((split, node[1]))
            if left is None or right is None:
                return right if left is None else left
            return left + right

        summed = total((0, virtual_workers))
        assert summed is not None
        return (summed / len(tensors)).to(first.dtype)

    def _agreed(self, i: int, copies: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Of integers or booleans."""
        own, first = self._own[i], next(iter(copies.values()))
        if own.is_count:
            return reduce(torch.maximum, copies.values())
        for v, copy in copies.items():
            if not torch.equal(copy, first):
                raise ModelError(
                    f"buffer {own.names} ({first.dtype}) differs between virtual workers "
                    f"after a step ({first.flatten()[:4].tolist()} and, on virtual worker {v}, "
                    f"{copy.flatten()[:4].tolist()}); only float buffers are averaged, and "
                    f"of {_COUNT} the largest "
                    "is taken. Make it a float buffer, or change it in the loop's body"
                )
        return first

    def _agreed_extra(self, i: int, copies: Mapping[int, _Value]) -> _Value:
        first = next(iter(copies.values()))
        for v, copy in copies.items():
            if copy != first:
                raise ModelError(
                    f"the extra state {self._extra[i].name!r} (get_extra_state) differs on "
                    f"virtual worker {v} after a step: "
                    "forward may change it only in a way that does not depend on the rows, "
                    "as it cannot be averaged. Keep "
                    "what depends on rows in a float buffer"
                )
        return first


# --------------------------------------------------------------------------------------- memory


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: they compare where numbers are NaN, 0.0 or -0.0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.element_size()])


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, each once: one of those that `expand` made of it."""
    shape = [
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    strides = [max(1, stride) for stride in tensor.stride()]
    return tensor.as_strided(shape, strides) if tensor.numel() else tensor


def copy_values(mine: torch.Tensor, given: torch.Tensor) -> None:
    """Copy the values of `given`, also into a tensor that `expand` made, of which one element is
    many."""
    if mine.data_ptr() == given.data_ptr():
        return
    for dim, (size, stride) in enumerate(zip(mine.shape, mine.stride(), strict=True)):
        if stride == 0 and size > 1:
            mine, given = mine.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    mine.copy_(given)


def _memories(model: nn.Module) -> Iterable[_Memory]:
    """The memory of the buffers, in the order of their first names."""
    held: dict[int, list[tuple[int, _BufferSlot, torch.Tensor]]] = {}  # by the tensor's identity
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                slot = _BufferSlot(f"{prefix}.{key}" if prefix else key, module, key)
                held.setdefault(id(buffer), []).append((len(held), slot, buffer))
    found: dict[int, _Memory] = {}
    buffers = [entries[0][2] for entries in held.values()]
    for together in _overlapping([*model.parameters(), *buffers]):
        if any(isinstance(tensor, nn.Parameter) for tensor in together):
            continue
        inside = [entry for tensor in together for entry in held[id(tensor)]]
        (first, *_), slots, tensors = zip(*sorted(inside, key=lambda entry: entry[0]), strict=True)
        homes = tuple(tensor.detach() for tensor in tensors)
        found[first] = _Memory(slots, tensors, homes, _content(slots, tensors))
    return [found[first] for first in sorted(found)]


def _overlapping(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """In groups: all of a group lie, one after the other, in memory that overlaps."""
    empty = [tensor for tensor in tensors if tensor.numel() == 0]
    yield from ([tensor] for tensor in {id(tensor): tensor for tensor in empty}.values())
    full = [tensor for tensor in tensors if tensor.numel()]
    group: list[torch.Tensor] = []
    until = ("", 0)
    for tensor in sorted(full, key=_first):
        if group and _first(tensor) >= until:
            yield group
            group = []
        until = max(until, _last(tensor)) if group else _last(tensor)
        group.append(tensor)
    if group:
        yield group


def _first(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()


def _last(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr() + _reach(tensor) * tensor.element_size()


def _reach(tensor: torch.Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _content(slots: Sequence[_BufferSlot], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = min(tensors, key=_first)
    if all(tensor is first for tensor in tensors):
        return _without_repeats(first.detach())
    for slot, tensor in zip(slots, tensors, strict=True):
        stored = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if tensor.dtype != first.dtype or not stored:
            raise ModelError(
                f"buffer {slot.name!r} ({tensor.dtype}) shares memory with {slots[0].name!r} "
                f"({tensors[0].dtype}) in "
                "another dtype or by way of NumPy. Register one of them, and make the other "
                "from it in forward"
            )
    size = max(_last(tensor)[1] for tensor in tensors) - first.data_ptr()
    elements = size // first.element_size()
    return first.detach().as_strided((elements,), (1,), first.storage_offset())


def _assigned(own: _Memory) -> torch.Tensor:
    """The value of a buffer that a leaf assigned anew. Raises ModelError."""
    if len(own.slots) > 1:
        raise ModelError(
            f"buffers {own.names} share memory, and one of them was assigned anew in a step; "
            "write into it "
            "(copy_, add_), or register a copy of the other"
        )
    slot, tensor = own.slots[0], own.homes[0]
    present = slot.tensor
    if present is None or present.shape != tensor.shape or present.dtype != tensor.dtype:
        raise ModelError(
            f"buffer {slot.name!r} changed its shape or dtype in a step, or was removed"
        )
    value = present.detach()
    for dim, (size, whole) in enumerate(zip(own.content.shape, tensor.shape, strict=True)):
        if size != whole:
            value = value.narrow(dim, 0, 1)
    if value.shape != present.shape and not torch.equal(value.expand_as(present), present):
        raise ModelError(
            f"buffer {slot.name!r} is an expanded tensor, of which many elements are one, "
            "and was assigned others in a "
            "step; register it with .clone()"
        )
    return torch.empty_like(own.content).copy_(value)
