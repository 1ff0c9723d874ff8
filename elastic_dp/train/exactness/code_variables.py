"""Which variables code refers to by name: a function, and the body of a loop.

Of a loop's body these are variables of the frames from the train function inwards: those that exist
when the first body begins, and those that a body may read before it assigns them. A variable that
each body assigns first carries nothing from one body to the next. Python's bytecode tells.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_dp.module_pickling import is_of_user

_OUTSIDE = "elastic_dp.train.train_function"  # calls the train function


def variables_of(function: Any, without: Collection[int] = ()) -> Mapping[str, Any]:
    """Returns the variables that a function, such as the loss function, reaches by name, with those
    that `functools.partial` gives it and attributes of the object whose method it is. `without`:
    the identities of objects whose attributes are left out."""
    from torch import nn  # takes seconds, and commands that use this module do not need it

    given: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        given |= {f"loss_fn.{key}": one for key, one in function.keywords.items()}
        given |= {f"loss_fn.args[{n}]": one for n, one in enumerate(function.args)}
        function = function.func
    owner = getattr(function, "__self__", function)  # the object of a method
    is_left_out = isinstance(owner, nn.Module) or id(owner) in without
    held = {} if is_left_out else getattr(owner, "__dict__", {})
    own = given | {f"loss_fn.{name}": value for name, value in held.items()}
    code = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(code, types.FunctionType):
        return {**globals_of(code), **closure_of(code), **own}
    return own


@functools.lru_cache(maxsize=256)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the globals that code, or code within it, reads or writes."""
    found = (
        one.argval
        for inner in codes_in(code)
        for one in dis.get_instructions(inner)
        if one.opname == "LOAD_NAME" or "GLOBAL" in one.opname
    )
    return tuple(dict.fromkeys(found))


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that a function names."""
    held = function.__globals__
    return {name: held[name] for name in _global_names(function.__code__) if name in held}


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables of outer functions that a function names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and those defined within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def package_of_train_function() -> str:
    """Returns the package that is the user's even if it is installed."""
    frames = _frames()
    return _module_of(frames[0]).partition(".")[0] if frames else ""


def variables_of_body(
    root: str, compared: dict[types.CodeType, ComparedNames]
) -> list[tuple[str, Any]]:
    """Returns the variables of the loop that runs in this thread. `root`: the package of the train
    function. `compared`: by the code of its frames; the first body adds them."""
    found: list[tuple[str, Any]] = []
    for frame in _frames():
        code, held, globals_ = frame.f_code, frame.f_locals, frame.f_globals
        if not is_of_user(_module_of(frame), root) or not code.co_flags & inspect.CO_OPTIMIZED:
            continue
        if code not in compared:
            compared[code] = ComparedNames.of(frame)
        names = compared[code]
        found += [(name, held[name]) for name in names.present if name in held]
        found += [(name, held.get(name)) for name in names.made]
        found += [(name, globals_[name]) for name in names.globals if name in globals_]
    return found


def _frames() -> list[types.FrameType]:
    """Returns the frames from the train function inwards, without those of elastic_dp; none in a
    thread of its own."""
    frames = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and _module_of(frame) != _OUTSIDE:
        if not _module_of(frame).startswith("elastic_dp."):
            frames.append(frame)
        frame = frame.f_back
    return [] if frame is None else frames[::-1]


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@dataclass(frozen=True)
class ComparedNames:
    """What is compared of a frame. `present`: variables that exist when the first body begins, and
    are read later or have an optimizer. `made`: those that a body makes, and a later one may read
    first."""

    present: Sequence[str]
    made: Sequence[str]
    globals: Sequence[str]

    @classmethod
    def of(cls, frame: types.FrameType) -> ComparedNames:
        code, held = frame.f_code, frame.f_locals
        read = _read_from(code, frame.f_lasti, leaves=True)
        read |= {*code.co_cellvars, *code.co_freevars}  # functions read these
        from torch.optim import Optimizer

        present = [n for n, one in held.items() if n in read or isinstance(one, Optimizer)]
        targets = [*_loop_targets(code, frame.f_lasti)]
        made = sorted(_read_from(code, frame.f_lasti) - {*held, *targets})
        return cls([*dict.fromkeys(present + targets)], made, _globals_in(code, frame.f_globals))


def _globals_in(code: types.CodeType, held: Mapping[str, Any]) -> Sequence[str]:
    """Returns the globals that code names, with functions of its module that it uses."""
    names: dict[str, Any] = {}
    pending = [code]
    while pending:
        for name in _global_names(pending.pop()):
            if name not in names and name in held:
                names[name] = value = held[name]
                if isinstance(value, types.FunctionType) and value.__globals__ is held:
                    pending.append(value.__code__)
    return list(names)


def _read_from(code: types.CodeType, at: int, *, leaves: bool = False) -> set[str]:
    """Returns the variables that code may read before it assigns them, when the loop whose next
    step is taken at `at` goes on, or with `leaves` when it ends, too."""
    steps = list(dis.get_instructions(code))
    index = {one.offset: n for n, one in enumerate(steps)}
    first = bisect.bisect_right(list(index), at) - 1  # Python 3.12 may be within an instruction
    after: list[list[int]] = []
    for n, one in enumerate(steps):
        following = [] if one.opname in _ENDS or n + 1 == len(steps) else [n + 1]
        if one.opcode in _JUMPS and (leaves or n != first):
            following.append(index[one.argval])
        after.append(following)
    live: list[frozenset[str]] = [frozenset()] * len(steps)
    changes = True
    while changes:
        changes = False
        for n in range(len(steps) - 1, -1, -1):
            names = frozenset[str]().union(*(live[k] for k in after[n]))
            for action, name in reversed([*_accesses(steps[n])]):
                names = names | {name} if action == "LOAD" else names - {name}
            changes |= names != live[n]
            live[n] = names
    return set(live[first])


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ENDS = frozenset(
    ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
)


# They put aside a variable that has the name of one of a comprehension.
_OF_COMPREHENSIONS = "LOAD_FAST_AND_CLEAR", "STORE_FAST_MAYBE_NULL"


def _accesses(one: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Yields ("LOAD" or "STORE", variable) of an instruction, which may be several in one."""
    actions = [word for word in one.opname.split("_") if word in ("LOAD", "STORE", "DELETE")]
    if ("_FAST" in one.opname or "_DEREF" in one.opname) and one.opname not in _OF_COMPREHENSIONS:
        names = [one.argval] if isinstance(one.argval, str) else one.argval
        yield from zip(actions, names, strict=False)


def _loop_targets(code: types.CodeType, at: int) -> Iterator[str]:
    """Yields the variables that `for i, step in enumerate(ctx.steps(…))` assigns."""
    for one in dis.get_instructions(code):
        if one.offset > at and one.opname.startswith("STORE_FAST"):
            yield from [one.argval] if isinstance(one.argval, str) else one.argval
        stores = one.opname.startswith(("UNPACK_", "STORE_")) and "LOAD" not in one.opname
        if one.offset > at and not stores:
            return
