"""Names what the loop's body changes and a worker that joins would lack.

Compared around each body are the variables of the frames between `ctx.steps` and the train function
that exist when the first body begins or that a body may read before it assigns them, those that the
loss function refers to, globals that either code names, and plain attributes and hooks of the
model's modules. What lies deeper (modules, classes, what functions keep, objects in objects,
environment variables that the code names) takes longer. It is compared around the first bodies of a
process and every 16th. A change is one warning per run, by the names of the variables.
A body that uses a scheduler of the run's optimizers, or one of torch's averaged models, without
passing it to `ctx.steps` raises LoopError.

A GradScaler that the body or the loss function uses is refused, and so is a second call of
`scheduler.step()`. With `staleness=1`, whose leaves may run again after the body, the loss function
may refer to nothing that the body or the step changes.

Not named are readings of a clock, and what objects of installed packages keep for themselves
(timers, loggers, progress bars).
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import dis
import functools
import inspect
import itertools
import operator
import os
import random
import re
import sys
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError, LossError
from elastic_dp.module_pickling import is_installed
from elastic_dp.train.exactness.purity_probe import variables_of
from elastic_dp.train.state.module_attributes import ModuleAttributes
from elastic_dp.train.state.weight_comparison import digest_of

_FIRST, _EVERY = 8, 16  # bodies around which all is compared
_BODIES = 2  # around which the bytes of small tensors are compared
_ITEMS = 64  # of a container; of a larger one its length, its first and its last item are compared
_DEEPEST = 2  # containers within containers; twice as deep where all is compared
_TENSORS = 8  # of a module
_NAMED = 8  # variables in one warning
_NBYTES = 65_536  # of an array or a tensor, and where all is compared:
_NBYTES_OF_ALL = 8 << 20
_BYTES_OF = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_OF_TORCH = frozenset(vars(nn.Module()))
_OUTSIDE = "elastic_dp.train.train_function"  # calls the train function

Facts = dict[str, Any]


class BodyVariables:
    """`passed`: `state=` of ctx.steps. What it, the scheduler and the optimizers hold counts as
    passed. `delays`: the job has `staleness=1`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        loss_fn: Any,
        scheduler: Any,
        passed: Mapping[str, Any],
        *,
        modules: ModuleAttributes,
        delays: bool = False,
    ) -> None:
        self._optimizers = list(optimizers)
        self._model, self._scheduler = model, scheduler
        ids = {id(module) for module in model.modules()}
        for one in [*passed.values(), scheduler, *self._optimizers]:
            held = one.modules() if isinstance(one, nn.Module) else _attributes(one).values()
            for value in [one, *held]:
                if type(value) in _PLAIN:  # small integers are one object each
                    continue
                inner = value.modules() if isinstance(value, nn.Module) else ()
                ids |= {id(value), *map(id, inner)}
        self._passed = ids
        self._loss, self._delays = loss_fn, delays
        self._root: str | None = None  # the package of the train function
        # Locals and globals that are compared.
        self._present: dict[types.CodeType, _Compared] = {}
        self._qualnames: set[str] = set()  # of the code whose locals are compared
        self._named: set[str] = set()
        self._before: Facts | None = None  # outside of a body
        self._deep, self._deepest = True, _DEEPEST
        self._clocks: list[float] = []
        self._bodies, self._epoch = 0, None
        self._modules = modules
        functions = getattr(scheduler, "lr_lambdas", ())  # those that its state_dict lacks
        self._schedules = [one for one in functions if isinstance(one, types.FunctionType)]
        self._after: Facts = {}  # of the schedules, at the end of the last body

    def other_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Returns the optimizers that the loss function refers to, but for those of the run."""
        return {
            name: value
            for name, value in variables_of(self._loss).items()
            if isinstance(value, torch.optim.Optimizer) and id(value) not in self._passed
        }

    def check_loss(self) -> None:
        """Checks what the loss function has used, once it was tried. Raises LossError."""
        for name, value in variables_of(self._loss).items():
            for one in (value, *_attributes(value).values()):
                scales = isinstance(one, torch.amp.GradScaler) and one.is_enabled()
                if scales and one._scale is not None:
                    raise LossError(_scales("loss function", name))

    def check_delayed(self, function: Any, held: Mapping[str, Any]) -> None:
        """Raises LossError if `function`, of leaves of delayed gradients, refers to what is in
        `held`: the body or the step changes it before they run again."""
        names = {id(value): name for name, value in held.items() if value is not None}
        for path, value in _reached(function, self._model, self._has_users_type).items():
            if id(value) in names:
                raise _changes_while_delayed(path, f"is {names[id(value)]}")

    def begin(self) -> None:
        """Records the variables at the start of a body."""
        for name, value in self._of_schedules().items():
            if name in self._after and not _same(self._after[name], value):
                raise _schedule_counts(name, self._after[name], value)
        self._deep = self._bodies < _FIRST or self._bodies % _EVERY == 0
        self._deepest = _DEEPEST * (1 + self._deep)
        self._before, self._clocks = self._facts(), _clocks()
        self._modules.body_begins()
        self._epoch = getattr(self._scheduler, "last_epoch", None)

    def check(self) -> list[str]:
        """Compares the variables at the end of a body. Returns warnings. Raises LoopError."""
        if self._before is None:
            return []
        before, now, self._before = self._before, self._facts(), None
        self._bodies += 1
        self._after = self._of_schedules()
        if getattr(self._scheduler, "last_epoch", None) != self._epoch:
            raise LoopError(
                "the body of the loop over ctx.steps called scheduler.step(), and so does the "
                "loop, since the scheduler is passed as scheduler=: leave out one of the two, or "
                'pass it as state={"scheduler": scheduler} and call it in the body'
            )
        changed = {
            name: (before[name], value)
            for name, value in now.items()
            if name in before and not _same(before[name], value)
        } | self._modules.changed_by_body()
        for name, pair in changed.items():
            for one, other in zip(*map(_uses, pair), strict=False):
                if one != other:
                    raise _not_passed(other.kind, name, averages=other.averages)
        if self._delays:
            of_loss = tuple(f"{name}." for name in variables_of(self._loss))
            for name in changed:
                if f"{name}.".startswith(("model.", *of_loss)):
                    raise _changes_while_delayed(name, "was changed by the body")
        clocks = list(zip(self._clocks, _clocks(), strict=True))
        new = {
            name: pair
            for name, pair in changed.items()
            if name not in self._named and not _is_clock(pair[1], clocks)
        }
        self._named.update(new)
        return [_warning(new)] if new else []

    # ----------------------------------------------------------------------------------- private

    def _facts(self) -> Facts:
        facts: Facts = {}
        variables = list(self._variables())
        for name, value in variables_of(self._loss).items():
            if name not in self._named:
                facts.update(self._facts_of(name, value))
        for name, value in variables:
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise LoopError(_scales("body of the loop over ctx.steps", name))
            if name not in self._named:
                facts.update(self._facts_of(name, value))
        return facts

    def _of_schedules(self) -> Facts:
        return {
            name: self._fact(value, 0)
            for one in self._schedules
            for name, value in variables_of(one).items()
        }

    def _variables(self) -> Iterator[tuple[str, Any]]:
        """Yields the variables of the frames that run the loop, from the train function inwards."""
        frames = []
        frame: types.FrameType | None = sys._getframe()
        while frame is not None and (module := frame.f_globals.get("__name__", "")) != _OUTSIDE:
            if not module.startswith("elastic_dp."):
                frames.append(frame)
            frame = frame.f_back
        if frame is None:  # the loop runs in a thread of its own
            return
        if self._root is None and frames:
            self._root = frames[-1].f_globals.get("__name__", "").partition(".")[0]
        for user in reversed(frames):
            code, globals_ = user.f_code, user.f_globals
            if not code.co_flags & inspect.CO_OPTIMIZED or not self._is_users(
                globals_.get("__name__", ""), code.co_filename
            ):
                continue
            held = user.f_locals
            if code not in self._present:
                self._present[code] = _Compared.of(user)
                self._qualnames.add(code.co_qualname)
            compared = self._present[code]
            yield from ((name, held[name]) for name in compared.present if name in held)
            yield from ((name, held.get(name)) for name in compared.made)
            yield from ((name, globals_[name]) for name in compared.globals if name in globals_)
            if self._deep:
                keys = compared.environment
                yield from ((f"{key} in os.environ", os.environ.get(key)) for key in keys)

    def _is_users(self, module: str, file: str) -> bool:
        return module.partition(".")[0] == self._root or not is_installed(file)

    def _facts_of(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if id(value) in self._passed:
            return
        if not self._deep and isinstance(value, type | types.ModuleType | types.FunctionType):
            return
        fact = self._fact(value, 0)
        if fact is not _NONE:
            yield name, fact
        elif not isinstance(value, nn.Module) and self._has_users_type(value):
            for key, item in itertools.islice(_attributes(value).items(), _ITEMS):
                path = f"{name}.{key}"
                if path not in self._named and (found := self._fact(item, 1)) is not _NONE:
                    yield path, found

    def _has_users_type(self, value: Any) -> bool:
        kind = value if isinstance(value, type | types.FunctionType) else type(value)
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return True
        name = value.__name__ if isinstance(value, types.ModuleType) else kind.__module__ or ""
        if name.partition(".")[0] in ("elastic_dp", "builtins"):
            return False
        return self._is_users(name, getattr(sys.modules.get(name), "__file__", None) or "")

    def _fact(self, value: Any, depth: int) -> Any:
        """Returns what is compared of a value, or `_NONE`."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._passed:
            return _NONE
        match value:
            case list() | tuple() | deque():
                if len(value) > _ITEMS:
                    ends = value[0], value[-1]
                    facts = [len(value), *(self._fact(one, depth + 1) for one in ends)]
                    with contextlib.suppress(TypeError):  # not all can be hashed
                        facts += [hash(tuple(value))] if self._deep else []
                    return _Items(facts)
                if depth <= self._deepest:
                    return _Items([self._fact(item, depth + 1) for item in value])
            case dict():
                if len(value) > _ITEMS:
                    keys = next(iter(value)), next(reversed(value))
                    return _Items([len(value), *(self._fact(value[k], depth + 1) for k in keys)])
                if depth <= self._deepest:
                    return {key: self._fact(item, depth + 1) for key, item in value.items()}
            case set():
                return len(value) if len(value) > _ITEMS else frozenset(value)
            case Enum():
                return _Items([value.name])
            case torch.Tensor():
                return self._of_tensor(value)
            case AveragedModel():
                return _Used(type(value).__name__, value.n_averaged._version, averages=True)
            case nn.Module():
                return self._of_module(value, depth)
            case LRScheduler():
                if any(value.optimizer is one for one in self._optimizers):
                    return _Used(type(value).__name__, value.last_epoch, averages=False)
            case types.GeneratorType():
                if value.gi_frame and not value.gi_running:
                    held = value.gi_frame.f_locals.values()
                    items = [self._fact(x, depth + 1) for x in held]
                    return _Items([value.gi_frame.f_lasti, *items])
            case Iterator() if type(value).__module__ in ("builtins", "itertools"):
                if (left := operator.length_hint(value, -1)) >= 0:
                    return _Items([left])
                # itertools warns that Python 3.14 will not have it.
                with contextlib.suppress(TypeError), warnings.catch_warnings(action="ignore"):
                    return _Items([self._fact(part, depth) for part in value.__reduce__()[1:]])
            case Iterator() if not self._has_users_type(value):  # of a DataLoader
                return _Items([x for x in _attributes(value).values() if type(x) in _PLAIN])
            case np.generic():
                return value.item()
            case np.ndarray() if value.nbytes <= self._nbytes() and value.dtype.kind in "biufc":
                return _Items([xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).data)])
            case bytearray():
                return _Items([hash(bytes(value))])
            case np.random.Generator():
                return _Items([repr(value.bit_generator.state)])
            case np.random.RandomState():
                return _Items([repr(value.get_state())])
            case random.Random():
                return _Items([hash(value.getstate())])
            case torch.Generator():
                return _Items([hash(value.get_state().numpy().tobytes())])
            case functools.partial():
                return self._fact([value.func, value.args, value.keywords], depth)
            case types.FunctionType() if self._deep:
                return self._of_function(value, depth)
            case _ if self._deep and 0 < depth <= _DEEPEST and self._has_users_type(value):
                return self._of_attributes(_attributes(value), depth)
        return _NONE

    def _nbytes(self) -> int:
        return _NBYTES_OF_ALL if self._deep else _NBYTES

    def _of_attributes(self, held: Mapping[str, Any], depth: int) -> Any:
        some = itertools.islice(held.items(), _ITEMS // 4)
        return {key: self._fact(item, depth + 1) for key, item in some}

    def _of_function(self, function: types.FunctionType, depth: int) -> Any:
        """Returns what a function keeps: defaults, and variables of functions that have ended."""
        held = [function.__defaults__, function.__kwdefaults__]
        if function.__qualname__.rpartition(".<locals>.")[0] not in self._qualnames:
            cells = function.__closure__ or ()
            held += [cell.cell_contents for cell in cells if cell != types.CellType()]
        kept = [one for one in held if one is not None]
        if depth > _DEEPEST or not kept or not self._has_users_type(function):
            return _NONE
        return _Items([self._fact(one, depth + 1) for one in kept])

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        version = None if tensor.is_inference() else tensor._version
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype in _BYTES_OF
        small = tensor.layout is torch.strided and tensor.nbytes <= self._nbytes()
        if self._bodies < _BODIES and plain and small and tensor.device.type == "cpu":
            return _Version(id(tensor), (version, digest_of([tensor])))
        return _NONE if version is None else _Version(id(tensor), version)

    def _of_module(self, module: nn.Module, depth: int) -> Any:
        if any(id(one) in self._passed for one in module.modules()):
            return _NONE
        tensors = itertools.islice(itertools.chain(module.parameters(), module.buffers()), _TENSORS)
        versions = [(id(t), t._version) for t in tensors if not t.is_inference()]
        own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        return _Version(id(module), (versions, self._of_attributes(own, depth)), True)


_NONE = object()  # of a value that is not compared


@dataclass(frozen=True, slots=True)
class _Items:
    """The content of a value that a message does not show."""

    items: list[Any]


@dataclass(frozen=True, slots=True)
class _Version:
    """A tensor, or the tensors of a module."""

    identity: int
    version: Any
    is_of_module: bool = False


@dataclass(frozen=True, slots=True)
class _Used:
    """How often a scheduler or an averaged model was used."""

    kind: str
    count: int
    averages: bool


def _uses(fact: Any) -> Iterator[_Used]:
    if isinstance(fact, _Used):
        yield fact
    elif isinstance(fact, dict | _Items):
        for item in fact.values() if isinstance(fact, dict) else fact.items:
            yield from _uses(item)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other or one != one != other))


