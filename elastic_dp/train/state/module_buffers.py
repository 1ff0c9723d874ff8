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

Buffers that share memory (one tensor under two names, a view, an expanded tensor) are one piece of
it, which is undone and combined as one, and each of its elements is there once. A buffer in the
memory of a parameter belongs to that parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import msgpack
import torch
from torch import nn

from elastic_dp.checkpoint.codec import from_bytes, to_bytes
from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.distributed.reduction_tree import Node, middle
from elastic_dp.errors import LoopError, ModelError, StateError
from elastic_dp.train.state.module_attributes import ModuleAttributes
from elastic_dp.train.state.weight_comparison import INTEGERS

_COUNT = "num_batches_tracked"  # of torch's batch normalisation
_EXTRA = "_extra_state"  # the name that torch uses in a state_dict
_COMPARED_NUMEL = 1 << 16  # up to this size a buffer is always compared bit by bit

_BODY = -1  # instead of a virtual worker: the loop body

# What a leaf left in a piece of memory, or in a module's extra state.
_Value = torch.Tensor | bytes


@dataclass(frozen=True, slots=True)
class LeafBuffers:
    """What a leaf left, by number; extra state is numbered after the buffers. It has certainly
    written those in `written`. A device may have the others, which the host has not read yet."""

    values: Mapping[int, _Value]
    written: frozenset[int]
    is_read: bool = True

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        return {i: x for i, x in self.values.items() if isinstance(x, torch.Tensor)}


