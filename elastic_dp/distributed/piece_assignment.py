"""Which two members hold each piece of sharded state: a pure function of who holds it now.

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

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple

_LOOKED_AT = 3  # of the most and the least loaded ranks, for each copy that is moved
# By how much the largest part of the primaries may grow so that lone holders are primaries: their
# copies need not be made before the next step then. Of the part, or bytes, if these are more.
_MORE_PART, _MORE_BYTES = 64, 256 << 10


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
    piece and keeps it is its primary, as far as its part allows. `topology` is that of the
    membership.
    """
    if world_size == 1:
        return [Holders(0, None) for _ in sizes]
    assignment = _Assignment(sizes, world_size, topology)
    everyone = range(world_size)
    held = held or [()] * len(sizes)
    for piece, ranks in enumerate(held):
        if len(ranks) == 2:
            assignment.place(piece, *sorted(ranks))
    for piece, ranks in enumerate(held):
        if len(ranks) > 2:
            assignment.place(piece, *assignment.best_pair(sorted(ranks)))
    alone = [(piece, *ranks) for piece, ranks in enumerate(held) if len(ranks) == 1]
    kept = {piece: rank for piece, rank in alone if assignment.keep(piece, rank)}
    for piece, rank in kept.items():
        assignment.add_partner(piece, rank)
    for piece, ranks in enumerate(held):
        if len(ranks) <= 1 and piece not in kept:
            assignment.place(piece, *assignment.best_pair(everyone))
    assignment.balance()
    assignment.separate()
    return assignment.holders(kept)


