"""Restores captured values into existing objects, in place where other objects may hold them,
too."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_dp.checkpoint.encoding import FACTORIES, type_name
from elastic_dp.checkpoint.extra_state import unpacked
from elastic_dp.checkpoint.python_objects.object_kinds import (
    MARK,
    MISSING,
    References,
    attributes_of,
    cannot_make,
    class_named,
    content_of,
    new_generator,
    same_kind,
)
from elastic_dp.errors import ModelError


class Restore:
    """Restores values into existing objects. `shared`: identities of tensors that others are views
    of."""

    def __init__(
        self, references: References, shared: Iterable[int] = (), unwritten: Iterable[Any] = ()
    ) -> None:
        """`unwritten`: objects and tensors that no value is written into."""
        self._references, self._shared = references, set(shared)
        self._found: dict[str, Any] = {}
        self._used: set[int] = (
            set()
        )  # identities of objects, and addresses of memory, that hold a restored value
        self._kept: list[Any] = []
        for one in unwritten:
            self._take(
                one.untyped_storage().data_ptr() if isinstance(one, torch.Tensor) else id(one), one
            )

    def value(self, given: Any, mine: Any, path: str, *, in_place: bool = True) -> Any:
        """Returns the restored value: `mine`, updated in place, if it is an object that can take
        the value."""
        if isinstance(given, torch.Tensor):
            return self._tensor(given, mine) if in_place else given
        if type(given) in (list, dict, tuple):
            made = self._container(given, mine, path)
        elif isinstance(given, np.ndarray):
            made = self._array(given, mine)
        else:
            return given
        self._found[path] = made
        return made

    def _container(self, given: Any, mine: Any, path: str) -> Any:
        if type(given) is tuple:
            return tuple(self._items(given, mine, path))
        if type(given) is list:
            return self._fill_list(given, mine, path, list)
        if MARK in given:
            return _RESTORERS[given[MARK]](self, given, mine, path)
        return self._fill_dict([[key, item] for key, item in given.items()], mine, path, dict)

    def attributes(self, given: Mapping[str, Any], owner: Any, path: str) -> None:
        """Restores the attributes of an object. Attributes that are not given stay."""
        mine = attributes_of(owner) or {}
        for key, item in given.items():
            value = self.value(item, mine.get(key, MISSING), f"{path}.{key}")
            if value is not MISSING and value is not mine.get(key, MISSING):
                object.__setattr__(owner, key, value)

    def pairs(
        self, given: Iterable[Any], mine: Mapping[Any, Any], path: str, *, in_place: bool = True
    ) -> dict[Any, Any]:
        """Restores pairs of keys and values. Objects in `mine` that can take a value are updated in
        place."""
        found = {}
        for taken, item in given:
            key = self.value(taken, MISSING, f"a key of {path}")
            at = f"{path}[{self._references.word(key)}]"
            value = self.value(item, mine.get(key, MISSING), at, in_place=in_place)
            if value is not MISSING:
                found[key] = value
        return found

    # ------------------------------------------------------------------------------- values

    def _tensor(self, given: torch.Tensor, mine: Any) -> torch.Tensor:
        """Copies into `mine`, which a closure may hold, unless other tensors share its memory."""
        fits = type(mine) is torch.Tensor and id(given) not in self._shared
        if not (fits and same_kind(mine, given) and self._take(mine.untyped_storage().data_ptr())):
            return given
        with torch.no_grad():
            mine.copy_(given)
        return mine

    def _array(self, given: np.ndarray, mine: Any) -> np.ndarray:
        fits = type(mine) is np.ndarray and mine.shape == given.shape and mine.dtype == given.dtype
        if fits and mine.flags.writeable and self._claim(mine):
            np.copyto(mine, given)
            return mine
        return given.copy()

    def _fill_list(self, given: list[Any], mine: Any, path: str, cls: Callable[[], Any]) -> Any:
        before = list(mine) if isinstance(mine, list | deque) else []
        target = mine if type(mine) is type(cls()) and self._claim(mine) else cls()
        self._found[path] = target
        values = self._items(given, before, path)
        target.clear()
        target.extend(values)
        return target

    def _fill_dict(self, pairs: list[Any], mine: Any, path: str, cls: Callable[[], Any]) -> Any:
        before = dict(mine) if isinstance(mine, dict) else {}
        target = mine if type(mine) is type(cls()) and self._claim(mine) else cls()
        self._found[path] = target
        items = self.pairs(pairs, before, path)
        target.clear()
        target.update(items)
        return target

    def _items(self, given: Iterable[Any], mine: Any, path: str) -> list[Any]:
        mine = list(mine) if isinstance(mine, list | tuple | deque) else []
        values = []
        for i, item in enumerate(given):
            value = self.value(item, mine[i] if i < len(mine) else MISSING, f"{path}[{i}]")
            values.append(None if value is MISSING else value)
        return values

    def _claim(self, mine: Any) -> bool:
        """Returns whether no other value was restored into this object.

        Two values of the state need not be one object there even if they are one object here.
        """
        return self._take(id(mine), mine)

    def _take(self, identity: int, keep: Any = None) -> bool:
        if identity in self._used:
            return False
        self._used.add(identity)
        self._kept.append(keep)
        return True

    # -------------------------------------------------------------------------------- marks

    def _set(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        items = [self.value(item, MISSING, f"a key of {path}") for item in given["items"]]
        if given["frozen"]:
            return frozenset(items)
        target = mine if type(mine) is set and self._claim(mine) else set()
        target.clear()
        target.update(items)
        return target

    def _deque(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        fits = type(mine) is deque and mine.maxlen == given["maxlen"]
        make: Callable[[], Any] = partial(deque, maxlen=given["maxlen"])
        return self._fill_list(given["items"], mine if fits else MISSING, path, make)

    def _defaultdict(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        factory: Any = FACTORIES.get(given["factory"])
        factory = mine.default_factory if type(mine) is defaultdict else factory
        return self._fill_dict(given["items"], mine, path, partial(defaultdict, factory))

    def _bytearray(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        target = mine if type(mine) is bytearray and self._claim(mine) else bytearray()
        target[:] = given["value"]
        return target

    def _leaf(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        value = given["value"]
        if isinstance(mine, torch.Tensor) and mine.is_leaf and same_kind(mine, value):
            with torch.no_grad():
                mine.copy_(value)
            return mine
        if given["parameter"]:
            return nn.Parameter(value, requires_grad=given["requires_grad"])
        return value.detach().requires_grad_(given["requires_grad"])

    def _generator(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        state = unpacked(given["state"])
        if type(mine).__name__ != given["type"] or not self._claim(mine):
            mine = new_generator(given)
        if isinstance(mine, torch.Generator):
            mine.set_state(state)
        elif isinstance(mine, np.random.Generator):
            mine.bit_generator.state = state
        elif isinstance(mine, np.random.BitGenerator):
            mine.state = state
        elif isinstance(mine, np.random.RandomState):
            mine.set_state(state)
        else:
            mine.setstate(state)
        return mine

    def _state_dict(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        self._found[path] = _there(mine, path)
        inner = self.value(given["value"], mine.state_dict(), f"{path}.state_dict()")
        mine.load_state_dict(inner)
        return mine

    def _parts(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        """Restores what a method is bound to, or what a partial holds."""
        if isinstance(mine, partial):
            inner = [mine.func, *mine.args, *mine.keywords.values()]
            path = f"{path} (a partial)"
        else:
            inner, path = [getattr(mine, "__self__", MISSING)], path
        if len(inner) == len(given["items"]) and inner[0] is not MISSING:
            for i, (item, part) in enumerate(zip(given["items"], inner, strict=True)):
                at = f"{path}[{i}]" if isinstance(mine, partial) else f"{path}.__self__"
                self.value(item, part, at)
        return mine

    def _function(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        cells = {}
        if isinstance(mine, types.FunctionType) and mine.__closure__:
            cells = dict(zip(mine.__code__.co_freevars, mine.__closure__, strict=True))
        for name, item in given["cells"].items():
            if name in cells:
                before = content_of(cells[name])
                value = self.value(item, before, f"{path} (its closure's {name})")
                if value is not before:
                    cells[name].cell_contents = value
        return mine

    def _wrapped(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        """Returns a new tensor of a subclass."""
        cls = _class_of(given, mine, path)
        inner = {
            name: self.value(item, MISSING, f"{path}.{name}", in_place=False)
            for name, item in given["tensors"].items()
        }
        size, stride = torch.Size(given["size"]), given["stride"]
        return cls.__tensor_unflatten__(inner, given["context"], size, stride)

    def _named(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        cls = _class_of(given, mine, path)
        return tuple.__new__(cls, self._items(given["items"], mine, path))

    def _enum(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        cls = _class_of(given, mine, path)
        return cls[given["name"]]

    def _object(self, given: dict[str, Any], mine: Any, path: str) -> Any:
        if type_name(type(mine)) != given["type"] or not self._claim(mine):
            cls = class_named(given["type"])
            if cls is None:
                raise cannot_make(path, given["type"])
            mine = object.__new__(cls)
        self._found[path] = mine
        self.attributes(given["attributes"], mine, path)
        for key in (attributes_of(mine) or {}).keys() - given["attributes"].keys():
            object.__delattr__(mine, key)
        return mine


_RESTORERS: dict[str, Callable[[Restore, dict[str, Any], Any, str], Any]] = {
    "reference": lambda r, given, mine, path: r._references.objects[given["name"]],
    "again": lambda r, given, mine, path: r._found[given["path"]],
    "constant": lambda r, given, mine, path: mine,
    "dict": lambda r, given, mine, path: r._fill_dict(given["items"], mine, path, dict),
    "ordered": lambda r, given, mine, path: r._fill_dict(given["items"], mine, path, OrderedDict),
    "counter": lambda r, given, mine, path: r._fill_dict(given["items"], mine, path, Counter),
    "defaultdict": Restore._defaultdict,
    "set": Restore._set,
    "deque": Restore._deque,
    "bytearray": Restore._bytearray,
    "leaf": Restore._leaf,
    "wrapped": Restore._wrapped,
    "generator": Restore._generator,
    "state_dict": Restore._state_dict,
    "parts": Restore._parts,
    "function": Restore._function,
    "named": Restore._named,
    "enum": Restore._enum,
    "object": Restore._object,
}


class Plain(Restore):
    """Restores values in Python's and torch's own types only, without the original objects."""

    def __init__(self) -> None:
        super().__init__(References())

    def named(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Restores what `Capture.attributes` returned."""
        return {key: self.value(item, MISSING, f"{path}.{key}") for key, item in given.items()}

    def _container(self, given: Any, mine: Any, path: str) -> Any:
        kind = given.get(MARK) if type(given) is dict else None
        if kind in ("constant", "parts", "function"):
            return None
        if kind in ("reference", "enum"):
            return given["name"]
        if kind == "generator":
            return unpacked(given["state"], plain=True)
        if kind == "state_dict":
            return self.value(given["value"], MISSING, f"{path}.state_dict()")
        if kind == "named":
            return tuple(self._items(given["items"], MISSING, path))
        if kind == "object":
            return self.named(given["attributes"], path)
        if kind == "wrapped":
            return self.named(given["tensors"], path)
        return super()._container(given, mine, path)


def _class_of(given: Mapping[str, Any], mine: Any, path: str) -> Any:
    """Returns the class of a captured value, which a script may have defined where `mine` is."""
    cls = type(mine) if type_name(type(mine)) == given["type"] else class_named(given["type"])
    if cls is None:
        raise cannot_make(path, given["type"])
    return cls


def _there(mine: Any, path: str) -> Any:
    if mine is MISSING:
        raise ModelError(
            f"{path} is in the state that is restored, but does not exist here; create it in "
            "__init__"
        )
    return mine
