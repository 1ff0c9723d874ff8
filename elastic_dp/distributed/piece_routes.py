"""Where the finished sums of a bucket go if only some members need each element of it.

The members have finished one chunk each, one after another in the bucket (`reduction_rounds.py`).
What a member needs arrives in the order of the bucket, so each of its pieces is in one run of
memory, whichever chunks it lies in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class HeldRange(NamedTuple):
    """The elements `first` up to `last` of a parameter, as they lie in memory, and the ranks that
    need their gradient. `piece` is the caller's number for it."""

    piece: int
    first: int
    last: int
    ranks: Sequence[int]


HeldRanges = Mapping[torch.Tensor, Sequence[HeldRange]]  # by parameter, in order


@dataclass(frozen=True, slots=True)
class PieceRoute:
    """What one rank sends of its finished chunk of a bucket, and what it receives."""

    cuts: list[tuple[int, int]]  # ranges of its chunk, in the order in which they are sent
    sent: list[int]  # [rank]: elements that it sends
    received: list[int]  # [rank]: elements that it receives
    held: list[tuple[int, int, int]]  # its pieces: number, and where they lie in what it receives


def piece_route(
    rank: int, world_size: int, chunk: int, ranges: Sequence[HeldRange], numel: int
) -> PieceRoute:
    """Returns the route of `rank`.

    `ranges` are those of a bucket of `numel` elements, whose `first` and `last` are counted from
    its beginning, in ascending order. `chunk` is the number of elements of each rank's part.
    """
    start, end = rank * chunk, min((rank + 1) * chunk, numel)
    cuts_of: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for one in ranges:
        if one.first < end and start < one.last:
            cut = max(one.first, start) - start, min(one.last, end) - start
            for receiver in one.ranks:
                cuts_of[receiver].append(cut)
    sent = [sum(last - first for first, last in cuts) for cuts in cuts_of]
    needed = [one for one in ranges if rank in one.ranks]
    received = [
        sum(
            max(0, min(one.last, (sender + 1) * chunk) - max(one.first, sender * chunk))
            for one in needed
        )
        for sender in range(world_size)
    ]
    held, at = [], 0
    for one in needed:
        held.append((one.piece, at, at + one.last - one.first))
        at += one.last - one.first
    return PieceRoute([cut for cuts in cuts_of for cut in cuts], sent, received, held)
