"""Detects a loop body that changes parameters, the optimizer's parameter groups or its state.

Each member runs each body once, on the state that the step computed or that it took over from
another member. If a body wrote to that state, some members would apply the change twice. For some
tens of microseconds per step, the guard detects:

- a call of `optimizer.step()`, immediately;
- a parameter, buffer or module that did not exist before the loop, even one that a forward pass
  created;
- another tensor or module in the place of a parameter, and every write that raises a parameter's
  version;
- for a few parameters in turn, a change of the optimizer's state and, on the host, a change that
  bypasses the version (`p.data.mul_(…)`). The latter is found by a sample of values, read through
  NumPy, since a torch operator costs ten times as much. A change to all parameters is found at
  once, a change to one of them some steps later. On a device this comparison would make the host
  wait, so it is left out.

Numbers and strings that modules hold as plain attributes are compared in turn, too. A body may set
them, but a worker that joins lacks the new value, so the user gets a warning.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_dp.distributed.local_shards import is_sharded, local_of
from elastic_dp.errors import LoopError, LossError

_WATCHED = 4  # parameters that are compared closely in a step
_SAMPLED_NUMEL = 16  # elements of each of them, spread over it
_PLAIN = (int, float, complex, str)
_version = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class _ModuleEntry:
    """A parameter, or a module with parameters, that a module holds under a name."""

    name: str
    holder: dict[str, Any]
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Sample:
    """A view of some elements of a parameter, and the address of its memory at that time."""

    at: int
    view: np.ndarray[Any, Any]


class LoopBodyGuard:
    """Watches one model and its optimizer from `begin` to `check`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._sharded = any(map(is_sharded, self._parameters))
        held = list(_module_entries(model))
        self._held_names, self._module_entries = [h.name for h in held], [h.value for h in held]
        self._holders, self._keys = [h.holder for h in held], [h.key for h in held]
        self._dicts, self._dict_names = _dicts(model)
        self._entries = [set(d) for d in self._dicts]
        self._sizes = list(map(len, self._dicts))
        self._absent = [
            (n, d, k)
            for n, d in zip(self._dict_names, self._dicts, strict=True)
            for k in d
            if d[k] is None
        ]
        self._optimizer = optimizer
        # Modules with extra state are left out: a worker that joins receives it.
        self._plain = [
            (f"{name}.".lstrip("."), vars(module))
            for name, module in model.named_modules()
            if type(module).get_extra_state is nn.Module.get_extra_state
        ]
        self._at, self._said = 0, set[str]()
        self._attributes: list[dict[str, Any]] = []
        self._watching = self.is_in_loss = False
        self._window = range(0, 0)
        self._samples: dict[int, _Sample] = {}
        self._groups = _groups(optimizer)
        optimizer.register_step_pre_hook(self._steps)

    def begin(self) -> None:
        """Records the state at the start of the body."""
        self._versions = self._present_versions()
        first = self._window.stop if self._window.stop < len(self._names) else 0
        self._window = range(first, min(first + _WATCHED, len(self._names)))
        self._values = [self._sample(i) for i in self._window]
        self._states = [self._state(i) for i in self._window]
        self._at = self._at + _WATCHED if self._at + _WATCHED < len(self._plain) else 0
        self._attributes = self._present_attributes()
        self._watching = True

    @contextlib.contextmanager
    def in_loss(self) -> Iterator[None]:
        """A context in which the loss function runs."""
        self.is_in_loss = True
        try:
            yield
        finally:
            self.is_in_loss = False

    def versions(self) -> list[int]:
        """Returns the versions of the parameters."""
        return list(map(_version, self._parameters))

    def written_since(self, versions: list[int]) -> str | None:
        """Returns the name of a parameter whose version differs from `versions`, or None."""
        now = self.versions()
        if now == versions:
            return None
        return next(n for n, a, b in zip(self._names, versions, now, strict=True) if a != b)

    def check(self) -> None:
        """Checks the state at the end of the body. Raises LoopError."""
        if not self._watching:
            return
        self._watching = False
        if _groups(self._optimizer) != self._groups:
            raise LoopError(
                "the body of the loop over ctx.steps changed which parameters the optimizer "
                "has, e.g. by add_param_group: a worker that joins would not know. Make all "
                "groups before the loop, and in the body set their lr, or requires_grad of their "
                "parameters"
            )
        grown = self._grown()
        if grown is not None:
            raise LoopError(
                f"model.{grown} was added to the model, or removed from it, since the loop over "
                "ctx.steps began: a worker that joins would not know, and what a forward pass "
                "derives from its rows differs between workers. Create all parameters, buffers "
                "and modules before the loop; a cache may be a plain attribute"
            )
        same = list(map(is_, map(dict.get, self._holders, self._keys), self._module_entries))
        if not all(same):
            name = self._held_names[same.index(False)]
            raise _body_wrote(f"put something else in the place of {name!r}")
        versions = self._present_versions()
        if versions != self._versions:
            changed = next(
                i for i, v in enumerate(zip(versions, self._versions, strict=True)) if v[0] != v[1]
            )
            raise _body_wrote(f"wrote to {self._names[changed % len(self._names)]!r}")
        for i, values, state in zip(self._window, self._values, self._states, strict=True):
            if values != self._sample(i):
                raise _body_wrote(f"wrote to {self._names[i]!r}")
            if state != self._state(i):
                raise _body_wrote(f"wrote to the optimizer's state of {self._names[i]!r}")

    def attributes_set(self) -> list[str]:
        """Returns warnings about plain attributes that the body has set, each one once."""
        found = []
        for (prefix, _), before, now in zip(
            self._plain[self._at :], self._attributes, self._present_attributes(), strict=False
        ):
            if before != now:
                found += [prefix + key for key in before | now if before.get(key) != now.get(key)]
        new = [f"model.{name}" for name in found if name not in self._said]
        self._attributes, self._said = [], self._said.union(found)
        return new and [
            f"WARNING: the body of the loop over ctx.steps changed {', '.join(new)}, which a "
            "worker that joins or starts again lacks. If the loss depends on it, keep it in an "
            "object that is passed as state=, or in get_extra_state"
        ]

    # ------------------------------------------------------------------------------ private

    def _present_attributes(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in held.items() if isinstance(value, _PLAIN)}
            for _, held in self._plain[self._at : self._at + _WATCHED]
        ]

    def _grown(self) -> str | None:
        """Returns the name of a parameter, buffer or module that was added, removed, or set from
        None.

        Returns None if there is no such change.
        """
        if list(map(len, self._dicts)) != self._sizes:
            for prefix, d, before in zip(self._dict_names, self._dicts, self._entries, strict=True):
                for key in before ^ set(d):
                    return prefix + key
        for prefix, d, key in self._absent:
            if d[key] is not None:
                return prefix + key
        return None

    def _steps(self, *_: Any) -> None:
        if self.is_in_loss:
            raise LossError(
                "the loss function called optimizer.step(): return the loss, and the optimizer "
                "makes one step for the whole global batch"
            )
        if self._watching:
            raise LoopError(
                "the body of the loop over ctx.steps called optimizer.step(): when a body begins, "
                "the step has been made, and its gradients are gone"
            )

    def _present_versions(self) -> list[int]:
        """Returns the parameters' versions and addresses. `p.data = …` changes the latter."""
        held = map(local_of, self._parameters) if self._sharded else self._parameters
        places = map(torch.Tensor.data_ptr, held)
        return [*self.versions(), *places]

    def _sample(self, i: int) -> bytes:
        """Returns the bytes of some elements of a parameter."""
        p, sample = local_of(self._parameters[i]), self._samples.get(i)
        if sample is None or sample.at != p.data_ptr():
            sample = self._samples[i] = _Sample(p.data_ptr(), _sampled_view(p))
        return sample.view.tobytes()

    def _state(self, i: int) -> list[tuple[str, int, int]]:
        entry = self._optimizer.state.get(self._parameters[i], {})
        return [
            (key, id(value), value._version if isinstance(value, torch.Tensor) else 0)
            for key, value in entry.items()
        ]


