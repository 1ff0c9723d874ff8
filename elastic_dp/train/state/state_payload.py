"""The state as workers send it to each other: JSON and tensors, as in a checkpoint.

A payload names no code, and reading it runs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch

from elastic_dp.checkpoint.codec import decode, encode
from elastic_dp.checkpoint.layout import TensorSpec, flat_bytes, is_dense
from elastic_dp.errors import CollectiveFailed

LENGTH_BYTES = 8
DIGEST_BYTES = 16

# Returns the tensors that are written in place, by slot, for an encoded tree and its tensors.
Targets = Callable[[Any, Sequence[TensorSpec]], Mapping[int, torch.Tensor]]


@dataclass(frozen=True)
class StatePayload:
    """An encoded tree: its JSON, and its tensors by slot, whose memory dense ones share."""

    encoded: Any
    specs: Sequence[TensorSpec]
    tensors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, tree: Any, device_types: Mapping[str, str] | None = None) -> StatePayload:
        """`device_types` is the type of the device on which each tensor belongs, by its name, if
        that is not where it is. Raises StateError, which names an entry that cannot be stored."""
        encoded, named = encode(tree)
        specs = [TensorSpec.of(name, tensor) for name, tensor in named]
        if device_types is not None:
            specs = [replace(spec, device=device_types.get(spec.name, "cpu")) for spec in specs]
        return cls(encoded, specs, [tensor for _, tensor in named])

    @cached_property
    def text(self) -> bytes:
        """All but the tensors' contents."""
        told = [self.encoded, [spec.to_json() for spec in self.specs]]
        return json.dumps(told, separators=(",", ":"), allow_nan=False).encode()

    @property
    def digest(self) -> bytes:
        """Payloads with the same digest have the same tensors, by name and kind."""
        told = json.dumps([spec.to_json() for spec in self.specs]).encode()
        return blake2b(told, digest_size=DIGEST_BYTES).digest()

    @classmethod
    def receive(cls, text: bytes, device: torch.device, targets: Targets | None) -> StatePayload:
        """Returns a payload like that with this text, whose tensors are to be written: those that
        `targets` names, or new ones; without memory on a meta `device`. Raises CollectiveFailed."""
        try:
            encoded, told = json.loads(text)
            specs = [TensorSpec.from_json(spec) for spec in told]
        except (ValueError, TypeError) as error:
            raise CollectiveFailed(f"a member sends what is no state: {error}") from None
        own = {} if targets is None else targets(encoded, specs)
        return cls(encoded, specs, _destinations(specs, device, own))

    def tree(self) -> Any:
        return decode(self.encoded, self.tensors)


def to_vectors(tree: Any, device_types: Mapping[str, str] | None = None) -> list[torch.Tensor]:
    """Returns a tree as byte vectors that follow each other. Those of dense tensors are their
    memory. `device_types`: see `StatePayload.of`."""
    payload = StatePayload.of(tree, device_types)
    head = bytearray(len(payload.text).to_bytes(LENGTH_BYTES, "little") + payload.text)
    return [torch.frombuffer(head, dtype=torch.uint8), *map(flat_bytes, payload.tensors)]


def from_vector(flat: torch.Tensor, device: torch.device) -> Any:
    """Reverses `to_vectors`, in new memory."""
    at = LENGTH_BYTES + int.from_bytes(flat[:LENGTH_BYTES].numpy().tobytes(), "little")
    payload = StatePayload.receive(flat[LENGTH_BYTES:at].numpy().tobytes(), device, None)
    for spec, tensor in zip(payload.specs, payload.tensors, strict=True):
        flat_bytes(tensor).copy_(flat[at : at + spec.nbytes])
        at += spec.nbytes
    return payload.tree()


def rehome_state(
    tree: Any,
    device: torch.device,
    targets: Targets,
    device_types: Mapping[str, str],
) -> Any:
    """Returns the tree with each tensor copied once: to those that `targets` names, or to new ones.
    `device_types`: see `StatePayload.of`."""
    given = StatePayload.of(tree, device_types)
    own = _destinations(given.specs, device, targets(given.encoded, given.specs))
    for mine, tensor in zip(own, given.tensors, strict=True):
        mine.copy_(tensor)
    return decode(given.encoded, own)


def tensor_slot(encoded: Any) -> int | None:
    """Returns the slot of a tensor in an encoded tree, or None if the value is not a tensor."""
    is_tensor = isinstance(encoded, dict) and encoded.get("$") == "tensor"
    return encoded["v"] if is_tensor else None


def _destinations(
    specs: Sequence[TensorSpec], device: torch.device, own: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the tensors to write to: those of `own` where one is named and fits, else new
    ones, on `device` unless the spec's is the host."""
    tensors = []
    for slot, spec in enumerate(specs):
        mine = own.get(slot)
        if mine is not None and is_dense(mine) and _fits(mine.detach(), spec):
            tensors.append(mine.detach())
            continue
        is_host = spec.device == "cpu" and device.type != "meta"
        empty = torch.empty(
            spec.shape, dtype=spec.torch_dtype, device=torch.device("cpu") if is_host else device
        )
        tensors.append(
            empty if spec.stride is None else empty.view(-1).as_strided(spec.shape, spec.stride)
        )
    return tensors


def _fits(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    mine = TensorSpec.of(spec.name, tensor)
    return (mine.dtype, mine.shape, mine.stride) == (spec.dtype, spec.shape, spec.stride)
