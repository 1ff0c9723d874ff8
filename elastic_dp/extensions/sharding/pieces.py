"""The pieces into which an optimizer's state is divided: what has one primary and one backup. They
are updated with the kind of optimizer that the user chose.

A piece is a unit of a parameter (`gradient_units.py`), or a whole parameter where the optimizer
looks at whole ones, or where a try shows that its update of a unit has other bits. The pieces are
the same on all workers and in all generations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elastic_dp.distributed.gradient_units import UnitLayout, in_memory_order

State = dict[str, Any]  # of one piece, as in `optimizer.state[p]`


class StatePiece(NamedTuple):
    """The elements `first` up to `last` of a parameter, in the order in which they lie in memory.
    `parameter` is its number in the model. A whole parameter keeps its shape."""

    parameter: int
    first: int
    last: int
    whole: bool

    @property
    def numel(self) -> int:
        return self.last - self.first

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view of a tensor that has the shape and the strides of the parameter."""
        return tensor if self.whole else in_memory_order(tensor)[self.first : self.last]

    def within(self, flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Returns `flat`, of shape (numel,), in the form of this piece of `parameter`."""
        if not self.whole:
            return flat
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def pieces_of(parameters: Sequence[torch.Tensor], whole: Collection[int]) -> list[StatePiece]:
    """Returns the pieces of all parameters, in order. The numbers in `whole` are not divided."""
    layout = UnitLayout.of(parameters)
    pieces = []
    for number, p in enumerate(parameters):
        if number in whole or p.dim() == 0 or p.numel() == 0:
            pieces.append(StatePiece(number, 0, p.numel(), True))
        else:
            units = [layout.units[unit] for unit in layout.of_parameter(number)]
            pieces += [StatePiece(number, unit.first, unit.last, False) for unit in units]
    return pieces


def part_of(piece: StatePiece, parameter: torch.Tensor, value: Any) -> Any:
    """Returns a copy of what belongs to a piece of a value of its parameter's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if piece.whole or not value.dim():
        return value.clone()
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return piece.of(value).clone()


class PieceUpdates:
    """Runs `step` of an optimizer of the same class on pieces. The user's own optimizer keeps its
    groups, which a scheduler or the loop's body may change, and has no state. The tensors and the
    state of each update are given."""

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

    def has(self, piece: int) -> bool:
        """Returns whether the optimizer updates this piece."""
        return self._group_of[piece] is not None

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
            group = self._optimizer.param_groups[index]
            inner.param_groups = [{**group, "params": [tensors[n] for n in mine]}]
            given = {tensors[n]: _copy(states[n]) if copies else states[n] for n in mine}
            inner.state = defaultdict(dict, given)
            for n in mine:
                tensors[n].grad = gradients[n]
            try:
                inner.step()
            finally:
                for n in mine:
                    tensors[n].grad = None
            states.update((n, inner.state[tensors[n]]) for n in mine)


def _copy(state: State) -> State:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _alike(optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer of the same class with the same attributes."""
    made = object.__new__(type(optimizer))
    # A scheduler counts the calls of the user's own `step` by an attribute of that name.
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made
