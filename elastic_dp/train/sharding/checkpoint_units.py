"""The pieces of a sharded optimizer's state in checkpoints: what a member writes and reads of them.

A member reads the pieces that it is to hold, whether the state was divided when it was written, and
into whatever pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.checkpoint.codec import decode
from elastic_dp.checkpoint.commit_record import Manifest, StateTree
from elastic_dp.checkpoint.layout import TensorSpec
from elastic_dp.checkpoint.snapshot import HeldPiece, HeldState
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.checkpointing.collective_read import Ranges, ReadCheckpoint
from elastic_dp.train.sharding.pieces import StatePiece, part_of
from elastic_dp.train.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.state.state_payload import tensor_slot


class CheckpointPieces:
    """The pieces of one job, which are the same on all workers."""

    def __init__(
        self,
        sharding: ShardedOptimizer,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._sharding, self._parameters = sharding, list(parameters.values())
        groups = optimizer.param_groups
        self._numbers = {id(p): n for n, p in enumerate(p for g in groups for p in g["params"])}

    def _optimized(self) -> Iterator[tuple[int, StatePiece, torch.Tensor, int]]:
        """Yields the number of each piece that the optimizer updates, the piece, its parameter, and
        the parameter's number in the order of the optimizer's groups."""
        for number, piece in enumerate(self._sharding.pieces):
            p = self._parameters[piece.parameter]
            if id(p) in self._numbers:
                yield number, piece, p, self._numbers[id(p)]

    def held(self, worker: WorkerId, members: Sequence[WorkerId]) -> HeldState:
        """Returns what `worker` holds. `members` are those of the generation in which it got its
        pieces, by rank."""
        sharding, found = self._sharding, []
        for number, piece, p, of_optimizer in self._optimized():
            state = sharding.held.get(number)
            if state is None:
                continue
            ranks = sharding.holders[number].ranks if sharding.holders else ()
            holders = tuple(members[rank] for rank in ranks) or (worker,)
            form = (None, None) if piece.whole else (tuple(p.shape), tuple(p.stride()))
            found.append(HeldPiece(of_optimizer, piece.first, piece.last, state, holders, *form))
        return HeldState(len(self._numbers), found)

    def needs(
        self, manifest: Manifest, world_size: int, topology: Sequence[Sequence[int]]
    ) -> list[Ranges]:
        """Returns what each rank of a generation needs of a checkpoint: the pieces that it is to
        hold, and all else."""
        rest = without_optimizer(manifest)
        of_all = {name: [(0, spec.nbytes)] for name, spec in rest.specs.items()}
        found: list[defaultdict[str, list[tuple[int, int]]]] = [
            defaultdict(list, {name: [*some] for name, some in of_all.items()})
            for _ in range(world_size)
        ]
        holders = self._sharding.holders_of_any(world_size, topology)
        for number, piece, p, of_optimizer in self._optimized():
            entry, specs = manifest.entry(of_optimizer)
            for value in entry.values():
                for slot in slots_in(value):
                    spec = specs[slot]
                    if spec.name in of_all:
                        continue
                    part = _part(value, spec, piece, p)
                    for rank in holders[number].ranks:
                        found[rank][spec.name].append(part)
        return [*found]

    def hold(
        self,
        read: ReadCheckpoint,
        places: Mapping[str, str],
        rank: int,
        world_size: int,
        topology: Sequence[Sequence[int]],
    ) -> None:
        """Makes what was read what this member holds. `places`: see `places_here`."""
        manifest = read.commit.manifest
        mine = self._sharding.to_hold(rank, world_size, topology)
        self._sharding.hold(
            {
                number: {
                    key: _value(value, piece, p, manifest.entry(of_optimizer)[1], read, places)
                    for key, value in manifest.entry(of_optimizer)[0].items()
                }
                for number, piece, p, of_optimizer in self._optimized()
                if number in mine
            }
        )


def _value(
    value: Any,
    piece: StatePiece,
    p: torch.Tensor,
    specs: Sequence[TensorSpec],
    read: ReadCheckpoint,
    places: Mapping[str, str],
) -> Any:
    """Returns a value of a piece's state, where it belongs."""
    slot = tensor_slot(value)
    if slot is None:
        needed = set(slots_in(value))
        tensors = [
            spec.view(read.content(spec.name, 0, spec.nbytes)).clone() if n in needed else p
            for n, spec in enumerate(specs if needed else ())
        ]
        return decode(value, tensors)
    spec = specs[slot]
    start, end = _part(value, spec, piece, p)
    content = read.content(spec.name, start, end)
    if (start, end) == (0, spec.nbytes):
        part = part_of(piece, p, spec.view(content))
    else:
        if content.untyped_storage().nbytes() > content.nbytes:
            content = content.clone()
        part = content.view(spec.torch_dtype)
    is_here = places.get(spec.name, "cpu") == "cpu"
    return part if is_here else part.to(p.device)


def _part(value: Any, spec: TensorSpec, piece: StatePiece, p: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of a tensor in a parameter's state that a piece needs."""
    whole = 0, spec.nbytes
    if piece.whole or not spec.shape or tensor_slot(value) is None:
        return whole
    like = spec.view(torch.empty(spec.nbytes, dtype=torch.uint8, device="meta"))
    if like.shape != p.shape or like.stride() != p.stride():
        return whole  # its elements lie in another order
    return piece.first * spec.itemsize, piece.last * spec.itemsize


def without_optimizer(manifest: Manifest) -> Manifest:
    """Returns the description of the state without that of the optimizer's parameters."""
    step = manifest.common.tree["step"]
    tree = manifest.common.tree | {"step": step | {"optimizer": [{} for _ in step["optimizer"]]}}
    specs, used = manifest.common.specs, set(slots_in(tree))
    unused = TensorSpec("", "uint8", (0,))  # keeps the slots of the others
    kept = tuple(spec if slot in used else unused for slot, spec in enumerate(specs))
    return Manifest(manifest.step, StateTree(tree, kept), ())


def slots_in(encoded: Any) -> Iterator[int]:
    """Yields the slot of each tensor in an encoded tree, also of what is stored as one."""
    if isinstance(encoded, dict):
        slots = encoded.get("v") if "$" in encoded else None, encoded.get("content")
        yield from (slot for slot in slots if type(slot) is int)
        encoded = encoded.values()
    elif not isinstance(encoded, list):
        return
    for value in encoded:
        yield from slots_in(value)
