"""The state of a run's optimizer, of the optimizers inside it (Lookahead, Muon beside AdamW), and
of its scheduler.

    state       per parameter, and everything else in `optimizer.state`: read when it is sent
    hyper       the parameter groups, and
    own         attributes that are not torch's own, and objects registered as step hooks: both are
                copied at each commit, since the loop body may change them

State that cannot be sent is refused by name: before the first step; after it, for what that step
created; and after any later step in which an attribute changes its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from elastic_dp.checkpoint.python_objects import MISSING, Capture, References, Restore, held_in
from elastic_dp.distributed.local_shards import (
    is_sharded,
    local_of,
    part_of,
    sharded_like,
    whole_of,
)
from elastic_dp.errors import LoopError, ModelError

_OF_TORCH = ("defaults", "state", "param_groups")  # attributes of every optimizer
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SCHEDULER = "scheduler.state_dict()"


class OptimizerState:
    """The state of an optimizer. `references` names the run's other objects. Raises ModelError."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        parameters: Mapping[str, torch.Tensor],
        references: References,
    ) -> None:
        self.outer, self._scheduler, self._references = optimizer, scheduler, references
        self._parameters = parameters
        found = {id(one): (path, one) for path, one in held_in(optimizer, "optimizer")}
        self._all = list(found.values())  # the outermost one first
        for path, one in self._all:
            self._refer_to(path, one)
        self.all = [one for _, one in self._all]
        references.add("scheduler", scheduler)
        # Paths of the objects at the start of the loop or the last transfer; None: not known yet.
        self._built: set[str] | None = None
        self._constants: dict[str, Any] = {}
        self._state_is_checked = False
        self._watched: list[tuple[str, torch.Tensor, int]] = []
        self.committed: dict[str, Any] = {}

    def replace_committed(self, given: Mapping[str, Any]) -> None:
        """Takes over what another worker recorded at the commit, on a worker that joins."""
        self.committed |= given

    def note_commit(self) -> None:
        """Records the state at a commit, or after a state transfer: the body starts from it.

        Raises ModelError for state that cannot be sent.
        """
        began, captures = self._built is not None, [Capture(self._references, clones=True)]
        captures.append(Capture(self._references))
        self.committed = self._now(*captures)
        self._watched = [(path, t, t._version) for path, t in captures[1].tensors]
        if not began or (not self._state_is_checked and any(one.state for _, one in self._all)):
            captures.append(Capture(self._references))
            self._state(captures[2])
            self._state_is_checked = began
        self._check(*captures)

    def check_body(self) -> None:
        """Raises LoopError if the loop body wrote to a tensor that belongs to an optimizer."""
        for path, tensor, version in self._watched:
            if tensor._version != version:
                raise LoopError(
                    f"the body of the loop over ctx.steps wrote to {path}: tensors of the "
                    "optimizer may change only inside the step; keep what the body changes in an "
                    "object of its own and pass it as state="
                )

    # ------------------------------------------------------------------------------- transfer

    def now(self) -> dict[str, Any]:
        """Returns what the body may have changed. `committed` holds the same as of the commit."""
        return self._now(Capture(self._references, clones=True), Capture(self._references))

    def state(
        self, of_parameters: Mapping[torch.Tensor, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Returns what only steps change. Tensors are the optimizers' own. Raises ModelError.

        `of_parameters` is the state of the parameters, if the optimizer does not have it itself.
        """
        capture = Capture(self._references)
        tree = self._state(capture, of_parameters)
        self._check(capture)
        return tree

    def gathered(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the state of each parameter, whole and on the host. `gather` is its
        counterpart."""
        return {
            p: {key: whole_of(value) for key, value in self.outer.state.get(p, {}).items()}
            for p in self._optimized()
        }

    def gather(self) -> None:
        """Takes part in `gathered` of another process of this worker."""
        for p in self._optimized():
            for value in self.outer.state.get(p, {}).values():
                whole_of(value)

    def owners(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that every worker has, in whose memory state may lie."""
        groups = {
            f"{path}.param_groups[{i}][{key!r}]": item
            for path, one in self._all
            for i, group in enumerate(one.param_groups)
            for key, item in group.items()
            if isinstance(item, torch.Tensor)
        }
        return {f"parameter {n}": local_of(p) for n, p in self._parameters.items()} | groups

    def adopt(self, state: Mapping[str, Any], hyper: Mapping[str, Any], shared: set[int]) -> None:
        """Takes over `state`, as `state()` returns it, and `hyper`, as `now()` returns it.

        Both may come from an earlier version and lack entries.
        """
        restore = Restore(self._references, shared)
        names = {p: name for name, p in self._parameters.items()}
        for p, given in zip(self._optimized(), state["optimizer"], strict=True):
            if not given:
                self.outer.state.pop(p, None)
                continue
            mine = self.outer.state[p]
            at = f"optimizer.state[{names[p]}]"
            values = {
                key: restore.value(item, mine.get(key, MISSING), f"{at}.{key}", in_place=False)
                for key, item in given.items()
            }
            mine.clear()
            mine.update(
                {key: _whole(value, p) for key, value in values.items() if value is not MISSING}
            )
        rest = state["optimizer_rest"]
        pairs = rest["state"]
        pairs = [list(pair) for pair in pairs.items()] if isinstance(pairs, dict) else pairs
        self._adopt_pairs(restore, self.outer, pairs, "optimizer.state", set(self._optimized()))
        for (path, one), given in zip(self._all[1:], state.get("inner_state", ()), strict=False):
            if given is not None:
                self._adopt_pairs(restore, one, given, f"{path}.state", set())
        vars(self.outer).update(rest.get("own", {}))  # checkpoints of earlier versions
        self._adopt_hyper(hyper, shared)
        self._built = None  # includes what this call created

    # ------------------------------------------------------------------------------- private

    def _refer_to(self, path: str, one: torch.optim.Optimizer) -> None:
        if isinstance(one, torch.optim.LBFGS | torch.optim.SparseAdam):
            raise ModelError(f"{path} is {type(one).__name__}, which a step cannot run; use Adam")
        if "_optimizer_step_pre_hooks" not in vars(one):  # its __init__ does not call torch's
            vars(one).setdefault("defaults", {})
            torch.optim.Optimizer.__setstate__(one, {})
        mine = {id(p) for p in self._parameters.values()}
        for group in one.param_groups:
            for p in group["params"]:
                if id(p) not in mine:
                    raise ModelError(
                        f"{path} holds a tensor of shape {tuple(p.shape)} that is not a "
                        "parameter of the model given to ctx.steps; pass one module that holds "
                        "all of them"
                    )
        add = self._references.add
        add(path, one)
        for name in _OF_TORCH:
            add(f"{path}.{name}", getattr(one, name, None))
        for i, group in enumerate(one.param_groups):
            add(f"{path}.param_groups[{i}]", group)
            add(f"{path}.param_groups[{i}]['params']", group["params"])

    def _optimized(self) -> list[torch.Tensor]:
        return [p for group in self.outer.param_groups for p in group["params"]]

    def _now(self, capture: Capture, own: Capture) -> dict[str, Any]:
        """`capture` copies tensors and is for groups and scheduler; `own` is for attributes."""
        hyper = [
            [
                capture.attributes(
                    {key: item for key, item in group.items() if key != "params"},
                    f"{path}.param_groups[{i}]",
                )
                for i, group in enumerate(one.param_groups)
            ]
            for path, one in self._all
        ]
        scheduler = None
        if self._scheduler is not None:
            scheduler = capture.value(self._scheduler.state_dict(), _SCHEDULER)
        attributes = [
            {
                "attributes": own.attributes(_own(one), path),
                "hooks": [
                    own.value(hook, f"{path}'s step hook {n}") for n, hook in enumerate(_hooks(one))
                ],
            }
            for path, one in self._all
        ]
        return {
            "hyper": hyper[0],
            "inner_hyper": hyper[1:],
            "scheduler": scheduler,
            "own": attributes,
        }

    def _state(
        self,
        capture: Capture,
        of_parameters: Mapping[torch.Tensor, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        optimized = self._optimized()
        given = self.outer.state if of_parameters is None else of_parameters
        names = {p: name for name, p in self._parameters.items()}
        entries = {p: given.get(p, {}) for p in optimized}
        if of_parameters is None:
            entries = {p: _local(entry, p, names[p]) for p, entry in entries.items()}
        tree: dict[str, Any] = {
            "optimizer": [
                capture.attributes(entry, f"optimizer.state[{names[p]}]")
                for p, entry in entries.items()
            ]
        }
        known = set(optimized)
        rest = {key: item for key, item in _pairs(self.outer) if key not in known}
        tree["optimizer_rest"] = {"state": capture.pairs(rest, "optimizer.state")}
        tree["inner_state"] = [
            None if one.state is self.outer.state else capture.pairs(one.state, f"{path}.state")
            for path, one in self._all[1:]
        ]
        return tree

    def _check(self, *captures: Capture) -> None:
        """Raises ModelError for objects that were created or replaced since the loop began.

        A worker that joins would not have them.
        """
        built = {path for capture in captures for path in capture.built}
        constants = {path: x for capture in captures for path, x in capture.constants.items()}
        if self._built is None:
            self._built, self._constants = built, constants
            return
        for path in sorted(built - self._built):
            raise ModelError(
                f"{path} was made in a step: a worker that joins would not have it. Make it "
                "in __init__, before the loop"
            )
        for path, value in constants.items():
            if self._constants.setdefault(path, value) is not value:
                raise ModelError(
                    f"{path} is a {type(value).__name__}, which is not sent to a worker that "
                    "joins, and was replaced by another one in a step; keep it out of the "
                    "optimizer, or make it of numbers and tensors"
                )

    def _adopt_pairs(
        self,
        restore: Restore,
        one: torch.optim.Optimizer,
        pairs: list[Any],
        path: str,
        but: set[torch.Tensor],
    ) -> None:
        before = dict(_pairs(one))
        for key in before:
            if key not in but:
                del one.state[key]
        one.state.update(restore.pairs(pairs, before, path, in_place=False))

    def _adopt_hyper(self, given: Mapping[str, Any], shared: set[int]) -> None:
        defaults = [item for _, one in self._all for item in one.defaults.values()]
        restore = Restore(self._references, shared, defaults)
        groups = [given["hyper"], *given.get("inner_hyper", ())]
        for (path, one), theirs in zip(self._all, groups, strict=False):
            for i, (mine, values) in enumerate(zip(one.param_groups, theirs, strict=True)):
                for key, item in values.items():
                    before = mine.get(key, MISSING)
                    if isinstance(before, torch.Tensor) and isinstance(item, torch.Tensor):
                        before.copy_(item)
                    else:
                        value = restore.value(item, before, f"{path}.param_groups[{i}].{key}")
                        if value is not MISSING:
                            mine[key] = value
        if self._scheduler is not None:
            mine = self._scheduler.state_dict()
            self._scheduler.load_state_dict(restore.value(given["scheduler"], mine, _SCHEDULER))
        restore = Restore(self._references, shared, [*self.owners().values(), *defaults])
        for (path, one), attributes in zip(self._all, given.get("own", ()), strict=False):
            theirs = attributes["attributes"]
            restore.attributes(theirs, one, path)
            for key in _own(one).keys() - theirs.keys():
                delattr(one, key)
            for n, (hook, item) in enumerate(zip(_hooks(one), attributes["hooks"], strict=False)):
                restore.value(item, hook, f"{path}'s step hook {n}")


def same(one: Any, other: Any) -> bool:
    """Returns whether captured values are equal. Tensors are equal if they share the same
    memory."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if type(one) is dict:
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


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


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _OF_TORCH and not key.startswith("_optimizer_")
    }


def _hooks(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for name in _HOOKS:
        yield from getattr(optimizer, name, {}).values()
