"""The state of a run's optimizer, of the optimizers inside it (Lookahead, Muon beside AdamW), and
of its scheduler.

    state       per parameter, and everything else in `optimizer.state`: read when it is sent
    held        parameter groups, other attributes, step hooks and the scheduler (held_values.py):
                copied at each commit, since the loop body may change them

State that cannot be sent is refused by name: before the first step; after it, for what that step
created.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_dp.distributed.local_shards import (
    is_sharded,
    local_of,
    part_of,
    sharded_like,
    whole_of,
)
from elastic_dp.errors import ModelError
from elastic_dp.train.state.held_values import HeldValues, checked, refuse_shared_memory

_OF_TORCH = ("defaults", "state", "param_groups")  # attributes of every optimizer
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SCHEDULER = "scheduler.state_dict()"


class OptimizerState:
    """The state of an optimizer. Raises ModelError for state that cannot be sent. `committed` is
    what is held, as of the last commit: {"optimizers": …, "scheduler": …}."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        model: torch.nn.Module,
        others: Iterable[Any],
    ) -> None:
        """`others`: objects that each worker has, and that are carried apart."""
        self.outer, self._scheduler, self._model = optimizer, scheduler, model
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._names = {p: name for name, p in self._parameters.items()}
        found = {id(one): (path, one) for path, one in _optimizers_in(optimizer, "optimizer")}
        self._all = list(found.values())  # the outermost one first
        self.all = [one for _, one in self._all]
        self._held = HeldValues()
        self._held.know(*model.modules(), *model.parameters(), *model.buffers(), *others)
        if scheduler is not None:
            self._held.know(scheduler)
        for path, one in self._all:
            self._prepare(path, one)
        self._is_checked = self._state_is_checked = False
        self.committed: dict[str, Any] = {}

    def note_commit(self) -> None:
        """Records what is held at a commit, or after a state transfer: the body starts from it."""
        has_state = any(one.state for one in self.all)
        self.committed = self.now()
        if not self._is_checked or self._state_is_checked != has_state:
            refuse_shared_memory([*self._held.tensors, *self._tensors_of(self.state())])
            self._held.begin()
            self._is_checked, self._state_is_checked = True, has_state

    # ------------------------------------------------------------------------------- transfer

    def now(self) -> dict[str, Any]:
        """Returns what is held now."""
        read, self._held.tensors = self._held.read, []
        for path, one in self._all:
            self._held.note_function(type(one).step, f"{path}.step()")
        for name, function in _rates_of(self._scheduler):
            self._held.note_function(function, f"scheduler.{name}")
        optimizers = [
            {
                "groups": [
                    read(_without_params(group), f"{path}.param_groups[{i}]", "groups")
                    for i, group in enumerate(one.param_groups)
                ],
                "attributes": read(_own(one), path, path),
                "hooks": read(_hooks(one), f"{path}.step_hooks", path),
            }
            for path, one in self._all
        ]
        scheduler = None
        if self._scheduler is not None:
            scheduler = read(self._scheduler.state_dict(), _SCHEDULER)
        return {"optimizers": optimizers, "scheduler": scheduler}

    def state(
        self, of_parameters: Mapping[torch.Tensor, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Returns what only steps change. Tensors are the optimizers' own. `of_parameters` is the
        state of the parameters, if the optimizer does not have it itself."""
        tree = self._state_of(*self._all[0], of_parameters)
        inner = [
            None if one.state is self.outer.state else self._state_of(path, one)
            for path, one in self._all[1:]
        ]
        return {
            "optimizer": tree["parameters"],
            "optimizer_rest": tree["rest"],
            "inner_state": inner,
        }

    def gathered(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the state of each parameter, whole, on the host. The others call `gather`."""
        return {
            p: {key: whole_of(value) for key, value in self.outer.state.get(p, {}).items()}
            for p in _optimized(self.outer)
        }

    def gather(self) -> None:
        """Takes part in `gathered` of another process of this worker."""
        for p in _optimized(self.outer):
            for value in self.outer.state.get(p, {}).values():
                whole_of(value)

    def adopt_state(self, state: Mapping[str, Any]) -> None:
        """Takes over `state`, as `state()` returns it."""
        outer = {"parameters": state["optimizer"], "rest": state["optimizer_rest"]}
        for one, given in zip(self.all, [outer, *state["inner_state"]], strict=True):
            if given is not None:
                _adopt_state(one, given)

    def adopt_held(self, held: Mapping[str, Any]) -> None:
        """Takes over `held`, as `now()` returns it."""
        self._held.begin_writing()
        for (path, one), given in zip(self._all, held["optimizers"], strict=True):
            for i, (mine, theirs) in enumerate(zip(one.param_groups, given["groups"], strict=True)):
                mine |= self._held.write(theirs, mine, f"{path}.param_groups[{i}]")
            own = _own(one)
            values = self._held.write(given["attributes"], own, path)
            for key in own.keys() - values.keys():
                if type(own[key]) in (bool, int, float, str):
                    delattr(one, key)  # the others do not have it yet
            for key, value in values.items():
                if hasattr(type(one), key) or key in _OF_TORCH:
                    raise ModelError(f"the state that is restored has a value for {path}.{key}")
                vars(one)[key] = value
            self._held.write(given["hooks"], _hooks(one), f"{path}.step_hooks")
        if self._scheduler is not None:
            mine = self._scheduler.state_dict()
            values = self._held.write(held["scheduler"], mine, _SCHEDULER)
            self._scheduler.load_state_dict(mine | values)
        self._is_checked = False

    # ------------------------------------------------------------------------------- private

    def _prepare(self, path: str, one: torch.optim.Optimizer) -> None:
        check_kind(path, one, self._names)
        if "_optimizer_load_state_dict_pre_hooks" not in vars(one):  # it does not call torch's
            vars(one).setdefault("defaults", {})
            torch.optim.Optimizer.__setstate__(one, {})
        self._held.know(one, *(getattr(one, name) for name in _OF_TORCH if hasattr(one, name)))
        for group in one.param_groups:
            self._sort(group)
            self._held.know(group, group["params"])

    def _sort(self, group: dict[str, Any]) -> None:
        """Sorts a group as the model's parameters: the order of a set differs by process."""
        order = {p: number for number, p in enumerate(self._names)}
        names = group.get("param_names") or group["params"]
        pairs = list(zip(group["params"], names, strict=True))
        pairs.sort(key=lambda pair: order[pair[0]])
        group["params"][:] = [p for p, _ in pairs]
        if "param_names" in group:
            group["param_names"] = [name for _, name in pairs]

    def _state_of(
        self,
        path: str,
        one: torch.optim.Optimizer,
        of_parameters: Mapping[torch.Tensor, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        optimized = _optimized(one)
        entries = [
            checked(
                _local(dict(one.state.get(p, {})), p, self._names[p])
                if of_parameters is None
                else dict(of_parameters.get(p, {})),
                f"{path}.state[{self._names[p]}]",
            )
            for p in optimized
        ]
        known = set(optimized)
        rest = {key: value for key, value in _pairs(one) if key not in known}
        return {"parameters": entries, "rest": checked(rest, f"{path}.state")}

    def _tensors_of(self, state: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yields the tensors of a state and of the model, with their kinds and paths."""
        for name, tensor in self._parameters.items():
            yield "model", f"model.{name}", local_of(tensor)
        for name, tensor in self._model.named_buffers():
            yield f"buffer {name}", f"model.{name}", local_of(tensor)
        for p, entry in zip(_optimized(self.outer), state["optimizer"], strict=True):
            yield from _tensors_in(entry, f"optimizer.state[{self._names[p]}]")
        for part in ("optimizer_rest", "inner_state"):
            yield from _tensors_in(state[part], f"optimizer ({part})")


def check_kind(name: str, optimizer: torch.optim.Optimizer, known: Container[torch.Tensor]) -> None:
    """Raises ModelError for an optimizer that no step can run, or one with parameters that are not
    `known`. `name`: in messages."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(f"{name} is LBFGS, which evaluates the loss several times per step")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError(f"{name} is SparseAdam, which needs sparse gradients; use Adam")
    for p in _optimized(optimizer):
        if p not in known:
            raise ModelError(
                f"the {name} holds a tensor of shape {tuple(p.shape)} that is not a parameter of "
                "the model given to ctx.steps; pass one module that holds all of them"
            )


def _adopt_state(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    optimized = _optimized(one)
    known = set(optimized)
    for key in [key for key, _ in _pairs(one) if key not in known]:
        del one.state[key]
    for p, entry in zip(optimized, given["parameters"], strict=True):
        if entry:
            mine = one.state[p]
            mine.clear()
            mine.update({key: _whole(value, p) for key, value in entry.items()})
        else:
            one.state.pop(p, None)
    one.state.update(given["rest"])


def _tensors_in(tree: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(tree, torch.Tensor) and is_traceable_wrapper_subclass(tree):
        return
    if isinstance(tree, torch.Tensor | np.ndarray):
        yield "state", path, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _tensors_in(item, f"{path}.{key}")
    elif isinstance(tree, list | tuple | deque):
        for item in tree:
            yield from _tensors_in(item, path)


def _optimizers_in(
    value: Any, path: str, seen: set[int] | None = None
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yields an optimizer and those in its attributes, lists and dicts, with their paths."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    if isinstance(value, torch.optim.Optimizer):
        seen.add(id(value))
        yield path, value
        for key, item in vars(value).items():
            if key not in _OF_TORCH and key not in _HOOKS:
                yield from _optimizers_in(item, f"{path}.{key}", seen)
    elif isinstance(value, dict):
        for n, (key, item) in enumerate(value.items()):
            word = repr(key) if isinstance(key, str | int) else f"entry {n}"
            yield from _optimizers_in(item, f"{path}[{word}]", seen)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _optimizers_in(item, f"{path}[{i}]", seen)


def _local(state: Mapping[str, Any], p: torch.Tensor, name: str) -> Mapping[str, Any]:
    """Returns the state of a parameter; if that is sharded, the local parts of what is sharded like
    it. Raises ModelError for what is sharded otherwise."""
    if not is_sharded(p):
        return state
    layout = _layout_of(p)
    for key, value in state.items():
        if is_sharded(value) and _layout_of(value) != layout:
            raise ModelError(
                f"optimizer.state[{name}].{key} is not sharded as the parameter is: use an "
                "optimizer that updates each element by itself, such as AdamW"
            )
        if not is_sharded(value) and _is_part(value, p):
            raise ModelError(
                f"optimizer.state[{name}].{key} has the shape of a part of the parameter and is "
                "not sharded: it cannot be told from one that is"
            )
    return {key: local_of(value) for key, value in state.items()}


def _whole(value: Any, p: torch.Tensor) -> Any:
    """Reverses `_local` for one value."""
    return sharded_like(value, p) if is_sharded(p) and _is_part(value, p) else value


def part_of_state(value: Any, p: torch.Tensor, process: int) -> Any:
    """Returns what a process of this worker has of a value of a parameter's whole state."""
    if isinstance(value, torch.Tensor) and is_sharded(p) and value.shape == p.shape:
        return part_of(value, p, process)
    return value


def _is_part(value: Any, p: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == local_of(p).shape


def _layout_of(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.device_mesh, tensor.placements


def _pairs(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Any, Any]]:
    """Returns all of an optimizer's state. That of a sharded one refuses to be read otherwise."""
    state = optimizer.state
    return dict.items(state) if isinstance(state, dict) else state.items()


def _optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _OF_TORCH and not key.startswith("_optimizer_")
    }


def inner_schedulers(scheduler: Any) -> Iterable[Any]:
    """Returns the schedulers of a chain or a sequence; none of another scheduler."""
    return getattr(scheduler, "_schedulers", None) or ()


def _rates_of(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Yields, by name, the functions of a LambdaLR and of a CyclicLR, or of those in a chain or a
    sequence of schedulers."""
    for one in inner_schedulers(scheduler):
        yield from _rates_of(one)
    for n, rate in enumerate(getattr(scheduler, "lr_lambdas", None) or ()):
        yield f"lr_lambdas[{n}]", rate
    if (rate := getattr(scheduler, "_scale_fn_custom", None)) is not None:
        yield "scale_fn", rate


def _hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    hooks = [hook for name in _HOOKS for hook in getattr(optimizer, name, {}).values()]
    return {str(n): hook for n, hook in enumerate(hooks)}