class ModuleBuffers:
    """The buffers of one model. Raises ModelError for unsupported ways of sharing memory."""

    def __init__(self, model: nn.Module) -> None:
        self._own = list(_buffer_memories(model))
        self._committed = [memory.content.detach().clone() for memory in self._own]
        self._bits = [_bits_of(memory.content) for memory in self._own]
        self._committed_bits = [_bits_of(committed) for committed in self._committed]
        self._compared = [memory.content.numel() <= _COMPARED_NUMEL for memory in self._own]
        self._versions = [memory.version for memory in self._own]
        self.attributes = ModuleAttributes(model)
        self._extra = extra_states(model)
        self._committed_extra = [extra.read() for extra in self._extra]
        self._leaves: dict[int, LeafBuffers] = {}  # by virtual worker
        # Whether what leaves left is read later; see `unread`.
        self._later = any(accelerator_of(m.content.device).asynchronous for m in self._own)
        self._committed_on_host = self._read_committed()

    def _read_committed(self) -> list[torch.Tensor]:
        if not self._later:
            return self._committed
        return [committed.cpu().clone() for committed in self._committed]

    def begin(self) -> None:
        """Begins a step. On a device, takes the buffers as the loop body left them, to be read with
        those of the leaves: the body must not change them."""
        self.attributes.begin()
        if self._later:
            self._leaves[_BODY] = self._take()

    def unread(self) -> list[torch.Tensor]:
        """Returns what `take` needs on the host: the buffers that a leaf may have written.

        To compare each of them on the device, the host would have to wait for each.
        """
        unread = (leaf for leaf in self._leaves.values() if not leaf.is_read)
        return [tensor for leaf in unread for tensor in leaf.tensors.values()]

    def take(self, read: Sequence[torch.Tensor]) -> None:
        """Takes the values of `unread`, in its order. Raises LoopError."""
        values = iter(read)
        for v, leaf in self._leaves.items():
            if leaf.is_read:
                continue
            changed = dict(leaf.values)
            for i in leaf.tensors:
                changed[i] = value = next(values)
                if i not in leaf.written and _same_bits(value, self._committed_on_host[i]):
                    del changed[i]
            self._leaves[v] = LeafBuffers(changed, leaf.written)
        body = self._leaves.pop(_BODY, None)
        if body is not None and body.tensors:
            raise LoopError(changed_by_body(self._own[min(body.tensors)].slots[0].name))

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
        left = self._take()
        self.attributes.undo(self._modules_of(left.written) if left.written else ())
        if contributes:
            self._leaves[virtual_worker] = left

    def finished(self, virtual_workers: range) -> dict[int, LeafBuffers]:
        """Returns what these leaves wrote, for `reuse`."""
        return {v: self._leaves[v] for v in virtual_workers if v in self._leaves}

    def reuse(self, leaves: Mapping[int, LeafBuffers]) -> None:
        """Takes what leaves wrote in an earlier attempt of this step, in place of running them."""
        self._leaves |= leaves

    def undo(self, *, tried: bool = False) -> None:
        """Restores the committed buffers and discards the step.

        `tried`: the trial micro-batch before the first step just ran, which shows how large buffers
        are written.
        """
        if tried:
            self.attributes.tried()
            for i in range(len(self._own)):
                self._compared[i] = self._compared[i] or (not self._written(i) and self._differs(i))
        self._take()
        self.attributes.undo()
        self._leaves.clear()

    @property
    def try_again(self) -> bool:
        """Whether the trial micro-batch must run once more; see module_attributes.py."""
        return self.attributes.is_undecided

    def changed(self) -> bytes:
        """Returns a byte per buffer and extra state: 1 if a leaf of this worker wrote to it."""
        flags = bytearray(len(self._own) + len(self._extra))
        for leaf in self._leaves.values():
            for i in leaf.values:
                flags[i] = 1
        return bytes(flags)

    def payload(self, changed: Sequence[int]) -> bytes:
        """Returns this worker's values of everything that any leaf changed, by virtual worker."""
        committed: list[_Value] = [*self._committed_on_host, *self._committed_extra]
        values = {
            v: [_bytes_of(leaf.values.get(i, committed[i])) for i in changed]
            for v, leaf in self._leaves.items()
        }
        packed: bytes = msgpack.packb(values)
        return packed

    def combine(
        self, payloads: Sequence[bytes], changed: Sequence[int], virtual_workers: int
    ) -> dict[int, _Value]:
        """Returns the new value of everything that was changed, from the payloads of all ranks.

        Raises ModelError for values that must agree and do not.
        """
        leaves: dict[int, dict[int, _Value]] = {}
        for payload in payloads:
            for v, contents in msgpack.unpackb(payload, strict_map_key=False).items():
                pairs = zip(changed, contents, strict=True)
                leaves[v] = {i: self._value(i, content) for i, content in pairs}
        return {
            i: self._combined(i, {v: leaf[i] for v, leaf in leaves.items()}, virtual_workers)
            for i in changed
        }

    def _value(self, i: int, content: bytes) -> _Value:
        if i >= len(self._own):
            return content
        like = self._committed[i]
        flat = torch.frombuffer(bytearray(content), dtype=like.dtype) if content else like.cpu()
        return flat.view(like.shape)

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

    def committed(self) -> tuple[list[torch.Tensor], list[bytes]]:
        """Returns copies of all buffers, and the extra state, as each leaf of this step has found
        them."""
        return [committed.clone() for committed in self._committed], list(self._committed_extra)

    @contextmanager
    def replaced(self, buffers: Sequence[torch.Tensor], extra: Sequence[bytes]) -> Iterator[None]:
        """A context in which leaves start from these values. What they write is discarded."""
        present, leaves = self.committed(), self._leaves
        self._leaves = {}
        self._put(buffers, extra)
        try:
            yield
        finally:
            self._put(*present)
            self._leaves = leaves

    def written_outside(self) -> str | None:
        """Returns the name of a buffer that was written outside a step, or None."""
        for i, memory in enumerate(self._own):
            if memory.replaced or self._written(i):
                return memory.slots[0].name
        return None

    # ------------------------------------------------------------------------------ private

    def _modules_of(self, numbers: Iterable[int]) -> set[int]:
        """Returns the identities of the modules that have these buffers."""
        own = (self._own[i] for i in numbers if i < len(self._own))
        return {id(slot.module) for memory in own for slot in memory.slots}

    @torch.no_grad()
    def _put(self, buffers: Sequence[torch.Tensor], extra: Sequence[bytes]) -> None:
        for i, (own, value) in enumerate(zip(self._own, buffers, strict=True)):
            own.put_back()
            own.content.copy_(value)
            self._committed[i].copy_(value)
            self._versions[i] = own.version
        for state, content in zip(self._extra, extra, strict=True):
            state.write(content)
        self._committed_extra = list(extra)

    def _written(self, i: int) -> bool:
        if self._own[i].version != self._versions[i]:
            return True
        # On a device the next step looks (`begin`), since the host would wait here.
        return self._compared[i] and not self._later and self._differs(i)

    def _differs(self, i: int) -> bool:
        return not torch.equal(self._bits[i], self._committed_bits[i])

    @torch.no_grad()
    def _take(self) -> LeafBuffers:
        """Copies every buffer and extra state that was written, or on a device may have been, and
        restores it."""
        values: dict[int, _Value] = {}
        written = set[int]()
        for i, own in enumerate(self._own):
            replaced = own.replaced
            if replaced or self._written(i):
                written.add(i)
            elif not (self._later and self._compared[i]):
                continue
            values[i] = _assigned_value(own) if replaced else own.content.detach().clone()
            own.put_back()
            own.content.copy_(self._committed[i])
            self._versions[i] = own.version
        for i, extra in enumerate(self._extra, len(self._own)):
            present = extra.read()
            if present != self._committed_extra[i - len(self._own)]:
                values[i] = present
                extra.write(self._committed_extra[i - len(self._own)])
        return LeafBuffers(values, frozenset(written), is_read=not self._later)

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


