"""The format of all state, in checkpoints and between members: a tree of values as JSON and
tensors.

JSON's own values stand for themselves. Every other value is an object {"$": kind, …}, and a tensor
is the number of its slot. Decoding makes values of Python, NumPy and torch. It looks up no class by
name, except tensor subclasses that `STATE_TYPES` allows, imports nothing and calls nothing that the
data name.

    supported   None, bool, int, float (with the bits of NaN), complex, str, bytes, list, tuple,
                set, dict with any of these as keys, in order, OrderedDict, defaultdict, Counter,
                deque; tensors (dense, any dtype); NumPy arrays and scalars of any dtype without
                objects and fields; torch's dtypes, devices and sizes; io.BytesIO; registered tensor
                subclasses
    refused     everything else, by its path
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_dp.checkpoint.layout import TensorSpec, dtype_name, flat_bytes
from elastic_dp.errors import CheckpointError, StateError

_LONG_BYTES = 1 << 10  # longer bytes and arrays are stored as tensors
_LENGTH_BYTES = 8
_FACTORIES = {cls.__name__: cls for cls in (list, dict, int, float, set, str, tuple, bool)}
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TORCHAO = {
    f"torchao.optim.subclass_{bits}:OptimState{name}"
    for bits, name in (("4bit", "4bit"), ("8bit", "8bit"), ("fp8", "Fp8"))
}


@dataclass(frozen=True)
class StateType:
    """How state of a type is read and written. None: a tensor subclass that takes itself apart."""

    get: Callable[[Any], Any] | None = None
    set: Callable[[Any, Any], Any] | None = None


# Registered types. Subclasses are not included.
STATE_TYPES: dict[type, StateType] = {}


def register_state_type(
    cls: type,
    get: Callable[[Any], Any] | None = None,
    set: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Makes objects of a type part of the state if an optimizer or a scheduler holds one.

    `get` returns the state of an object as numbers, text, tensors and containers of them. `set`
    writes such a state into an object that exists. Leave both out for a tensor subclass with
    `__tensor_flatten__` and `__tensor_unflatten__`. Call it before the loop, on each worker.
    """
    is_wrapper = issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_unflatten__")
    if (get is None) != (set is None) or is_wrapper != (get is None):
        raise TypeError(
            f"register_state_type({cls.__name__}) needs get= and set=; a tensor subclass needs "
            "__tensor_flatten__ and __tensor_unflatten__ instead"
        )
    STATE_TYPES[cls] = StateType(get, set)


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
        return ".".join(reversed(keys)) or "the state itself"


def encode(tree: Any) -> tuple[Any, list[NamedTensor]]:
    """Returns JSON for the tree, and its tensors by slot, detached but not copied. Raises
    StateError.

    Equal trees give equal JSON, whatever the order of their sets.
    """
    encoder = _Encoder()
    try:
        return encoder.value(tree, _Path(None, None)), encoder.tensors
    except RecursionError:
        raise StateError(
            "the state", "nested too deeply, or a container that holds itself"
        ) from None


def decode(encoded: Any, tensors: Sequence[torch.Tensor], *, plain: bool = False) -> Any:
    """Returns the tree that `encode` encoded. Raises CheckpointError.

    `tensors` are the tree's tensors by slot. With `plain`, the tree has only types of Python and
    torch: NumPy's values become tensors and numbers, and deques become lists.
    """
    try:
        return _Decoder(tensors, plain).value(encoded)
    except _MALFORMED as error:
        raise CheckpointError(f"the state is malformed ({type(error).__name__}: {error})") from None


def to_bytes(value: Any) -> bytes:
    """Returns a value as bytes, which are equal if and only if the values are. Raises
    StateError."""
    tree, named = encode(value)
    tensors = [tensor.contiguous() for _, tensor in named]
    kinds = [[dtype_name(t.dtype), list(t.shape), t.device.type] for t in tensors]
    head = json.dumps([tree, kinds], separators=(",", ":")).encode()
    contents = [flat_bytes(t.cpu()).numpy().tobytes() for t in tensors]
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *contents])


def from_bytes(content: bytes, *, plain: bool = False) -> Any:
    """Reverses `to_bytes`. With `plain` (see `decode`), tensors are on the host. Raises
    CheckpointError."""
    try:
        at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        tree, kinds = json.loads(content[_LENGTH_BYTES:at])
        tensors = []
        for word, shape, device in kinds:
            spec = TensorSpec.from_json(["", word, shape, None, device])
            end = at + spec.nbytes
            raw = torch.frombuffer(bytearray(content[at:end] or b"\0"), dtype=torch.uint8)
            tensor = spec.view(raw[: end - at].clone())
            tensors.append(tensor if plain else tensor.to(device))
            at = end
    except _MALFORMED as error:
        raise CheckpointError(f"the state is malformed ({type(error).__name__}: {error})") from None
    return decode(tree, tensors, plain=plain)


