"""Captures what objects hold as values: copies containers and refuses by name what it cannot
capture."""

from __future__ import annotations

import enum
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_dp.checkpoint.encoding import FACTORIES, type_name
from elastic_dp.checkpoint.python_objects.object_kinds import (
    CONSTANTS,
    FOREIGN,
    FUNCTIONS,
    MARK,
    NO_ATTRIBUTES,
    PROCESS,
    SCALARS,
    TENSORS,
    UNCHANGING,
    References,
    assigned_in,
    attributes_of,
    carries_itself,
    class_named,
    closure_of,
    generator_state,
    is_generator,
    is_state,
    mark,
    refused,
    wrapped_tensors,
)
from elastic_dp.errors import ModelError


class Capture:
    """One capture of some objects. Raises ModelError for what cannot be captured."""

    def __init__(self, references: References, *, clones: bool = False) -> None:
        """With `clones`, tensors are copied; otherwise they are the objects' own."""
        self._references, self._clones = references, clones
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps objects alive while `_seen` holds their identities
        self._arrays: list[tuple[int, int]] = []  # their byte bounds
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.constants: dict[str, Any] = {}
        self.built: set[str] = (
            set()
        )  # paths of objects that cannot be created here: the user's code must have built them

    def value(self, value: Any, path: str) -> Any:
        cls = type(value)
        if cls in SCALARS or isinstance(value, np.generic):
            return value
        name = self._references.name_of(value)
        if name is not None:
            return mark("reference", name=name)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if id(value) in self._seen:
            return mark("again", path=self._seen[id(value)])
        self._seen[id(value)] = path
        self._kept.append(value)
        taken = _CONTAINERS.get(cls)
        return self._object(value, path) if taken is None else taken(self, value, path)

    def attributes(self, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {
            key: value if type(value) in SCALARS else self.value(value, f"{path}.{key}")
            for key, value in values.items()
        }

    # ---------------------------------------------------------------------------- containers

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        values = list(values)
        if SCALARS.issuperset(map(type, values)):
            return values
        return [self.value(value, f"{path}[{i}]") for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if MARK not in value and all(type(key) is str for key in value):
            return {key: self.value(item, f"{path}[{key!r}]") for key, item in value.items()}
        return mark("dict", items=self.pairs(value, path))

    def pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self._key(key, path), self.value(item, f"{path}[{self._references.word(key)}]")]
            for key, item in value.items()
        ]

    def _key(self, key: Any, path: str) -> Any:
        if type(key) in SCALARS or isinstance(key, np.generic):
            return key
        name = self._references.name_of(key)
        if name is not None:
            return mark("reference", name=name)
        if type(key) is tuple:
            return tuple(self._key(item, path) for item in key)
        if type(key) is frozenset:
            return self._set(key, path)
        raise refused(f"a key of {path}", key)

    def _set(self, value: Any, path: str) -> Any:
        items = sorted((self._key(item, path) for item in value), key=repr)  # equal on all members
        return mark("set", items=items, frozen=isinstance(value, frozenset))

    def _deque(self, value: deque[Any], path: str) -> Any:
        return mark("deque", items=self._items(value, path), maxlen=value.maxlen)

    def _defaultdict(self, value: defaultdict[Any, Any], path: str) -> Any:
        name = getattr(value.default_factory, "__name__", "")
        if value.default_factory is not None and FACTORIES.get(name) is not value.default_factory:
            self.built.add(path)
        return mark("defaultdict", items=self.pairs(value, path), factory=name)

    def _array(self, value: np.ndarray, path: str) -> Any:
        if value.dtype.hasobject:
            raise ModelError(f"{path} is a NumPy array of Python objects; make it a list")
        first, last = np.lib.array_utils.byte_bounds(value)
        overlaps = any(first < end and start < last for start, end in self._arrays)
        if overlaps or isinstance(value.base, torch.Tensor):
            raise ModelError(
                f"{path} is a NumPy array in the memory of another array or tensor, and a worker "
                "that joins would have two; make it a tensor, or a copy"
            )
        self._arrays.append((first, last))
        return value.copy()

    # ------------------------------------------------------------------------------- tensors

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        plain = type(value) is torch.Tensor and not value.requires_grad
        if plain and value.layout is torch.strided and not value.is_quantized:
            self.tensors.append((path, value))
            return value.clone() if self._clones else value
        if wrapped := wrapped_tensors(value):
            tensors, context = wrapped
            inner = {name: self._tensor(part, f"{path}.{name}") for name, part in tensors.items()}
            size, stride = tuple(value.shape), value.stride()
            fields = {"tensors": inner, "context": context, "size": size, "stride": stride}
            return self._made(value, path, mark("wrapped", **fields))
        if type(value) not in TENSORS or value.layout is not torch.strided or value.is_quantized:
            raise ModelError(
                f"{path} is a {type(value).__name__} ({value.layout}, {value.dtype}), and "
                "only dense tensors, and subclasses that __tensor_flatten__ makes such tensors and "
                "numbers of, are sent to a worker that joins; use to_dense() or dequantize()"
            )
        if value.grad_fn is not None:
            raise ModelError(
                f"{path} is part of an autograd graph, which is not sent to a worker that joins; "
                "detach() it"
            )
        self.tensors.append((path, value))
        if not value.requires_grad and not isinstance(value, nn.Parameter):
            return value.clone() if self._clones else value
        return mark(
            "leaf",
            value=value.detach().clone() if self._clones else value.detach(),
            parameter=isinstance(value, nn.Parameter),
            requires_grad=value.requires_grad,
        )

    # ------------------------------------------------------------------------------- objects

    def _object(self, value: Any, path: str) -> Any:
        generator = generator_state(value)
        if generator is not None:
            return generator
        if isinstance(value, FUNCTIONS):
            return self._function(value, path)
        if isinstance(value, enum.Enum):
            return self._made(value, path, mark("enum", name=value.name))
        if isinstance(value, torch.optim.Optimizer):
            raise ModelError(
                f"{path} is an optimizer that was created after the loop began: a worker that "
                "joins would not have it. Create it in __init__"
            )
        if isinstance(value, CONSTANTS) or type(value) is object or self._is_of_the_model(value):
            return mark("constant")
        if carries_itself(value):
            self.built.add(path)
            return mark("state_dict", value=self.value(value.state_dict(), f"{path}.state_dict()"))
        if isinstance(value, tuple) and hasattr(type(value), "_fields"):
            return self._made(value, path, mark("named", items=self._items(value, path)))
        module = type(value).__module__.partition(".")[0]
        if module in UNCHANGING:
            self.constants[path] = value
        if module in UNCHANGING or module in PROCESS:
            return mark("constant")
        return self._plain_object(value, path)

    def _is_of_the_model(self, value: Any) -> bool:
        """Returns whether the value is a module around the model's tensors, as `torch.compile`
        returns."""
        return isinstance(value, nn.Module) and all(
            self._references.name_of(tensor) is not None
            for tensor in [*value.parameters(), *value.buffers()]
        )

    def _plain_object(self, value: Any, path: str) -> Any:
        module = type(value).__module__.partition(".")[0]
        attributes = attributes_of(value)
        if isinstance(value, NO_ATTRIBUTES) or attributes is None or hasattr(value, "__next__"):
            raise refused(path, value)
        if module in FOREIGN:
            raise refused(path, value)
        return self._made(value, path, mark("object", attributes=self.attributes(attributes, path)))

    def _made(self, value: Any, path: str, mark: dict[str, Any]) -> dict[str, Any]:
        cls = type(value)
        if class_named(type_name(cls)) is not cls:
            self.built.add(path)
        return mark | {"type": type_name(cls)}

    def _function(self, value: Any, path: str) -> Any:
        """Captures what a function is bound to. The function itself is the same code everywhere."""
        if isinstance(value, partial):
            inner = [value.func, *value.args, *value.keywords.values()]
            return mark("parts", items=self._items(inner, f"{path} (a partial)"))
        owner = getattr(value, "__self__", None)
        if isinstance(
            value, types.BuiltinFunctionType
        ):  # a method of a compiled module, a container or a generator
            owner = owner if type(owner) in _CONTAINERS or is_generator(owner) else None
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            return mark("parts", items=[self.value(owner, f"{path}.__self__")])
        cells = {
            name: self.value(content, f"{path} (its closure's {name})")
            for name, content in closure_of(value).items()
            if is_state(content)
            or (type(content) in SCALARS and name in assigned_in(value.__code__))
        }
        return mark("function", cells=cells) if cells else mark("constant")