class _Assignment:
    """The pairs of ranks that hold the pieces, while they are chosen."""

    def __init__(
        self, sizes: Sequence[int], world_size: int, topology: Sequence[Sequence[int]]
    ) -> None:
        self._sizes = sizes
        self._ranks = range(world_size)
        self._load = [0] * world_size
        self._limit = -(-2 * sum(sizes) // world_size)
        self._largest = max(sizes, default=0)
        self._pieces: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        # [rank][rank]: bytes of a pair; at how many levels (node, zone, …) its places differ
        self._shared = [[0] * world_size for _ in self._ranks]
        places = [
            [
                number
                for number, (first, last) in enumerate(pairwise(accumulate(level, initial=0)))
                for _ in range(first, last)
            ]
            for level in topology
        ]
        self._distances = [
            [sum(level[one] != level[other] for level in places) for other in self._ranks]
            for one in self._ranks
        ]

    def place(self, piece: int, one: int, other: int) -> None:
        self._pieces[_pair(one, other)].append(piece)
        self._count(one, other, self._sizes[piece])

    def _count(self, one: int, other: int, size: int) -> None:
        self._shared[one][other] += size
        self._shared[other][one] += size
        self._load[one] += size
        self._load[other] += size

    def best_pair(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Returns the least loaded rank, and its best partner among `ranks`."""
        first = min(ranks, key=self._load.__getitem__)
        return first, self._best_partner(first, ranks)

    def keep(self, piece: int, rank: int) -> bool:
        """Lets a rank keep a piece that it alone holds, unless it holds its part already, as where
        one member has everything. Returns whether it did; then `add_partner` is called later."""
        if self._load[rank] >= self._limit:
            return False
        self._load[rank] += self._sizes[piece]
        return True

    def add_partner(self, piece: int, rank: int) -> None:
        partner = self._best_partner(rank, self._ranks)
        self._load[rank] -= self._sizes[piece]
        self.place(piece, rank, partner)

    def _best_partner(self, first: int, ranks: Sequence[int]) -> int:
        """Returns the best of `ranks` to hold a piece together with `first`. It is called for each
        piece."""
        load, shared = self._load, self._shared[first]
        distances = self._distances[first]
        full = self._limit + 2 * self._largest
        # Loads that differ by less than a piece count as equal, or the same pairs meet every time.
        light = min(load) + self._largest
        best, least = -1, None
        for rank in ranks:
            if rank == first:
                continue
            mine = load[rank]
            more = mine - light if mine > light else 0
            rating = mine > full, -distances[rank], more, shared[rank]
            if least is None or rating < least:
                best, least = rank, rating
        return best

    def balance(self) -> None:
        """Moves copies from ranks with more than their part to those with less."""
        while (move := self._next_move()) is not None:
            pair, index, rank, receiver = move
            self._move(pair, index, rank, receiver)

    def _move(self, pair: tuple[int, int], index: int, rank: int, receiver: int) -> None:
        piece = self._pieces[pair].pop(index)
        self._count(*pair, -self._sizes[piece])
        self.place(piece, receiver, _other(pair, rank))

    def separate(self) -> None:
        """Moves copies to other nodes where both holders of a piece are on one, as after joins that
        came one by one: the first members had to hold what others hold now. Loads stay as even as
        they are, so a node that gives a copy away takes one of a piece of which it has none. If it
        has more than half of the members, there is none left for some of its pieces."""
        for node in self._nodes():
            near = [p for p in self._pieces if p[0] in node and p[1] in node and self._pieces[p]]
            if not near or len(node) == len(self._ranks):
                continue
            far = [p for p in self._pieces if p[0] not in node and p[1] not in node]
            # The last ones first: there an exchange separates both pieces.
            far.sort(key=lambda p: (self._distances[p[0]][p[1]] == 0, p))
            outside = [rank for rank in self._ranks if rank not in node]
            for pair in near:
                while self._pieces[pair] and (
                    self._give_away(pair, outside)
                    or self._exchange(pair, far)
                    or self._take(pair, far)
                ):
                    while far and not self._pieces[far[-1]]:
                        far.pop()

    def _nodes(self) -> list[set[int]]:
        found = {tuple(r for r in self._ranks if row[r] == 0) for row in self._distances}
        return [set(node) for node in sorted(found)]

    def _give_away(self, pair: tuple[int, int], outside: Sequence[int]) -> bool:
        """Moves a copy of a piece of `pair` to a rank on another node, if one has room for it."""
        index = len(self._pieces[pair]) - 1
        size = self._sizes[self._pieces[pair][index]]
        giver = max(pair, key=self._load.__getitem__)
        receiver = min(outside, key=self._load.__getitem__)
        if not self._stays_even({giver: -size, receiver: size}):
            return False
        self._move(pair, index, giver, receiver)
        return True

    def _exchange(self, pair: tuple[int, int], far: Sequence[tuple[int, int]]) -> bool:
        """Exchanges a copy of a piece of `pair` for one of a piece of `far`."""
        index = len(self._pieces[pair]) - 1
        size = self._sizes[self._pieces[pair][index]]
        for other in reversed(far):
            for theirs in range(len(self._pieces[other]) - 1, -1, -1):
                more = self._sizes[self._pieces[other][theirs]] - size
                for giver, receiver in product(pair, other):
                    if self._stays_even({giver: more, receiver: -more}):
                        self._move(other, theirs, receiver, giver)
                        self._move(pair, index, giver, receiver)
                        return True
        return False

    def _take(self, pair: tuple[int, int], far: Sequence[tuple[int, int]]) -> bool:
        """Moves a copy of a piece of `far` to a rank of `pair`, which can give more away then."""
        receiver = min(pair, key=self._load.__getitem__)
        for other in reversed(far):
            giver = max(other, key=self._load.__getitem__)
            for index in range(len(self._pieces[other]) - 1, -1, -1):
                size = self._sizes[self._pieces[other][index]]
                if self._stays_even({giver: -size, receiver: size}):
                    self._move(other, index, giver, receiver)
                    return True
        return False

    def _stays_even(self, more: Mapping[int, int]) -> bool:
        """Returns whether loads differ by at most two pieces if ranks get so many bytes more, or by
        no more than they differ now."""
        after = [load + more.get(rank, 0) for rank, load in enumerate(self._load)]
        now = max(self._load) - min(self._load)
        return max(after) - min(after) <= max(2 * self._largest, now)

    def holders(self, alone: Mapping[int, int]) -> list[Holders]:
        """Returns the pairs. The primaries are chosen so that each rank has equally many bytes. A
        rank is the primary of what it `alone` holds now, unless some rank would have notably more
        for it: all members reserve memory by the largest part."""
        kept, most = self._primaries(alone)
        free, least = self._primaries({})
        more = max(_MORE_BYTES, self._limit // (2 * _MORE_PART))
        return kept if most <= least + more else free

    def _primaries(self, alone: Mapping[int, int]) -> tuple[list[Holders], int]:
        """Returns the pairs, and the most bytes of which a rank is the primary. It is that of what
        it `alone` holds up to its part less a piece, so that the others even out what is left."""
        pairs = {piece: pair for pair, pieces in self._pieces.items() for piece in pieces}
        load = [0] * len(self._ranks)
        given: dict[int, Holders] = {}
        for piece, rank in alone.items():
            one, other = pairs[piece]
            upto = load[rank] + self._sizes[piece] + self._largest
            if rank in (one, other) and 2 * upto <= self._limit:
                given[piece] = Holders(rank, other if rank == one else one)
                load[rank] += self._sizes[piece]
        order = sorted(pairs.keys() - given.keys(), key=lambda n: (-self._sizes[n], n))
        chosen: dict[int, Holders] = {}
        for piece in order:
            less, more = sorted(pairs[piece], key=lambda rank: (load[rank], rank))
            load[less] += self._sizes[piece]
            chosen[piece] = Holders(less, more)
        improved = True
        while improved:
            improved = False
            for piece, (primary, backup) in chosen.items():
                assert backup is not None
                if load[primary] - load[backup] > self._sizes[piece] > 0:
                    load[primary] -= self._sizes[piece]
                    load[backup] += self._sizes[piece]
                    chosen[piece], improved = Holders(backup, primary), True
        chosen |= given
        return [chosen[piece] for piece in range(len(self._sizes))], max(load)

    def _next_move(self) -> tuple[tuple[int, int], int, int, int] | None:
        """Returns a pair, the index of one of its pieces, which of the two gives it up, and who
        receives it; or None if the loads are balanced."""
        by_load = sorted(self._ranks, key=lambda rank: (self._load[rank], rank))
        least, most = self._load[by_load[0]], self._load[by_load[-1]]
        givers = [r for r in reversed(by_load) if self._load[r] > most - self._largest]
        receivers = [r for r in by_load if self._load[r] < least + self._largest]
        for may_come_closer in (False, True):
            for some in ((givers[:_LOOKED_AT], receivers[:_LOOKED_AT]), (by_load, by_load)):
                if (move := self._best_move(*some, may_come_closer)) is not None:
                    return move
        return None

    def _best_move(
        self, givers: Sequence[int], receivers: Sequence[int], may_come_closer: bool
    ) -> tuple[tuple[int, int], int, int, int] | None:
        """Returns the move that brings the two holders farthest from each other, and after which
        pairs share most evenly. `may_come_closer`: the two may then share a node that they did not
        share before."""
        tolerance, distances = 2 * self._largest, self._distances
        moves = [
            (
                distances[other][giver] - distances[other][receiver],
                self._shared[other][receiver] - self._shared[other][giver],
                giver,
                receiver,
                other,
            )
            for giver in givers
            for receiver in receivers
            if self._load[giver] - self._load[receiver] > tolerance
            for other in self._ranks
            if other not in (giver, receiver)
            and (may_come_closer or distances[other][giver] <= distances[other][receiver])
        ]
        for _, _, giver, receiver, other in sorted(moves):
            pair, gap = _pair(giver, other), self._load[giver] - self._load[receiver]
            for index in range(len(self._pieces[pair]) - 1, -1, -1):
                if 0 < self._sizes[self._pieces[pair][index]] < gap:
                    return pair, index, giver, receiver
        return None


def _other(pair: tuple[int, int], rank: int) -> int:
    return pair[0] if pair[1] == rank else pair[1]


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)