def _groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _dicts(model: nn.Module) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns all dicts that hold parameters, buffers and modules, and the prefixes of the names in
    them."""
    dicts, names = [], []
    for prefix, module in model.named_modules():
        dicts += [module._parameters, module._buffers, module._modules]
        names += [f"{prefix}." if prefix else ""] * 3
    return dicts, names


def _module_entries(model: nn.Module) -> Iterator[_ModuleEntry]:
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for key, p in module._parameters.items():
            if p is not None:
                yield _ModuleEntry(dot + key, module._parameters, key, p)
        for key, child in module._modules.items():
            if child is not None and next(child.parameters(), None) is not None:
                yield _ModuleEntry(dot + key, module._modules, key, child)


def _sampled_view(p: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a view of some elements, or an empty array for a tensor on a device."""
    if p.device.type != "cpu" or p.numel() == 0:
        return np.empty(0)
    p = p.detach()
    while p.dim() > 1:  # unless it is contiguous, a line through its middle
        p = p.view(-1) if p.is_contiguous() else p.select(0, p.shape[0] // 2)
    few = p.view(-1)[:: math.ceil(p.numel() / _SAMPLED_NUMEL)]
    return few.unsqueeze(-1).view(torch.uint8).numpy()


def _body_wrote(what: str) -> LoopError:
    return LoopError(
        f"the body of the loop over ctx.steps {what}. Parameters, buffers and the optimizer's "
        "state may change only inside the step; keep an average of them in a model of its own "
        "and pass it as state=, or evaluate another model with ctx.evaluate(…, model=…)"
    )