def _bytes_of(value: _Value) -> bytes:
    if isinstance(value, bytes):
        return value
    flat = value.detach().contiguous().view(-1)
    content: bytes = flat.view(torch.uint8).numpy().tobytes()
    return content


def changed_by_body(name: str) -> str:
    return (
        f"the body of the loop over ctx.steps changed the buffer {name!r}, e.g. by "
        "calling the model in training mode: use ctx.evaluate, or call model.eval() "
        "before and model.train() after; keep an average of buffers in a model of its "
        "own and pass it as state="
    )


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
class _BufferMemory:
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


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(_bits_of(one), _bits_of(other)))


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
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


def _buffer_memories(model: nn.Module) -> Iterable[_BufferMemory]:
    """Returns the memory of the buffers, in the order of their first names."""
    held: dict[int, list[tuple[int, _BufferSlot, torch.Tensor]]] = {}  # by the tensor's identity
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                slot = _BufferSlot(f"{prefix}.{key}" if prefix else key, module, key)
                held.setdefault(id(buffer), []).append((len(held), slot, buffer))
    found: dict[int, _BufferMemory] = {}
    buffers = [entries[0][2] for entries in held.values()]
    for together in _overlapping([*model.parameters(), *buffers]):
        if any(isinstance(tensor, nn.Parameter) for tensor in together):
            continue
        inside = [entry for tensor in together for entry in held[id(tensor)]]
        (first, *_), slots, tensors = zip(*sorted(inside, key=lambda entry: entry[0]), strict=True)
        homes = tuple(tensor.detach() for tensor in tensors)
        found[first] = _BufferMemory(slots, tensors, homes, _content(slots, tensors))
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


def _assigned_value(own: _BufferMemory) -> torch.Tensor:
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


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module (`torch.nn.Module.get_extra_state`) as bytes, which can be
    compared, sent and stored without knowing their meaning. `name` is its key in the model's
    state_dict."""

    name: str
    module: nn.Module

    def read(self) -> bytes:
        """Returns the present extra state. Raises ModelError if it cannot be stored."""
        try:
            return to_bytes({"value": self.module.get_extra_state()})
        except StateError as error:
            at = "" if error.path == "value" else f" at {error.path.removeprefix('value.')}"
            raise ModelError(
                f"get_extra_state of model.{self.name.removesuffix(_EXTRA).rstrip('.')} "
                f"returns{at} {error.reason}, which cannot be sent to a worker that joins. "
                "Return tensors, numbers and containers of them"
            ) from None

    def write(self, content: bytes) -> None:
        """Sets the extra state, unless the module already has it."""
        if content != self.read():
            self.module.set_extra_state(from_bytes(content)["value"])


def extra_states(model: nn.Module) -> list[ExtraState]:
    """Returns the modules of the model that have extra state, in the model's order."""
    return [
        ExtraState(f"{prefix}.{_EXTRA}" if prefix else _EXTRA, module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
