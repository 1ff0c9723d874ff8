"""Gathers the updated parameters of a step, each from the primary of its pieces.

Each member has its part of one flat tensor for each dtype: the pieces of which it is the primary,
one after another, with room as for the largest part. An all-gather sends the parts to all members.

A member launches the all-gathers only after it has the gradient of everything that it holds, and
has updated what it is the primary of. So who has received all parts knows that all members have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import xxhash

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.gradient_units import in_memory_order
from elastic_dp.distributed.piece_assignment import Holders
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.extensions.sharding.pieces import StatePiece
from elastic_dp.train.state.tensor_digests import sum_of_bits


class ParameterGather:
    """The memory and the collectives for the pieces in `updated`, in one generation."""

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[StatePiece],
        holders: Sequence[Holders],
        updated: Collection[int],
        memory: Mapping[torch.dtype, torch.Tensor],
    ) -> None:
        """`memory`: for what is gathered, by dtype; none of it is read before."""
        self.memory = memory
        self._group, self._parameters, self._pieces = group, parameters, pieces
        self._flats: list[torch.Tensor] = []
        self._flying: list[Any] = []
        # By number of the piece: where this member writes what it sends, and where all arrive.
        self.targets: dict[int, torch.Tensor] = {}
        self._arrive: dict[int, torch.Tensor] = {}
        self.backed: list[int] = []  # what this member holds and does not send
        self._views: list[torch.Tensor] = []  # of the parameters, for what arrives
        self._places: list[int] = []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number in sorted(updated):
            by_dtype.setdefault(self._parameter(number).dtype, []).append(number)
        for dtype, numbers in by_dtype.items():
            self._lay_out(dtype, numbers, holders)

    def _lay_out(
        self, dtype: torch.dtype, numbers: Sequence[int], holders: Sequence[Holders]
    ) -> None:
        rank, world_size = self._group.rank, self._group.world_size
        parts: list[list[int]] = [[] for _ in range(world_size)]
        for number in numbers:
            parts[holders[number].primary].append(number)
        # At least one element, so that each member sends something to each other one.
        size = max(1, *(sum(self._pieces[n].numel for n in part) for part in parts))
        flat = self.memory.get(dtype)
        if flat is None or flat.numel() < world_size * size:
            device = self._parameter(numbers[0]).device
            flat = torch.zeros(world_size * size, dtype=dtype, device=device)
        flat = flat[: world_size * size]
        self._flats.append(flat)
        for owner, part in enumerate(parts):
            at = owner * size
            for number in part:
                self._arrive[number] = self._cut(flat, at, number)
                at += self._pieces[number].numel
        self.targets |= {number: self._arrive[number] for number in parts[rank]}
        self.backed += [number for number in numbers if holders[number].backup == rank]

    def _cut(self, flat: torch.Tensor, at: int, number: int) -> torch.Tensor:
        piece = self._pieces[number]
        return piece.within(flat[at : at + piece.numel], self._parameter(number))

    def _parameter(self, number: int) -> torch.Tensor:
        return self._parameters[self._pieces[number].parameter]

    def launch(self) -> None:
        """Sends this member's part to all others. Raises GroupError."""
        rank, world_size = self._group.rank, self._group.world_size
        gather = self._group.transport.all_gather
        parts = (flat.view(world_size, -1)[rank] for flat in self._flats)
        self._flying = [*map(gather, self._flats, parts)]

    def wait(self) -> None:
        """Waits for the parts of all members; on a device, its stream does. Raises GroupError."""
        for operation in self._flying:
            self._group.transport.wait(operation)

    def differ(self, digests: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Returns whether each piece has another digest than what has arrived, on their device."""
        mine = torch.stack(list(digests.values()))
        arrived = torch.stack([digest_of_piece(self._arrive[n]) for n in digests])
        return (mine != arrived).view(len(digests), -1).any(dim=1)

    @torch.no_grad()
    def install(self) -> None:
        """Writes what has arrived to the parameters."""
        places = [p.data_ptr() for p in self._parameters]
        if places != self._places:  # of which the views are
            of_pieces = (self._pieces[n].of(self._parameter(n).detach()) for n in self._arrive)
            self._views, self._places = list(of_pieces), places
        if self._views:
            torch._foreach_copy_(self._views, list(self._arrive.values()))


def digest_of_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a digest of a dense tensor's bits; on a device, without a wait, their sum."""
    flat = in_memory_order(tensor)
    if accelerator_of(tensor.device).asynchronous:
        return sum_of_bits(flat)
    digest = xxhash.xxh3_128_digest(flat.view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
