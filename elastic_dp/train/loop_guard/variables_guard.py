"""Checks each body of the loop. Warns of changes that a joining worker would not have, or raises
LoopError. What a body writes to the model and the optimizer: model_guard.py.

Compared around each body (facts.py) are the variables of the frames between `ctx.steps` and the
train function, those that the loss function refers to, globals that either code names, users' own
objects among all of these, and attributes of the model's modules. Left out are variables that each
body assigns before it reads them, readings of a clock, what functions keep, and objects of
installed packages (timers, loggers, progress bars). A change is one warning per run, by name.

Refused are a scheduler of the run's optimizers and an averaged model that are used and not passed,
a second call of `scheduler.step()`, and a GradScaler. With `staleness=1`, whose leaves may run
again after the body, the loss function may refer to nothing that the body or the step changes. If a
body sets the rate of a parameter group, the members compare it in the next step: `ParameterGroups`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError, LossError
from elastic_dp.module_pickling import is_of_user
from elastic_dp.train.exactness.code_variables import (
    ComparedNames,
    package_of_train_function,
    variables_of,
    variables_of_body,
)
from elastic_dp.train.exactness.facts import (
    DRAWN,
    Facts,
    Look,
    changes_by_micro_batch,
    listed,
    with_values,
)
from elastic_dp.train.state.held_values import PLAIN
from elastic_dp.train.state.module_attributes import attributes_of, path_in_model
from elastic_dp.train.state.module_buffers import ModuleBuffers, changed_by_body
from elastic_dp.train.state.train_state import TrainState

_TENSORS = 8  # of a module whose values are looked at
_NAMED = 8  # variables in one warning
_NBYTES = 65_536  # of arrays and tensors whose content is compared
_MODULE, _USED = "#module", "!"  # begin facts about a module, and about what a body must not use


class _Seen(NamedTuple):
    """What was seen when a body began or ended."""

    of_loss: Facts  # of the variables that the loss function refers to
    of_body: Facts  # of the other variables
    optimizers: Mapping[str, torch.optim.Optimizer]  # by their variables
    clocks: Sequence[float]
    epoch: Any  # of the scheduler


class VariablesGuard:
    """Checks the bodies of one loop, and what its loss function refers to."""

    def __init__(
        self, state: TrainState, buffers: ModuleBuffers, loss_fn: Any, inner_optimizer: Any = None
    ) -> None:
        self._buffers, self._body = buffers, state.model_guard
        self._optimizers, self._scheduler = list(state.optimizers.all), state.scheduler
        passed: dict[str, Any] = {f"state[{key!r}]": one for key, one in state.user.items()}
        passed |= {f"optimizer {n}": one for n, one in enumerate(self._optimizers)}
        passed["scheduler="] = state.scheduler
        self._passed = {id(module) for module in state.model.modules()}
        for one in passed.values():  # what these hold counts as passed
            held = () if isinstance(one, nn.Module) else attributes_of(one).values()
            for value in [one, *held]:
                inner = value.modules() if isinstance(value, nn.Module) else ()
                # Small integers are one object each.
                self._passed |= {id(x) for x in [value, *inner] if type(x) not in PLAIN}
        self._tensors = weakref.WeakKeyDictionary[nn.Module, Sequence[_Tensors] | None]()
        self._look = Look(_NBYTES, self._passed, self._of_others, self._is_opened)
        self._users = dict[type | types.ModuleType, bool]()
        self._root = package_of_train_function()
        self._compared: dict[types.CodeType, ComparedNames] = {}
        # Each object once, by one of its names.
        self._in_model = {
            id(value): (path_in_model(name, key), value)
            for name, module in state.model.named_modules()
            for key, value in attributes_of(module).items()
            if self._is_opened(value) or _holds_more(value)
        }
        self._loss, self._delays = loss_fn, state.previous is not None
        self._seen: _Seen | None = None
        self._in_body = False
        self._tried: set[str] = set()  # variables of the loss function that steps have changed
        self._named: set[str] = set()  # variables that bodies have changed
        if self._delays:
            for function in (loss_fn, inner_optimizer):
                _check_delayed(function, passed)
        self._body.watch_others(
            {
                name: value
                for name, value in variables_of(loss_fn).items()
                if isinstance(value, torch.optim.Optimizer) and id(value) not in self._passed
            }
        )

    def loss_tried(self, changing: Iterable[str]) -> None:
        """Checks what the loss function used when it was tried. `changing`: what it has changed
        then, which has been said. Raises LossError."""
        self._tried = {_variable(name.partition(" ")[0]) for name in changing}
        for name, value in variables_of(self._loss).items():
            for one in (value, *attributes_of(value).values()):
                scales = isinstance(one, torch.amp.GradScaler) and one.is_enabled()
                if scales and one._scale is not None:
                    raise LossError(_scales("loss function", name))
        self._seen = self._look_around(body=False)

    def body_begins(self, warn: Callable[[str], None]) -> None:
        """Records the state and the variables at the start of a body. Warns of what the last step
        has changed. Raises LoopError."""
        self._body.begin()
        last = self._seen
        self._seen, self._in_body = self._look_around(), True
        # The length of a container is left out: it may be a cache.
        changed = {
            _variable(name)
            for name, fact in self._seen.of_loss.items()
            if last and last.of_loss.get(name, fact) != fact and not name.startswith("len(")
        }
        if new := sorted(changed - self._tried):
            warn(changes_by_micro_batch(listed(new, _NAMED)))
        self._tried |= changed

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
        if self._in_body and self._seen is not None:
            before = self._seen
            self._seen, self._in_body = self._look_around(), False
            self._compare(before, self._seen, warn)
        written = self._buffers.written_outside()
        if written is not None:
            raise LoopError(changed_by_body(written))

    # ----------------------------------------------------------------------------------- private

    def _compare(self, before: _Seen, now: _Seen, warn: Callable[[str], None]) -> None:
        """Compares what was seen before a body and at its end."""
        if now.epoch != before.epoch:
            raise LoopError(
                "the body of the loop over ctx.steps called scheduler.step(), and so does the "
                "loop, since the scheduler is passed as scheduler=: leave out one of the two, or "
                'pass it as state={"scheduler": scheduler} and call it in the body'
            )
        facts = before.of_loss | before.of_body
        changed = {
            name: (facts[name], fact)
            for name, fact in (now.of_loss | now.of_body).items()
            if facts.get(name, fact) != fact
        }
        of_model = self._buffers.attributes.changed_by_body()
        changed |= {name: (_told(was), _told(value)) for name, (was, value) in of_model.items()}
        clocks = list(zip(before.clocks, now.clocks, strict=True))
        new: dict[str, str] = {}  # the fact now, by what a message names
        for name, (was, fact) in changed.items():
            if fact.startswith(_USED):
                raise _not_passed(fact.removeprefix(_USED).partition(" ")[0], _variable(name))
            variable = _variable(name)
            if variable not in self._named and not _is_clock(fact, clocks):
                self._named.add(variable)
                new[with_values(name, was, fact) if name == variable else variable] = fact
        if self._delays:
            of_loss = tuple(f"{name}." for name in variables_of(self._loss))
            for name in map(_variable, changed):
                if f"{name}.".startswith(("model.", *of_loss)):
                    raise _changes_while_delayed(name, "was changed by the body")
        if new:
            warn(_warning(new))
        ours = {id(one) for one in self._optimizers}
        rebound = [
            name
            for name, one in sorted(now.optimizers.items())
            if id(one) not in ours and id(before.optimizers.get(name)) in ours
        ]
        if rebound and not self._named.issuperset(rebound):
            self._named.update(rebound)
            warn(
                "WARNING: the body of the loop over ctx.steps gives another optimizer to "
                f"{listed(rebound, _NAMED)}, and the loop goes on with the one that "
                "ctx.steps was given. Set what changes in its parameter groups"
            )

    def _look_around(self, *, body: bool = True) -> _Seen:
        """`body`: also at the variables of the body."""
        variables = variables_of_body(self._root, self._compared) if body else []
        for name, value in variables:
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise LoopError(_scales("body of the loop over ctx.steps", name))
        of_loss = variables_of(self._loss, without=self._passed)
        return _Seen(
            self._facts(of_loss.items()),
            self._facts(
                (n, x)
                for n, x in [*variables, *(self._in_model.values() if body else ())]
                if n not in of_loss or of_loss[n] is not x
            ),
            {n: one for n, one in variables if isinstance(one, torch.optim.Optimizer)},
            _clocks(),
            getattr(self._scheduler, "last_epoch", None),
        )

    def _facts(self, variables: Iterable[tuple[str, Any]]) -> Facts:
        facts: Facts = {}
        for name, value in variables:
            if name in self._named or isinstance(value, types.FunctionType):
                continue
            if not isinstance(value, type | types.ModuleType):
                facts |= self._look.facts_of(name, value)
            elif self._is_users(value):
                facts |= self._look.of_attributes(name, value)
        return facts

    def _is_opened(self, value: Any) -> bool:
        never = nn.Module | types.FunctionType | types.ModuleType | type
        return not isinstance(value, never) and self._is_users(type(value))

    def _is_users(self, kind: type | types.ModuleType) -> bool:
        """Returns whether a class or a module is the user's. One of installed packages that holds
        settings of scripts counts as such."""
        if kind not in self._users:
            name = kind.__name__ if isinstance(kind, types.ModuleType) else kind.__module__ or ""
            holds_settings = kind in (argparse.Namespace, types.SimpleNamespace)
            self._users[kind] = holds_settings or is_of_user(name, self._root)
        return self._users[kind]

    def _of_others(self, name: str, value: Any) -> Iterator[tuple[str, str]]:
        """Yields facts about what a body may use beside plain values; see `Look`."""
        match value:
            case AveragedModel():
                yield name, f"{_USED}{type(value).__name__} {value.n_averaged._version}"
            case LRScheduler():
                if any(value.optimizer is one for one in self._optimizers):
                    yield name, f"{_USED}{type(value).__name__} {value.last_epoch}"
            case nn.Module() if (tensors := self._tensors_of(value)) is not None:
                held = [t for one in tensors for t in one.values() if t is not None]
                seen = [(id(t), t._version) for t in held if not t.is_inference()]
                some = held[:: max(1, len(held) // _TENSORS)]
                own = {f"tensor {n}": one for n, one in enumerate(some)} | attributes_of(value)
                own.pop("training", None)
                facts = [self._look.facts_of(key, one) for key, one in own.items()]
                yield name, f"{_MODULE} {id(value)} {seen} {facts}"

    def _tensors_of(self, module: nn.Module) -> Sequence[_Tensors] | None:
        """Returns what a module and those in it have tensors in. None: one of them is passed."""
        if module not in self._tensors:
            every = [*module.modules()]
            passed = any(id(one) in self._passed for one in every)
            tensors = [held for one in every for held in (one._parameters, one._buffers)]
            self._tensors[module] = None if passed else tensors
        return self._tensors[module]


_Tensors = Mapping[str, torch.Tensor | None]


def _holds_more(value: Any) -> bool:
    """Returns whether it is a container of more than plain values."""
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | dict) and any(type(one) not in PLAIN for one in items)


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
    travel = (
        f"let them travel: {remedy}. ctx.carry takes numbers, strings, tensors and containers of "
        "them, state= objects with state_dict; step.number counts the steps"
    )
    if fact.startswith(DRAWN):
        travel = "draw from the global generators, which are seeded for each body"
    return (
        f"WARNING: the body of the loop over ctx.steps changes {listed([*changed], _NAMED)}. A "
        "worker that joins or starts again will not have these values. If the loss or a decision "
        f"depends on them, {travel}"
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


def _check_delayed(function: Any, held: Mapping[str, Any]) -> None:
    """Raises LossError if `function`, of leaves of delayed gradients, refers to what is in `held`:
    the body or the step changes it before they run again."""
    names = {id(value): name for name, value in held.items() if value is not None}
    for path, value in variables_of(function).items():
        if id(value) in names:
            raise _changes_while_delayed(path, f"is {names[id(value)]}")


def _changes_while_delayed(name: str, what: str) -> LossError:
    return LossError(
        f"the loss function or the inner optimizer refers to {name}, which {what}. With "
        "staleness=1 a micro-batch whose worker is lost runs again after the loop's body and the "
        "scheduler, and must see what it saw: derive the value from the batch or the step of "
        "inner_optimizer, make it a buffer that forward changes, or leave out staleness"
    )
