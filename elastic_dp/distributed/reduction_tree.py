"""The fixed binary tree over virtual workers 0..V-1, along which exact mode adds.

A node is a half-open range (first, last). A node of more than one leaf splits at the largest power
of two that is smaller than its size, so the tree depends on V alone. Floating-point addition is
commutative, bit for bit, but not associative, so two sums over one tree are equal wherever its
nodes are added.

A worker has a share of the leaves: one or more ranges. Each range consists of a few whole subtrees
(`cover`). The worker adds up each of them (`fold` is the order of its work), and the owner of a
chunk adds the subtrees of all workers (`add_up`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeVar

Node = tuple[int, int]
Share = Sequence[Node]  # ranges of leaves, in ascending order with gaps between them
T = TypeVar("T")


def middle(node: Node) -> int:
    """Returns where a node of two or more leaves splits."""
    first, last = node
    size = last - first
    assert size >= 2, node
    return first + (1 << (size - 1).bit_length() - 1)


def cover(first: int, last: int, virtual_workers: int) -> list[Node]:
    """Returns the largest subtrees that together are exactly first..last-1, in order."""

    def walk(node: Node) -> list[Node]:
        low, high = node
        if high <= first or last <= low:
            return []
        if first <= low and high <= last:
            return [node]
        split = middle(node)
        return walk((low, split)) + walk((split, high))

    return walk((0, virtual_workers))


def cover_share(ranges: Iterable[Node], virtual_workers: int) -> list[Node]:
    """Returns the largest subtrees that together are exactly the leaves of `ranges`, in order. The
    ranges may touch, and they may come in any order."""
    joined: list[Node] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return [node for one in joined for node in cover(*one, virtual_workers)]


class TreeLeaf(NamedTuple):
    """One virtual worker's turn in a worker's step. `merges` is how many times its gradient, or the
    sum so far, is added to the top of the stack, each time completing a node."""

    virtual_worker: int
    merges: int


@functools.lru_cache(1024)
def fold(first: int, last: int, virtual_workers: int) -> list[TreeLeaf]:
    """Returns the order in which a worker runs its leaves and adds them, subtree by subtree. The
    sums form a stack, on which each leaf pushes what it completes. At the end the stack holds
    exactly the nodes of `cover`, in order."""
    leaves: list[TreeLeaf] = []

    def walk(node: Node) -> None:
        low, high = node
        if high - low == 1:
            leaves.append(TreeLeaf(low, 0))
        else:
            split = middle(node)
            walk((low, split))
            walk((split, high))
            leaves[-1] = leaves[-1]._replace(merges=leaves[-1].merges + 1)

    for node in cover(first, last, virtual_workers):
        walk(node)
    return leaves


def add_up(sums: Mapping[Node, T], root: Node, add: Callable[[T, T, Node], T]) -> T:
    """Returns the sum of `root`, from the sums of nodes that together are exactly it. `add(one,
    other, node)` returns the sum of `node`."""

    def walk(node: Node) -> T:
        if node in sums:
            return sums[node]
        split = middle(node)
        return add(walk((node[0], split)), walk((split, node[1])), node)

    return walk(root)


@dataclass(frozen=True, slots=True)
class ReductionRound:
    """The part of one rank in one round: sums finish within a node, then within a zone, before
    anything crosses it.

    In a round the members of a group (a node, a zone, in the last round all members) add up what
    its parts hold: single members in the first round, the groups of the round before in later ones.
    A bucket is divided into as many chunks as there are ranks. Each member of a group owns
    consecutive chunks of the group's sums, and in the end rank r owns chunk r of the whole sum. So
    every send is a part of a flat tensor, and what arrives lies in order. Bytes that leave a node
    fall by the number of its members, compared with one round.

    The sums of a group are those of the subtrees that its virtual workers consist of. They are
    added along the same tree in any number of rounds, so their bits are the same. Sizes are in
    chunks.
    """

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
    `topology` is that of the membership. Without it there is one round."""
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
