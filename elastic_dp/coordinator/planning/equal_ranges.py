"""Distributes virtual workers over ranks: contiguous ranges of almost equal size.

Sizes differ by at most one. A worker sends one partial sum for each whole subtree (an aligned block
of a power of two) of the binary tree over 0..virtual_workers-1 that its range consists of. So the
ranges of even size come first: as long as only those are assigned, every range begins at an even
number and splits no pair.

Where several ranks share a node, their ranges together are whole subtrees wherever that makes no
range longer than the longest equal one, so the step does not take longer (`ranges_by_node`).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def equal_ranges(virtual_workers: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return [(first, last)] by rank; rank r runs virtual workers first..last-1.

    Every virtual worker is in exactly one range. Raises ValueError if `world_size` is not within
    1..virtual_workers.
    """
    if not 1 <= world_size <= virtual_workers:
        raise ValueError(f"world size {world_size} is not within 1..{virtual_workers}")
    small, larger = divmod(virtual_workers, world_size)
    sizes = [small] * (world_size - larger), [small + 1] * larger
    even, odd = sizes if small % 2 == 0 else reversed(sizes)
    return tuple(pairwise(accumulate(even + odd, initial=0)))


def ranges_by_node(virtual_workers: int, nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return [(first, last)] by rank, where `nodes` are the numbers of consecutive ranks on one
    node.

    The range of a node ends at the largest subtree's end that is possible. With one node it is
    `equal_ranges`. Raises ValueError as that does.
    """
    world_size = sum(nodes)
    if len(nodes) == 1 or not world_size <= virtual_workers:
        return equal_ranges(virtual_workers, world_size)
    most = -(-virtual_workers // world_size)  # virtual workers of a rank
    ranges: list[tuple[int, int]] = []
    first, ranks = 0, world_size  # of the ranks that are still without a range
    for count in nodes:
        ranks -= count
        least = max(first + count, virtual_workers - most * ranks)
        last = _roundest(least, min(first + most * count, virtual_workers - ranks))
        ranges += [(first + a, first + b) for a, b in equal_ranges(last - first, count)]
        first = last
    return tuple(ranges)


def _roundest(low: int, high: int) -> int:
    """Return the number within low..high that the largest power of two divides."""
    bit = (low - 1 ^ high).bit_length() - 1
    return high >> bit << bit
