"""The pieces of a sharded optimizer's state as units of a checkpoint (checkpoint/state_units.py).

A member writes units that it holds, and receives nothing for a checkpoint. A restored member reads
the units that it is to hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.checkpoint.state_units import PlacedUnit, StateUnit, UnitPlace, UnitTable
from elastic_dp.checkpoint.unit_snapshot import HeldUnit, UnitGroup
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.sharding.pieces import part_of
from elastic_dp.train.sharding.sharded_optimizer import ShardedOptimizer


class CheckpointUnits:
    """The units of one job's checkpoints, which are the same on all workers."""

    def __init__(
        self,
        sharding: ShardedOptimizer,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._sharding = sharding
        groups, tensors = optimizer.param_groups, list(parameters.values())
        self._parameters = tensors
        numbers = {id(p): n for n, p in enumerate(p for g in groups for p in g["params"])}
        self._places: dict[int, UnitPlace] = {}  # by piece, of those that the optimizer updates
        self._forms: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by parameter
        for number, piece in enumerate(sharding.pieces):
            p = tensors[piece.parameter]
            if id(p) in numbers:
                self._places[number] = UnitPlace(numbers[id(p)], piece.first, piece.last)
                self._forms[piece.parameter] = tuple(p.shape), tuple(p.stride())

    @property
    def total(self) -> int:
        """The number of units of a checkpoint."""
        return len(self._places)

    def groups(
        self, worker: WorkerId, members: Sequence[WorkerId], writers: Collection[WorkerId]
    ) -> list[UnitGroup]:
        """Returns the units that `worker` holds, by who is to write them: the first holder that is
        one of `writers`.

        `members` are those of the generation in which it got its pieces, by rank.
        """
        sharding = self._sharding
        groups: defaultdict[tuple[WorkerId, ...], list[HeldUnit]] = defaultdict(list)
        for number, place in self._places.items():
            if number not in sharding.held:
                continue
            ranks = sharding.holders[number].ranks if sharding.holders else ()
            holders = tuple(members[rank] for rank in ranks) or (worker,)
            groups[holders].append(self._held(number, place))
        found = []
        for holders, units in groups.items():
            writing = [holder for holder in holders if holder in writers]
            found.append(UnitGroup(writing[0] if writing else holders[0], units))
        return found

    def _held(self, number: int, place: UnitPlace) -> HeldUnit:
        piece, state = self._sharding.pieces[number], self._sharding.held[number]
        shape, stride = (None, None) if piece.whole else self._forms[piece.parameter]
        return HeldUnit(place, state, shape, stride)

    def to_hold(
        self, table: UnitTable, rank: int, world_size: int, topology: Sequence[Sequence[int]]
    ) -> list[PlacedUnit] | None:
        """Returns the units that a rank is to hold in a generation that restores them, or None if
        the state was divided in another way, as where another version has written it."""
        whole = {place: self._sharding.pieces[n].whole for n, place in self._places.items()}
        stored = {place: one.unit.kind.shape is None for place, one in table.units.items()}
        if whole != stored:
            return None
        mine = self._sharding.to_hold(rank, world_size, topology)
        return [table.units[place] for n, place in self._places.items() if n in mine]

    def hold(
        self, states: Iterable[tuple[StateUnit, dict[str, Any]]], places: Mapping[str, str]
    ) -> None:
        """Makes these, which were read and are on the host, what this member holds. `places`: see
        `places_here`."""
        numbers = {place: number for number, place in self._places.items()}
        self._sharding.hold(
            {
                numbers[unit.place]: {
                    key: self._placed(value, key, numbers[unit.place], places)
                    for key, value in state.items()
                }
                for unit, state in states
            }
        )

    def absorb(self, states: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> None:
        """Makes a whole state, which is on the host, what this member holds.

        `states` are those of the optimizer's parameters, in order. `places`: see `places_here`.
        """
        held: dict[int, dict[str, Any]] = {}
        for number, place in self._places.items():
            piece = self._sharding.pieces[number]
            p, held[number] = self._parameters[piece.parameter], {}
            for key, value in states[place.parameter].items():
                held[number][key] = self._placed(part_of(piece, p, value), key, number, places)
        self._sharding.hold(held)

    def _placed(self, value: Any, key: str, piece: int, places: Mapping[str, str]) -> Any:
        """Returns a value of a piece's state where it belongs."""
        if places.get(f"step.optimizer.{self._places[piece].parameter}.{key}", "cpu") == "cpu":
            return value
        return value.to(self._parameters[self._sharding.pieces[piece].parameter].device)
