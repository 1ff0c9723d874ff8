"""The model's buffers within a step: every virtual worker starts from the same values.

A copy of all buffers is kept as of the last commit. What a leaf (one virtual worker's micro-batch)
writes is saved and undone before the next leaf, and discarded if the step is aborted. A write is
detected by the tensor's identity, its memory address and its version. Small buffers are also
compared bit by bit, since batch normalisation and `buffer.data.copy_` write without raising the
version. Large buffers are compared bit by bit in the trial micro-batch before the first step, and
in every step if that one wrote to them without raising the version. At the end of a step:

- A float buffer that some leaf changed becomes the mean over all leaves that contributed, added up
  along the tree of virtual workers.
- `num_batches_tracked`, the count of torch's batch normalisation, becomes the largest value. Each
  leaf starts from the same count, so a step counts once if any leaf used the module. (A sum would
  count a step V times, and a cumulative average, which divides by the count, would give it a V-th
  of its weight.)
- Any other integer or boolean buffer, and a module's extra state (`get_extra_state`), must be the
  same on all leaves.

Buffers that share memory (one tensor under two names, a view, an expanded tensor) are treated as
one piece of memory, so each element is undone and combined once. A buffer in the memory of a
parameter belongs to that parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from elastic_dp.checkpoint.extra_state import extra_states
from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.reduction_tree import Node, middle
from elastic_dp.errors import LoopError, ModelError
from elastic_dp.train.state.unread_buffers import BODY, UnreadBuffers, changed_by_body
from elastic_dp.train.state.weight_comparison import INTEGERS

_COMPARED_NUMEL = 1 << 16  # up to this size a buffer is always compared bit by bit
_COUNT = "num_batches_tracked"
_LENGTH_BYTES = 8

# What a leaf left in a piece of memory, or in a module's extra state.
_Value = torch.Tensor | bytes


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
class _Memory:
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
        return all(slot.key == _COUNT for slot in self.slots)


class ModuleBuffers:
    """The buffers of one model. Raises ModelError for unsupported ways of sharing memory."""

    def __init__(self, model: nn.Module) -> None:
        self._own = list(_memories(model))
        self._committed = [memory.content.detach().clone() for memory in self._own]
        self._bits = [_bits(memory.content) for memory in self._own]
        self._committed_bits = [_bits(committed) for committed in self._committed]
        self._compared = [memory.content.numel() <= _COMPARED_NUMEL for memory in self._own]
        self._versions = [memory.version for memory in self._own]
        self._extra = extra_states(model)
        self._committed_extra = [extra.read() for extra in self._extra]
        # virtual worker -> what it changed, by number; extra state is numbered after the buffers
        self._leaves: dict[int, dict[int, _Value]] = {}
        # On a device, what each leaf left, until it is read; see `unread`.
        self._later = any(accelerator_of(m.content.device).asynchronous for m in self._own)
        self._unread: dict[int, UnreadBuffers] = {}
        self._committed_on_host = self._read_committed()

    def _read_committed(self) -> list[torch.Tensor]:
        if not self._later:
            return self._committed
        return [committed.cpu().clone() for committed in self._committed]

    def begin(self) -> None:
        """Begins a step. On a device, takes the buffers as the loop body left them, to be read with
        those of the leaves: the body must not change them."""
        if self._later:
            self._unread = {BODY: self._take_later()}

    def unread(self) -> list[torch.Tensor]:
        """Returns what `take` needs on the host: the buffers that a leaf may have written.

        To compare each of them on the device, the host would have to wait for each.
        """
        return [t for leaf in self._unread.values() for t in leaf.tensors.values()]

    def take(self, read: Sequence[torch.Tensor]) -> None:
        """Takes the values of `unread`, in its order. Raises LoopError."""
        values = iter(read)
        for v, leaf in self._unread.items():
            changed: dict[int, _Value] = {}
            for i in leaf.tensors:
                value = next(values)
                if i in leaf.written or not _same_bits(value, self._committed_on_host[i]):
                    changed[i] = value
            if v != BODY:
                self._leaves[v] = changed | leaf.extra
            elif changed:
                raise LoopError(changed_by_body(self._own[min(changed)].slots[0].name))
        self._unread = {}

    def reload(self) -> None:
        """Takes the present buffers, which a state transfer has written, as the committed ones."""
        for memory, committed in zip(self._own, self._committed, strict=True):
            committed.copy_(memory.content)
        self._committed_on_host = self._read_committed()
        self._leaves.clear()
        self._versions = [memory.version for memory in self._own]
        self.take_extra_state()

    def take_extra_state(self) -> None:
        """Takes the present extra state as committed: the loop body may change it, like
        `state=`."""
        self._committed_extra = [extra.read() for extra in self._extra]

    def after_leaf(self, virtual_worker: int, contributes: bool) -> None:
        """Saves what this leaf wrote, and undoes it."""
        if self._later:
            left = self._take_later()
            if contributes:
                self._unread[virtual_worker] = left
            return
        changed = self._undo()
        if contributes:
            self._leaves[virtual_worker] = changed

    def undo(self, *, tried: bool = False) -> None:
        """Restores the committed buffers and discards the step.

        `tried`: the trial micro-batch before the first step just ran, which shows how large buffers
        are written.
        """
        if tried:
            for i in range(len(self._own)):
                self._compared[i] = self._compared[i] or (not self._written(i) and self._differs(i))
        if self._later:
            self._take_later()
        else:
            self._undo()
        self._unread.clear()
        self._leaves.clear()

    def changed(self) -> bytes:
        """Returns a byte per buffer and extra state: 1 if a leaf of this worker wrote to it."""
        flags = bytearray(len(self._own) + len(self._extra))
        for leaf in self._leaves.values():
            for i in leaf:
                flags[i] = 1
        return bytes(flags)

    def payload(self, changed: Sequence[int]) -> bytes:
        """Returns this worker's values of everything that any leaf changed.

        The format is the virtual worker and the bytes of each value, for each leaf.
        """
        committed: list[_Value] = [*self._committed_on_host, *self._committed_extra]
        parts = []
        for v, leaf in self._leaves.items():
            parts.append(v.to_bytes(4, "little"))
            for i in changed:
                value = leaf.get(i, committed[i])
                if isinstance(value, bytes):
                    parts += [len(value).to_bytes(_LENGTH_BYTES, "little"), value]
                else:
                    flat = value.detach().contiguous().view(-1)
                    parts.append(flat.view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def combine(
        self, payloads: Sequence[bytes], changed: Sequence[int], virtual_workers: int
    ) -> dict[int, _Value]:
        """Returns the new value of everything that was changed, from the payloads of all ranks.

        Raises ModelError for values that must agree and do not.
        """
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
        """Makes these values the committed buffers."""
        for i, value in values.items():
            if isinstance(value, bytes):
                self._extra[i - len(self._own)].write(value)
                self._committed_extra[i - len(self._own)] = value
            else:
                # Without waiting for a device, which gets a copy of the value first.
                self._own[i].content.copy_(value, non_blocking=True)
                self._committed[i].copy_(value, non_blocking=True)
                if self._later:
                    self._committed_on_host[i].copy_(value)
                self._versions[i] = self._own[i].version
        self._leaves.clear()

    def written_outside(self) -> str | None:
        """Returns the name of a buffer that was written outside a step, or None."""
        for i, memory in enumerate(self._own):
            if memory.replaced or self._written(i):
                return memory.slots[0].name
        return None

    # ------------------------------------------------------------------------------ private

    def _written(self, i: int) -> bool:
        if self._own[i].version != self._versions[i]:
            return True
        # On a device the next step looks (`begin`), since the host would wait here.
        return self._compared[i] and not self._later and self._differs(i)

    def _differs(self, i: int) -> bool:
        return not torch.equal(self._bits[i], self._committed_bits[i])

    @torch.no_grad()
    def _take_later(self) -> UnreadBuffers:
        """Copies every buffer that may have been written, and restores it, on the device."""
        tensors, written = {}, set()
        for i, own in enumerate(self._own):
            replaced = own.replaced
            if replaced or own.version != self._versions[i]:
                written.add(i)
            elif not self._compared[i]:
                continue
            tensors[i] = _assigned(own) if replaced else own.content.detach().clone()
            own.put_back()
            own.content.copy_(self._committed[i])
            self._versions[i] = own.version
        return UnreadBuffers(tensors, written, self._undo_extra())

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
        return changed | self._undo_extra()

    def _undo_extra(self) -> dict[int, _Value]:
        changed: dict[int, _Value] = {}
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
                # A sum in 16 or 8 bits may overflow where the mean does not, and torch cannot add
                # float8.
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
        """Returns the common value of integer or boolean buffers, or the largest count."""
        own, first = self._own[i], next(iter(copies.values()))
        if own.is_count:
            return reduce(torch.maximum, copies.values())
        for v, copy in copies.items():
            if not torch.equal(copy, first):
                raise ModelError(
                    f"buffer {own.names} ({first.dtype}) differs between virtual workers "
                    f"after a step ({first.flatten()[:4].tolist()} and, on virtual worker {v}, "
                    f"{copy.flatten()[:4].tolist()}); only float buffers are averaged, and "
                    f"of {_COUNT} the largest is taken. Make it a float buffer, or change it in "
                    "the loop's body"
                )
        return first

    def _agreed_extra(self, i: int, copies: Mapping[int, _Value]) -> _Value:
        first = next(iter(copies.values()))
        for v, copy in copies.items():
            if copy != first:
                raise ModelError(
                    f"the extra state {self._extra[i].name!r} (get_extra_state) differs on "
                    f"virtual worker {v} after a step: forward may change it only in a way that "
                    "does not depend on the rows, as it cannot be averaged. Keep what depends on "
                    "rows in a float buffer"
                )
        return first


# --------------------------------------------------------------------------------------- memory


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(_bits(one), _bits(other)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
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


def _memories(model: nn.Module) -> Iterable[_Memory]:
    """Returns the memory of the buffers, in the order of their first names."""
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
    """Yields groups of tensors whose memory overlaps."""
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
                f"({tensors[0].dtype}) in another dtype or through NumPy. Register one of them, "
                "and make the other from it in forward"
            )
    size = max(_last(tensor)[1] for tensor in tensors) - first.data_ptr()
    elements = size // first.element_size()
    return first.detach().as_strided((elements,), (1,), first.storage_offset())


def _assigned(own: _Memory) -> torch.Tensor:
    """Returns the value that a leaf assigned to a buffer. Raises ModelError."""
    if len(own.slots) > 1:
        raise ModelError(
            f"buffers {own.names} share memory, and one of them was reassigned in a step; "
            "write into it (copy_, add_), or register a copy of the other"
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
            f"buffer {slot.name!r} is an expanded tensor, whose elements share memory, and was "
            "assigned different elements in a step; register it with .clone()"
        )
    return torch.empty_like(own.content).copy_(value)
