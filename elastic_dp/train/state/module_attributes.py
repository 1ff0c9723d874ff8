"""Attributes of modules that forward or the loop's body changes: numbers, text, functions, tensors
that are no buffers, and what dicts, lists, sets and arrays hold.

A module that changes itself when the rows ask for it, such as a rotary embedding that recomputes
its frequencies for a longer row, computes something else for the rows that come after it. These
differ between workers. So what a micro-batch changes in a module is undone with its attributes:
each micro-batch begins with the module as the step began. Two changes cannot be undone, and are
refused by name: that of a buffer with other attributes, half of which would be left, and that of a
tensor in place.

Attributes that one micro-batch changes each time, such as a counter, stay as they are: the check
before the first step names them. All workers find the same ones, by one micro-batch of step 1. Of
torch's layers, numbers, text and functions are watched alone.

What the body changes is named: numbers, text, functions, and the number of hooks. A look at all
attributes of a module takes some hundred nanoseconds, so what the step began with is what the body
is compared with, and hooks are counted where some are, or were added.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from operator import call, is_, itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic_dp.errors import ModelError

_PLAIN = (bool, int, float, complex, str, type(None))
_WATCHED = (*_PLAIN, FunctionType, MethodType)
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}  # other parts keep them
_MOST = 1000  # elements of a container, and 8 bytes of an array, that are compared


class _Held(NamedTuple):
    """A tensor, with its version, or a container, with a copy, in an attribute."""

    place: int
    key: str
    held: Any
    before: Any

    @classmethod
    def of(cls, place: int, key: str, held: Any) -> _Held:
        is_tensor = isinstance(held, torch.Tensor)
        return cls(place, key, held, held._version if is_tensor else held.copy())

    @property
    def has_changed(self) -> bool:
        held, before = self.held, self.before
        if isinstance(held, torch.Tensor):
            return bool(held._version != before)
        if isinstance(held, np.ndarray):
            return held.shape != before.shape or held.tobytes() != before.tobytes()
        if len(held) != len(before) or isinstance(held, set):
            return bool(len(held) != len(before) or held != before)
        if isinstance(held, dict):
            same_keys = all(map(is_, held, before))
            return not (same_keys and all(map(is_, held.values(), before.values())))
        return not all(map(is_, held, before))

    def restore(self) -> None:
        if isinstance(self.held, np.ndarray):
            self.held[...] = self.before
            return
        self.held.clear()
        (self.held.extend if isinstance(self.held, list | deque) else self.held.update)(self.before)


class ModuleAttributes:
    """The attributes of all modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [  # those with extra state carry their attributes
            (name, module)
            for name, module in model.named_modules()
            if type(module).get_extra_state is nn.Module.get_extra_state
        ]
        self._dicts = [vars(module) for _, module in self._modules]
        self._counters: set[tuple[int, str]] = set()  # changed by each micro-batch
        self._sizes: list[int] = []
        self._names: list[set[str]] = []  # of all attributes of each module
        # Of the modules with numbers to watch: place and names, the reader, what it reads.
        self._numbers: list[tuple[int, list[str]]] = []
        self._readers: list[Callable[[dict[str, Any]], Any]] = []
        self._watched: list[dict[str, Any]] = []
        self._held: list[_Held] = []  # tensors and containers
        self._first: set[tuple[int, str]] | None = None  # changed by its first run
        self._made: int | None = None  # hooks of this process, when those of the modules were found
        self._hooks: dict[str, Any] = {}  # where a module has some, by name
        self._of_hooks: list[int] = []  # their numbers, when the body began
        self.begin()

    def begin(self) -> None:
        """Takes the attributes as they are now: each micro-batch begins with them."""
        sizes = list(map(len, self._dicts))
        if sizes != self._sizes or self._has_other_kinds():
            self._sizes = sizes
            self._find_attributes()
        self._values = self._read()
        self._held = [_Held.of(place, key, held) for place, key, held, _ in self._held]

    def tried(self) -> None:
        """Takes what the micro-batch before the first step has changed. It may fill caches."""
        changed = self._changed(self._before())
        if self._first is None:
            self._first = changed
        else:
            self._counters |= changed & self._first
            self._first = set()
        self._sizes = []  # finds them anew, without the counters
        self.begin()

    @property
    def is_undecided(self) -> bool:
        """Whether that micro-batch must run again, to tell counters from caches."""
        return bool(self._first)

    def undo(self, written: Collection[int] = ()) -> None:
        """Undoes what a micro-batch has changed. `written`: identities of modules whose buffers it
        has changed. Raises ModelError."""
        if not self._differ():
            return
        began = self._before()
        changed = self._changed(began) - self._counters
        for place in {place for place, _ in changed}:
            name, module = self._modules[place]
            keys = sorted(key for at, key in changed if at == place)
            before, now = began.get(place, {}), self._dicts[place]
            for one in self._held:
                if one.place == place and isinstance(one.held, torch.Tensor) and one.has_changed:
                    raise ModelError(_in_place_refusal(name, one.key))
            if id(module) in written:
                raise ModelError(_refusal(name, keys, before, now))
            self._restore(place, before)
        self._values = self._read()

    def body_begins(self) -> None:
        """Counts the hooks. The attributes are as the step began."""
        self._find_hooks()
        self._of_hooks = list(map(len, self._hooks.values()))

    def changed_by_body(self) -> dict[str, tuple[Any, Any]]:
        """Returns what the body has changed, by name: before and now."""
        found: dict[str, tuple[Any, Any]] = {}
        if self._differ():
            began = self._before()
            for place, held in enumerate(self._dicts):
                before = began.get(place, {})
                new = [key for key, value in held.items() if type(value) in _WATCHED]
                for key in dict.fromkeys([*before, *new]):
                    was, now = before.get(key), held.get(key)
                    watched = key not in _OF_TORCH and (place, key) not in self._counters
                    if watched and key != "training" and not _same(now, was):
                        found[self._path(place, key)] = was, now
        counts = dict(zip(self._hooks, self._of_hooks, strict=True))
        self._find_hooks()
        if list(map(len, self._hooks.values())) != [*counts.values()]:
            for path in counts | self._hooks:
                pair = counts.get(path, 0), len(self._hooks.get(path, ()))
                found |= {path: pair} if pair[0] != pair[1] else {}
        return found

    # ------------------------------------------------------------------------------ private

    def _path(self, place: int, key: str) -> str:
        return f"model.{self._modules[place][0]}.{key}".replace("..", ".")

    def _find_hooks(self) -> None:
        """Finds the hooks of the modules, if this process has made any since the last time."""
        if self._made != RemovableHandle.next_id:
            self._made = RemovableHandle.next_id
            self._hooks = {
                self._path(place, kind): held[kind]
                for place, held in enumerate(self._dicts)
                for kind in _HOOKS
                if held[kind]
            }

    def _find_attributes(self) -> None:
        self._names = [set(held) for held in self._dicts]
        self._numbers, self._readers, self._watched = [], [], []
        self._held = []
        for place, ((_, module), held) in enumerate(zip(self._modules, self._dicts, strict=True)):
            is_layer = _is_layer(module)
            keys = []
            for key, value in held.items():
                if key in _OF_TORCH or (place, key) in self._counters:
                    continue
                if type(value) in _WATCHED:
                    keys.append(key)
                elif not is_layer and (
                    isinstance(value, torch.Tensor) or _is_small_container(value)
                ):
                    self._held.append(_Held(place, key, value, None))
            if keys:
                self._numbers.append((place, keys))
                self._watched.append(held)
                self._readers.append(itemgetter(*keys))

    def _has_other_kinds(self) -> bool:
        """Whether other objects are there than when the attributes were found, as the loop's body
        or a cache of the first micro-batch may leave them."""
        return any(self._dicts[one.place].get(one.key) is not one.held for one in self._held)

    def _read(self) -> list[Any]:
        try:
            return list(map(call, self._readers, self._watched))
        except KeyError:  # an attribute is gone
            return []

    def _differ(self) -> bool:
        if list(map(len, self._dicts)) != self._sizes:
            return True
        try:
            if list(map(call, self._readers, self._watched)) != self._values:
                return True
        except (KeyError, RuntimeError, ValueError):  # one is gone, or a tensor now
            return True
        if not self._held:
            return False
        return self._has_other_kinds() or any(one.has_changed for one in self._held)

    def _before(self) -> dict[int, dict[str, Any]]:
        """Returns the numbers that are watched by the places of their modules, as the step
        began."""
        return {
            place: dict(zip(keys, values if len(keys) > 1 else (values,), strict=True))
            for (place, keys), values in zip(self._numbers, self._values, strict=True)
        }

    def _changed(self, began: Mapping[int, Mapping[str, Any]]) -> set[tuple[int, str]]:
        changed = {
            (place, key)
            for place, before in began.items()
            for key, value in before.items()
            if not _same(self._dicts[place].get(key), value)
        }
        for place, (held, names) in enumerate(zip(self._dicts, self._names, strict=True)):
            changed |= {(place, key) for key in held.keys() - names}
        for one in self._held:
            if self._dicts[one.place].get(one.key) is not one.held or one.has_changed:
                changed.add((one.place, one.key))
        return changed

    def _restore(self, place: int, before: dict[str, Any]) -> None:
        held = self._dicts[place]
        for key in held.keys() - self._names[place]:
            del held[key]
        for key, value in before.items():
            if held.get(key, self) is not value:
                held[key] = value
        for one in self._held:
            if one.place == place:
                held[one.key] = one.held
                if one.has_changed:
                    one.restore()


