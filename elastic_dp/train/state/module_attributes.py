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

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from elastic_dp.errors import ModelError
from elastic_dp.train.state.held_values import (
    CHANGEABLE,
    PLAIN,
    is_registered,
    refill,
    state_as_bytes,
)

_NAMED = (*PLAIN, FunctionType, MethodType)  # kinds, where the body changes them
_HELD = (torch.Tensor, np.ndarray, *CHANGEABLE)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}  # other parts keep them
_MOST = 1000  # elements of a container, and 8 bytes of an array, that are compared


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, without what torch keeps in a module."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, Mapping):
        slots = chain(*(getattr(kind, "__slots__", ()) for kind in type(value).__mro__))
        return {name: getattr(value, name) for name in slots if hasattr(value, name)}
    of_torch = _OF_TORCH if isinstance(value, nn.Module) else ()
    return {key: one for key, one in dict(held).items() if key not in of_torch}


def path_in_model(module: str, key: str) -> str:
    return ".".join(filter(None, ("model", module, key)))


class _Content(NamedTuple):
    """What an attribute holds, and what it is compared with: the version of a tensor, the state of
    a generator, a copy of an array or of a container."""

    held: Any
    before: Any

    @property
    def has_changed(self) -> bool:
        held, before = self.held, self.before
        if isinstance(held, torch.Tensor):
            return bool(held._version != before)
        if is_registered(held):
            return state_as_bytes(held) != before
        if isinstance(held, np.ndarray):
            return held.shape != before.shape or held.tobytes() != before.tobytes()
        if len(held) != len(before) or isinstance(held, set):
            return bool(held != before)
        if isinstance(held, dict) and not all(map(is_, held.values(), before.values())):
            return True
        return not all(map(is_, held, before))

    def restore(self, path: str) -> None:
        """Raises ModelError for what cannot be restored."""
        if isinstance(self.held, torch.Tensor):
            raise ModelError(
                f"forward changed {path} in place, a tensor that is neither a parameter nor a "
                "buffer, when the rows asked for it: what comes of it depends on which rows a "
                "worker has. Make it a buffer (register_buffer), whose changes by all workers are "
                "combined"
            )
        if is_registered(self.held):
            raise ModelError(
                f"forward drew from {path}, a generator of its own: what comes of it depends on "
                "how many micro-batches a worker has. Draw from the global generators, which are "
                "seeded for each"
            )
        if isinstance(self.held, np.ndarray):
            self.held[...] = self.before
        else:
            refill(self.held, self.before)


_At = tuple[int, str]  # the number of a module, and the name of its attribute
_GONE = object()


class ModuleAttributes:
    """The attributes of all modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._dicts = [vars(module) for _, module in self._modules]
        self._counters: set[_At] = set()  # changed by each micro-batch
        self._first: set[_At] | None = None  # changed by its first run
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
            content = self._contents.get((place, key))
            if content is not None and content.has_changed:
                content.restore(path_in_model(name, key))
            if id(module) in written:
                raise self._refusal(place, sorted(key for at, key in changed if at == place))
            if (place, key) in self._before:
                self._dicts[place][key] = self._before[place, key]
            else:
                del self._dicts[place][key]

    def evaluation_begins(self) -> None:
        """What the body has changed so far is not undone with what an evaluation changes."""
        if self._changed():
            self._by_body = self.changed_by_body()
            self._take()

    def changed_by_body(self) -> dict[str, tuple[Any, Any]]:
        """Returns what the body has changed, by name: before and now."""
        found = dict(self._by_body)
        for place, key in sorted(self._changed()):
            was, now = self._before.get((place, key)), self._dicts[place].get(key)
            is_named = type(was) in _NAMED and ((place, key) in self._before or type(now) in _NAMED)
            is_named = is_named and not _same(now, was)
            if key != "training" and (is_named or isinstance(was, _HELD)):
                found[path_in_model(self._modules[place][0], key)] = was, now
        return found

    # ------------------------------------------------------------------------------ private

    def _present(self) -> dict[_At, Any]:
        return {
            (place, key): value
            for place, held in enumerate(self._dicts)
            for key, value in held.items()
            if key not in _OF_TORCH and (place, key) not in self._counters
        }

    def _take(self) -> None:
        self._before = self._present()
        self._sizes = list(map(len, self._dicts))
        self._holders = [self._dicts[place] for place, _ in self._before]
        self._keys = [key for _, key in self._before]
        self._contents = {
            (place, key): _Content(value, before)
            for (place, key), value in self._before.items()
            if not _is_layer(self._modules[place][1])
            if (before := _to_compare(value)) is not None
        }

    def _changed(self) -> set[_At]:
        """Returns the attributes that are others than the step began with."""
        changed = set[_At]()
        for at, one in self._contents.items():
            if one.has_changed:
                changed.add(at)
        now = list(map(dict.get, self._holders, self._keys, repeat(_GONE)))
        before = self._before.values()
        if all(map(is_, now, before)) and list(map(len, self._dicts)) == self._sizes:
            return changed
        pairs = zip(self._before, now, before, strict=True)
        changed |= {at for at, value, was in pairs if not _same(value, was)}
        return changed | (self._present().keys() - self._before.keys())

    def _refusal(self, place: int, keys: Sequence[str]) -> ModelError:
        """Returns the error for attributes that a buffer of their module was changed with."""
        held, called = self._dicts[place], []
        for key in keys:
            was = self._before.get((place, key), _GONE)
            shown = f" ({was!r}, then {held.get(key)!r})" if type(was) in PLAIN else ""
            called.append(f"{key}{shown}")
        return ModelError(
            f"forward changed {', '.join(called)} of {path_in_model(self._modules[place][0], '')} "
            "together with a buffer of it, when the rows asked for it: what comes of it depends on "
            "which rows a worker has. Use a module that does not change with its rows (a rotary "
            "embedding of a fixed length or rope_type), or run a batch with the longest rows "
            "before the loop"
        )


def _is_layer(module: nn.Module) -> bool:
    name = type(module).__module__
    return name.startswith("torch.nn.modules.") and not name.endswith(".container")


def _to_compare(value: Any) -> Any:
    """Returns what the content of a value is compared with, or None."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if is_registered(value):
        return state_as_bytes(value)
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= 8 * _MOST and not value.dtype.hasobject
        return value.copy() if is_small and value.flags.writeable else None
    return value.copy() if type(value) in CHANGEABLE and len(value) <= _MOST else None


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _NAMED and now == before)
