"""The state of all pieces by parameter, as an optimizer that is not sharded has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_dp.train.sharding.piece_updates import State
from elastic_dp.train.sharding.pieces import StatePiece


class WholeState:
    """Takes one piece after another, and copies each into tensors of the parameter's shape."""

    def __init__(self, parameters: Sequence[torch.Tensor], pieces: Sequence[StatePiece]) -> None:
        self._parameters, self._pieces = parameters, pieces
        self._states: dict[int, State] = {}  # by number of the parameter
        self.memory: set[int] = set()  # addresses of what nobody else has

    @torch.no_grad()
    def add(self, number: int, state: State, *, is_new: bool = False) -> None:
        """Adds the state of a piece. That of a whole parameter is not copied. `is_new`: nobody else
        has its tensors."""
        piece = self._pieces[number]
        if piece.whole:
            self._states[piece.parameter] = state
            if is_new:
                self.memory |= {
                    address_of(x) for x in state.values() if isinstance(x, torch.Tensor)
                }
            return
        p, mine = self._parameters[piece.parameter], self._states.setdefault(piece.parameter, {})
        for key, value in state.items():
            if not _is_divided(value):
                mine[key] = value
                continue
            if key not in mine:
                mine[key] = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
                self.memory.add(address_of(mine[key]))
            piece.of(mine[key]).copy_(value)

    def of_piece(self, number: int) -> State:
        """Returns the state of a piece, with tensors that share this object's memory."""
        piece = self._pieces[number]
        given = self._states.get(piece.parameter, {})
        return {key: _part(piece, value) for key, value in given.items()}

    def by_parameter(self) -> dict[torch.Tensor, State]:
        return {self._parameters[n]: state for n, state in self._states.items() if state}


def part_of(piece: StatePiece, parameter: torch.Tensor, value: Any) -> Any:
    """Returns a copy of what belongs to a piece of a value of its parameter's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if not piece.whole and _is_divided(value) and value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return _part(piece, value).clone()


def _part(piece: StatePiece, value: Any) -> Any:
    return piece.of(value) if _is_divided(value) else value


def address_of(tensor: torch.Tensor) -> int:
    """Returns where the memory begins in which a tensor lies."""
    return tensor.untyped_storage().data_ptr()


def _is_divided(value: Any) -> bool:
    """Returns whether a value of a piece's state has an element for each of its own."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
