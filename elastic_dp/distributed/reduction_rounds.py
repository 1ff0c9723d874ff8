"""What each member sends in which round, so that sums finish within a node, then within a zone,
before anything crosses it.

In a round the members of a group (a node, a zone, in the last round all members) add up what its
parts hold: single members in the first round, the groups of the round before in later ones. A
bucket is divided into as many chunks as there are ranks. Each member of a group owns consecutive
chunks of the group's sums, and in the end rank r owns chunk r of the whole sum. So every send is a
part of a flat tensor, and what arrives lies in order. Bytes that leave a node fall by the number of
its members, compared with one round.

The sums of a group are those of the subtrees that its virtual workers consist of. They are added
along the same tree in any number of rounds, so their bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from elastic_dp.distributed.reduction_tree import Node, Share, cover_share


@dataclass(frozen=True, slots=True)
class ReductionRound:
    """The part of one rank in one round. Sizes are in chunks."""

    # [j][rank]: what it sends of its j-th sum, and what it receives of the rank's part's j-th sum
    sent: list[list[int]]
    received: list[list[int]]
    first: int  # of the chunks of each sum that are its own from now on
    owned: int  # ... and their number
    nodes: list[list[Node]]  # [j]: whose sums arrive, in order, each of `owned` chunks
    sums: list[Node]  # what it adds up from them, in order


def reduction_rounds(
    rank: int, shares: Sequence[Share], virtual_workers: int, topology: Sequence[Sequence[int]] = ()
) -> list[ReductionRound]:
    """Returns the rounds of `rank`. `shares[r]` are the ranges of virtual workers of rank r.

    `topology` is that of the membership. Without it there is one round.
    """
    everyone = len(shares)

    def covered(group: range) -> list[Node]:
        return cover_share(chain.from_iterable(shares[member] for member in group), virtual_workers)

    def owned(group: range, member: int) -> range:
        index = member - group.start
        return range(index * everyone // len(group), (index + 1) * everyone // len(group))

    rounds = []
    parts = [range(r, r + 1) for r in range(everyone)]
    for sizes in (*topology, (everyone,)):
        groups = [range(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        group = next(group for group in groups if rank in group)
        covers = {part: covered(part) for part in parts}
        part_of = {member: part for part in parts for member in part}
        own, inner = owned(group, rank), part_of[rank]
        sent = [[0] * everyone for _ in range(max(map(len, covers.values())))]
        received = [[0] * everyone for _ in sent]
        for member in group:
            for j, _ in enumerate(covers[inner]):
                sent[j][member] = _overlap(owned(inner, rank), owned(group, member))
            for j, _ in enumerate(covers[part_of[member]]):
                received[j][member] = _overlap(owned(part_of[member], member), own)
        within = [covers[part] for part in parts if part[0] in group]
        nodes = [[nodes[j] for nodes in within if len(nodes) > j] for j in range(len(sent))]
        rounds.append(ReductionRound(sent, received, own.start, len(own), nodes, covered(group)))
        parts = groups
    return rounds


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