# ------------------------------------------------------------------------------------- encoding


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[NamedTensor] = []
        self._slots: dict[int, int] = {}  # by address
        self._names: set[str] = set()

    def value(self, value: Any, path: _Path) -> Any:
        cls = type(value)
        if value is None or cls is bool or cls is str or cls is int:
            return value
        if cls is float:
            return value if value - value == 0.0 else _tag("float", _bits(value))
        encoder = _ENCODERS.get(cls)
        if encoder is not None:
            return encoder(self, value, path)
        if isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value):
                return self._subclass(value, path)
            return _tag("tensor", self._slot(_storable(value, path), path))
        if isinstance(value, np.generic):
            return _tag("scalar", self._numpy(np.asarray(value), path))
        raise StateError(str(path), f"a {cls.__module__}.{cls.__qualname__}; {_remedy(value)}")

    def _list(self, value: Iterable[Any], path: _Path) -> list[Any]:
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
        name = getattr(value.default_factory, "__name__", None)
        if value.default_factory is not _FACTORIES.get(str(name)):
            raise StateError(str(path), "a defaultdict of a function; make it a dict")
        return _tag("defaultdict", self._items(value, path), factory=name)

    def _set(self, value: set[Any] | frozenset[Any], path: _Path) -> Any:
        items = sorted((self.value(item, path) for item in value), key=json.dumps)
        return _tag(type(value).__name__, items)

    def _bytes(self, value: bytes | bytearray, path: _Path) -> Any:
        return _tag(type(value).__name__, self._content(value, path))

    def _content(self, value: bytes | bytearray, path: _Path) -> Any:
        if len(value) < _LONG_BYTES:
            return base64.b64encode(value).decode()
        return self._slot(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)

    def _numpy(self, value: np.ndarray, path: _Path) -> dict[str, Any]:
        if value.dtype.kind in "OV":
            what = "objects" if value.dtype.hasobject else "records"
            raise StateError(str(path), f"a NumPy array of {what}; make it a list or a dict")
        facts = {"dtype": value.dtype.str, "shape": list(value.shape)}
        return facts | {"content": self._content(value.tobytes(), path)}

    def _subclass(self, value: Any, path: _Path) -> Any:
        """Encodes a tensor subclass as the tensors that it wraps, by torch's protocol for it."""
        cls = type(value)
        if subclass_named(_type_name(cls)) is not cls or value.requires_grad:
            raise StateError(str(path), f"a {cls.__module__}.{cls.__qualname__}; {_SUBCLASS}")
        names, context = value.__tensor_flatten__()
        inner = {name: self.value(getattr(value, name), _Path(path, name)) for name in names}
        more = {"context": self.value(context, path), "size": [*value.shape]}
        return _tag("subclass", inner, type=_type_name(cls), stride=[*value.stride()], **more)

    def _slot(self, tensor: torch.Tensor, path: _Path) -> int:
        """Returns the slot of a tensor. Equal views of one memory (tied weights) share a slot."""
        at = tensor.data_ptr()
        known = self._slots.get(at) if at else None
        if known is not None and _same_view(tensor, self.tensors[known].tensor):
            return known
        name = str(path)
        while name in self._names:
            name += "'"
        self._names.add(name)
        self.tensors.append(NamedTensor(name, tensor))
        self._slots[at] = len(self.tensors) - 1
        return len(self.tensors) - 1


_SUBCLASS = (
    "only dense tensors are stored: use to_dense() or dequantize(), or name a subclass with "
    "elastic_dp.register_state_type"
)
_ENCODERS: dict[type, Callable[..., Any]] = {
    list: _Encoder._list,
    dict: _Encoder._dict,
    tuple: lambda e, v, path: _tag("tuple", e._list(v, path)),
    set: _Encoder._set,
    frozenset: _Encoder._set,
    OrderedDict: _Encoder._ordered,
    Counter: lambda e, v, path: _tag("counter", e._items(v, path)),
    defaultdict: _Encoder._defaultdict,
    deque: lambda e, v, path: _tag("deque", e._list(v, path), maxlen=v.maxlen),
    bytes: _Encoder._bytes,
    bytearray: _Encoder._bytes,
    io.BytesIO: lambda e, v, path: _tag("file", e._content(v.getvalue(), path)),
    complex: lambda e, v, path: _tag("complex", [_bits(v.real), _bits(v.imag)]),
    np.ndarray: lambda e, v, path: _tag("array", e._numpy(v, path)),
    torch.Size: lambda e, v, path: _tag("size", list(v)),
    torch.dtype: lambda e, v, path: _tag("dtype", dtype_name(v)),
    torch.device: lambda e, v, path: _tag("device", str(v)),
}


