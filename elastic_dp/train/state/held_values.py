"""What an optimizer or a scheduler holds under names: attributes, entries of parameter groups, step
hooks, entries of a scheduler's state_dict.

    values      numbers, text, tensors, arrays and containers of them: carried
    objects     with `state_dict` and `load_state_dict`, or of a registered type: carried by these,
                into the object that the receiver has
    constants   parameters, modules of the model, functions, classes, loggers, locks, …: not
                carried. An error names one that is replaced, or whose content changes
    refused     everything else, by name
"""

from __future__ import annotations

import copy
import enum
import inspect
import io
import logging
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_dp.checkpoint.codec import STATE_TYPES, encode, register_state_type, to_bytes
from elastic_dp.errors import ModelError, StateError
from elastic_dp.module_pickling import is_installed
from elastic_dp.train.exactness.code_variables import closure_of, globals_of

Held = dict[str, dict[str, Any]]  # {"values": …, "objects": …}, each by name

PLAIN = (type(None), bool, int, float, complex, str, bytes)
CHANGEABLE = (list, dict, OrderedDict, Counter, defaultdict, deque, set)
_CONTAINERS = (*CHANGEABLE, tuple, frozenset)
_MOST = 1000  # values of a function's variables that are compared in each step
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_CONSTANTS = (
    *(type, types.ModuleType, types.CodeType, types.MethodWrapperType, property, slice),
    *(enum.Enum, weakref.ref, io.IOBase, logging.Filterer, np.ufunc, np.dtype),
)
# Objects of these packages belong to their process: locks, threads, streams, kernels, loggers.
_PROCESS = {
    *("_thread", "_weakref", "concurrent", "contextlib", "functools", "logging", "pathlib", "re"),
    *("threading", "elastic_dp", "torch", "triton", "numba", "ray", "tqdm", "wandb"),
}
_REMEDY = (
    "keep numbers and tensors in optimizer.state or in a parameter group, or give the class "
    "state_dict() and load_state_dict()"
)


def _set_generator(mine: np.random.Generator, state: Any) -> None:
    mine.bit_generator.state = state


register_state_type(torch.Generator, torch.Generator.get_state, torch.Generator.set_state)
register_state_type(random.Random, random.Random.getstate, random.Random.setstate)
register_state_type(np.random.Generator, lambda one: one.bit_generator.state, _set_generator)
register_state_type(
    np.random.RandomState,
    lambda one: one.get_state(legacy=False),
    np.random.RandomState.set_state,
)


