"""Classifies objects (values, constants, references) and finds what they hold.

Objects hold values in attributes, closures and generators.
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import random
import sys
import threading
import types
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_dp.checkpoint.extra_state import packed
from elastic_dp.errors import ModelError

MARK = "elastic_dp"
MISSING: Any = object()  # represents an attribute that does not exist

SCALARS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        torch.dtype,
        torch.device,
        torch.Size,
    }
)
TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
# Objects of these modules belong to their process: handles, locks, files, kernels, loggers.
PROCESS = frozenset(
    {
        *(
            "_io",
            "_thread",
            "_weakref",
            "abc",
            "ast",
            "concurrent",
            "contextlib",
            "ctypes",
            "functools",
            "inspect",
            "io",
        ),
        *(
            "logging",
            "multiprocessing",
            "operator",
            "os",
            "pathlib",
            "re",
            "select",
            "socket",
            "subprocess",
            "threading",
        ),
        *("typing", "warnings", "weakref", "elastic_dp", "torch", "triton", "numba", "ray"),
        *("mlflow", "rich", "tensorboard", "tensorboardX", "tqdm", "wandb"),
    }
)
# Values that a checkpoint cannot store. They are accepted as long as they do not change.
UNCHANGING = ("datetime", "decimal", "fractions", "time", "uuid")
CONSTANTS = (
    *(type, types.ModuleType, type(Ellipsis), type(NotImplemented), slice, property, BaseException),
    *(np.ufunc, np.dtype, random.SystemRandom, types.CodeType, types.MappingProxyType),
    *(io.IOBase, logging.Filterer, threading.Thread),
)
NO_ATTRIBUTES = (
    *(dict, list, tuple, set, frozenset, deque, str, bytes, bytearray, int, float, np.ndarray),
)
_WALKED = {"argparse", "collections", "types", "__main__"}  # of the standard library
FOREIGN = (PROCESS | sys.stdlib_module_names) - _WALKED
_WAY_OUT = (
    "give its class state_dict() and load_state_dict(), build it from numbers, tensors and "
    'containers, or create it in the loop body and pass it as state={"name": …}'
)


class References:
    """Objects, by name, that the receiver of the state also has."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        for name, generator in (
            ("torch.default_generator", torch.default_generator),
            ("numpy.random", np.random.mtrand._rand),
            ("random", random._inst),
        ):
            self.add(name, generator)

    def add(self, name: str, value: Any) -> None:
        """Adds an object. The first name of an object counts."""
        if id(value) not in self._names:
            self._names[id(value)] = name
            self.objects[name] = value

    def name_of(self, value: Any) -> str | None:
        """Returns the object's name, or None."""
        return self._names.get(id(value))

    def word(self, key: Any) -> str:
        """Returns the text of a key in the path of what it leads to."""
        return self.name_of(key) or repr(key)


def mark(kind: str, **fields: Any) -> dict[str, Any]:
    return {MARK: kind, **fields}


def refused(path: str, value: Any) -> ModelError:
    cls = type(value)
    return ModelError(
        f"{path} is a {cls.__module__}.{cls.__qualname__}, which can neither be sent to a "
        f"worker that joins nor be stored in a checkpoint: {_WAY_OUT}"
    )


def cannot_make(path: str, name: str) -> ModelError:
    return ModelError(
        f"{path} is a {name.replace(':', '.')} in the state that is restored, but does not "
        "exist here, and its class is not defined here; create it in __init__"
    )


def same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    shapes = one.shape == other.shape and one.stride() == other.stride()
    return shapes and one.dtype == other.dtype and one.device == other.device


def wrapped_tensors(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Returns the tensors that a tensor subclass wraps, by name, and what else it is made of; None
    if it is not such a subclass, requires a gradient, or is made of more than tensors and values.

    Subclasses take themselves apart by torch's protocol for them, `__tensor_flatten__`. Quantized
    tensors of torchao do.
    """
    if type(value) in TENSORS or value.requires_grad or not is_traceable_wrapper_subclass(value):
        return None
    names, context = value.__tensor_flatten__()
    if not _is_of_scalars(context):
        return None
    return {name: getattr(value, name) for name in names}, context


def _is_of_scalars(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_of_scalars, [*value.keys(), *value.values()]))
    if type(value) in (list, tuple):
        return all(map(_is_of_scalars, value))
    return type(value) in SCALARS


def carries_itself(value: Any) -> bool:
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return all(map(callable, methods))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes in the object's dict and slots, or None if it has neither."""
    slots = [
        name
        for cls in type(value).__mro__
        for name in _names(vars(cls).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if hasattr(value, "__dict__"):
        return found | vars(value)
    return found if slots else None


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def class_named(name: str) -> type | None:
    """Returns the class of this name (see `type_name`), or None. Imports nothing."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for word in qualified.split("."):
        found = getattr(found, word, None)
    return found if isinstance(found, type) else None


def closure_of(function: Any) -> dict[str, Any]:
    """Returns the contents of the function's closure by name, without empty cells."""
    if not isinstance(function, types.FunctionType) or function.__closure__ is None:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    held = {name: content_of(cell) for name, cell in cells}
    return {name: value for name, value in held.items() if value is not MISSING}


def content_of(cell: Any) -> Any:
    """Returns the content of a cell, or MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@functools.cache
def assigned_in(code: types.CodeType) -> frozenset[str]:
    """Returns the outer names to which the code assigns (`nonlocal`)."""
    steps = dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname == "STORE_DEREF")


def is_state(value: Any) -> bool:
    """Returns whether a closure's value is captured: one that may change and consists of values.

    Everything else that a closure refers to is left alone.
    """
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, deque, set):
        return all(
            type(item) in SCALARS or isinstance(item, torch.Tensor | np.ndarray) for item in value
        )
    if type(value) is np.ndarray or is_generator(value):
        return True
    return type(value) is torch.Tensor and value.grad_fn is None


# ------------------------------------------------------------------------------------- generators


def is_generator(value: Any) -> bool:
    numpy = (np.random.Generator, np.random.BitGenerator, np.random.RandomState)
    return isinstance(value, (torch.Generator, *numpy)) or type(value) is random.Random


def generator_state(value: Any) -> dict[str, Any] | None:
    """Returns the state of a random number generator as a mark, or None for another object."""
    if not is_generator(value):
        return None
    device, bits = "", ""
    if isinstance(value, torch.Generator):
        state: Any = value.get_state()
        device = value.device.type
    elif isinstance(value, np.random.Generator):
        state, bits = value.bit_generator.state, type(value.bit_generator).__name__
    elif isinstance(value, np.random.BitGenerator):
        state = value.state
    elif isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
    else:
        state = value.getstate()
    return mark(
        "generator", type=type(value).__name__, state=packed(state), device=device, bits=bits
    )


def new_generator(given: dict[str, Any]) -> Any:
    """Creates a generator for a state whose generator was created after the loop began."""
    if given["device"]:
        return torch.Generator(given["device"])
    if given["bits"]:
        return np.random.Generator(getattr(np.random, given["bits"])())
    if given["type"] == "Random":
        return random.Random()
    return getattr(np.random, given["type"])()
