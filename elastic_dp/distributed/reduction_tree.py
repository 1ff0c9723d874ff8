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
    """Returns the largest subtrees that together are exactly the leaves of `ranges`, in order.

    The ranges may touch, and they may come in any order.
    """
    joined: list[Node] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return [node for one in joined for node in cover(*one, virtual_workers)]


class TreeLeaf(NamedTuple):
    """One virtual worker's turn in a worker's step.

    `merges` is how many times its gradient, or the sum so far, is added to the top of the stack,
    each time completing a node.
    """

    virtual_worker: int
    merges: int


@functools.lru_cache(1024)
def fold(first: int, last: int, virtual_workers: int) -> list[TreeLeaf]:
    """Returns the order in which a worker runs its leaves and adds them, subtree by subtree.

    The sums form a stack, on which each leaf pushes what it completes. At the end the stack holds
    exactly the nodes of `cover`, in order.
    """
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
    """Returns the sum of `root`, from the sums of nodes that together are exactly it.

    `add(one, other, node)` returns the sum of `node`.
    """

    def walk(node: Node) -> T:
        if node in sums:
            return sums[node]
        split = middle(node)
        return add(walk((node[0], split)), walk((split, node[1])), node)

    return walk(root)
