"""Which two members hold each piece of sharded state, and where the finished sums of a bucket go if
only they need them. Who holds a piece is a pure function of who holds it now.

Each piece has a primary and a backup. The backup is on another node, and in another zone, where
that keeps the loads balanced: no member holds more than its part of the bytes, give or take two
pieces, so the memory of a member is known before. With one member there is no backup, and two
members hold everything. If no node has more than half of the members, no piece has both copies on
one node, as far as sizes of pieces allow.

What members hold stays where it is as far as the balance allows. After a loss only the lost copies
are made again; a joiner is given its part, and nothing else moves, unless both copies of a piece
are on one node and one of them can be on another. Pairs of members share about equally many pieces,
so that the copies that are lost with a member are spread over all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

_LOOKED_AT = 128  # pieces of a rank, for each copy that it gives away
_TURNS = 4  # of each node, to move copies to others


class Holders(NamedTuple):
    """The ranks that hold a piece."""

    primary: int
    backup: int | None  # None: there is one member

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.primary,) if self.backup is None else (self.primary, self.backup)


def assign_pieces(
    sizes: Sequence[int],
    world_size: int,
    topology: Sequence[Sequence[int]] = (),
    held: Sequence[Collection[int]] = (),
) -> list[Holders]:
    """Returns the holders of each piece, whose sizes are in bytes.

    `held[piece]` are the ranks that hold it now; without it, any may. A rank that alone holds a
    piece and keeps it is its primary, unless it would be the primary of notably more than others:
    all members reserve memory by the largest part. `topology` is that of the membership.
    """
    if world_size == 1:
        return [Holders(0, None) for _ in sizes]
    assignment = _Assignment(sizes, world_size, topology)
    everyone, held = range(world_size), held or [()] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: len(held[piece]) != 2):
        ranks = sorted(held[piece])
        if len(ranks) > 1:
            assignment.place(piece, ranks if len(ranks) == 2 else assignment.best_pair(ranks))
    # Unless a rank holds its part already, as where one member has everything.
    alone = {piece: min(ranks) for piece, ranks in enumerate(held) if len(ranks) == 1}
    kept = {piece: rank for piece, rank in alone.items() if assignment.keep(piece, rank)}
    for piece, rank in kept.items():
        assignment.place(piece, [assignment.best_partner(rank, everyone)])
    for piece in (piece for piece, ranks in enumerate(held) if len(ranks) < 2):
        if piece not in kept:
            assignment.place(piece, assignment.best_pair(everyone))
    assignment.balance()
    assignment.separate()
    return assignment.with_primaries(kept)


class _Assignment:
    """The pairs of ranks that hold the pieces, while they are chosen."""

    def __init__(
        self, sizes: Sequence[int], world_size: int, topology: Sequence[Sequence[int]]
    ) -> None:
        self._sizes, self._ranks = sizes, range(world_size)
        self._load = [0] * world_size
        self._part = -(-2 * sum(sizes) // world_size)
        self._largest = max(sizes, default=0)
        self._pairs: list[set[int]] = [set() for _ in sizes]
        self._of_rank: list[set[int]] = [set() for _ in self._ranks]
        # [rank][rank]: bytes of a pair; at how many levels (node, zone, …) its places differ
        self._shared = [[0] * world_size for _ in self._ranks]
        levels = [[n for n, size in enumerate(level) for _ in range(size)] for level in topology]
        self._distances = [
            [sum(places[one] != places[other] for places in levels) for other in self._ranks]
            for one in self._ranks
        ]

    def place(self, piece: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._count(piece, rank, self._sizes[piece])
            self._pairs[piece].add(rank)
            self._of_rank[rank].add(piece)

    def _remove(self, piece: int, rank: int) -> None:
        self._pairs[piece].remove(rank)
        self._of_rank[rank].remove(piece)
        self._count(piece, rank, -self._sizes[piece])

    def _count(self, piece: int, rank: int, size: int) -> None:
        self._load[rank] += size
        for other in self._pairs[piece]:
            self._shared[rank][other] += size
            self._shared[other][rank] += size

    def _move(self, piece: int, giver: int, receiver: int) -> None:
        self._remove(piece, giver)
        self.place(piece, [receiver])

    def keep(self, piece: int, rank: int) -> bool:
        """Lets a rank keep a piece that it alone holds, as long as it holds less than its part."""
        is_kept = self._load[rank] < self._part
        if is_kept:
            self.place(piece, [rank])
        return is_kept

    def best_pair(self, ranks: Iterable[int]) -> tuple[int, int]:
        """Returns the least loaded rank, and its best partner."""
        ranks = list(ranks)
        first = min(ranks, key=self._load.__getitem__)
        return first, self.best_partner(first, ranks)

    def best_partner(self, first: int, ranks: Iterable[int]) -> int:
        """Returns the best of `ranks` to hold a piece together with `first`."""
        load, shared, distances = self._load, self._shared[first], self._distances[first]
        full = self._part + 2 * self._largest
        # Loads that differ by less than a piece count as equal, or the same pairs meet every time.
        light = min(load) + self._largest

        def rating(rank: int) -> tuple[bool, int, int, int]:
            return load[rank] > full, -distances[rank], max(light, load[rank]), shared[rank]

        return min((rank for rank in ranks if rank != first), key=rating)

    def balance(self) -> None:
        """Moves copies from the rank with the most to the one with the least. Of the copies, that
        which brings both holders farthest from each other, and after which pairs share most
        evenly."""
        while True:
            giver = max(self._ranks, key=self._load.__getitem__)
            receiver = min(self._ranks, key=self._load.__getitem__)
            if self._load[giver] - self._load[receiver] <= 2 * self._largest:
                return

            def rating(piece: int, giver: int = giver, receiver: int = receiver) -> Any:
                (other,) = self._pairs[piece] - {giver}
                nearer = self._distances[other][giver] - self._distances[other][receiver]
                more = self._shared[other][receiver] - self._shared[other][giver]
                return nearer, more, piece

            # There is one, since the giver has more than what both hold.
            movable = (n for n in self._of_rank[giver] - self._of_rank[receiver] if self._sizes[n])
            self._move(min(islice(movable, _LOOKED_AT), key=rating), giver, receiver)

    def separate(self) -> None:
        """Moves copies to other nodes where both holders of a piece are on one, as after joins that
        came one by one: the first members had to hold what others hold now. In return a node takes
        copies of pieces of which it has none. If it has more than half of the members, there are
        none left. What it takes may have been apart from others before, so nodes take turns."""
        node_of = [tuple(r for r in self._ranks if not d[r]) for d in self._distances]
        for _ in range(_TURNS):
            near = {node_of[one] for one, other in self._pairs if node_of[one] == node_of[other]}
            near.discard(tuple(self._ranks))  # there is no other node
            if not near:
                return
            for node in sorted(near):
                self._separate(set(node))

    def _separate(self, node: set[int]) -> None:
        far = sum(pair.isdisjoint(node) for pair in self._pairs)
        near = [n for n, pair in enumerate(self._pairs) if pair <= node]
        outside = [rank for rank in self._ranks if rank not in node]
        for number, piece in enumerate(near):
            giver = max(sorted(self._pairs[piece]), key=self._load.__getitem__)
            receiver = min(outside, key=self._load.__getitem__)
            more = self._load[receiver] + self._sizes[piece]
            if number < far or more <= max(self._load):
                self._move(piece, giver, receiver)
        self.balance()

    def with_primaries(self, kept: Mapping[int, int]) -> list[Holders]:
        """Returns the pairs. The primaries are chosen so that each rank has equally many bytes, but
        for those in `kept`, by piece, as long as they have at most a piece more."""
        load, chosen = [0] * len(self._ranks), [Holders(0, None)] * len(self._pairs)

        def choose(piece: int, primary: int, backup: int) -> None:
            load[primary] += self._sizes[piece]
            chosen[piece] = Holders(primary, backup)

        def even_out(pieces: Collection[int], tolerance: int) -> None:
            improved = True
            while improved:
                improved = False
                for piece in pieces:
                    (primary, backup), size = chosen[piece], self._sizes[piece]
                    assert backup is not None
                    if load[primary] - load[backup] > size + tolerance > 0:
                        load[primary] -= size
                        choose(piece, backup, primary)
                        improved = True

        kept = {piece: rank for piece, rank in kept.items() if rank in self._pairs[piece]}
        for piece, rank in kept.items():
            choose(piece, rank, *(self._pairs[piece] - {rank}))
        others = sorted({*range(len(self._pairs))} - kept.keys(), key=lambda n: -self._sizes[n])
        for piece in others:
            choose(piece, *sorted(self._pairs[piece], key=lambda rank: (load[rank], rank)))
        even_out(others, 0)
        even_out(kept, self._largest)
        even_out(others, 0)
        return chosen


# ------------------------------------------------------------------------------ finished sums


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
    """Returns the route of `rank`. The members have finished one chunk each, one after another in
    the bucket (`reduction_rounds`). What a member needs arrives in the order of the bucket, so each
    of its pieces is in one run of memory, whichever chunks it lies in. Where sums are rounded in
    blocks (`gradient_rounding.py`), whole blocks travel.

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
