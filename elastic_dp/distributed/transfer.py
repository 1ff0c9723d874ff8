"""State from one member to others: a nested tree of values and tensors, sent by broadcast; or bytes, of each a share.

The tree is split into a skeleton (pickled: the members of one run trust each other; classes of the user's own script
by value, since a worker cannot import it) and its tensors. Large
tensors travel as they are, small ones together. The receiver decides where each tensor goes; nothing it holds
is touched before `receive` has returned, unless it hands out its own tensors itself (a void worker may).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from elastic_dp.distributed.process_group import Operation, ProcessGroup
from elastic_dp.errors import SpecError

_TOGETHER_BYTES = 1 << 20  # smaller tensors are packed into one broadcast of about this size
_PIECE_BYTES = 4 << 20  # of what each member has a share of
_MAX_IN_FLIGHT = 2  # more of them only get in each other's way
_HEAD_BYTES = 1 << 16  # of the first broadcast: the skeleton's length, and as much of it as fits

# A broadcast in flight, its buffer, and what that is taken apart into when it has arrived, if anything.
_Flight = tuple[Operation, torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands in the skeleton for the tensor of this index."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    def empty(self, device: torch.device) -> torch.Tensor:
        """A fresh tensor of this kind, on `device` unless it lives on the host anyway."""
        place = device if self.device_type != "cpu" else torch.device("cpu")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)


Targets = Callable[[Any, Sequence[TensorSpec]], dict[int, torch.Tensor]]


def pack(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree with its tensors replaced by slots; the tensors are appended to `tensors`."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return TensorSlot(len(tensors) - 1)
    if isinstance(tree, dict):
        packed = {key: pack(value, tensors) for key, value in tree.items()}
        return packed if type(tree) is dict else _like(tree, packed)
    if type(tree) in (list, tuple):
        return type(tree)(pack(value, tensors) for value in tree)
    return tree


def unpack(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(skeleton, TensorSlot):
        return tensors[skeleton.index]
    if isinstance(skeleton, dict):
        whole = {key: unpack(value, tensors) for key, value in skeleton.items()}
        return whole if type(skeleton) is dict else _like(skeleton, whole)
    if type(skeleton) in (list, tuple):
        return type(skeleton)(unpack(value, tensors) for value in skeleton)
    return skeleton


def _like(mapping: Any, items: dict[Any, Any]) -> Any:
    """`items` in a mapping of the other's type (OrderedDict, defaultdict, Counter)."""
    new = mapping.copy()
    new.clear()
    new.update(items)
    return new


def pickled_tree(skeleton: Any, path: str) -> bytes:
    """Raises SpecError, which names the entry that cannot be pickled."""
    try:
        return cloudpickle.dumps(skeleton)
    except Exception as error:  # a class may raise anything
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(skeleton, dict):
            inner = skeleton.items()
        elif isinstance(skeleton, list | tuple):
            inner = enumerate(skeleton)
        for key, value in inner:
            pickled_tree(value, f"{path}[{key!r}]")
        raise SpecError(f"{path} cannot be sent to a worker that joins: {error}") from error


@dataclass(frozen=True, slots=True)
class Parcel:
    """A tree that is ready to be sent: the length and the text of its skeleton, and its tensors as they are."""

    head: torch.Tensor
    flats: Sequence[torch.Tensor]


def wrap(tree: Any) -> Parcel:
    """Needs no group, so it can be made while one forms. The tensors must not change before it is sent."""
    tensors: list[torch.Tensor] = []
    skeleton = pack(tree, tensors)
    tensors = [t if _is_dense(t) else t.contiguous() for t in tensors]
    specs = [_spec_of(t) for t in tensors]
    pickled = pickled_tree((skeleton, specs), "the state")
    text = bytearray(len(pickled).to_bytes(8, "little") + pickled)
    text.extend(bytes(max(0, _HEAD_BYTES - len(text))))
    return Parcel(torch.frombuffer(text, dtype=torch.uint8), [_flat_bytes(t) for t in tensors])


def send(group: ProcessGroup, parcel: Parcel) -> None:
    """Give it to all others of `group`; this is rank 0 there."""
    head = parcel.head.to(group.home)
    first = group.broadcast(head[:_HEAD_BYTES], 0)
    if len(head) > _HEAD_BYTES:
        group.wait(group.broadcast(head[_HEAD_BYTES:], 0))
    _stream(group, parcel.flats, sending=True)
    group.wait(first)
    group.synchronize()


