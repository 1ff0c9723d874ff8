"""Attributes of modules that forward or the loop's body changes.

A module that changes itself when the rows ask for it, such as a rotary embedding that recomputes
its frequencies for a longer row, computes something else for the rows that come after it. These
differ between workers. So what a micro-batch changes in a module is undone with its attributes:
each micro-batch begins with the module as the step began. Two changes cannot be undone, and are
refused by name: that of a buffer with other attributes, half of which would be left, and that of a
tensor in place.

Attributes that one micro-batch changes each time, such as a counter, stay as they are: the check
before the first step names them. All workers find the same ones, by one micro-batch of step 1. Of
small containers and arrays the content is compared, but not in layers of torch.

What the body changes is named: numbers, text, functions, tensors, and what such a container holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from contextlib import suppress
from itertools import chain
from operator import call, is_, itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from elastic_dp.checkpoint.codec import to_bytes
from elastic_dp.errors import ModelError
from elastic_dp.train.state.held_values import is_registered, state_of

_PLAIN = (bool, int, float, complex, str, type(None))
_NAMED = (*_PLAIN, FunctionType, MethodType)  # kinds, where the body changes them
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_HELD = (torch.Tensor, np.ndarray, *_CONTAINERS)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}  # other parts keep them
_MOST = 1000  # elements of a container, and 8 bytes of an array, that are compared


class _Content(NamedTuple):
    """A tensor, with its version, a container, with a copy, or a generator, with its state, in an
    attribute."""

    place: int
    key: str
    held: Any
    before: Any

    @property
    def has_changed(self) -> bool:
        held, before = self.held, self.before
        if isinstance(held, torch.Tensor):
            return bool(held._version != before)
        if is_registered(held):
            return to_bytes(state_of(held)) != before
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
        self._modules = list(model.named_modules())
        self._dicts = [vars(module) for _, module in self._modules]
        self._counters: set[tuple[int, str]] = set()  # changed by each micro-batch
        self._first: set[tuple[int, str]] | None = None  # changed by its first run
        self._by_body: dict[str, tuple[Any, Any]] = {}  # changed before its last evaluation
        self._take()

    def begin(self) -> None:
        """Takes the attributes as they are now: each micro-batch begins with them."""
        self._by_body = {}
        if self._changed():
            self._take()

    def tried(self) -> None:
        """Takes what the micro-batch before the first step has changed. It may fill caches."""
        changed = self._changed()
        if self._first is None:
            self._first = changed
        else:
            self._counters |= changed & self._first
            self._first = set()
        self._take()

    @property
    def is_undecided(self) -> bool:
        """Whether that micro-batch must run again, to tell counters from caches."""
        return bool(self._first)

    def undo(self, written: Collection[int] = ()) -> None:
        """Undoes what a micro-batch has changed. `written`: identities of modules whose buffers it
        has changed. Raises ModelError."""
        changed = self._changed()
        for place, key in changed:
            name, module = self._modules[place]
            held, before = self._dicts[place], self._all[place]
            content = next((x for x in self._contents if (x.place, x.key) == (place, key)), None)
            if content is not None and content.has_changed:
                if isinstance(content.held, torch.Tensor):
                    raise ModelError(_in_place_refusal(name, key))
                if is_registered(content.held):
                    raise ModelError(_drawn_refusal(name, key))
                content.restore()
            if id(module) in written:
                keys = sorted(key for at, key in changed if at == place)
                raise ModelError(_refusal(name, keys, before, held))
            if key in before:
                held[key] = before[key]
            else:
                del held[key]

    def evaluation_begins(self) -> None:
        """What the body has changed so far is not undone with what an evaluation changes."""
        if self._changed():
            self._by_body = self.changed_by_body()
            self._take()

    def changed_by_body(self) -> dict[str, tuple[Any, Any]]:
        """Returns what the body has changed, by name: before and now."""
        found = dict(self._by_body)
        for place, key in self._changed():
            was, now = self._all[place].get(key), self._dicts[place].get(key)
            is_named = type(was) in _NAMED and (key in self._all[place] or type(now) in _NAMED)
            is_named = is_named and not _same(now, was)
            if key != "training" and (is_named or isinstance(was, _HELD)):
                found[self._path(place, key)] = was, now
        return found

    # ------------------------------------------------------------------------------ private

    def _path(self, place: int, key: str) -> str:
        return f"model.{self._modules[place][0]}.{key}".replace("..", ".")

    def _take(self) -> None:
        self._all = [  # by place; counters' values are not kept alive
            {key: None if (place, key) in self._counters else x for key, x in held.items()}
            for place, held in enumerate(self._dicts)
        ]
        self._sizes = list(map(len, self._dicts))
        own = [[key for key in held if key not in _OF_TORCH] for held in self._all]
        # Two keys at least, for a tuple. A compiled module has no "training" of its own.
        some = map(next, map(iter, self._all))
        self._readers = [itemgetter(key, key, *keys) for key, keys in zip(some, own, strict=True)]
        self._values = [*chain.from_iterable(map(call, self._readers, self._all))]
        self._contents = [
            _Content(place, key, value, before)
            for place, held in enumerate(self._all)
            if not _is_layer(self._modules[place][1])
            for key, value in held.items()
            if key not in _OF_TORCH and (place, key) not in self._counters
            if (before := _to_compare(value)) is not None
        ]

    def _changed(self) -> set[tuple[int, str]]:
        """Returns the places and names of attributes that are others than the step began with."""
        changed = set[tuple[int, str]]()
        for one in self._contents:
            if one.has_changed:
                changed.add((one.place, one.key))
        with suppress(KeyError):  # an attribute is gone
            values = chain.from_iterable(map(call, self._readers, self._dicts))
            if list(map(len, self._dicts)) == self._sizes and all(map(is_, values, self._values)):
                return changed
        for place, (held, before) in enumerate(zip(self._dicts, self._all, strict=True)):
            if len(held) == len(before) and all(map(is_, held.values(), before.values())):
                continue
            changed |= {
                (place, key)
                for key in held.keys() | before.keys()
                if not (key in held and key in before and _same(held[key], before[key]))
            }
        return {(place, key) for place, key in changed - self._counters if key not in _OF_TORCH}


def _is_layer(module: nn.Module) -> bool:
    name = type(module).__module__
    return name.startswith("torch.nn.modules.") and not name.endswith(".container")


def _to_compare(value: Any) -> Any:
    """Returns what the content of a value is compared with, or None."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if is_registered(value):
        return to_bytes(state_of(value))
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= 8 * _MOST and not value.dtype.hasobject
        return value.copy() if is_small and value.flags.writeable else None
    return value.copy() if type(value) in _CONTAINERS and len(value) <= _MOST else None


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _NAMED and now == before)


def _in_place_refusal(name: str, key: str) -> str:
    where = f"model.{name}.{key}".replace("..", ".")
    return (
        f"forward changed {where} in place, a tensor that is neither a parameter nor a buffer, "
        "when the rows asked for it: what comes of it depends on which rows a worker has. Make it "
        "a buffer (register_buffer), whose changes by all workers are combined"
    )


def _drawn_refusal(name: str, key: str) -> str:
    where = f"model.{name}.{key}".replace("..", ".")
    return (
        f"forward drew from {where}, a generator of its own: what comes of it depends on how many "
        "micro-batches a worker has. Draw from the global generators, which are seeded for each"
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