def _is_layer(module: nn.Module) -> bool:
    name = type(module).__module__
    return name.startswith("torch.nn.modules.") and not name.endswith(".container")


def _is_small_container(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= 8 * _MOST and not value.dtype.hasobject and value.flags.writeable
    return type(value) in _CONTAINERS and len(value) <= _MOST


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and bool(now == before))


def _in_place_refusal(name: str, key: str) -> str:
    where = f"model.{name}.{key}".replace("..", ".")
    return (
        f"forward changed {where} in place, a tensor that is neither a parameter nor a buffer, "
        "when the rows asked for it: what comes of it depends on which rows a worker has. Make it "
        "a buffer (register_buffer), whose changes by all workers are combined"
    )


def _refusal(name: str, keys: list[str], before: dict[str, Any], after: dict[str, Any]) -> str:
    where = f"model.{name}".rstrip(".")
    called = ", ".join(
        f"{key} ({before[key]!r}, then {after.get(key)!r})"
        if type(before.get(key, ())) in _PLAIN
        else key
        for key in keys
    )
    return (
        f"forward changed {called} of {where} together with a buffer of it, when "
        "the rows asked for it: what comes of it depends on which rows a worker has. Use a module "
        "that does not change with its rows (a rotary embedding of a fixed length or rope_type), "
        "or run a batch with the longest rows before the loop"
    )
