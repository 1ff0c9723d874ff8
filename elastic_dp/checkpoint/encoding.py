"""Encodes a tree of state as JSON and tensors, without loss.

JSON's own values stand for themselves. Every other value is an object {"$": kind, …}, and a tensor
is the number of its slot. Nothing is pickled. `decoding.py` is the inverse.

    supported   None, bool, int, float (with the bits of NaN), complex, str, bytes, list, tuple,
                set, dict with any of these as keys, in order, OrderedDict, defaultdict, Counter,
                deque, range; tensors (dense, any dtype); NumPy arrays and scalars of any dtype
                without objects; torch's dtypes, devices and sizes; dataclasses, enums, named tuples
    refused     everything else, by its path: functions, open files, sparse, quantised and meta
                tensors
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum, Flag
from typing import Any, NamedTuple

import numpy as np
import torch

from elastic_dp.errors import StateError

_LONG_BYTES = 1 << 10  # larger bytes objects and arrays are stored as tensors
_LARGE_INT = 1 << 63  # JSON readers of other languages may lose larger ones
FACTORIES = {cls.__name__: cls for cls in (list, dict, int, float, set, str, tuple, bool)}
NUMPY_TO_TORCH = "?bBhHiIlLqQefdFD"  # NumPy's type codes for which torch has a dtype


class NamedTensor(NamedTuple):
    """A tensor and its path in the tree, which is unique."""

    name: str
    tensor: torch.Tensor


class _Path(NamedTuple):
    """The location of a value. It is formatted only for a tensor or an error."""

    above: _Path | None
    key: Any

    def __str__(self) -> str:
        keys, at = [], self
        while at.above is not None:
            keys.append(at.key if isinstance(at.key, str) else repr(at.key))
            at = at.above
        return ".".join(reversed(keys)) or "the tree itself"


def encode(tree: Any) -> tuple[Any, list[NamedTensor]]:
    """Returns JSON for the tree, and its tensors by slot, detached but not copied. Raises
    StateError.

    Equal trees give equal JSON, whatever the order of their sets.
    """
    encoder = _Encoder()
    return encoder.value(tree, _Path(None, None)), encoder.tensors


def type_name(cls: type) -> str:
    """Returns the name of a type in the JSON: module and qualified name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def types_in(tree: Any) -> dict[str, type]:
    """Returns the types that `decode` needs for a tree like this one, by name.

    Types that a script defines cannot be found by their names.
    """
    found: dict[str, type] = {}

    def look(value: Any) -> None:
        if _is_record(value):
            found[type_name(type(value))] = type(value)
        if isinstance(value, Mapping):
            look(list(value.items()))
        elif isinstance(value, list | tuple | set | frozenset | deque):
            for item in value:
                look(item)
        elif dataclasses.is_dataclass(value):
            look([getattr(value, field.name, None) for field in dataclasses.fields(value)])

    look(tree)
    return found