def _attributes(value: Any) -> Mapping[str, Any]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, Mapping):
        return held
    slots = itertools.chain(*(getattr(kind, "__slots__", ()) for kind in type(value).__mro__))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _clocks() -> list[float]:
    seconds = [time.time(), time.perf_counter(), time.monotonic(), time.process_time()]
    return [*seconds, *(1e9 * s for s in seconds)]


def _is_clock(value: Any, clocks: list[tuple[float, float]]) -> bool:
    return type(value) in (int, float) and any(a <= value <= b for a, b in clocks)


def _warning(changed: Mapping[str, tuple[Any, Any]]) -> str:
    listed = [name + _values(*pair) for name, pair in itertools.islice(changed.items(), _NAMED)]
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    name, (_, value) = next(iter(changed.items()))
    of_model = name.startswith("model.")
    name = re.split(r"\W", name)[0]
    remedy = f"c = ctx.carry({name}=…) before the loop, c.{name} in it"
    if isinstance(value, _Version) and value.is_of_module:
        remedy = f'state={{"{name}": {name}}} of ctx.steps'
    if of_model:
        remedy = "make it a buffer, or return it from get_extra_state"
    return (
        f"WARNING: the body of the loop over ctx.steps changes {', '.join(listed)}{more}. A worker "
        "that joins or starts again begins with values of its own. If the loss or a decision "
        f"depends on them, let them travel: {remedy}. ctx.carry takes numbers, strings, tensors "
        "and containers of them, state= objects with state_dict; step.number counts the steps"
    )


