"""What a module keeps beside its tensors: `get_extra_state` and `set_extra_state` of
`torch.nn.Module`, as bytes.

Bytes compare, travel and are stored without knowing what the module put in; values are those of
`encoding.py`, and `io.BytesIO`. Nothing is pickled.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic_dp.checkpoint.decoding import decode
from elastic_dp.checkpoint.encoding import encode, types_in
from elastic_dp.checkpoint.layout import flat_bytes
from elastic_dp.errors import ModelError, StateError

_KEY = "_extra_state"  # as torch names it in a state_dict
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class ExtraState:
    """Of one module. `name`: its key in the model's state_dict."""

    name: str
    module: nn.Module

    def read(self) -> bytes:
        """As it is now. Raises ModelError if it cannot be stored."""
        value = self.module.get_extra_state()
        try:
            return packed(value)
        except StateError as error:
            at = "" if error.path == "value" else f" at {error.path.removeprefix('value.')}"
            raise ModelError(
                f"get_extra_state of model.{self.name.removesuffix(_KEY).rstrip('.')} "
                f"returns{at} {error.reason}, which a "
                "worker that joins cannot be given. Return tensors, numbers and containers of them"
            ) from None

    def write(self, content: bytes) -> None:
        if content != self.read():
            self.module.set_extra_state(
                unpacked(content, types=types_in(self.module.get_extra_state()))
            )


def extra_states(model: nn.Module) -> list[ExtraState]:
    """Of the modules that have any, in the model's order."""
    return [
        ExtraState(f"{prefix}.{_KEY}" if prefix else _KEY, module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def packed(value: Any) -> bytes:
    """Raises StateError."""
    is_file = isinstance(value, io.BytesIO)
    tree, named = encode({"file": is_file, "value": value.getvalue() if is_file else value})
    tensors = [tensor.contiguous() for _, tensor in named]
    kinds = [[str(t.dtype), list(t.shape), t.device.type] for t in tensors]
    head = json.dumps([tree, kinds], separators=(",", ":")).encode()
    contents = [flat_bytes(t.cpu()).numpy().tobytes() for t in tensors]
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *contents])


def unpacked(
    content: bytes,
    *,
    types: Mapping[str, type] | None = None,
    plain: bool = False,
) -> Any:
    """`plain`: see `decode`; its tensors are on the host."""
    at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    tree, kinds = json.loads(content[_LENGTH_BYTES:at])
    tensors = []
    for word, shape, device in kinds:
        tensor = torch.empty(shape, dtype=getattr(torch, word.removeprefix("torch.")))
        size = tensor.numel() * tensor.element_size()
        if size:
            raw = torch.frombuffer(bytearray(content[at : at + size]), dtype=torch.uint8)
            flat_bytes(tensor).copy_(raw)
        tensors.append(tensor if plain else tensor.to(device))
        at += size
    whole = decode(tree, tensors, types=types, plain=plain)
    return io.BytesIO(whole["value"]) if whole["file"] and not plain else whole["value"]
