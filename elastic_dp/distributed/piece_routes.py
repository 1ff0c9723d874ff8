"""Where the finished sums of a bucket go if only some members need each element of it.

The members have finished one chunk each, one after another in the bucket (`reduction_rounds`).
What a member needs arrives in the order of the bucket, so each of its pieces is in one run of
memory, whichever chunks it lies in. Where sums are rounded in blocks (`gradient_rounding.py`),
whole blocks travel.
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
    """What one rank sends of its finished chunk, and receives, in the elements that are sent."""

    cuts: list[tuple[int, int]]  # ranges of its chunk, in the order in which they are sent
    sent: list[int]  # [rank]: elements that it sends
    received: list[int]  # [rank]: elements that it receives
    # Its pieces: number, and which elements of a gradient they are in what it receives.
    held: list[tuple[int, int, int]]


def piece_route(
    rank: int,
    world_size: int,
    chunk: int,
    ranges: Sequence[HeldRange],
    blocks: int,
    *,
    block: int = 1,
    record: int = 1,
) -> PieceRoute:
    """Returns the route of `rank`.

    `ranges` are those of a bucket of `blocks` blocks, whose `first` and `last` are counted from its
    beginning, in ascending order. `chunk` is the number of blocks of each rank's part. A block of
    `block` elements is sent in `record` elements. Each range begins with a block, and ends with one
    or with its parameter.
    """
    start, end = rank * chunk, min((rank + 1) * chunk, blocks)
    cuts_of: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    assert not any(one.first % block for one in ranges)
    spans = [(one, one.first // block, -(-one.last // block)) for one in ranges]
    for one, first, last in spans:
        if first < end and start < last:
            cut = (max(first, start) - start) * record, (min(last, end) - start) * record
            for receiver in one.ranks:
                cuts_of[receiver].append(cut)
    sent = [sum(last - first for first, last in cuts) for cuts in cuts_of]
    needed = [span for span in spans if rank in span[0].ranks]
    received = [
        record
        * sum(
            max(0, min(last, (sender + 1) * chunk) - max(first, sender * chunk))
            for _, first, last in needed
        )
        for sender in range(world_size)
    ]
    held, at = [], 0
    for one, first, last in needed:
        held.append((one.piece, at * block, at * block + one.last - one.first))
        at += last - first
    return PieceRoute([cut for cuts in cuts_of for cut in cuts], sent, received, held)
