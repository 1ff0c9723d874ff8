"""Who runs which virtual workers: contiguous, balanced ranges over the ranks.

Sizes differ by at most one. Where there is a choice of order, the one whose ranges are made of the fewest whole
subtrees of the binary tree over 0..virtual_workers-1 is taken, since a worker sends one partial sum for each.
"""

from functools import lru_cache


@lru_cache(maxsize=64)
def shares(virtual_workers: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """[(first, last)] by rank; rank r runs first..last-1. Every virtual worker is dealt exactly once."""
    if not 1 <= world_size <= virtual_workers:
        raise ValueError(f"world size {world_size} is not within 1..{virtual_workers}")
    small, larger = divmod(virtual_workers, world_size)
    orders = (
        [small + 1] * larger + [small] * (world_size - larger),
        [small] * (world_size - larger) + [small + 1] * larger,
        [
            (rank + 1) * virtual_workers // world_size - rank * virtual_workers // world_size
            for rank in range(world_size)
        ],
    )
    return min((_ranges(sizes) for sizes in orders), key=lambda ranges: _pieces(ranges))


def _ranges(sizes: list[int]) -> tuple[tuple[int, int], ...]:
    ranges, first = [], 0
    for size in sizes:
        ranges.append((first, first + size))
        first += size
    return tuple(ranges)


def _pieces(ranges: tuple[tuple[int, int], ...]) -> int:
    return sum(subtrees(first, last) for first, last in ranges)


def subtrees(first: int, last: int) -> int:
    """How many whole subtrees (aligned blocks of a power of two) make up first..last-1."""
    count = 0
    while first < last:
        aligned = first & -first or 1 << (last - first).bit_length()
        while aligned > last - first:
            aligned >>= 1
        first += aligned
        count += 1
    return count
