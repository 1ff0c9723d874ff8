"""The pieces of a sharded optimizer's state as units of a checkpoint (checkpoint/state_units.py).

A member writes units that it holds, and receives nothing for a checkpoint. A restored member reads
the units that it is to hold, or cuts what it is to hold out of a state that was not sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elastic_dp.checkpoint.commit_record import Manifest
from elastic_dp.checkpoint.snapshot import HeldUnit, UnitGroup
from elastic_dp.checkpoint.state_units import PlacedUnit, StateUnit, UnitPlace, UnitTable
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.distributed.gradient_units import in_memory_order
from elastic_dp.train.sharding.pieces import part_of
from elastic_dp.train.sharding.sharded_optimizer import ALL_HOLD, ShardedOptimizer
from elastic_dp.train.state.state_payload import tensor_slot


class StateCut(NamedTuple):
    """What belongs to a piece of a tensor in a checkpoint: bytes `first` ≤ i < `last` of `slot`.

    `of` is the number of the piece and the key in its state, `ranks` are those that are to hold it.
    """

    of: tuple[int, str]
    slot: int
    first: int
    last: int
    ranks: tuple[int, ...]


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

    def cuts(
        self, manifest: Manifest, world_size: int, topology: Sequence[Sequence[int]]
    ) -> list[StateCut]:
        """Returns what each rank of a generation is to hold of a state that was not sharded. What
        is not in it all ranks need; it is empty where each holds everything."""
        if manifest.units is not None or world_size <= ALL_HOLD:
            return []
        holders = self._sharding.holders_of_any(world_size, topology)
        entries, specs = manifest.tree["step"]["optimizer"], manifest.layout.specs
        times = Counter(_slots_in(manifest.tree))
        found = []
        for number, place in self._places.items():
            piece = self._sharding.pieces[number]
            shape, stride = self._forms[piece.parameter]
            for key, value in entries[place.parameter].items():
                slot = tensor_slot(value)
                if slot is None or times[slot] > 1 or not specs[slot].shape:
                    continue
                spec, first, last = specs[slot], 0, specs[slot].nbytes
                if not piece.whole:
                    like = spec.view(torch.empty(last, dtype=torch.uint8, device="meta"))
                    if tuple(like.shape) != shape or like.stride() != stride:
                        continue  # its elements lie in another order
                    first, last = piece.first * spec.itemsize, piece.last * spec.itemsize
                found.append(StateCut((number, key), slot, first, last, holders[number].ranks))
        return found

    def absorb(
        self,
        states: Sequence[Mapping[str, Any]],
        places: Mapping[str, str],
        cut: Mapping[tuple[int, str], torch.Tensor] | None,
        rank: int,
        world_size: int,
        topology: Sequence[Sequence[int]],
    ) -> None:
        """Makes a state that was not sharded what this member holds: all of it, or with `cut` what
        it is to hold.

        `states` are those of the optimizer's parameters, in order, on the host; `cut` has what was
        cut out of them, by `StateCut.of`. `places`: see `places_here`.
        """
        held: dict[int, dict[str, Any]] = {}
        mine: Collection[int] = self._places
        if cut is not None:
            mine = self._sharding.to_hold(rank, world_size, topology)
        for number, place in self._places.items():
            if number not in mine:
                continue
            piece = self._sharding.pieces[number]
            p, held[number] = self._parameters[piece.parameter], {}
            for key, value in states[place.parameter].items():
                part = None if cut is None else cut.get((number, key))
                if part is None:
                    part = part_of(piece, p, value)
                elif not piece.whole:
                    part = in_memory_order(part)
                held[number][key] = self._placed(part, key, number, places)
        self._sharding.hold(held)

    def _placed(self, value: Any, key: str, piece: int, places: Mapping[str, str]) -> Any:
        """Returns a value of a piece's state where it belongs."""
        if places.get(f"step.optimizer.{self._places[piece].parameter}.{key}", "cpu") == "cpu":
            return value
        return value.to(self._parameters[self._sharding.pieces[piece].parameter].device)


def _slots_in(encoded: Any) -> Iterator[int]:
    """Yields the slot of each tensor or array in an encoded tree, as often as it is there."""
    if isinstance(encoded, dict):
        slot = tensor_slot(encoded)
        if slot is None:
            slot = encoded.get("slot")
        if isinstance(slot, int):
            yield slot
        encoded = encoded.values()
    elif not isinstance(encoded, list):
        return
    for value in encoded:
        yield from _slots_in(value)
