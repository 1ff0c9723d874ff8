"""Updates pieces of parameters with the kind of optimizer that the user chose.

The user's own optimizer keeps its groups, which a scheduler or the loop's body may change, and has
no state. The tensors and the state of each update are given.

A call of a kernel takes longer than what it does to a small piece, such as a bias. So small pieces
are updated as one tensor, where a try has shown that the optimizer is elementwise
(`elementwise_updates.py`): kernels treat whole multiples of CUT_ELEMENTS alike, wherever they lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.gradient_units import CUT_ELEMENTS
from elastic_dp.extensions.sharding.pieces import StatePiece
from elastic_dp.train.exactness.torch_optimizers import may_write_to_gradients
from elastic_dp.train.master_weights import class_of

State = dict[str, Any]  # of one piece, as in `optimizer.state[p]`

TOGETHER_ELEMENTS = 32768  # at most: of more, torch gives each of its threads a part


class PieceUpdates:
    """Runs `step` of an optimizer of the same class on pieces."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[StatePiece],
    ) -> None:
        self._optimizer = optimizer
        numbers = {id(p): number for number, p in enumerate(parameters)}
        group_of = {
            numbers[id(p)]: index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        # By piece; None: the optimizer does not have its parameter.
        self._group_of = [group_of.get(piece.parameter) for piece in pieces]
        self._is_small = [
            not piece.whole
            and 0 < piece.numel < TOGETHER_ELEMENTS
            and piece.numel % CUT_ELEMENTS == 0
            and not accelerator_of(parameters[piece.parameter].device).asynchronous
            for piece in pieces
        ]

    def has(self, piece: int) -> bool:
        """Returns whether the optimizer updates this piece."""
        return self._group_of[piece] is not None

    @property
    def may_write_to_gradients(self) -> bool:
        """Whether `run` may write to the gradients that it is given."""
        optimizer = self._optimizer
        return may_write_to_gradients(class_of(optimizer), optimizer.param_groups)

    def run(
        self,
        tensors: Mapping[int, torch.Tensor],
        gradients: Mapping[int, torch.Tensor],
        states: dict[int, State],
        *,
        copies: bool = False,
    ) -> None:
        """Updates these pieces in place, and the states of the same pieces, which are other ones
        afterwards. With `copies` the tensors in the given states stay as they are."""
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for piece in tensors:
            group_of_piece = self._group_of[piece]
            assert group_of_piece is not None
            by_group[group_of_piece].append(piece)
        for index, mine in sorted(by_group.items()):
            inner = _alike(self._optimizer)
            updates: list[tuple[list[int], torch.Tensor, torch.Tensor, State]] = []
            for some in self._together(mine, tensors, gradients, states):
                if len(some) == 1:
                    (piece,) = some
                    state = _copy(states[piece]) if copies else states[piece]
                    updates.append((some, tensors[piece], gradients[piece], state))
                else:
                    tensor, gradient = (
                        torch.cat([of[n] for n in some]) for of in (tensors, gradients)
                    )
                    updates.append((some, tensor, gradient, _joined([states[n] for n in some])))
            group = self._optimizer.param_groups[index]
            inner.param_groups = [{**group, "params": [tensor for _, tensor, _, _ in updates]}]
            inner.state = defaultdict(dict, {tensor: state for _, tensor, _, state in updates})
            for _, tensor, gradient, _ in updates:
                tensor.grad = gradient
            try:
                inner.step()
            finally:
                for _, tensor, _, _ in updates:
                    tensor.grad = None
            for some, tensor, _, _ in updates:
                state = inner.state[tensor]
                if len(some) == 1:
                    states[some[0]] = state
                else:
                    numels = [tensors[n].numel() for n in some]
                    torch._foreach_copy_([tensors[n] for n in some], tensor.split(numels))
                    states.update(zip(some, _divided(state, numels), strict=True))

    def _together(
        self,
        pieces: Iterable[int],
        tensors: Mapping[int, torch.Tensor],
        gradients: Mapping[int, torch.Tensor],
        states: Mapping[int, State],
    ) -> list[list[int]]:
        """Returns these pieces, those together that are updated as one tensor."""
        found: list[list[int]] = []
        open_lists: dict[Any, tuple[list[int], int]] = {}
        for piece in pieces:
            kind = _kind_of(states[piece], tensors[piece]) if self._is_small[piece] else None
            if kind is None:
                found.append([piece])
                continue
            kind = tensors[piece].dtype, gradients[piece].dtype, kind
            numel = tensors[piece].numel()
            some, total = open_lists.get(kind, ([], TOGETHER_ELEMENTS))
            if total + numel > TOGETHER_ELEMENTS:
                some, total = [], 0
                found.append(some)
            some.append(piece)
            open_lists[kind] = some, total + numel
        return found


def _kind_of(state: State, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns what is equal in the states of pieces that are updated as one tensor: all but what is
    of each element. None: this state cannot be joined with others."""
    found: list[Any] = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                found.append((key, value.dtype, repr(value.item())))
            elif value.shape == tensor.shape:
                found.append((key, value.dtype))
            else:
                return None
        elif value is None or isinstance(value, int | float | str):
            found.append((key, type(value), repr(value)))
        else:
            return None
    return tuple(found)


def _joined(states: Sequence[State]) -> State:
    """Returns the state of these pieces as that of one tensor, in new memory."""
    return {
        key: torch.cat([one[key] for one in states])
        if isinstance(value, torch.Tensor) and value.dim()
        else _copy_of(value)
        for key, value in states[0].items()
    }


def _divided(state: State, numels: Sequence[int]) -> list[State]:
    """Returns the states of the pieces, of such lengths, of which `state` is that of one tensor."""
    states = [State() for _ in numels]
    for key, value in state.items():
        is_divided = isinstance(value, torch.Tensor) and value.dim()
        values = value.split(numels) if is_divided else (_copy_of(value) for _ in numels)
        for one, part in zip(states, values, strict=True):
            one[key] = part
    return states


def _copy(state: State) -> State:
    return {key: _copy_of(value) for key, value in state.items()}


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _alike(optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer of the same class with the same attributes."""
    made = object.__new__(type(optimizer))
    # A scheduler counts the calls of the user's own `step` by an attribute of that name.
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made