class HeldValues:
    """Reads what objects hold, and writes it into objects of another worker. Raises ModelError."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # by identity: what each worker has
        self._constants: dict[str, list[Any]] = {}  # with their content, by path
        self._objects: dict[str, Any] = {}  # by path
        self._began = False  # objects that appear later are refused
        self._written_to: dict[int, Any] = {}  # by identity
        self.tensors: list[tuple[str, str, Any]] = []  # see `refuse_shared_memory`

    def know(self, *values: Any) -> None:
        """Adds objects that each worker has. They are not carried."""
        self._known |= {id(value): value for value in values}

    def begin(self) -> None:
        """From now on objects may not be made or replaced."""
        self._began = True

    def begin_writing(self) -> None:
        self._written_to = {}

    # ---------------------------------------------------------------------------------- reading

    def read(self, holder: Mapping[Any, Any], path: str, kind: str = "") -> Held:
        """Returns copies of what `holder` holds. Adds its own tensors and arrays to `tensors`, if
        they are of a `kind`."""
        values, objects = dict[str, Any](), dict[str, Any]()
        for key, value in holder.items():
            if type(value) in PLAIN:
                values[key] = value
                continue
            at, owner = f"{path}.{key}", _owner_of(value)
            if self._is_constant(owner):
                self._note_function(at, value, [value, *self._content_of(value, at)])
            elif _is_object(owner):
                if self._objects.get(at) is not owner and self._began:
                    raise _made_in_step(at)
                self._objects[at] = owner
                objects[key] = _copied(state_of(owner), at)
            else:
                leaves = list(_leaves(value))
                carried = [leaf for leaf in leaves if not self._is_constant(leaf)]
                if leaves and not carried:
                    self._note_function(at, value, [*leaves, *self._content_of(value, at)])
                    continue
                if any(isinstance(leaf, torch.optim.Optimizer) for leaf in carried):
                    raise _made_in_step(at)
                if len(carried) < len(leaves) or owner is not value:
                    raise _refused(at, value)
                values[key] = _copied(value, at)
                own = (x for x in leaves if isinstance(x, torch.Tensor | np.ndarray))
                self.tensors += [(kind, at, x) for x in own if kind]
        return {"values": values, "objects": objects}

    def note_function(self, function: Any, path: str) -> None:
        """Raises ModelError if what a function refers to has changed since it was noted."""
        function = inspect.unwrap(function)
        self._note_function(path, function, self._content_of(function, path, refuses=False))

    def _is_constant(self, value: Any) -> bool:
        """Also for the `id()` of an object that each worker has, since ids differ on each."""
        if id(value) in self._known or (type(value) is int and value in self._known):
            return True
        cls = type(value)
        if isinstance(value, nn.Module):  # a wrapper, as torch.compile returns
            tensors = [*value.parameters(), *value.buffers()]
            return all(id(tensor) in self._known for tensor in tensors)
        carried = (torch.Tensor, torch.optim.Optimizer, torch.Size, torch.dtype, torch.device)
        if isinstance(value, carried) or _is_object(value):
            return False
        constant = cls is object or isinstance(value, (*_CONSTANTS, *_FUNCTIONS))
        return constant or _is_of_process(cls)

    def _note_function(self, path: str, function: Any, content: list[Any]) -> None:
        """`content`: what it is bound to. Of the globals that a function of the user's names, these
        are numbers, texts, containers and generators."""
        self._note_constant(f"{path}, or a variable that it uses,", content)
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        is_function = isinstance(function, types.FunctionType)
        if not is_function or is_installed(function.__code__.co_filename):
            return
        for name, value in globals_of(function).items():
            key = f"the global {name}, which {path} uses,"
            is_compared = type(value) in (*PLAIN, *_CONTAINERS) or is_registered(value)
            if is_compared or key in self._constants:
                self._note_constant(key, [*islice(_leaves(value), _MOST)])

    def _note_constant(self, path: str, content: list[Any]) -> None:
        content = [state_as_bytes(x) if is_registered(x) else x for x in content]
        content += [x._version for x in content if self._is_compared(x)]
        before = self._constants.setdefault(path, content)
        if len(before) != len(content) or not all(
            one is two or (type(one) in PLAIN and one == two)
            for one, two in zip(before, content, strict=True)
        ):
            raise ModelError(
                f"{path} has changed since the loop began, and is not carried to a worker that "
                f"joins or to a checkpoint: {_REMEDY}; make a function an object with __call__"
            )

    def _is_compared(self, value: Any) -> bool:
        is_tensor = isinstance(value, torch.Tensor) and not value.is_inference()
        return is_tensor and not self._is_constant(value)

    def _content_of(self, value: Any, path: str, *, refuses: bool = True) -> list[Any]:
        """Returns what a function of the user's is bound to, and for a method the attributes that
        it names. It may not change."""
        if isinstance(value, partial):
            inner = self._content_of(value.func, path, refuses=refuses)
            held: list[Any] = [value.args, value.keywords, inner]
        elif _is_of_process(value):  # also our own hooks: a body is watched while it runs
            return []
        elif isinstance(value, types.FunctionType):
            held = [*closure_of(value).values()]
        elif isinstance(value, types.MethodType) and id(value.__self__) not in self._known:
            attributes, refuses = getattr(value.__self__, "__dict__", {}), False
            names = getattr(getattr(value, "__code__", None), "co_names", ())
            held = [attributes[name] for name in names if name in attributes]
            held += self._content_of(value.__func__, path, refuses=False)
        else:
            return []
        leaves = list(_leaves(held) if refuses else islice(_leaves(held), _MOST))
        for leaf in leaves if refuses else ():
            is_array = isinstance(leaf, torch.Tensor | np.ndarray)
            if (is_array and not self._is_constant(leaf)) or type(leaf) in STATE_TYPES:
                raise ModelError(
                    f"{path} is a function with a {type(leaf).__name__} in its closure, which is "
                    "not carried to a worker that joins. Make it an object with __call__, "
                    "state_dict and load_state_dict"
                )
        return leaves

    # ---------------------------------------------------------------------------------- writing

    def write(self, given: Held, holder: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """Returns the values by name. What can be is written in place."""
        for key, state in given["objects"].items():
            mine = _owner_of(holder.get(key))
            if not _is_object(mine):
                raise ModelError(
                    f"{path}.{key} is in the state that is restored, and not here: make it in "
                    "__init__"
                )
            if carries_itself(mine):
                mine.load_state_dict(state)
            else:
                set_state = STATE_TYPES[type(mine)].set
                assert set_state is not None
                set_state(mine, state)
        return {key: self._written(x, holder.get(key)) for key, x in given["values"].items()}

    def _written(self, value: Any, mine: Any) -> Any:
        """Two names may hold one object here, and two different ones in what is given."""
        if type(value) is not type(mine) or type(mine) not in (torch.Tensor, *CHANGEABLE):
            return value
        if isinstance(mine, torch.Tensor) and (value.shape, value.dtype) != (
            mine.shape,
            mine.dtype,
        ):
            return value
        if id(mine) in self._written_to and to_bytes(mine) != to_bytes(value):
            return value
        self._written_to[id(mine)] = mine
        if isinstance(mine, torch.Tensor):
            mine.detach().copy_(value)
        else:
            refill(mine, value)
        return mine


def carries_itself(value: Any) -> bool:
    """Returns whether a value is an object with `state_dict` and `load_state_dict`."""
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return all(map(callable, methods)) and not isinstance(value, type)


def is_registered(value: Any) -> bool:
    """Returns whether a value is an object of a registered type, such as a generator."""
    how = STATE_TYPES.get(type(value))
    return how is not None and how.get is not None


def state_of(one: Any) -> Any:
    """Returns the state of an object that carries itself or is of a registered type."""
    if carries_itself(one):
        return one.state_dict()
    get = STATE_TYPES[type(one)].get
    assert get is not None
    return get(one)


def state_as_bytes(one: Any) -> bytes:
    """Returns the state of an object, such as a generator, to compare it."""
    return to_bytes(state_of(one))


def refill(container: Any, items: Any) -> None:
    """Gives a list, a dict or the like other items."""
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(items)


def checked(value: Any, path: str) -> Any:
    """Returns a value that can be sent and stored. Raises ModelError."""
    for leaf in _leaves(value):
        if isinstance(leaf, nn.Parameter):
            raise ModelError(
                f"{path} holds a parameter of the model, or has one as a key: keep what belongs to "
                "parameter p in optimizer.state[p]"
            )
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ModelError(
                f"{path} is part of an autograd graph, which is not sent to a worker that joins: "
                "detach() it"
            )
    try:
        encode(value)
    except StateError as error:
        at = "" if error.path == "the state itself" else f".{error.path}"
        raise ModelError(
            f"{path}{at} is {error.reason}, or give its class state_dict() and load_state_dict(): "
            "else a worker that joins would not have it"
        ) from None
    return value


def refuse_shared_memory(found: Iterable[tuple[str, str, Any]]) -> None:
    """Raises ModelError for tensors whose memory overlaps, which are separate ones after a
    transfer. Each entry is (kind, path, tensor). Equal views within one kind are allowed."""
    spans = sorted(
        ((str(getattr(x, "device", "cpu")), *_span(x)), kind, path, _view(x))
        for kind, path, x in found
        if (x.numel() if isinstance(x, torch.Tensor) else x.size)
    )
    last = ("", 0, 0), "", "", ""
    for span in spans:
        (device, first, end), kind, path, view = span
        overlaps = (device, first) < (last[0][0], last[0][2])
        if overlaps and (kind != last[1] or (kind != "model" and view != last[3])):
            raise ModelError(
                f"{path} and {last[2]} share memory, and a worker that joins would have two: make "
                "one of them a copy, or compute it from the other in forward or step()"
            )
        if (device, end) > (last[0][0], last[0][2]):
            last = span


def _span(x: Any) -> tuple[int, int]:
    if isinstance(x, torch.Tensor):
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (1 + last) * x.element_size()
    first, end = np.lib.array_utils.byte_bounds(x)
    return first, end


def _view(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)} {x.stride() if isinstance(x, torch.Tensor) else x.strides}"


def _copied(value: Any, path: str) -> Any:
    if type(value) in (list, tuple) and all(type(item) in PLAIN for item in value):
        return type(value)(value)
    return copy.deepcopy(checked(value, path))


def _leaves(value: Any) -> Iterator[Any]:
    """Yields what containers hold, and their keys that are not text. None is no leaf."""
    if isinstance(value, Mapping) and type(value) in _CONTAINERS:
        yield from _leaves([key for key in value if type(key) is not str])
        yield from _leaves([*value.values()])
    elif type(value) in _CONTAINERS:
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _owner_of(value: Any) -> Any:
    """Returns the object that a method is bound to, or the value."""
    owner = getattr(value, "__self__", None) if isinstance(value, _FUNCTIONS) else None
    return value if owner is None or isinstance(owner, types.ModuleType | type) else owner


def _is_object(value: Any) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        return False
    return is_registered(value) or carries_itself(value)


def _is_of_process(value: Any) -> bool:
    """Returns whether a class, a function or a method is of `_PROCESS`."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in _PROCESS


def _made_in_step(path: str) -> ModelError:
    return ModelError(
        f"{path} was made in a step: a worker that joins would not have it. Make it in __init__, "
        "before the loop"
    )


def _refused(path: str, value: Any) -> ModelError:
    cls = type(value)
    return ModelError(
        f"{path} is a {cls.__module__}.{cls.__qualname__} that holds parameters, modules or "
        f"functions beside values. It is not carried to a worker that joins: {_REMEDY}"
    )
