"""Plain attributes of modules (numbers and text) that forward changes.

A module that changes itself when the rows ask for it, such as a rotary embedding that recomputes
its frequencies for a longer row, computes something else for the rows that come after it. These
differ between workers. So what a micro-batch changes in a module is undone with its attributes:
each micro-batch begins with the module as the step began. A module that changes a buffer, too,
would leave half of the change behind, and is refused by name.

Attributes that one micro-batch changes each time, such as a counter, stay as they are: the check
before the first step names them. All workers find the same ones, by one micro-batch of step 1.

A look at all attributes of a module takes some hundred nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import call, itemgetter
from typing import Any

from torch import nn

from elastic_dp.errors import ModelError

_PLAIN = (bool, int, float, complex, str)
_OF_TORCH = {"training"}  # other parts keep it


class ModuleAttributes:
    """The attributes of all modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        # Modules with extra state carry their attributes, and torch's layers change none.
        self._modules = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).get_extra_state is nn.Module.get_extra_state and not _is_layer(module)
        ]
        self._dicts = [vars(module) for _, module in self._modules]
        self._counters: set[tuple[int, str]] = set()  # changed by each micro-batch
        self._sizes: list[int] = []
        self._readers: list[Callable[[dict[str, Any]], Any]] = []
        self._places: list[int] = []  # of the modules that have attributes to watch
        self._watched: list[dict[str, Any]] = []  # theirs
        self._first: set[tuple[int, str]] | None = None  # changed by its first run
        self.begin()

    def begin(self) -> None:
        """Takes the attributes as they are now: each micro-batch begins with them."""
        self._before = [held.copy() for held in self._dicts]
        sizes = list(map(len, self._dicts))
        if sizes != self._sizes:
            self._sizes = sizes
            self._find_attributes()
        self._values = self._read()

    def tried(self) -> None:
        """Takes what the micro-batch before the first step has changed. It may fill caches."""
        changed = self._changed()
        if self._first is None:
            self._first = changed
        else:
            self._counters |= changed & self._first
            self._first = set()
        self.begin()

    @property
    def is_undecided(self) -> bool:
        """Whether that micro-batch must run again, to tell counters from caches."""
        return bool(self._first)

    def undo(self, written: Collection[int] = ()) -> None:
        """Undoes what a micro-batch has changed. `written`: identities of modules whose buffers it
        has changed. Raises ModelError."""
        try:
            if self._read() == self._values:
                return
        except (RuntimeError, ValueError):  # an attribute is a tensor now, and is compared below
            pass
        changed = self._changed()
        changed -= self._counters
        for place in {place for place, _ in changed}:
            name, module = self._modules[place]
            keys = sorted(key for at, key in changed if at == place)
            if id(module) in written:
                raise ModelError(_refusal(name, keys, self._before[place], self._dicts[place]))
            self._restore(place)
        self._values = self._read()

    # ------------------------------------------------------------------------------ private

    def _find_attributes(self) -> None:
        self._readers, self._places, self._watched = [], [], []
        for place, held in enumerate(self._dicts):
            keys = [
                key for key, value in held.items() if type(value) in _PLAIN and key not in _OF_TORCH
            ]
            if keys:
                self._places.append(place)
                self._watched.append(held)
                self._readers.append(itemgetter(*keys))

    def _read(self) -> list[Any]:
        try:
            return list(map(call, self._readers, self._watched))
        except KeyError:  # an attribute is gone
            return []

    def _changed(self) -> set[tuple[int, str]]:
        return {
            (place, key)
            for place in self._places
            for key, value in self._before[place].items()
            if type(value) in _PLAIN
            and key not in _OF_TORCH
            and not _same(self._dicts[place].get(key), value)
        }

    def _restore(self, place: int) -> None:
        before, held = self._before[place], self._dicts[place]
        kept = {key for at, key in self._counters if at == place} | _OF_TORCH
        for key in held.keys() - before.keys():
            del held[key]
        for key, value in before.items():
            if key not in kept and held.get(key, self) is not value:
                held[key] = value


def _is_layer(module: nn.Module) -> bool:
    name = type(module).__module__
    return name.startswith("torch.nn.modules.") and not name.endswith(".container")


def _same(now: Any, before: Any) -> bool:
    return type(now) is type(before) and bool(now == before)


def _refusal(name: str, keys: list[str], before: dict[str, Any], after: dict[str, Any]) -> str:
    where = f"model.{name}".rstrip(".")
    called = ", ".join(f"{key} ({before[key]!r}, then {after.get(key)!r})" for key in keys)
    return (
        f"forward changed {called} of {where} together with a buffer of it, when "
        "the rows asked for it: what comes of it depends on which rows a worker has. Use a module "
        "that does not change with its rows (a rotary embedding of a fixed length or rope_type), "
        "or run a batch with the longest rows before the loop"
    )
