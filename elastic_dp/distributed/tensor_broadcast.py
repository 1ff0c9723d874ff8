"""Broadcasts a text and tensors from one member to the others, and exchanges shares of bytes.

The text describes the tensors. It belongs to the caller: this module does not read it, and it names
no code to run. Large tensors are sent as they are, small ones packed. The receiver decides where
each tensor goes. Its own tensors do not change until `receive` has returned, unless it passes them
as targets itself (a worker without state may).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.process_group import Operation, ProcessGroup
from elastic_dp.errors import CollectiveFailed

_PACKED_BYTES = 1 << 20  # smaller tensors are packed into one broadcast of about this size
_PIECE_BYTES = 4 << 20  # pieces of a span in `exchange_spans`
_MAX_IN_FLIGHT = 2  # more operations only slow each other down
_HEAD_BYTES = 1 << 16  # size of the first broadcast: the lengths, and what fits of the texts
_LENGTH_BYTES = 8  # of each of the two texts

# A broadcast in flight, its buffer, and the tensors that the buffer is unpacked into, if any.
_Flight = tuple[Operation, torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns a new tensor of this kind, on `device` unless its device type is the host's."""
        place = device if self.device_type != "cpu" else torch.device("cpu")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)


Targets = Callable[[bytes, Sequence[TensorMeta]], Mapping[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class StatePayload:
    """A payload that is ready to be sent.

    `head` holds the texts and their lengths, `flats` the tensors as bytes.
    """

    head: torch.Tensor
    flats: Sequence[torch.Tensor]


def pack_payload(
    text: bytes,
    tensors: Sequence[torch.Tensor] = (),
    device_types: Sequence[str] | None = None,
) -> StatePayload:
    """Returns the payload of a text and tensors. `device_types`: of the device on which each tensor
    belongs, if it is not where it is.

    It needs no group, so it can be made while one forms. The tensors must not change before it is
    sent.
    """
    tensors = [t if _is_dense(t) else t.contiguous() for t in tensors]
    metas = [meta_of(t) for t in tensors]
    if device_types is not None:
        metas = [replace(m, device_type=d) for m, d in zip(metas, device_types, strict=True)]
    specs = _specs_to_json(metas)
    lengths = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") for part in (specs, text))
    head = bytearray(lengths + specs + text)
    head.extend(bytes(max(0, _HEAD_BYTES - len(head))))
    return StatePayload(
        torch.frombuffer(head, dtype=torch.uint8), [_flat_bytes(t) for t in tensors]
    )


def to_flats(
    text: bytes, tensors: Sequence[torch.Tensor], device_types: Sequence[str] | None = None
) -> list[torch.Tensor]:
    """Returns a text and tensors as byte vectors, which follow each other where they are sent.
    `device_types`: see `pack_payload`.

    Those of dense tensors are their memory.
    """
    payload = pack_payload(text, tensors, device_types)
    _, end = _text_ends(payload.head[: 2 * _LENGTH_BYTES].numpy().tobytes())
    return [payload.head[:end], *payload.flats]  # without the room of a broadcast


def from_flat(flat: torch.Tensor, device: torch.device) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the text and the tensors, in new memory, of what `to_flats` returned, in one."""
    specs_end, end = _text_ends(flat[: 2 * _LENGTH_BYTES].numpy().tobytes())
    content = flat[2 * _LENGTH_BYTES : end].numpy().tobytes()
    middle = specs_end - 2 * _LENGTH_BYTES
    tensors = [spec.empty(device) for spec in _specs_from_json(content[:middle])]
    at = end
    for tensor in tensors:
        mine = _flat_bytes(tensor)
        mine.copy_(flat[at : at + mine.numel()])
        at += mine.numel()
    return content[middle:], tensors


def send(group: ProcessGroup, payload: StatePayload) -> None:
    """Sends the payload to all other members of `group`. The caller is rank 0."""
    head = payload.head
    first = group.broadcast(head[:_HEAD_BYTES], 0)
    if len(head) > _HEAD_BYTES:
        group.wait(group.broadcast(head[_HEAD_BYTES:], 0))
    _stream(group, payload.flats, sending=True)
    group.wait(first)
    group.synchronize()


def receive(
    group: ProcessGroup,
    device: torch.device,
    targets: Targets | None = None,
) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the text and the tensors that rank 0 of `group` sends.

    `targets(text, specs)` may name tensors, by number, that are written in place.
    """
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
    group.wait(group.broadcast(head, 0))
    first = head.numpy().tobytes()
    begin = 2 * _LENGTH_BYTES
    middle, end = _text_ends(first)
    rest = torch.empty(max(0, end - _HEAD_BYTES), dtype=torch.uint8)
    if rest.numel():
        group.wait(group.broadcast(rest, 0))
    content = first + rest.numpy().tobytes()
    specs, text = _specs_from_json(content[begin:middle]), content[middle:end]
    tensors = _destinations(specs, device, {} if targets is None else targets(text, specs))
    _stream(group, [_flat_bytes(t) for t in tensors], sending=False)
    group.synchronize()
    return text, tensors


def _text_ends(head: bytes) -> tuple[int, int]:
    """Returns where the two texts of a payload end: what describes its tensors, and its own."""
    sizes = [int.from_bytes(head[at : at + _LENGTH_BYTES], "little") for at in (0, _LENGTH_BYTES)]
    return 2 * _LENGTH_BYTES + sizes[0], 2 * _LENGTH_BYTES + sum(sizes)


def _destinations(
    specs: Sequence[TensorMeta], device: torch.device, ours: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the tensors to receive into: those of `ours` where one is named and fits, else new
    ones."""
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


def copy_to_own_memory(
    tensors: Sequence[torch.Tensor],
    metas: Sequence[TensorMeta],
    device: torch.device,
    ours: Mapping[int, torch.Tensor],
) -> list[torch.Tensor]:
    """Copies tensors to those that `ours` names, as in `receive`, or to new ones as `metas`
    says."""
    own = _destinations(metas, device, ours)
    for mine, given in zip(own, tensors, strict=True):
        mine.copy_(given)
    return own


def exchange_spans(
    group: ProcessGroup, line: torch.Tensor, spans: Sequence[tuple[int, int]]
) -> None:
    """Gives every rank the bytes that each rank has.

    `line` is on the host. Rank r has the bytes start ≤ i < end of `spans[r]`; afterwards every rank
    has all spans. Pieces of all ranks take turns, so that all ranks send at the same time.
    """

    def launched() -> Iterator[_Flight]:
        for at in range(0, max((end - start for start, end in spans), default=0), _PIECE_BYTES):
            for root, (start, end) in enumerate(spans):
                if start + at < end:
                    piece = line[start + at : min(start + at + _PIECE_BYTES, end)]
                    yield group.broadcast(piece, root), piece, []

    _wait_in_turn(group, launched(), most=2 * len(spans))
    group.synchronize()


def _stream(group: ProcessGroup, flats: Sequence[torch.Tensor], *, sending: bool) -> None:
    """Broadcasts byte vectors, a few in flight. Receivers unpack the packed ones."""

    def launched() -> Iterator[_Flight]:
        for parts in _packs(flats):
            direct = len(parts) == 1 and not _is_remote(parts[0])
            if direct:
                buffer = parts[0]
            elif sending:
                buffer = torch.cat(on_host(group, parts))
            else:
                size = sum(p.numel() for p in parts)
                buffer = torch.empty(size, dtype=torch.uint8)
            yield group.broadcast(buffer, 0), buffer, [] if direct or sending else parts

    _wait_in_turn(group, launched(), most=_MAX_IN_FLIGHT)


def _wait_in_turn(group: ProcessGroup, launched: Iterable[_Flight], most: int) -> None:
    """Waits for each operation in turn, with at most `most` in flight, and copies what has
    arrived."""
    flights: deque[_Flight] = deque()

    def land() -> None:
        operation, buffer, parts = flights.popleft()
        group.wait(operation)
        if parts:
            for part, piece in zip(parts, buffer.split([p.numel() for p in parts]), strict=True):
                part.copy_(piece)  # to a device, it waits: the buffer is gone afterwards

    for flight in launched:
        flights.append(flight)
        if len(flights) >= most:
            land()
    while flights:
        land()


def _is_remote(tensor: torch.Tensor) -> bool:
    return accelerator_of(tensor.device).asynchronous


def on_host(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors on the host. Those of a device are copied at once, behind all that is
    launched so far. Raises GroupError."""
    remote = [tensor for tensor in tensors if _is_remote(tensor)]
    if not remote:
        return list(tensors)
    assert group.on_device is not None
    read = iter(group.on_device.read(remote))
    return [next(read) if _is_remote(tensor) else tensor for tensor in tensors]


def _packs(flats: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields large tensors alone and small ones in packs. Both sides cut equally, by sizes
    alone."""
    pack_: list[torch.Tensor] = []
    size = 0
    for flat in flats:
        if flat.numel() == 0:
            continue
        if flat.numel() >= _PACKED_BYTES:
            yield [flat]
            continue
        pack_.append(flat)
        size += flat.numel()
        if size >= _PACKED_BYTES:
            yield pack_
            pack_, size = [], 0
    if pack_:
        yield pack_


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)


def _specs_to_json(specs: Sequence[TensorMeta]) -> bytes:
    """Encodes the distinct kinds and the kind of each tensor: models have many tensors of few
    kinds."""
    kinds = {spec: number for number, spec in enumerate(dict.fromkeys(specs))}
    told = [[str(k.dtype)[6:], k.shape, k.stride, k.device_type] for k in kinds]
    return json.dumps([told, [kinds[spec] for spec in specs]], separators=(",", ":")).encode()


def _specs_from_json(content: bytes) -> list[TensorMeta]:
    told, numbers = json.loads(content)
    kinds = []
    for name, shape, stride, device_type in told:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CollectiveFailed(f"a member sends a tensor of {name!r}, unknown here")
        kinds.append(TensorMeta(tuple(shape), tuple(stride), dtype, device_type))
    return [kinds[number] for number in numbers]


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return tensor.is_contiguous()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel() and all(s > 0 for s in tensor.stride())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor as bytes, without a copy."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