def _values(before: Any, now: Any) -> str:
    short = [repr(x) for x in (before, now) if type(x) in _PLAIN]
    return f" ({short[0]}, then {short[1]})" if len(short) == 2 and len("".join(short)) < 48 else ""


def _scales(where: str, name: str) -> str:
    return (
        f"the {where} uses {name}, a GradScaler: its factor would stay in the loss and in the "
        'gradients. Write ctx.steps(…, precision="fp16"), which scales the loss and skips steps '
        'that overflow, or "bf16", and return the loss itself'
    )


def _not_passed(kind: str, name: str, *, averages: bool) -> LoopError:
    word = "ema" if averages else "scheduler"
    by_hand = averages or kind == "ReduceLROnPlateau"
    alone = "" if by_hand else ", or as scheduler= and leave the call to the loop"
    return LoopError(
        f"the body of the loop over ctx.steps changed a {kind} that is not passed to ctx.steps "
        f"({name}): a worker that joins or starts again would start it from the beginning. Pass it "
        f'as state={{"{word}": {name}}}{alone}'
    )


def _schedule_counts(name: str, before: Any, now: Any) -> LoopError:
    return LoopError(
        f"scheduler= changes {name}{_values(before, now)}, a variable of its function, whenever it "
        "is called: a worker that joins or starts again begins with a value of its own. Compute "
        "the rate from the argument of the function, the number of the step, alone"
    )


