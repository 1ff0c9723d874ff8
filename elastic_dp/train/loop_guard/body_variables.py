"""Names what the loop's body changes and a worker that joins would lack.

The body's variables are in the frames between `ctx.steps` and the train function. The guard reads
those that a body may read before it writes them, and those that the loss function refers to, before
and after each body. A change is one warning per run, by the names of the variables. A body that
uses a scheduler of the run's optimizers, or one of torch's averaged models, without passing it to
`ctx.steps` raises LoopError.

A GradScaler that the body or the loss function uses is refused, and so is a second call of
`scheduler.step()`.

Not named are what a body assigns before it reads it, readings of a clock, and what objects of
installed packages keep for themselves (timers, loggers, progress bars).
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import itertools
import random
import re
import sys
import time
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError, LossError
from elastic_dp.module_pickling import is_installed

_BODIES = 2  # around which the attributes of modules are compared
_ITEMS = 64  # of a container; of a larger one its length and its last item are compared
_DEEPEST = 2  # containers within containers
_TENSORS = 8  # of a module
_NAMED = 8  # variables in one warning
_NBYTES = 1024  # of an array
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF|CLOSURE|GLOBAL|NAME)")
_CLIPS = {"clip_grad_norm_", "clip_grad_value_"}
_OF_TORCH = frozenset(vars(nn.Module()))
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", *_ENDS}
_OUTSIDE = "elastic_dp.train.train_function"  # calls the train function
_NOT_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)

Facts = dict[str, Any]


class BodyVariables:
    """`passed`: the values of `state=`. What these, the scheduler and the optimizers hold counts as
    passed."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        loss_fn: Any,
        scheduler: Any,
        passed: Iterable[Any],
    ) -> None:
        self._optimizers = list(optimizers)
        self._model, self._scheduler = model, scheduler
        ids = {id(module) for module in model.modules()}
        for one in [*passed, scheduler, *self._optimizers]:
            held = one.modules() if isinstance(one, nn.Module) else _attributes(one).values()
            for value in [one, *held]:
                if type(value) in _PLAIN:  # small integers are one object each
                    continue
                modules = value.modules() if isinstance(value, nn.Module) else ()
                ids |= {id(value), *map(id, modules)}
        self._passed = ids
        self._loss = _LossScope(loss_fn)
        self._root: str | None = None  # the package of the train function
        self._named: set[str] = set()
        self._before: Facts | None = None  # outside of a body
        self._clocks: list[float] = []
        self._bodies, self._epoch = 0, None

    def other_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Returns the optimizers that the loss function refers to, but for those of the run."""
        return {
            name: value
            for name, value in self._loss.variables()
            if isinstance(value, torch.optim.Optimizer) and id(value) not in self._passed
        }

    def check_loss(self) -> None:
        """Checks what the loss function has used, once it was tried. Raises LossError."""
        for name, value in self._loss.variables():
            for one in (value, *_attributes(value).values()):
                if isinstance(one, torch.amp.GradScaler) and one._scale is not None:
                    raise LossError(_scales("loss function", name))
        clips = self._loss.names & _CLIPS
        if clips and "backward" not in self._loss.names:
            raise LossError(
                f"the loss function calls {min(clips)}, which finds no gradients there: the "
                "backward pass comes after it. Write ctx.steps(…, clip_norm=1.0) or clip_value="
            )

    def begin(self) -> None:
        """Records the variables at the start of a body."""
        self._before, self._clocks = self._facts(), _clocks()
        self._epoch = getattr(self._scheduler, "last_epoch", None)

    def check(self) -> list[str]:
        """Compares the variables at the end of a body. Returns warnings. Raises LoopError."""
        if self._before is None:
            return []
        before, now, self._before = self._before, self._facts(), None
        self._bodies += 1
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
        }
        for name, pair in changed.items():
            for one, other in zip(*map(_uses, pair), strict=False):
                if one != other:
                    raise _not_passed(other.kind, name, averages=other.averages)
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
        facts: Facts = self._of_modules() if self._bodies < _BODIES else {}
        for name, value in self._loss.variables():
            if name not in self._named:
                facts.update(self._facts_of(name, value))
        for name, value in self._variables():
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise LoopError(_scales("body of the loop over ctx.steps", name))
            if name not in self._named:
                facts.update(self._facts_of(name, value))
        return facts

    def _of_modules(self) -> Facts:
        # Modules with extra state are left out: a worker that joins receives it.
        return {
            f"model.{prefix}.{key}".replace("..", "."): value
            for prefix, module in self._model.named_modules()
            if type(module).get_extra_state is nn.Module.get_extra_state
            for key, value in vars(module).items()
            if type(value) in _PLAIN and key not in _OF_TORCH
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
            code = user.f_code
            if not code.co_flags & inspect.CO_OPTIMIZED or not self._is_users(
                user.f_globals.get("__name__", ""), code.co_filename
            ):
                continue
            if names := _carried_names(code, user.f_lasti):
                variables, globals_ = user.f_locals, user.f_globals
                for name in names:
                    if name in variables:
                        yield name, variables[name]
                    elif name in globals_:
                        yield name, globals_[name]

    def _is_users(self, module: str, file: str) -> bool:
        return module.partition(".")[0] == self._root or not is_installed(file)

    def _facts_of(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if id(value) in self._passed or isinstance(value, _NOT_LOOKED_INTO):
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
        kind = type(value)
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return True
        module = sys.modules.get(kind.__module__)
        if kind.__module__.partition(".")[0] in ("elastic_dp", "builtins"):
            return False
        return self._is_users(kind.__module__, getattr(module, "__file__", None) or "")

    def _fact(self, value: Any, depth: int) -> Any:
        """Returns what is compared of a value, or `_NONE`."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._passed:
            return _NONE
        match value:
            case list() | tuple() | deque():
                if len(value) > _ITEMS:
                    return len(value), self._fact(value[-1], depth + 1)
                if depth <= _DEEPEST:
                    return _Items([self._fact(item, depth + 1) for item in value])
            case dict():
                if len(value) > _ITEMS:
                    return len(value)
                if depth <= _DEEPEST:
                    return {key: self._fact(item, depth + 1) for key, item in value.items()}
            case set():
                return len(value) if len(value) > _ITEMS else frozenset(value)
            case torch.Tensor():
                return _NONE if value.is_inference() else _Version(id(value), value._version)
            case AveragedModel():
                return _Used(type(value).__name__, value.n_averaged._version, averages=True)
            case nn.Module():
                return self._versions(value)
            case LRScheduler():
                if any(value.optimizer is one for one in self._optimizers):
                    return _Used(type(value).__name__, value.last_epoch, averages=False)
            case itertools.count():
                return _Items([repr(value)])
            case np.generic():
                return value.item()
            case np.ndarray() if value.nbytes <= _NBYTES and value.dtype.kind in "biufc":
                return _Items([value.tobytes()])
            case np.random.Generator():
                return _Items([repr(value.bit_generator.state)])
            case random.Random():
                return _Items([hash(value.getstate())])
            case torch.Generator():
                return _Items([hash(value.get_state().numpy().tobytes())])
        return _NONE

    def _versions(self, module: nn.Module) -> Any:
        if any(id(one) in self._passed for one in module.modules()):
            return _NONE
        tensors = itertools.islice(itertools.chain(module.parameters(), module.buffers()), _TENSORS)
        return _Version(id(module), sum(t._version for t in tensors if not t.is_inference()))


