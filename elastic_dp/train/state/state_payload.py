"""The state as members send it to each other: JSON and tensors, as in a checkpoint. It names no
code and runs none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from elastic_dp.checkpoint.decoding import decode
from elastic_dp.checkpoint.encoding import encode
from elastic_dp.distributed import tensor_broadcast
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import StatePayload, TensorMeta

# For an encoded tree and its tensors: which of ours are to be written in place, by number.
Targets = Callable[[Any, Sequence[TensorMeta]], Mapping[int, torch.Tensor]]


def serialize_state(tree: Any) -> StatePayload:
    """Raises StateError, which names the entry that has no such form."""
    encoded, tensors = encode(tree)
    text = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    return tensor_broadcast.pack_payload(text, [tensor for _, tensor in tensors])


def receive_state(
    group: ProcessGroup,
    device: torch.device,
    types: Mapping[str, type],
    targets: Targets | None = None,
) -> tuple[Any, int]:
    """The tree that rank 0 of `group` sends, and the bytes of its tensors. `types`: see
    `decode`."""

    def ours(text: bytes, specs: Sequence[TensorMeta]) -> Mapping[int, torch.Tensor]:
        return {} if targets is None else targets(json.loads(text), specs)

    text, tensors = tensor_broadcast.receive(group, device, ours)
    tree = decode(json.loads(text), tensors, types=types)
    return tree, sum(t.numel() * t.element_size() for t in tensors)


def rehome_state(
    tree: Any,
    device: torch.device,
    types: Mapping[str, type],
    targets: Targets,
    device_types: Mapping[str, str],
) -> Any:
    """The same tree, each of its tensors copied once, into memory of our own: the tensors that
    `targets` names, or new ones. `device_types`: by a tensor's name, where it belongs."""
    encoded, named = encode(tree)
    metas = [
        replace(tensor_broadcast.meta_of(tensor), device_type=device_types.get(name, "cpu"))
        for name, tensor in named
    ]
    tensors = [tensor for _, tensor in named]
    own = tensor_broadcast.copy_to_own_memory(tensors, metas, device, targets(encoded, metas))
    return decode(encoded, own, types=types)


def tensor_slot(encoded: Any) -> int | None:
    """The number of the tensor that stands here in an encoded tree, if one does."""
    is_tensor = isinstance(encoded, dict) and encoded.get("$") == "tensor"
    return encoded["v"] if is_tensor else None