def receive(
    group: ProcessGroup,
    device: torch.device,
    targets: Targets | None = None,
) -> tuple[Any, int]:
    """The tree that rank 0 of `group` sends, and the bytes of its tensors.

    `targets(skeleton, specs)` may name tensors of ours, by slot index, that are to be written in place.
    """
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device=group.home)
    group.wait(group.broadcast(head, 0))
    group.synchronize()
    first = head.cpu().numpy().tobytes()
    length = int.from_bytes(first[:8], "little")
    rest = torch.empty(max(0, 8 + length - _HEAD_BYTES), dtype=torch.uint8, device=group.home)
    if rest.numel():
        group.wait(group.broadcast(rest, 0))
        group.synchronize()
    skeleton, specs = pickle.loads(first[8:] + rest.cpu().numpy().tobytes())
    tensors = _room(specs, device, targets, skeleton)
    _stream(group, [_flat_bytes(t) for t in tensors], sending=False)
    group.synchronize()
    return unpack(skeleton, tensors), sum(t.numel() * t.element_size() for t in tensors)


def _room(
    specs: Sequence[TensorSpec], device: torch.device, targets: Targets | None, skeleton: Any
) -> list[torch.Tensor]:
    """Where the tensors go: into ours, where one is named and fits, else into fresh memory."""
    ours = {} if targets is None else targets(skeleton, specs)
    tensors = []
    for i, spec in enumerate(specs):
        mine = ours.get(i)
        fits = (
            mine is not None
            and mine.stride() == spec.stride
            and mine.shape == spec.shape
            and mine.dtype == spec.dtype
        )
        tensors.append(mine.detach() if fits else spec.empty(device))  # type: ignore[union-attr]
    return tensors


def settle(tree: Any, device: torch.device, targets: Targets) -> Any:
    """The same tree with its tensors in memory of ours: in what `targets` names, as in `receive`, or in fresh one."""
    tensors: list[torch.Tensor] = []
    skeleton = pack(tree, tensors)
    own = _room([_spec_of(t) for t in tensors], device, targets, skeleton)
    for mine, given in zip(own, tensors, strict=True):
        mine.copy_(given)
    return unpack(skeleton, own)


def share_out(group: ProcessGroup, line: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """The bytes start ≤ i < end of `line` (on the host) are there at the rank whose span that is; afterwards at all.

    In pieces, one of each rank in turn, so that all of them send at one time."""

    def launched() -> Iterator[_Flight]:
        for at in range(0, max((end - start for start, end in spans), default=0), _PIECE_BYTES):
            for root, (start, end) in enumerate(spans):
                if start + at < end:
                    piece = line[start + at : min(start + at + _PIECE_BYTES, end)]
                    buffer = piece.to(group.home)
                    yield group.broadcast(buffer, root), buffer, [] if buffer is piece else [piece]

    _land(group, launched(), most=2 * len(spans))
    group.synchronize()


def _stream(group: ProcessGroup, flats: Sequence[torch.Tensor], *, sending: bool) -> None:
    """Broadcast byte vectors, a few in flight; on the receivers, packed ones are taken apart again."""

    def launched() -> Iterator[_Flight]:
        for parts in _together(flats):
            direct = len(parts) == 1 and parts[0].device.type == group.home.type
            if direct:
                buffer = parts[0]
            elif sending:
                buffer = torch.cat([p.to(group.home) for p in parts])
            else:
                size = sum(p.numel() for p in parts)
                buffer = torch.empty(size, dtype=torch.uint8, device=group.home)
            yield group.broadcast(buffer, 0), buffer, [] if direct or sending else parts

    _land(group, launched(), most=_MAX_IN_FLIGHT)


def _land(group: ProcessGroup, launched: Iterable[_Flight], most: int) -> None:
    """Wait for each in turn, with at most so many in flight, and copy what has arrived to where it belongs."""
    flights: deque[_Flight] = deque()

    def land() -> None:
        operation, buffer, parts = flights.popleft()
        group.wait(operation)
        if parts:
            for part, piece in zip(parts, buffer.split([p.numel() for p in parts]), strict=True):
                part.copy_(piece)

    for flight in launched:
        flights.append(flight)
        if len(flights) >= most:
            land()
    while flights:
        land()


def _together(flats: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large ones alone, small ones of one device in packs; the same cut on both sides, by sizes alone."""
    pack_: list[torch.Tensor] = []
    size = 0
    for flat in flats:
        if flat.numel() == 0:
            continue
        if flat.numel() >= _TOGETHER_BYTES:
            yield [flat]
            continue
        pack_.append(flat)
        size += flat.numel()
        if size >= _TOGETHER_BYTES:
            yield pack_
            pack_, size = [], 0
    if pack_:
        yield pack_


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return tensor.is_contiguous()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel() and all(s > 0 for s in tensor.stride())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, without a copy; it must be dense."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