def _changes_while_delayed(name: str, what: str) -> LossError:
    return LossError(
        f"the loss function, the inner optimizer or the model refers to {name}, which {what}. With "
        "staleness=1 a micro-batch whose worker is lost runs again after the loop's body and the "
        "scheduler, and must see what it saw: derive the value from the batch or the step of "
        "inner_optimizer, make it a buffer that forward changes, or leave out staleness"
    )


# -------------------------------------------------------------------------------- what code names


def _reached(function: Any, model: nn.Module, is_users: Callable[[Any], bool]) -> Facts:
    """Returns what a function and the model refer to, by name: variables, items of containers, and
    attributes of users' objects that this code names."""
    names = {"forward", "__call__"}
    size, found = 0, dict[str, Any]()
    while len(names) > size:  # code that is found later may name more
        size, found, seen = len(names), {}, set[int]()
        pending = [("loss_fn", function), ("model", model)]
        while pending:
            path, value = pending.pop()
            if id(value) in seen or type(value) in _PLAIN:
                continue
            seen.add(id(value))
            found[path] = value
            if isinstance(value, types.MethodType):
                pending += [("self", value.__self__), (path, value.__func__)]
            elif isinstance(value, functools.partial):
                pending += [(path, value.func), (path, value.args), (path, value.keywords)]
            elif isinstance(value, types.FunctionType):
                if is_users(value):
                    names |= set(_names_in(value.__code__))
                    pending += variables_of(value).items()
            elif isinstance(value, list | tuple | dict):
                items = value.values() if isinstance(value, dict) else value
                pending += [(f"{path}[…]", item) for item in itertools.islice(items, _ITEMS)]
            elif isinstance(value, nn.Module) or is_users(value):
                if isinstance(value, nn.Module):
                    pending += [(f"{path}.{name}", one) for name, one in value.named_children()]
                own = [*_attributes(type(value)).items(), *_attributes(value).items()]
                named = [pair for pair in own if pair[0] in names - _OF_TORCH]
                pending += [(f"{path}.{name}", one) for name, one in named]
    return found