def _remedy(value: Any) -> str:
    if isinstance(value, Enum):
        return "store its name"
    if is_dataclass(value) and not isinstance(value, type):
        return "store dataclasses.asdict() of it"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "store its _asdict()"
    return "store its content as numbers, text, tensors and containers of them"


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
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
        raise StateError(str(path), f"a {kind}; {_SUBCLASS}")
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _tag(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"$": kind, "v": value, **more}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def subclass_named(name: str) -> Any:
    """Returns the registered tensor subclass of this name, or None. torchao's are registered once
    it is imported."""
    if name in _TORCHAO:
        module, _, word = name.partition(":")
        return getattr(sys.modules.get(module), word, None)
    known = (cls for cls, how in STATE_TYPES.items() if how.get is None)
    return next((cls for cls in known if _type_name(cls) == name), None)


# ------------------------------------------------------------------------------------- decoding


class _Decoder:
    def __init__(self, tensors: Sequence[torch.Tensor], plain: bool) -> None:
        self._tensors, self._plain = tensors, plain

    def value(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.value(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        if "$" not in encoded:
            return {key: self.value(item) for key, item in encoded.items()}
        decoder = _DECODERS.get(encoded["$"])
        if decoder is None:
            raise ValueError(f"a {encoded['$']!r}, which this version does not know")
        return decoder(self, encoded)

    def tensor(self, slot: Any) -> torch.Tensor:
        if type(slot) is not int or not 0 <= slot < len(self._tensors):
            raise ValueError(f"there is no tensor {slot!r}")
        return self._tensors[slot]

    def items(self, encoded: dict[str, Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in encoded["v"]]

    def _ordered(self, encoded: dict[str, Any]) -> OrderedDict[Any, Any]:
        made: OrderedDict[Any, Any] = OrderedDict(self.items(encoded))
        if "metadata" in encoded:
            made._metadata = self.value(encoded["metadata"])  # type: ignore[attr-defined]
        return made

    def _defaultdict(self, encoded: dict[str, Any]) -> dict[Any, Any]:
        name = encoded["factory"]
        factory: Any = None if name is None else _FACTORIES[name]
        items = self.items(encoded)
        return dict(items) if self._plain else defaultdict(factory, items)

    def _deque(self, encoded: dict[str, Any]) -> Any:
        items = self.value(encoded["v"])
        return items if self._plain else deque(items, encoded["maxlen"])

    def content(self, stored: Any) -> bytes:
        if isinstance(stored, str):
            return base64.b64decode(stored)
        return self.tensor(stored).numpy().tobytes()

    def _numpy(self, encoded: dict[str, Any]) -> Any:
        facts = encoded["v"]
        dtype = np.dtype(str(facts["dtype"]))
        if dtype.kind in "OV":
            raise ValueError(f"an array of {dtype}")
        content = self.content(facts["content"])
        array = np.frombuffer(bytearray(content), dtype).reshape(facts["shape"])
        if encoded["$"] == "scalar":
            return array.item() if self._plain else array[()]
        if not self._plain:
            return array
        numbers = dtype.kind in "?biufc" and dtype.isnative and dtype.char not in "gG"
        return torch.from_numpy(array) if numbers else array.tolist()

    def _subclass(self, encoded: dict[str, Any]) -> Any:
        name, inner = encoded["type"], {k: self.value(x) for k, x in encoded["v"].items()}
        if self._plain:
            return inner
        cls = subclass_named(name)
        if cls is None:
            raise ValueError(
                f"a tensor of type {name}, which is not registered: import its package, or call "
                "elastic_dp.register_state_type"
            )
        size, stride = torch.Size(encoded["size"]), tuple(encoded["stride"])
        return cls.__tensor_unflatten__(inner, self.value(encoded["context"]), size, stride)


def _dtype(word: Any) -> torch.dtype:
    found = getattr(torch, word)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{word!r} is not a dtype")
    return found


def _float(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


_DECODERS: dict[Any, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "float": lambda d, e: _float(e["v"]),
    "complex": lambda d, e: complex(_float(e["v"][0]), _float(e["v"][1])),
    "tensor": lambda d, e: d.tensor(e["v"]),
    "tuple": lambda d, e: tuple(d.value(e["v"])),
    "set": lambda d, e: set(d.value(e["v"])),
    "frozenset": lambda d, e: frozenset(d.value(e["v"])),
    "dict": lambda d, e: dict(d.items(e)),
    "counter": lambda d, e: Counter(dict(d.items(e))),
    "bytes": lambda d, e: d.content(e["v"]),
    "bytearray": lambda d, e: bytearray(d.content(e["v"])),
    "file": lambda d, e: d.content(e["v"]) if d._plain else io.BytesIO(d.content(e["v"])),
    "dtype": lambda d, e: _dtype(e["v"]),
    "device": lambda d, e: torch.device(e["v"]),
    "size": lambda d, e: torch.Size(e["v"]),
    "ordered": _Decoder._ordered,
    "defaultdict": _Decoder._defaultdict,
    "deque": _Decoder._deque,
    "array": _Decoder._numpy,
    "scalar": _Decoder._numpy,
    "subclass": _Decoder._subclass,
}
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    binascii.Error,
    struct.error,
)
