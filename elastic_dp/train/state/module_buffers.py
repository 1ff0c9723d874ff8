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
- Any other integer or boolean buffer must be the same on all leaves.

One tensor under several names is one buffer. Views of others are refused (optimizer_state.py), and
expanded tensors (steps_arguments.py). A module's extra state (`get_extra_state`) may not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import msgpack
import torch
from torch import nn

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.process_group import ProcessGroup, RecordGather
from elastic_dp.distributed.reduction_tree import Node, middle
from elastic_dp.errors import LoopError, ModelError
from elastic_dp.train.gang import Gang
from elastic_dp.train.state.module_attributes import ModuleAttributes
from elastic_dp.train.state.tensor_digests import bits_of, same_bits
from elastic_dp.train.state.train_state import extra_states
from elastic_dp.train.step.participants import StepParticipant, Verdict, either_of

_COUNT = "num_batches_tracked"  # of torch's batch normalisation
_COMPARED_NUMEL = 1 << 16  # up to this size a buffer is always compared bit by bit

_BODY = -1  # instead of a virtual worker: the loop body


@dataclass(frozen=True, slots=True)
class LeafBuffers:
    """What a leaf left, by number. It has certainly written those in `written`. A device may have
    the others, which the host has not read yet."""

    values: Mapping[int, torch.Tensor]
    written: frozenset[int]
    is_read: bool = True


_NOTHING = LeafBuffers({}, frozenset())


