"""Checks each body of the loop. Warns of changes that a joining worker would not have, or raises
LoopError. What a body writes to the model and the optimizer: model_guard.py.

Compared around each body (facts.py) are the variables of the frames between `ctx.steps` and the
train function that exist when the first body begins or that a body may read before it assigns them,
those that the loss function refers to, globals that either code names, the attributes of users' own
objects and of objects in them, and attributes of the model's modules. What lies deeper (what
functions keep, the environment) is not. If a body sets the rate of a parameter group, the members
find that out before the next step; see `ParameterGroups`. A change is one warning per run, by the
names of the variables. A body that uses a scheduler of the run's optimizers, or one of torch's
averaged models, without passing it to `ctx.steps` raises LoopError.

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
import inspect
import re
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError, LossError
from elastic_dp.module_pickling import is_of_user
from elastic_dp.train.exactness.facts import (
    MOST,
    PLAIN,
    Facts,
    Look,
    attributes,
    changes_by_micro_batch,
    listed,
    variables_of,
    with_values,
)
from elastic_dp.train.state.module_buffers import ModuleBuffers, changed_by_body
from elastic_dp.train.state.train_state import TrainState

_TENSORS = 8  # of a module whose values are looked at
_NAMED = 8  # variables in one warning
_WITHIN = 16  # attributes of an object within an object or a container
_NBYTES = 65_536  # of arrays and tensors whose content is compared
_OUTSIDE = "elastic_dp.train.train_function"  # calls the train function
_MODULE, _USED = "#module", "!"  # begin facts about a module, and about what a body must not use


class VariablesGuard:
    """Checks the bodies of one loop, and what its loss function refers to."""

    def __init__(
        self, state: TrainState, buffers: ModuleBuffers, loss_fn: Any, inner_optimizer: Any = None
    ) -> None:
        self._buffers, self._body = buffers, state.model_guard
        model, scheduler, passed = state.model, state.scheduler, state.user
        self._optimizers, self._scheduler = list(state.optimizers.all), scheduler
        ids = {id(module) for module in model.modules()}
        # What these hold counts as passed.
        for one in [*passed.values(), scheduler, *self._optimizers]:
            held = one.modules() if isinstance(one, nn.Module) else attributes(one).values()
            for value in [one, *held]:
                if type(value) in PLAIN:  # small integers are one object each
                    continue
                inner = value.modules() if isinstance(value, nn.Module) else ()
                ids |= {id(value), *map(id, inner)}
        self._passed, self._installed = ids, list[Any]()
        self._bound: dict[str, torch.optim.Optimizer] = {}  # variables that have one
        self._parts = weakref.WeakKeyDictionary[nn.Module, _Parts]()
        self._look = Look(_NBYTES, ids, self._of_others)
        self._look_within = Look(_NBYTES, ids)  # objects in objects
        self._users = dict[type, bool]()
        self._prefixes: tuple[str, ...] = ()  # of the names of the loss function's variables
        self._left: Facts = {}  # of the loss function's variables, at the end of the last body
        self._of_step: list[str] = []  # what the last step has changed of these
        self._tried: set[str] = set()  # what steps have changed, and its trial
        self._loss, self._delays = loss_fn, state.previous is not None
        self._root = ""  # the package of the train function
        self._compared: dict[types.CodeType, _Compared] = {}
        self._named: set[str] = set()
        self._before: Facts | None = None  # outside of a body
        self._clocks: list[float] = []
        self._epoch: Any = None
        if self._delays:
            changing = {f"state[{key!r}]": value for key, value in passed.items()}
            changing |= {f"optimizer {n}": one for n, one in enumerate(self._optimizers)}
            for function in (loss_fn, inner_optimizer):
                self._check_delayed(function, changing | {"scheduler=": scheduler})
        self._body.watch_others(
            {
                name: value
                for name, value in variables_of(loss_fn).items()
                if isinstance(value, torch.optim.Optimizer) and id(value) not in ids
            }
        )

    def loss_tried(self, changing: Iterable[str]) -> None:
        """Checks what the loss function used when it was tried. `changing`: what it has changed
        then, which has been said. Raises LossError."""
        self._tried = {_variable(name.partition(" ")[0]) for name in changing}
        for name, value in variables_of(self._loss).items():
            for one in (value, *attributes(value).values()):
                scales = isinstance(one, torch.amp.GradScaler) and one.is_enabled()
                if scales and one._scale is not None:
                    raise LossError(_scales("loss function", name))
        self._left = self._of_loss(self._facts(()))

    def body_begins(self) -> None:
        """Records the state and the variables at the start of a body."""
        self._body.begin()
        self._before, self._clocks = self._facts([*self._variables()]), _clocks()
        left, now = self._left, self._of_loss(self._before)
        changed = {_variable(n) for n in left.keys() & now.keys() if left[n] != now[n]}
        self._of_step = sorted(changed - self._tried)
        self._tried |= changed
        self._epoch = getattr(self._scheduler, "last_epoch", None)

    def body_ended(self, warn: Callable[[str], None]) -> None:
        """Checks the body that has ended. Passes warnings to `warn`. Raises LoopError."""
        self._body.check()
        if dropped := self._body.dropped:
            warn(
                "WARNING: the body of the loop over ctx.steps sets the gradients of some "
                f"parameters to None, that of model.{dropped} among them. It has no effect: when a "
                "body begins, the step has been made. To keep parameters as they are in a step, "
                "set their requires_grad to False before"
            )
        if self._before is not None:
            self._compare(self._before, warn)
        if self._of_step:
            warn(changes_by_micro_batch(listed(self._of_step, _NAMED)))
            self._of_step = []
        written = self._buffers.written_outside()
        if written is not None:
            raise LoopError(changed_by_body(written))

    def close(self) -> None:
        self._body.close()

    # ----------------------------------------------------------------------------------- private

    def _check_delayed(self, function: Any, held: Mapping[str, Any]) -> None:
        """Raises LossError if `function`, of leaves of delayed gradients, refers to what is in
        `held`: the body or the step changes it before they run again."""
        names = {id(value): name for name, value in held.items() if value is not None}
        for path, value in variables_of(function).items():
            if id(value) in names:
                raise _changes_while_delayed(path, f"is {names[id(value)]}")

    def _compare(self, before: Facts, warn: Callable[[str], None]) -> None:
        """Compares the variables at the end of a body with those `before`."""
        bound = self._bound
        now, self._before = self._facts([*self._variables()]), None
        self._left = self._of_loss(now)
        if getattr(self._scheduler, "last_epoch", None) != self._epoch:
            raise LoopError(
                "the body of the loop over ctx.steps called scheduler.step(), and so does the "
                "loop, since the scheduler is passed as scheduler=: leave out one of the two, or "
                'pass it as state={"scheduler": scheduler} and call it in the body'
            )
        changed = {
            name: (before[name], value)
            for name, value in now.items()
            if before.get(name, value) != value
        }
        of_model = self._buffers.attributes.changed_by_body()
        changed |= {name: (_told(was), _told(value)) for name, (was, value) in of_model.items()}
        clocks = list(zip(self._clocks, _clocks(), strict=True))
        new: dict[str, str] = {}  # the fact now, by what a message names
        for name, (was, value) in changed.items():
            if value.startswith(_USED):
                raise _not_passed(value.removeprefix(_USED).partition(" ")[0], _variable(name))
            variable = _variable(name)
            if variable not in self._named and not _is_clock(value, clocks):
                self._named.add(variable)
                new[with_values(name, was, value) if name == variable else variable] = value
        if self._delays:
            of_loss = tuple(f"{name}." for name in variables_of(self._loss))
            for name in map(_variable, changed):
                if f"{name}.".startswith(("model.", *of_loss)):
                    raise _changes_while_delayed(name, "was changed by the body")
        if new:
            warn(_warning(new))
        ours = {id(one) for one in self._optimizers}
        others = {name for name, one in self._bound.items() if id(one) not in ours}
        if rebound := {name for name in others if id(bound.get(name)) in ours} - self._named:
            self._named |= rebound
            warn(
                "WARNING: the body of the loop over ctx.steps gives another optimizer to "
                f"{listed(sorted(rebound), _NAMED)}, and the loop goes on with the one that "
                "ctx.steps was given. Set what changes in its parameter groups"
            )

    def _facts(self, variables: Sequence[tuple[str, Any]]) -> Facts:
        facts: Facts = {}
        of_loss = variables_of(self._loss)
        self._prefixes = tuple(f"{name}." for name in of_loss)
        for name, value in variables:
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise LoopError(_scales("body of the loop over ctx.steps", name))
        passed = id(getattr(self._loss, "__self__", None)) in self._passed  # with all that it holds
        for name, value in [*of_loss.items(), *variables]:
            if name not in self._named and not (passed and name.startswith("loss_fn.")):
                facts |= self._facts_of(name, value)
        self._bound = {n: one for n, one in variables if isinstance(one, torch.optim.Optimizer)}
        return facts

    def _of_loss(self, facts: Facts) -> Facts:
        """Returns the facts about values that the loss function refers to. The length of a
        container is none: it may be a cache."""
        return {
            name: fact
            for name, fact in facts.items()
            if not name.startswith("len(") and f"{_variable(name)}.".startswith(self._prefixes)
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
        if not self._root and frames:
            self._root = frames[-1].f_globals.get("__name__", "").partition(".")[0]
        for user in reversed(frames):
            code, globals_ = user.f_code, user.f_globals
            is_users = is_of_user(globals_.get("__name__", ""), self._root)
            if not is_users or not code.co_flags & inspect.CO_OPTIMIZED:
                continue
            held = user.f_locals
            if code not in self._compared:
                self._compared[code] = _Compared.of(user)
            compared = self._compared[code]
            yield from ((name, held[name]) for name in compared.present if name in held)
            yield from ((name, held.get(name)) for name in compared.made)
            yield from ((name, globals_[name]) for name in compared.globals if name in globals_)

    def _facts_of(self, name: str, value: Any) -> Facts:
        if id(value) in self._passed or isinstance(value, types.FunctionType):
            return {}
        found = self._look.facts_of(name, value)
        if not found and not isinstance(value, nn.Module) and self._has_users_type(value):
            for key, item in [*attributes(value).items()][:MOST]:
                found |= self._look.facts_of(f"{name}.{key}", item)
        elif isinstance(value, type | types.ModuleType):  # of an installed package
            self._installed.append(value)  # so that no other object gets its id
            self._passed.add(id(value))
        return found

    def _has_users_type(self, value: Any) -> bool:
        if isinstance(value, type | types.ModuleType):
            return self._is_of_user(value)
        kind = type(value)
        if kind not in self._users:
            self._users[kind] = self._is_of_user(value)
        return self._users[kind]

    def _is_of_user(self, value: Any) -> bool:
        kind = value if isinstance(value, type) else type(value)
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return True
        name = value.__name__ if isinstance(value, types.ModuleType) else kind.__module__ or ""
        return is_of_user(name, self._root)

    def _parts_of(self, module: nn.Module) -> _Parts:
        if module not in self._parts:
            every = [*module.modules()]
            tensors = [held for one in every for held in (one._parameters, one._buffers)]
            self._parts[module] = _Parts([id(one) for one in every], tensors)
        return self._parts[module]

    def _of_others(self, name: str, value: Any) -> Iterator[tuple[str, str]]:
        """Yields facts about what a body may use beside plain values; see `Look`."""
        match value:
            case AveragedModel():
                yield name, f"{_USED}{type(value).__name__} {value.n_averaged._version}"
            case LRScheduler():
                if any(value.optimizer is one for one in self._optimizers):
                    yield name, f"{_USED}{type(value).__name__} {value.last_epoch}"
            case nn.Module():
                parts = self._parts_of(value)
                if not any(one in self._passed for one in parts.ids):
                    held = [t for one in parts.tensors for t in one.values() if t is not None]
                    seen = [(id(t), t._version) for t in held if not t.is_inference()]
                    some = held[:: max(1, len(held) // _TENSORS)]
                    own = {f"tensor {n}": one for n, one in enumerate(some)} | attributes(value)
                    own.pop("training", None)
                    facts = [self._look.facts_of(key, one) for key, one in own.items()]
                    yield name, f"{_MODULE} {id(value)} {seen} {facts}"
            case type() | types.ModuleType() | types.FunctionType():
                pass
            case _ if self._has_users_type(value):
                for key, item in [*attributes(value).items()][:_WITHIN]:
                    yield from self._look_within.facts_of(f"{name}.{key}", item).items()


class _Parts(NamedTuple):
    """The identities of a module and those that it has, and what they have tensors in."""

    ids: Sequence[int]
    tensors: Sequence[Mapping[str, torch.Tensor | None]]


def _told(value: Any) -> str:
    return repr(value) if isinstance(value, PLAIN) else "#"


def _variable(name: str) -> str:
    """Returns the name of a variable, or of its attribute, of which this is a part."""
    return name.removeprefix("len(").partition("[")[0].rstrip(")")


def _clocks() -> list[float]:
    seconds = [time.time(), time.perf_counter(), time.monotonic(), time.process_time()]
    return [*seconds, *(1e9 * s for s in seconds)]


def _is_clock(fact: str, clocks: list[tuple[float, float]]) -> bool:
    with contextlib.suppress(ValueError):
        return any(a <= float(fact) <= b for a, b in clocks)
    return False


def _warning(changed: Mapping[str, str]) -> str:
    name, fact = next(iter(changed.items()))
    of_model = name.startswith("model.")
    path = re.split(r"[^\w.]", name)[0]
    name = path.rpartition(".")[2]  # an attribute: its object may be no value that travels
    remedy = f"c = ctx.carry({name}=…) before the loop, c.{name} in it"
    if fact.startswith(_MODULE):
        remedy = f'state={{"{name}": {path}}} of ctx.steps'
    if of_model:
        remedy += f", and {path} = c.{name} in the loss function"
    names = listed([*changed], _NAMED)
    return (
        f"WARNING: the body of the loop over ctx.steps changes {names}. A worker that joins or "
        "starts again will not have these values. If the loss or a decision depends on them, let "
        f"them travel: {remedy}. ctx.carry takes numbers, strings, tensors and containers of "
        "them, state= objects with state_dict; step.number counts the steps"
    )


def _scales(where: str, name: str) -> str:
    return (
        f"the {where} uses {name}, a GradScaler: its factor would stay in the loss and in the "
        'gradients. Write ctx.steps(…, precision="fp16"), which scales the loss and skips steps '
        'that overflow, or "bf16", and return the loss itself'
    )


def _not_passed(kind: str, name: str) -> LoopError:
    averages = kind == AveragedModel.__name__
    word = "ema" if averages else "scheduler"
    by_hand = averages or kind == "ReduceLROnPlateau"
    alone = "" if by_hand else ", or as scheduler= and leave the call to the loop"
    return LoopError(
        f"the body of the loop over ctx.steps changed a {kind} that is not passed to ctx.steps "
        f"({name}): a worker that joins or starts again would start it from the beginning. Pass it "
        f'as state={{"{word}": {name}}}{alone}'
    )


def _changes_while_delayed(name: str, what: str) -> LossError:
    return LossError(
        f"the loss function or the inner optimizer refers to {name}, which {what}. With "
        "staleness=1 a micro-batch whose worker is lost runs again after the loop's body and the "
        "scheduler, and must see what it saw: derive the value from the batch or the step of "
        "inner_optimizer, make it a buffer that forward changes, or leave out staleness"
    )


# -------------------------------------------------------------------------------- what code names


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@dataclass(frozen=True)
class _Compared:
    """What is compared of a frame. `present`: variables that exist when the first body begins, and
    are read later or have an optimizer. `made`: those that a body makes, and a later one may read
    first."""

    present: Sequence[str]
    made: Sequence[str]
    globals: Sequence[str]

    @classmethod
    def of(cls, frame: types.FrameType) -> _Compared:
        code, held = frame.f_code, frame.f_locals
        read = _read_from(code, frame.f_lasti, leaves=True)
        read |= {*code.co_cellvars, *code.co_freevars}  # functions read these
        optimizer = torch.optim.Optimizer
        present = [n for n, one in held.items() if n in read or isinstance(one, optimizer)]
        targets = [*_loop_targets(code, frame.f_lasti)]
        made = sorted(_read_from(code, frame.f_lasti) - {*held, *targets})
        return cls([*dict.fromkeys(present + targets)], made, _globals_of(code, frame.f_globals))


def _globals_of(code: types.CodeType, held: Mapping[str, Any]) -> Sequence[str]:
    """Returns the globals that code names, with functions of its module that it uses."""
    names: dict[str, Any] = {}
    pending = [code]
    while pending:
        for name in _names_in(pending.pop()):
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