def _is_record(value: Any) -> bool:
    if isinstance(value, type):
        return False
    named = isinstance(value, tuple) and hasattr(type(value), "_fields")
    return dataclasses.is_dataclass(value) or isinstance(value, Enum) or named


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[NamedTensor] = []
        self._slots: dict[int, int] = {}  # by address
        self._names: set[str] = set()
        self._open: set[int] = set()  # containers whose items are being encoded

    def value(self, value: Any, path: _Path) -> Any:
        cls = type(value)
        if value is None or cls is bool or cls is str:
            return value
        if cls is int:
            return value if -_LARGE_INT < value < _LARGE_INT else _tag("int", hex(value))
        if cls is float:
            return value if value - value == 0.0 else _tag("float", _bits(value))
        encoder = _ENCODERS.get(cls)
        if encoder is not None:
            return self._inside(encoder, value, path)
        if isinstance(value, torch.Tensor):
            return _tag("tensor", self._slot(_storable(value, path), path))
        if isinstance(value, np.generic):
            return _tag("scalar", self._numpy(np.asarray(value), path))
        if _is_record(value):
            return self._inside(_Encoder._record, value, path)
        raise StateError(str(path), f"a {cls.__module__}.{cls.__qualname__}; {_WAY_OUT}")

    def _inside(self, encoder: Callable[..., Any], value: Any, path: _Path) -> Any:
        if id(value) in self._open:
            raise StateError(str(path), "a container that holds itself; state must be a tree")
        self._open.add(id(value))
        try:
            return encoder(self, value, path)
        finally:
            self._open.discard(id(value))

    def _list(self, value: Any, path: _Path) -> list[Any]:
        return [self.value(item, _Path(path, i)) for i, item in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: _Path) -> Any:
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: self.value(item, _Path(path, key)) for key, item in value.items()}
        return _tag("dict", self._items(value, path))

    def _items(self, value: Mapping[Any, Any], path: _Path) -> list[Any]:
        return [
            [self.value(key, _Path(path, key)), self.value(item, _Path(path, key))]
            for key, item in value.items()
        ]

    def _ordered(self, value: OrderedDict[Any, Any], path: _Path) -> Any:
        """Encodes an OrderedDict. `nn.Module.state_dict` stores module versions in its
        `_metadata`."""
        more = getattr(value, "_metadata", None)
        kept = {} if more is None else {"metadata": self.value(more, _Path(path, "_metadata"))}
        return _tag("ordered", self._items(value, path), **kept)

    def _defaultdict(self, value: defaultdict[Any, Any], path: _Path) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise StateError(str(path), f"a defaultdict of {factory!r}; make it a dict")
        return _tag("defaultdict", self._items(value, path), factory=name)

    def _counter(self, value: Counter[Any], path: _Path) -> Any:
        return _tag("counter", self._items(value, path))

    def _tuple(self, value: tuple[Any, ...], path: _Path) -> Any:
        return _tag("tuple", self._list(value, path))

    def _set(self, value: set[Any] | frozenset[Any], path: _Path) -> Any:
        kind = type(value).__name__
        return _tag(kind, sorted((self.value(item, path) for item in value), key=json.dumps))

    def _deque(self, value: deque[Any], path: _Path) -> Any:
        return _tag("deque", self._list(value, path), maxlen=value.maxlen)

    def _range(self, value: range, path: _Path) -> Any:
        return _tag("range", [value.start, value.stop, value.step])

    def _complex(self, value: complex, path: _Path) -> Any:
        return _tag("complex", [_bits(value.real), _bits(value.imag)])

    def _bytes(self, value: bytes | bytearray, path: _Path) -> Any:
        kind = type(value).__name__
        if len(value) < _LONG_BYTES:
            return _tag(kind, base64.b64encode(value).decode())
        return _tag(kind, self._slot(torch.frombuffer(bytearray(value), dtype=torch.uint8), path))

    def _torch_word(self, value: Any, path: _Path) -> Any:
        return _tag(type(value).__name__, str(value).removeprefix("torch."))

    def _size(self, value: torch.Size, path: _Path) -> Any:
        return _tag("size", list(value))

    def _array(self, value: np.ndarray, path: _Path) -> Any:
        return _tag("array", self._numpy(value, path))

    def _numpy(self, value: np.ndarray, path: _Path) -> dict[str, Any]:
        """Encodes the numbers as a tensor if torch has the dtype, otherwise their bytes."""
        if value.dtype.hasobject:
            raise StateError(str(path), "a NumPy array of Python objects; make it a list")
        named = np.lib.format.dtype_to_descr(value.dtype)
        if np.lib.format.descr_to_dtype(named) != value.dtype:
            raise StateError(str(path), f"a NumPy array of {value.dtype}; make it a tensor")
        facts = {"dtype": self.value(named, path), "shape": list(value.shape)}
        if value.nbytes < _LONG_BYTES:
            return {**facts, "bytes": base64.b64encode(value.tobytes()).decode()}
        dense = np.ascontiguousarray(value)
        if value.dtype.char not in NUMPY_TO_TORCH or not value.dtype.isnative:
            dense = np.frombuffer(bytearray(dense.tobytes()), np.uint8)
        elif not dense.flags.writeable:  # torch would warn
            dense = dense.copy()
        return {**facts, "slot": self._slot(torch.from_numpy(dense), path)}

    def _record(self, value: Any, path: _Path) -> Any:
        name = type_name(type(value))
        if isinstance(value, Enum):
            member = None if isinstance(value, Flag) else value.name
            return _tag("enum", self.value(value.value, path), type=name, member=member)
        if isinstance(value, tuple):
            return _tag("named", self._list(value, path), type=name)
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        inner = {key: self.value(getattr(value, key), _Path(path, key)) for key in fields}
        return _tag("dataclass", inner, type=name)

    def _slot(self, tensor: torch.Tensor, path: _Path) -> int:
        """Returns the slot of a tensor. Tensors on the same memory (tied weights) share a slot."""
        at = tensor.data_ptr()
        known = self._slots.get(at) if at else None
        if known is not None and _same_kind(tensor, self.tensors[known].tensor):
            return known
        name = str(path)
        while name in self._names:
            name += "'"
        self._names.add(name)
        self.tensors.append(NamedTensor(name, tensor))
        self._slots[at] = len(self.tensors) - 1
        return len(self.tensors) - 1


_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WAY_OUT = "keep it out of state_dict(), or store its content as numbers, tensors, containers"
_ENCODERS: dict[type, Callable[..., Any]] = {
    list: _Encoder._list, dict: _Encoder._dict, tuple: _Encoder._tuple, set: _Encoder._set,
    frozenset: _Encoder._set, OrderedDict: _Encoder._ordered, Counter: _Encoder._counter,
    defaultdict: _Encoder._defaultdict, deque: _Encoder._deque, range: _Encoder._range,
    bytes: _Encoder._bytes, bytearray: _Encoder._bytes, complex: _Encoder._complex,
    np.ndarray: _Encoder._array, torch.Size: _Encoder._size, torch.dtype: _Encoder._torch_word,
    torch.device: _Encoder._torch_word,
}  # fmt: skip


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    shapes = one.shape == other.shape and one.stride() == other.stride()
    return shapes and one.dtype == other.dtype and one.device == other.device


def _storable(tensor: torch.Tensor, path: _Path) -> torch.Tensor:
    if tensor.is_meta:
        raise StateError(
            str(path), "a tensor on the meta device, which has no values; make it real"
        )
    odd = type(tensor) not in _TENSORS
    if odd or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype})"
        raise StateError(
            str(path),
            f"a {kind}, and only dense tensors are stored; use to_dense() or dequantize()",
        )
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _tag(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"$": kind, "v": value, **more}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()