class _LossScope:
    """The variables of the loss function: those of functions around it, globals, attributes."""

    def __init__(self, loss_fn: Any) -> None:
        while isinstance(loss_fn, functools.partial):
            loss_fn = loss_fn.func
        owner = getattr(loss_fn, "__self__", loss_fn)  # the object of a method
        self._held = {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
        function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
        code = getattr(function, "__code__", None)
        self._cells: dict[str, Any] = {}
        self._globals: dict[str, Any] = {}
        self._names: list[str] = []
        self.names: set[str] = set()  # in its code, also those of attributes
        if code is not None:
            self.names = set(_names_in(code))
            self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
            self._globals = function.__globals__
            self._names = [
                name
                for name in code.co_names
                if not isinstance(self._globals.get(name), _NOT_LOOKED_INTO)
            ]

    def variables(self) -> Iterator[tuple[str, Any]]:
        for name in self._names:
            if name in self._globals:
                yield name, self._globals[name]
        for name, cell in self._cells.items():
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for name, value in self._held.items():
            yield f"loss_fn.{name}", value


_NONE = object()  # of a value that is not compared


@dataclass(frozen=True, slots=True)
class _Items:
    """The content of a value that a message does not show."""

    items: list[Any]


@dataclass(frozen=True, slots=True)
class _Version:
    """A tensor, or the tensors of a module."""

    identity: int
    version: int


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
    return held if isinstance(held, dict) else {}


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
    name = name.partition(".")[0]
    remedy = f"c = ctx.carry({name}=…) before the loop, c.{name} in it"
    if isinstance(value, _Version):
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


# -------------------------------------------------------------------------------- what code reads


@functools.cache
def _carried_names(code: types.CodeType, at: int) -> tuple[str, ...]:
    """Returns the variables that a pass through the loop around the instruction `at` may read
    before it writes them, and those that functions made outside of this loop refer to."""
    instructions = list(dis.get_instructions(code))
    number = {one.offset: i for i, one in enumerate(instructions)}
    start = max(i for i, one in enumerate(instructions) if one.offset <= at)
    after = [_successors(i, instructions, number) for i in range(len(instructions))]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        for i, one in enumerate(instructions):
            if entry.start <= one.offset < entry.end:
                after[i].add(number[entry.target])
    before: list[set[int]] = [set() for _ in instructions]
    for i, followers in enumerate(after):
        for follower in followers:
            before[follower].add(i)
    loop = _reachable(after, start) & _reachable(before, start)
    captured = set(code.co_freevars) | _counted(instructions, start)
    for i, one in enumerate(instructions):
        if i not in loop and one.opname in ("LOAD_CLOSURE", "LOAD_FAST"):
            captured |= {one.argval} & set(code.co_cellvars)
    written: dict[int, frozenset[str]] = {start: frozenset()}  # on all ways to an instruction
    read: set[str] = set()
    pending = [start] if loop else []
    while pending:
        i = pending.pop()
        done = set(written[i])
        for kind, name in _accesses(instructions[i]):
            if kind == "LOAD":
                read |= {name} - done
            else:
                done.add(name)
        for follower in after[i] & loop:
            known = written.get(follower)
            ways = frozenset(done) if known is None else known & done
            if ways != known:
                written[follower] = ways
                pending.append(follower)
    return tuple(sorted(read | captured))


def _counted(instructions: list[dis.Instruction], start: int) -> set[str]:
    """Returns the targets of `for i, step in enumerate(ctx.steps(…))`, which `enumerate` counts."""
    names: set[str] = set()
    if instructions[start].opname != "FOR_ITER":
        return names
    for one in instructions[start + 1 :]:
        kinds = {kind for kind, _ in _accesses(one)}
        if kinds == {"STORE"}:
            names |= {name for _, name in _accesses(one)}
        elif one.opname not in ("UNPACK_SEQUENCE", "NOP", "EXTENDED_ARG", "CACHE"):
            break
    return names if len(names) > 1 else set()


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _accesses(one: dis.Instruction) -> Iterator[tuple[str, str]]:
    kinds = _ACCESS.findall(one.opname)
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    yield from zip(kinds, names, strict=False)


def _successors(i: int, instructions: list[dis.Instruction], number: Mapping[int, int]) -> set[int]:
    one = instructions[i]
    jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
    found = {number[one.argval]} if jumps else set()
    if one.opname not in _JUMPS and i + 1 < len(instructions):
        found.add(i + 1)
    return found


def _reachable(edges: list[set[int]], start: int) -> set[int]:
    """Returns what can be reached from `start` in one step or more."""
    found: set[int] = set()
    pending = [*edges[start]]
    while pending:
        i = pending.pop()
        if i not in found:
            found.add(i)
            pending += edges[i]
    return found
