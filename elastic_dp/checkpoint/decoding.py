"""Decodes a tree of state from JSON and tensors, as `encoding.py` wrote them.

Decoding never runs code that a file names. A dataclass, an enum or a named tuple is looked up among
the given types and the modules that are already imported, and is filled without calling its
constructor.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from elastic_dp.checkpoint.encoding import FACTORIES, NUMPY_TO_TORCH
from elastic_dp.errors import CheckpointError


def decode(
    encoded: Any,
    tensors: Sequence[torch.Tensor],
    *,
    types: Mapping[str, type] | None = None,
    plain: bool = False,
) -> Any:
    """Returns the tree that `encode` encoded. Raises CheckpointError.

    `tensors` are the tree's tensors by slot. `types` maps names (`type_name`) to dataclasses, enums
    and named tuples; it takes precedence over the imported modules. With `plain`, the tree has only
    types of Python and torch, so that it can be used without the user's code: dataclasses become
    dicts, enums their values, NumPy's values tensors and numbers.
    """
    return _Decoder(tensors, types or {}, plain).value(encoded)


class _Decoder:
    def __init__(
        self, tensors: Sequence[torch.Tensor], types: Mapping[str, type], plain: bool
    ) -> None:
        self._tensors, self._types, self._plain = tensors, types, plain

    def value(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.value(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        if "$" not in encoded:
            return {key: self.value(item) for key, item in encoded.items()}
        decoder = _DECODERS.get(encoded["$"])
        if decoder is None:
            raise CheckpointError(
                f"the checkpoint holds a {encoded['$']!r}, which this version does not know"
            )
        return decoder(self, encoded)

    def _items(self, encoded: dict[str, Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in encoded["v"]]

    def _ordered(self, encoded: dict[str, Any]) -> OrderedDict[Any, Any]:
        made: OrderedDict[Any, Any] = OrderedDict(self._items(encoded))
        if "metadata" in encoded:
            made._metadata = self.value(encoded["metadata"])  # type: ignore[attr-defined]
        return made

    def _defaultdict(self, encoded: dict[str, Any]) -> dict[Any, Any]:
        name = encoded["factory"]
        made: defaultdict[Any, Any] = defaultdict(
            None if name is None else FACTORIES[name], self._items(encoded)
        )
        return dict(made) if self._plain else made

    def _deque(self, encoded: dict[str, Any]) -> Any:
        items = self.value(encoded["v"])
        return items if self._plain else deque(items, encoded["maxlen"])

    def _range(self, encoded: dict[str, Any]) -> Any:
        made = range(*encoded["v"])
        return list(made) if self._plain else made

    def _bytes(self, encoded: dict[str, Any]) -> bytes:
        stored = encoded["v"]
        if isinstance(stored, str):
            return base64.b64decode(stored)
        return self._tensors[stored].numpy().tobytes()

    def _array(self, encoded: dict[str, Any]) -> Any:
        array = self._numpy(encoded["v"])
        if not self._plain:
            return array
        numbers = array.dtype.char in NUMPY_TO_TORCH and array.dtype.isnative
        return torch.from_numpy(array) if numbers else array.tolist()

    def _scalar(self, encoded: dict[str, Any]) -> Any:
        array = self._numpy(encoded["v"])
        return array.item() if self._plain else array[()]

    def _numpy(self, facts: dict[str, Any]) -> np.ndarray:
        dtype = np.lib.format.descr_to_dtype(self.value(facts["dtype"]))
        if "slot" in facts:
            content = self._tensors[facts["slot"]].contiguous().view(-1).view(torch.uint8)
            array = np.frombuffer(bytearray(content.numpy()), dtype)
        else:
            array = np.frombuffer(bytearray(base64.b64decode(facts["bytes"])), dtype)
        return array.reshape(facts["shape"])

    def _enum(self, encoded: dict[str, Any]) -> Any:
        value = self.value(encoded["v"])
        if self._plain:
            return value
        cls: Any = self._type(encoded["type"], lambda found: issubclass(found, Enum))
        return cls(value) if encoded["member"] is None else cls[encoded["member"]]

    def _named(self, encoded: dict[str, Any]) -> Any:
        values = self.value(encoded["v"])
        if self._plain:
            return tuple(values)
        cls: Any = self._type(encoded["type"], lambda found: hasattr(found, "_fields"))
        return tuple.__new__(cls, values)

    def _dataclass(self, encoded: dict[str, Any]) -> Any:
        fields = self.value(encoded["v"])
        if self._plain:
            return fields
        made: Any = object.__new__(self._type(encoded["type"], dataclasses.is_dataclass))
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def _type(self, name: str, fits: Callable[[type], bool]) -> type:
        """Returns the type of this name if `fits` accepts it. Imports nothing."""
        module, _, qualified = name.partition(":")
        found: Any = self._types.get(name)
        if found is None:
            found = sys.modules.get(module)
            for word in qualified.split("."):
                found = getattr(found, word, None)
        if isinstance(found, type) and fits(found):
            return found
        raise CheckpointError(
            f"the checkpoint holds a {qualified} of {module}, which is not defined here; "
            "import it first, or export the checkpoint, which converts it to plain values"
        )


def _float(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


_DECODERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "int": lambda d, e: int(e["v"], 16),
    "float": lambda d, e: _float(e["v"]),
    "complex": lambda d, e: complex(_float(e["v"][0]), _float(e["v"][1])),
    "tensor": lambda d, e: d._tensors[e["v"]],
    "tuple": lambda d, e: tuple(d.value(e["v"])),
    "set": lambda d, e: set(d.value(e["v"])),
    "frozenset": lambda d, e: frozenset(d.value(e["v"])),
    "dict": lambda d, e: dict(d._items(e)),
    "counter": lambda d, e: Counter(dict(d._items(e))),
    "bytes": _Decoder._bytes,
    "bytearray": lambda d, e: bytearray(d._bytes(e)),
    "dtype": lambda d, e: getattr(torch, e["v"]),
    "device": lambda d, e: torch.device(e["v"]),
    "size": lambda d, e: torch.Size(e["v"]),
    "ordered": _Decoder._ordered, "defaultdict": _Decoder._defaultdict, "deque": _Decoder._deque,
    "range": _Decoder._range, "array": _Decoder._array, "scalar": _Decoder._scalar,
    "enum": _Decoder._enum, "named": _Decoder._named, "dataclass": _Decoder._dataclass,
}  # fmt: skip
