"""The extra state of modules as bytes: what `torch.nn.Module.get_extra_state` returns.

Bytes can be compared, sent and stored without knowing their meaning. Values are those of
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

_KEY = "_extra_state"  # the name that torch uses in a state_dict
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module. `name` is its key in the model's state_dict."""

    name: str
    module: nn.Module

    def read(self) -> bytes:
        """Returns the present extra state. Raises ModelError if it cannot be stored."""
        value = self.module.get_extra_state()
        try:
            return packed(value)
        except StateError as error:
            at = "" if error.path == "value" else f" at {error.path.removeprefix('value.')}"
            raise ModelError(
                f"get_extra_state of model.{self.name.removesuffix(_KEY).rstrip('.')} "
                f"returns{at} {error.reason}, which cannot be sent to a worker that joins. "
                "Return tensors, numbers and containers of them"
            ) from None

    def write(self, content: bytes) -> None:
        """Sets the extra state, unless the module already has it."""
        if content != self.read():
            self.module.set_extra_state(
                unpacked(content, types=types_in(self.module.get_extra_state()))
            )


def extra_states(model: nn.Module) -> list[ExtraState]:
    """Returns the modules of the model that have extra state, in the model's order."""
    return [
        ExtraState(f"{prefix}.{_KEY}" if prefix else _KEY, module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def packed(value: Any) -> bytes:
    """Serializes a value. Raises StateError if it cannot be stored."""
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
    """Returns the value that `packed` serialized. With `plain` (see `decode`), tensors are on the
    host."""
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
