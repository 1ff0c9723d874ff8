"""The state as members send it to each other: JSON and tensors, as in a checkpoint.

A payload names no code, and reading it runs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from elastic_dp.checkpoint.codec import decode, encode
from elastic_dp.distributed import tensor_broadcast
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import StatePayload, TensorMeta

# Returns the tensors that are written in place, by slot, for an encoded tree and its tensors.
Targets = Callable[[Any, Sequence[TensorMeta]], Mapping[int, torch.Tensor]]


def serialize_state(tree: Any) -> StatePayload:
    """Returns the payload of a tree. Raises StateError, which names an entry that cannot be
    stored."""
    encoded, tensors = encode(tree)
    text = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    return tensor_broadcast.pack_payload(text, [tensor for _, tensor in tensors])


def pack_state(tree: Any, device_types: Mapping[str, str]) -> torch.Tensor:
    """Returns a tree of the host as one byte vector, for a process on this machine. Raises
    StateError. `device_types`: see `rehome_state`."""
    encoded, named = encode(tree)
    text = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    places = [device_types.get(name, "cpu") for name, _ in named]
    return torch.cat(tensor_broadcast.to_flats(text, [tensor for _, tensor in named], places))


def unpack_state(flat: torch.Tensor, device: torch.device) -> Any:
    """Reverses `pack_state`."""
    text, tensors = tensor_broadcast.from_flat(flat, device)
    return decode(json.loads(text), tensors)


def receive_state(
    group: ProcessGroup,
    device: torch.device,
    targets: Targets | None = None,
) -> tuple[Any, int]:
    """Returns the tree that rank 0 of `group` sends, and the size of its tensors in bytes.

    `targets` names tensors that are received in place.
    """

    def ours(text: bytes, specs: Sequence[TensorMeta]) -> Mapping[int, torch.Tensor]:
        return {} if targets is None else targets(json.loads(text), specs)

    text, tensors = tensor_broadcast.receive(group, device, ours)
    tree = decode(json.loads(text), tensors)
    return tree, sum(t.numel() * t.element_size() for t in tensors)


def rehome_state(
    tree: Any,
    device: torch.device,
    targets: Targets,
    device_types: Mapping[str, str],
) -> Any:
    """Returns the tree with each tensor copied once: to those that `targets` names, or to new ones.

    `device_types` is the type of the device on which each tensor belongs, by the tensor's name.
    """
    encoded, named = encode(tree)
    metas = [
        replace(tensor_broadcast.meta_of(tensor), device_type=device_types.get(name, "cpu"))
        for name, tensor in named
    ]
    tensors = [tensor for _, tensor in named]
    own = tensor_broadcast.copy_to_own_memory(tensors, metas, device, targets(encoded, metas))
    return decode(encoded, own)


def tensor_slot(encoded: Any) -> int | None:
    """Returns the slot of a tensor in an encoded tree, or None if the value is not a tensor."""
    is_tensor = isinstance(encoded, dict) and encoded.get("$") == "tensor"
    return encoded["v"] if is_tensor else None