def _names_in(code: types.CodeType | None) -> Iterator[str]:
    for constant in () if code is None else (code, *code.co_consts):
        if constant is code:
            yield from code.co_names
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@dataclass(frozen=True)
class _Compared:
    """What is compared of a frame. `present`: variables that exist when the first body begins and
    are read later. `made`: those that a body makes, and a later one may read first."""

    present: Sequence[str]
    made: Sequence[str]
    globals: Sequence[str]
    environment: Sequence[str]

    @classmethod
    def of(cls, frame: types.FrameType) -> _Compared:
        code, held = frame.f_code, frame.f_locals
        read = _read_from(code, frame.f_lasti, leaves=True)
        read |= {*code.co_cellvars, *code.co_freevars}  # functions read these
        present = [name for name in held if name in read]
        targets = [*_loop_targets(code, frame.f_lasti)]
        made = sorted(_read_from(code, frame.f_lasti) - {*held, *targets})
        return cls([*dict.fromkeys(present + targets)], made, *_globals_of(code, frame.f_globals))


def _globals_of(
    code: types.CodeType, held: Mapping[str, Any]
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the globals that code names, with functions and classes of its module that it uses,
    and the environment variables that these name."""
    names: dict[str, Any] = {}
    pending: list[Any] = [code]
    texts: set[str] = set()
    reads_environment = False
    while pending:
        texts |= {*_texts_in(one := pending.pop())}
        for name in _names_in(one):
            reads_environment |= name in ("environ", "getenv")
            if name not in names and (value := held.get(name, _NONE)) is not _NONE:
                names[name] = value
                own = vars(value).values() if isinstance(value, type) else [value]
                functions = [one for one in own if isinstance(one, types.FunctionType)]
                pending += [one.__code__ for one in functions if one.__globals__ is held]
    return list(names), sorted(filter(str.isidentifier, texts)) if reads_environment else []


def _texts_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _texts_in(constant)
        elif isinstance(constant, str):
            yield constant


def _read_from(code: types.CodeType, at: int, *, leaves: bool = False) -> set[str]:
    """Returns the variables that code may read before it assigns them, when the loop whose next
    step is taken at `at` goes on. `leaves`: or ends."""
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
