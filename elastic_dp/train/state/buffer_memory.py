"""The memory in which a model's buffers lie. Buffers that share memory (one tensor under two names,
a view, an expanded tensor) are one piece of it, and each of its elements is there once. A buffer in
the memory of a parameter belongs to that parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elastic_dp.distributed.local_shards import local_of
from elastic_dp.errors import ModelError
from elastic_dp.train.state.weight_comparison import INTEGERS

COUNT = "num_batches_tracked"  # of torch's batch normalisation


@dataclass(frozen=True, slots=True)
class _BufferSlot:
    """Where a module holds a buffer, so that an assignment to it is detected and undone."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.module._buffers[self.key]


@dataclass(frozen=True, slots=True)
class BufferMemory:
    """The memory of one or several buffers. `content` holds each element once."""

    slots: tuple[_BufferSlot, ...]
    tensors: tuple[torch.Tensor, ...]  # of these slots
    homes: tuple[torch.Tensor, ...]  # views of the tensors' original memory
    content: torch.Tensor

    @property
    def replaced(self) -> bool:
        """Whether a slot holds another tensor, or a tensor has other memory (`buffer.data = …`)."""
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
        return all(slot.key == COUNT for slot in self.slots)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(bits_of(one), bits_of(other)))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the memory as integers, which compare equal for NaN and tell 0.0 from
    -0.0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.element_size()])


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view with each element once, without the repetitions that `expand` made."""
    shape = [
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    strides = [max(1, stride) for stride in tensor.stride()]
    return tensor.as_strided(shape, strides) if tensor.numel() else tensor


def copy_values(mine: torch.Tensor, given: torch.Tensor) -> None:
    """Copies the values of `given` to `mine`, including the case that `mine` is an expanded tensor.

    One element of memory is many elements of an expanded tensor.
    """
    if mine.data_ptr() == given.data_ptr():
        return
    for dim, (size, stride) in enumerate(zip(mine.shape, mine.stride(), strict=True)):
        if stride == 0 and size > 1:
            mine, given = mine.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    mine.copy_(given)


def buffer_memories(model: nn.Module) -> Iterable[BufferMemory]:
    """Returns the memory of the buffers, in the order of their first names."""
    held: dict[int, list[tuple[int, _BufferSlot, torch.Tensor]]] = {}  # by the tensor's identity
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                slot = _BufferSlot(f"{prefix}.{key}" if prefix else key, module, key)
                held.setdefault(id(buffer), []).append((len(held), slot, buffer))
    found: dict[int, BufferMemory] = {}
    buffers = [entries[0][2] for entries in held.values()]
    for together in _overlapping([*model.parameters(), *buffers]):
        if any(isinstance(tensor, nn.Parameter) for tensor in together):
            continue
        inside = [entry for tensor in together for entry in held[id(tensor)]]
        (first, *_), slots, tensors = zip(*sorted(inside, key=lambda entry: entry[0]), strict=True)
        homes = tuple(tensor.detach() for tensor in tensors)
        found[first] = BufferMemory(slots, tensors, homes, _content(slots, tensors))
    return [found[first] for first in sorted(found)]


def _overlapping(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Yields groups of tensors whose memory overlaps."""
    empty = [tensor for tensor in tensors if local_of(tensor).numel() == 0]
    yield from ([tensor] for tensor in {id(tensor): tensor for tensor in empty}.values())
    full = [tensor for tensor in tensors if local_of(tensor).numel()]
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
    return str(tensor.device), local_of(tensor).data_ptr()


def _last(tensor: torch.Tensor) -> tuple[str, int]:
    tensor = local_of(tensor)
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
                f"({tensors[0].dtype}) in another dtype or through NumPy. Register one of them, "
                "and make the other from it in forward"
            )
    size = max(_last(tensor)[1] for tensor in tensors) - first.data_ptr()
    elements = size // first.element_size()
    return first.detach().as_strided((elements,), (1,), first.storage_offset())


def assigned_value(own: BufferMemory) -> torch.Tensor:
    """Returns the value that a leaf assigned to a buffer. Raises ModelError."""
    if len(own.slots) > 1:
        raise ModelError(
            f"buffers {own.names} share memory, and one of them was reassigned in a step; "
            "write into it (copy_, add_), or register a copy of the other"
        )
    slot, tensor = own.slots[0], own.homes[0]
    present = slot.tensor
    if present is None or present.shape != tensor.shape or present.dtype != tensor.dtype:
        now = "nothing" if present is None else f"{tuple(present.shape)}, {present.dtype}"
        raise ModelError(
            f"buffer {slot.name!r} ({tuple(tensor.shape)}, {tensor.dtype}) was replaced in a step "
            f"by one of another shape or dtype ({now}). Give it its last shape and dtype before "
            "the loop: run a batch with the longest rows, under torch.autocast if the loop uses "
            "precision=, or assign it with .to(dtype)"
        )
    value = present.detach()
    for dim, (size, whole) in enumerate(zip(own.content.shape, tensor.shape, strict=True)):
        if size != whole:
            value = value.narrow(dim, 0, 1)
    if value.shape != present.shape and not torch.equal(value.expand_as(present), present):
        raise ModelError(
            f"buffer {slot.name!r} is an expanded tensor, whose elements share memory, and was "
            "assigned different elements in a step; register it with .clone()"
        )
    return torch.empty_like(own.content).copy_(value)