class ModuleBuffers(StepParticipant):
    """The buffers of one model. Those that a micro-batch has changed are combined over all virtual
    workers before the commit."""

    name = "buffers"

    def __init__(
        self,
        model: nn.Module,
        virtual_workers: Callable[[int], int],
        pass_point: Callable[[str, int], None],
        gang: Gang | None = None,
    ) -> None:
        """`virtual_workers`: their number, by step."""
        self._virtual_workers, self._pass_point, self._gang = virtual_workers, pass_point, gang
        self._own = _buffers_of(model)
        self.attributes = ModuleAttributes(model)
        self._extra = extra_states(model)
        self._committed_extra = [extra.read() for extra in self._extra]
        self._leaves: dict[int, LeafBuffers] = {}  # by virtual worker
        # Whether what leaves left is read later; see `unread`.
        self._later = any(accelerator_of(own.home.device).asynchronous for own in self._own)
        self._has_begun = False  # a step, which is neither committed nor undone
        self._changed: list[int] = []  # by some leaf of some member
        self._values: dict[int, torch.Tensor] = {}  # of these, combined

    # ------------------------------------------------------------------------ the participant

    def open(self, group: ProcessGroup) -> None:
        self._records = RecordGather(group)

    def begin(self, step: int) -> None:
        """Begins a step. On a device, takes the buffers as the loop body left them, to be read with
        those of the leaves: the body must not change them."""
        self._step, self._changed, self._values = step, [], {}
        self._has_begun = True
        self.attributes.begin()
        if self._later:
            self._leaves[_BODY] = self._take()

    def unread(self) -> list[torch.Tensor]:
        """Returns what `take` needs on the host: the buffers that a leaf may have written. To
        compare each of them on the device, the host would have to wait for each."""
        unread = (leaf for leaf in self._leaves.values() if not leaf.is_read)
        return [tensor for leaf in unread for tensor in leaf.values.values()]

    def take(self, read: Sequence[torch.Tensor]) -> None:
        """Takes the values of `unread`, in its order. Raises LoopError."""
        values = iter(read)
        for v, leaf in self._leaves.items():
            if leaf.is_read:
                continue
            changed = dict(leaf.values)
            for i in leaf.values:
                changed[i] = value = next(values)
                if i not in leaf.written and same_bits(value, self._own[i].on_host):
                    del changed[i]
            self._leaves[v] = LeafBuffers(changed, leaf.written)
        body = self._leaves.pop(_BODY, None)
        if body is not None and body.values:
            raise LoopError(changed_by_body(f"the buffer {self._own[min(body.values)].name!r}"))

    def propose(self) -> bytes:
        """Returns a byte per buffer: 1 if a leaf of this worker wrote to it."""
        changed = {i for leaf in self._leaves.values() for i in leaf.values}
        return bytes(i in changed for i in range(len(self._own))) if changed else b""

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        flags = either_of([p for p in proposals if p] or [b""])
        self._changed = [i for i, flag in enumerate(flags) if flag]
        return None

    def prepare(self) -> None:
        """Combines what was changed. Raises GroupError, and ModelError for values that must agree
        and do not."""
        if not self._changed:
            return
        if self._gang is not None:
            raise ModelError(
                f"a buffer of the model changed in step {self._step}, as those of batch "
                "normalization do, and each process of a worker has its own: use layers without "
                "such buffers, or processes_per_worker=1"
            )
        self._records.launch(self._payload())
        self._pass_point("buffers", self._step)
        copies: dict[int, dict[int, torch.Tensor]] = {i: {} for i in self._changed}
        for payload in self._records.collect():
            for v, contents in msgpack.unpackb(payload, strict_map_key=False).items():
                for i, content in zip(self._changed, contents, strict=True):
                    copies[i][v] = self._own[i].value_of(content)
        total = self._virtual_workers(self._step)
        self._values = {i: self._combined(i, some, total) for i, some in copies.items()}

    def _payload(self) -> bytes:
        """Returns this worker's values of everything that any leaf changed, by virtual worker."""
        values = {
            v: [_bytes_of(leaf.values.get(i, self._own[i].on_host)) for i in self._changed]
            for v, leaf in self._leaves.items()
        }
        packed: bytes = msgpack.packb(values)
        return packed

    @torch.no_grad()
    def commit(self) -> None:
        for i, value in self._values.items():
            self._own[i].commit(value)
        self._leaves.clear()
        self._has_begun = False

    def undo(self) -> None:
        """Discards the step. After its commit there is nothing to undo: what is in the modules then
        is the loop body's."""
        if self._has_begun:
            self.restore()
        self._has_begun = False

    def restore(self, *, tried: bool = False) -> None:
        """Restores the committed buffers and what a micro-batch has changed. `tried`: it was the
        trial before the first step, which shows how large buffers are written."""
        self._changed, self._values = [], {}
        if tried:
            self.attributes.tried()
            self._committed_extra = [extra.read() for extra in self._extra]
            for own in self._own:
                own.is_compared = own.is_compared or (not self._is_written(own) and own.differs)
        self._take()
        self.attributes.undo()
        self._leaves.clear()

    # --------------------------------------------------------------------------------- leaves

    def after_leaf(self, virtual_worker: int, contributes: bool) -> None:
        """Saves and undoes what this leaf wrote. Raises ModelError for what it may not write."""
        left = self._take() if self._own else _NOTHING
        if left.written:
            self.attributes.undo(
                {id(module) for i in left.written for module, _ in self._own[i].slots}
            )
        else:
            self.attributes.undo()
        if self._extra and (changed := self._changed_extra()):
            raise ModelError(f"forward changed {changed}: {_EXTRA_REMEDY}")
        if contributes:
            self._leaves[virtual_worker] = left

    def finished(self, virtual_workers: range) -> dict[int, LeafBuffers]:
        """Returns what these leaves wrote, for `reuse`."""
        return {v: self._leaves[v] for v in virtual_workers if v in self._leaves}

    def reuse(self, leaves: Mapping[int, LeafBuffers]) -> None:
        """Takes what leaves wrote in an earlier attempt of this step, in place of running them."""
        self._leaves |= leaves

    # --------------------------------------------------------------------------- outside of steps

    def reload(self) -> None:
        """Takes the present buffers, which a state transfer has written, as the committed ones."""
        for own in self._own:
            own.reload()
        self._leaves.clear()
        self._committed_extra = [extra.read() for extra in self._extra]

    def committed(self) -> list[torch.Tensor]:
        """Returns copies of all buffers, as each leaf of this step has found them."""
        return [own.committed.clone() for own in self._own]

    @contextmanager
    def replaced(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which leaves start from these values. What they write is discarded."""
        present, leaves = self.committed(), self._leaves
        self._leaves = {}
        self._put(buffers)
        try:
            yield
        finally:
            self._put(present)
            self._leaves = leaves

    def written_outside(self) -> str | None:
        """Returns what was written outside a step, a buffer or extra state, or None."""
        for own in self._own:
            if own.replaced or self._is_written(own):
                return f"the buffer {own.name!r}"
        return self._changed_extra()

    # ------------------------------------------------------------------------------ private

    def _changed_extra(self) -> str | None:
        pairs = zip(self._extra, self._committed_extra, strict=True)
        names = (extra.name for extra, before in pairs if extra.read() != before)
        return next((f"the extra state {name!r} (get_extra_state)" for name in names), None)

    @torch.no_grad()
    def _put(self, buffers: Sequence[torch.Tensor]) -> None:
        for own, value in zip(self._own, buffers, strict=True):
            own.committed.copy_(value)
            own.put_back()

    def _is_written(self, own: _Buffer) -> bool:
        if own.tensor._version != own.version:
            return True
        # On a device the next step looks (`begin`), since the host would wait here.
        return own.is_compared and not self._later and own.differs

    @torch.no_grad()
    def _take(self) -> LeafBuffers:
        """Copies every buffer that was written, or on a device may have been, and restores it."""
        values: dict[int, torch.Tensor] = {}
        written = set[int]()
        for i, own in enumerate(self._own):
            replaced = own.replaced
            if replaced or self._is_written(own):
                written.add(i)
            elif not (self._later and own.is_compared):
                continue
            values[i] = _assigned_value(own) if replaced else own.home.clone()
            own.put_back()
        return LeafBuffers(values, frozenset(written), is_read=not self._later)

    def _combined(
        self, i: int, tensors: Mapping[int, torch.Tensor], virtual_workers: int
    ) -> torch.Tensor:
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
                    f"buffer {own.name!r} ({first.dtype}) differs between virtual workers "
                    f"after a step ({first.flatten()[:4].tolist()} and, on virtual worker {v}, "
                    f"{copy.flatten()[:4].tolist()}); only float buffers are averaged, and "
                    f"of {_COUNT} the largest is taken. Make it a float buffer, or change it in "
                    "the loop's body"
                )
        return first


def _bytes_of(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().view(-1)
    content: bytes = flat.view(torch.uint8).numpy().tobytes()
    return content


_EXTRA_REMEDY = (
    "it is not combined over the micro-batches of a step. Keep what changes in a buffer, or in an "
    "object that the loop's body changes and that is passed as state="
)


def changed_by_body(what: str) -> str:
    return (
        f"the body of the loop over ctx.steps changed {what}, e.g. by "
        "calling the model in training mode: use ctx.evaluate, or call model.eval() "
        "before and model.train() after; keep an average of buffers in a model of its "
        "own and pass it as state="
    )


class _Buffer:
    """A buffer, and the modules that have it, with its key there, so that an assignment to it is
    detected and undone. `home`: a view of its original memory. `committed`: its value as of the
    last commit, and `on_host` the same on the host."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor, self.home = name, tensor, tensor.detach()
        self.slots: list[tuple[nn.Module, str]] = []
        self.committed = self.on_host = self.home.clone()
        self._bits, self._committed_bits = bits_of(self.home), bits_of(self.committed)
        self.is_compared = self.home.numel() <= _COMPARED_NUMEL  # bit by bit
        self.reload()

    def reload(self) -> None:
        """The present value is the committed one."""
        self.committed.copy_(self.home)
        if accelerator_of(self.home.device).asynchronous:
            self.on_host = self.committed.cpu().clone()
        self.version = self.tensor._version

    def commit(self, value: torch.Tensor) -> None:
        """`value`, on the host, is the committed one."""
        # Without waiting for a device, which gets a copy of the value first.
        self.home.copy_(value, non_blocking=True)
        self.committed.copy_(value, non_blocking=True)
        if self.on_host is not self.committed:
            self.on_host.copy_(value)
        self.version = self.tensor._version

    @property
    def replaced(self) -> bool:
        """Whether a slot holds another tensor, or it has other memory (`buffer.data = …`)."""
        tensor = self.tensor
        is_moved = tensor.data_ptr() != self.home.data_ptr()
        return is_moved or any(module._buffers[key] is not tensor for module, key in self.slots)

    @property
    def differs(self) -> bool:
        """Whether it has other bits than the committed value."""
        return not torch.equal(self._bits, self._committed_bits)

    def put_back(self) -> None:
        """Restores the committed value."""
        if self.tensor.data_ptr() != self.home.data_ptr():
            self.tensor.data = self.home
        for module, key in self.slots:
            module._buffers[key] = self.tensor
        self.home.copy_(self.committed)
        self.version = self.tensor._version

    def value_of(self, content: bytes) -> torch.Tensor:
        """Reverses `_bytes_of`."""
        dtype = self.committed.dtype
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else self.on_host
        return flat.view(self.committed.shape)

    @property
    def is_count(self) -> bool:
        return all(key == _COUNT for _, key in self.slots)


def _buffers_of(model: nn.Module) -> list[_Buffer]:
    """Returns the buffers, in the order of their first names."""
    found: dict[int, _Buffer] = {}  # by the tensor's identity
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                if id(tensor) not in found:
                    found[id(tensor)] = _Buffer(name, tensor)
                found[id(tensor)].slots.append((module, key))
    return list(found.values())


def _assigned_value(own: _Buffer) -> torch.Tensor:
    """Returns the value that a leaf assigned to a buffer. Raises ModelError."""
    if len(own.slots) > 1:
        raise ModelError(
            f"buffer {own.name!r} is held by several modules, and was reassigned in one of them in "
            "a step; write into it (copy_, add_), or register a copy in the other"
        )
    module, key = own.slots[0]
    tensor, present = own.home, module._buffers[key]
    if present is None or present.shape != tensor.shape or present.dtype != tensor.dtype:
        now = "nothing" if present is None else f"{tuple(present.shape)}, {present.dtype}"
        raise ModelError(
            f"buffer {own.name!r} ({tuple(tensor.shape)}, {tensor.dtype}) was replaced in a step "
            f"by one of another shape or dtype ({now}). Give it its last shape and dtype before "
            "the loop: run a batch with the longest rows, under torch.autocast if the loop uses "
            "precision=, or assign it with .to(dtype)"
        )
    return torch.empty_like(tensor).copy_(present.detach())