_CONTAINERS: dict[type, Callable[[Capture, Any, str], Any]] = {
    list: Capture._items,
    tuple: lambda c, value, path: tuple(c._items(value, path)),
    dict: Capture._dict,
    OrderedDict: lambda c, value, path: mark("ordered", items=c.pairs(value, path)),
    Counter: lambda c, value, path: mark("counter", items=c.pairs(value, path)),
    defaultdict: Capture._defaultdict,
    deque: Capture._deque,
    set: Capture._set,
    frozenset: Capture._set,
    bytearray: lambda c, value, path: mark("bytearray", value=bytes(value)),
    np.ndarray: Capture._array,
}


def held_in(
    value: Any, path: str, seen: set[int] | None = None
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yields the optimizers in an object, its containers and plain attributes, itself first, with
    their paths."""
    seen = set() if seen is None else seen
    if type(value) in SCALARS or isinstance(value, torch.Tensor) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif isinstance(value, dict):
        for n, (key, item) in enumerate(value.items()):
            word = repr(key) if type(key) in SCALARS else f"entry {n}"
            yield from held_in(item, f"{path}[{word}]", seen)
        return
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from held_in(item, f"{path}[{i}]", seen)
        return
    elif (
        isinstance(value, (nn.Module, type, types.ModuleType, *FUNCTIONS))
        or type(value).__module__.partition(".")[0] in FOREIGN
    ):
        return
    for key, item in (attributes_of(value) or {}).items():
        if key not in ("state", "param_groups", "defaults") or not hasattr(value, "param_groups"):
            yield from held_in(item, f"{path}.{key}", seen)
