"""Detects objects that the loop body changes and that are not passed to `ctx.steps`.

A worker that joins would lack the changes.

- Schedulers of the run's optimizers and torch's averaged models: a body that uses one that is not
  passed raises LoopError. The guard searches them once, among all objects of the process, when the
  loop begins.
- Variables of the loss function: numbers, generators, tensors and modules that it reaches by name.
  The guard compares them around the first bodies only, since that is too slow for each step. A
  change gives a warning.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError
from elastic_dp.train.exactness.purity_probe import Facts, facts_of, variables_of

_BODIES = 2  # bodies around which the variables of the loss function are compared
_DEEPEST = 5  # nesting of attributes and containers in passed objects
_MOST = 1000  # items of one container
_NOT_WALKED = (
    *(type, torch.Tensor, types.ModuleType, types.FunctionType, types.MethodType),
    *(int, float, complex, str, bytes, types.NoneType),  # equal ones may be one object
)


class UnpassedStateGuard:
    """Watches objects that are not passed to `ctx.steps`.

    `passed` are the scheduler, if there is one, and the values of `state=`. What optimizers hold
    counts as passed, too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        loss_fn: Any,
        passed: Iterable[Any],
    ) -> None:
        optimizers = list(optimizers)
        ours = {id(one) for one in optimizers}
        carried = [
            {key: x for key, x in vars(one).items() if key not in ("state", "param_groups")}
            for one in optimizers
        ]
        known = _within([*passed, *carried], 0, set())
        self._known = {id(x): x for x in [*known, *model.modules()]}
        self._used = [
            (one, _uses(one))
            for one in _of((LRScheduler, AveragedModel))
            if id(one) not in self._known
            and (isinstance(one, AveragedModel) or id(getattr(one, "optimizer", None)) in ours)
        ]
        self._loss_fn = loss_fn
        self._bodies, self._said = 0, set[str]()
        self._before: Facts | None = None

    def begin(self) -> None:
        """Records the state at the start of the body."""
        self._before = self._variables() if self._bodies < _BODIES else None

    def check(self) -> list[str]:
        """Checks the state at the end of the body. Returns warnings. Raises LoopError."""
        for one, before in self._used:
            if _uses(one) != before:
                name = type(one).__name__
                word = "ema" if isinstance(one, AveragedModel) else "scheduler"
                alone = "" if word == "ema" else ", or as scheduler= and leave the call to the loop"
                raise LoopError(
                    f"the body of the loop over ctx.steps changed a {name} that is not passed "
                    "to ctx.steps: a worker that joins or starts again would start it from the "
                    f'beginning. Pass it as state={{"{word}": {word}}}{alone}'
                )
        if self._before is None:
            return []
        self._bodies += 1
        before, now, self._before = self._before, self._variables(), None
        new = [x for x in before | now if before.get(x) != now.get(x) and x not in self._said]
        self._said.update(new)
        return new and [
            f"WARNING: the body of the loop over ctx.steps changed {', '.join(new[:5])}, which "
            "the loss function refers to. A worker that joins or starts again begins with a "
            "value of its own: if the loss depends on it, keep it in an object that is passed "
            "as state="
        ]

    def _variables(self) -> Facts:
        facts: Facts = {}
        for name, value in variables_of(self._loss_fn).items():
            if id(value) in self._known:
                continue
            if isinstance(value, nn.Module):
                tensors = [*value.parameters(), *value.buffers()]
                if not any(id(module) in self._known for module in value.modules()):
                    facts[name] = _written(tensors)
            elif isinstance(value, torch.Tensor):
                facts[name] = _written([value])
            else:
                facts |= facts_of(name, value)
        return facts


def _of(kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yields all objects of the process with these types or types derived from them.

    An object refers to its class, so the search asks for what refers to the classes.
    `gc.get_objects` would list them too, but also tuples that another thread is still making; while
    somebody else holds such a tuple, CPython cannot finish it and raises SystemError there.
    """
    classes = set[type]().union(*map(_with_subclasses, kinds))
    for one in gc.get_referrers(*classes):
        if type(one) in classes:
            yield one


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def _uses(one: Any) -> Any:
    """Returns a value that changes when the object is used."""
    return (
        one.n_averaged._version if isinstance(one, AveragedModel) else vars(one).get("last_epoch")
    )


def _written(tensors: Iterable[torch.Tensor]) -> str:
    seen = [(t.data_ptr(), t._version) for t in tensors if not t.is_inference()]
    return f"#{hash(tuple(seen))}"


def _within(values: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yields the objects in containers and attributes."""
    if len(values) > _MOST:
        return
    for value in values.values() if isinstance(values, dict) else values:
        if id(value) in seen or isinstance(value, _NOT_WALKED):
            continue
        seen.add(id(value))
        yield value
        if depth == _DEEPEST or isinstance(value, torch.optim.Optimizer):
            continue
        if isinstance(value, nn.Module):
            yield from value.modules()
        elif isinstance(value, dict | list | tuple):
            yield from _within(value, depth + 1, seen)
        elif hasattr(value, "__dict__"):
            yield from _within(vars(value), depth + 1, seen)
