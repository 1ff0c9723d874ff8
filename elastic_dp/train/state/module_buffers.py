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

Buffers that share memory are undone and combined as one; see buffer_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import msgpack
import torch
from torch import nn

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.reduction_tree import Node, middle
from elastic_dp.errors import LoopError, ModelError
from elastic_dp.train.state.buffer_memory import (
    COUNT,
    assigned_value,
    bits_of,
    buffer_memories,
    same_bits,
)
from elastic_dp.train.state.extra_state import extra_states
from elastic_dp.train.state.module_attributes import ModuleAttributes

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
        self._own = list(buffer_memories(model))
        self._committed = [memory.content.detach().clone() for memory in self._own]
        self._bits = [bits_of(memory.content) for memory in self._own]
        self._committed_bits = [bits_of(committed) for committed in self._committed]
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
                if i not in leaf.written and same_bits(value, self._committed_on_host[i]):
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
            values[i] = assigned_value(own) if replaced else own.content.detach().clone()
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
                    f"of {COUNT} the largest is taken. Make it a float buffer, or change it in "
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
