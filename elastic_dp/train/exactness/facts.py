"""Values by name, as texts that can be compared: numbers, texts, tensors, arrays, generators,
containers of them, and objects that have them as attributes. The trial before the first step and
the checks of loop bodies look at the same ones. Another thread of the user may change a container
meanwhile, so a copy of it is looked at."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elastic_dp.distributed.local_shards import local_of
from elastic_dp.train.exactness.code_variables import variables_of
from elastic_dp.train.state.held_values import PLAIN, is_registered, state_as_bytes
from elastic_dp.train.state.module_attributes import attributes_of, path_in_model
from elastic_dp.train.state.tensor_digests import digest_of

_MOST = 64  # items of a container, and attributes of an object
_WITHIN = 16  # attributes of an object within an object or a container
_OF_LARGER = 8  # the first items of a larger container, and its length
_SAMPLED = 4096  # elements of a larger tensor in the memory of the host
_DEEPEST = 2  # containers within containers, and objects within objects

Facts = dict[str, str]  # values that are compared, by name; a digest begins with "#"
DRAWN = "#generator "  # begins that of a generator


@dataclass(frozen=True)
class Look:
    """How closely values are compared. `nbytes`: arrays with more bytes are not compared; tensors
    with more, and tensors on a device, by version, and by their first elements if the host has
    them. `without`: the identities of values that are not compared. `others`: yields facts
    about values of other kinds. `opens`: says of which objects the attributes are looked at."""

    nbytes: float = math.inf
    without: Collection[int] = ()
    others: Callable[[str, Any], Iterator[tuple[str, str]]] = lambda name, value: iter(())
    opens: Callable[[Any], bool] = lambda value: False

    def facts_of(self, name: str, value: Any) -> Facts:
        facts: Facts = {}
        self._add(facts, name, value, 0, 0)
        return facts

    def of_attributes(self, name: str, value: Any) -> Facts:
        facts: Facts = {}
        self._add_attributes(facts, name, value, _MOST, 1)
        return facts

    def _add(self, facts: Facts, name: str, value: Any, depth: int, objects: int) -> None:
        """`depth`: how many containers it is in, and how many `objects`."""
        if type(value) in PLAIN:
            facts[name] = _shown(value)
            return
        if id(value) in self.without:
            return
        match value:
            case Enum():
                facts[name] = f"#{value.name}"
            case torch.Tensor():
                if (fact := self._of_tensor(local_of(value))) is not None:
                    facts[name] = fact
            case np.ndarray() | np.generic():
                if value.dtype.kind in "biufcSU" and value.nbytes <= self.nbytes:
                    facts[name] = _digest(f"{value.dtype} {value.shape}".encode(), value.tobytes())
            case _ if is_registered(value):
                facts[name] = DRAWN + _digest(state_as_bytes(value))
            case int() | float() | complex() | str() | bytes() | itertools.count():
                facts[name] = _shown(value)
            case dict() | list() | tuple() | set() | frozenset() | deque():
                facts[f"len({name})"] = repr(len(value))
                if depth < _DEEPEST and not isinstance(value, set | frozenset):
                    deeper = depth + 1 if len(value) <= _MOST else _DEEPEST
                    for n, (key, one) in enumerate(_first_items(value)):
                        shown = repr(key) if type(key) in PLAIN else f"#{n}"
                        self._add(facts, f"{name}[{shown}]", one, deeper, objects)
            case types.GeneratorType() if depth < _DEEPEST:
                if value.gi_frame and not value.gi_running:
                    held: Facts = {}
                    inner = [*value.gi_frame.f_locals.values(), value.gi_yieldfrom]
                    self._add(held, "", inner, depth + 1, objects)
                    facts[name] = f"#{value.gi_frame.f_lasti} {held}"
            case Iterator() if type(value).__module__ in ("builtins", "itertools"):
                if (left := operator.length_hint(value, -1)) >= 0:
                    facts[name] = f"#{left}"
                elif depth < _DEEPEST:
                    for n, one in enumerate(_parts(value)):
                        self._add(facts, f"{name}[#{n}]", one, depth + 1, objects)
            case _BaseDataLoaderIter():
                facts[name] = f"#{value._num_yielded}"
            case _:
                facts |= self.others(name, value)
                if objects < _DEEPEST and self.opens(value):
                    within = depth > 0 or objects > 0
                    most, around = (_WITHIN, _DEEPEST) if within else (_MOST, 1)
                    self._add_attributes(facts, name, value, most, around)

    def _add_attributes(self, facts: Facts, name: str, value: Any, most: int, objects: int) -> None:
        for key, one in itertools.islice(attributes_of(value).items(), most):
            self._add(facts, f"{name}.{key}", one, 0, objects)

    def _of_tensor(self, tensor: torch.Tensor) -> str | None:
        whole = self.nbytes == math.inf
        odd = tensor.is_meta or tensor.is_quantized or tensor.is_nested
        dense = tensor.layout is torch.strided and not odd
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        on_host = dense and plain and tensor.device.type == "cpu"
        near = on_host and not tensor.is_complex() and tensor.nbytes <= self.nbytes
        if near or (dense and whole):
            own = tensor.detach().resolve_conj().resolve_neg()
            return f"#{tensor.dtype} {tuple(tensor.shape)} {digest_of([own])}"
        if whole or tensor.is_inference():
            return None
        first = _first_elements(tensor) if on_host else ""
        return f"#{id(tensor)} {tensor._version} {first}"


def facts_of(name: str, value: Any) -> Facts:
    """Returns facts about a value and what it contains, not about other objects."""
    return Look().facts_of(name, value)


def facts_of_all(values: Iterable[tuple[str, Any]]) -> Facts:
    """Returns facts about values, by name."""
    return {name: fact for one in values for name, fact in facts_of(*one).items()}


def kept_by(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, Any]]:
    """Yields, by name, what the modules hold, and what the loss function reaches by name, with its
    attributes."""
    for prefix, module in model.named_modules():
        for key, value in attributes_of(module).items():
            yield path_in_model(prefix, key), value
    for name, p in model.named_parameters():
        yield f"model.{name}.requires_grad", p.requires_grad
    ours = {id(one) for one in (*model.modules(), *model.buffers())}
    for name, value in variables_of(loss_fn).items():
        yield name, value
        if isinstance(value, type | types.ModuleType | types.FunctionType) or id(value) in ours:
            continue
        held = attributes_of(value)
        if isinstance(value, nn.Module):
            held |= {key: one for key, one in value.named_buffers() if id(one) not in ours}
        for key, one in itertools.islice(held.items(), _MOST):
            yield f"{name}.{key}", one


def with_values(name: str, one: str | None, other: str | None) -> str:
    """Returns a name with two facts about it, if they are short."""
    short = [x for x in (one, other) if x is not None and not x.startswith("#") and len(x) <= 24]
    return f"{name} ({short[0]}, then {short[1]})" if len(short) == 2 else name


def changes_by_micro_batch(names: str) -> str:
    return (
        f"WARNING: {names} changes with each micro-batch. A worker that joins or starts again "
        "begins with a value of its own, and how often it changes depends on the number of "
        "workers. If the loss depends on it, make it a buffer of the model, or an object that is "
        "passed as state= and changed in the loop's body; draw random numbers from the global "
        "generators"
    )


def listed(names: list[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _first_items(value: Any) -> list[tuple[Any, Any]]:
    """Returns the items of a small container, or the first ones of a larger one, by key. Another
    thread may change it meanwhile: they are copied at once."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    with contextlib.suppress(RuntimeError):  # it changed
        return [*itertools.islice(items, len(value) if len(value) <= _MOST else _OF_LARGER)]
    return []


def _parts(iterator: Iterator[Any]) -> list[Any]:
    """Returns what an iterator of Python's own is made of, and where it is; nothing of one that
    does not tell, as those of `itertools` from Python 3.14 on."""
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(TypeError):
        reduced: Any = iterator.__reduce__()
        return [*reduced[1], *reduced[2:]]
    return []


def _first_elements(tensor: torch.Tensor) -> str:
    """Returns a digest of the first elements of a tensor in the memory of the host:
    `t.data.mul_(…)` raises no version. Empty where they do not lie one after the other."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    is_freed = tensor.untyped_storage().nbytes() < end
    if is_freed or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return ""
    return digest_of([tensor.detach().view(-1)[:_SAMPLED]])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else _digest(text.encode())


def _digest(*parts: bytes) -> str:
    return f"#{xxhash.xxh3_64_hexdigest(b' '.join(parts))}"
