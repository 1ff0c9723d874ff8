"""Who runs which virtual workers: contiguous, balanced ranges over the ranks.

Sizes differ by at most one. A worker sends one partial sum for each whole subtree (aligned block of
a power of two) of the binary tree over 0..virtual_workers-1 that its range is made of, so the
ranges of the even size come first: as long as only they were dealt, every range begins at an even
number and splits no pair.
"""

from itertools import accumulate, pairwise


def shares(virtual_workers: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """[(first, last)] by rank; rank r runs first..last-1. Every virtual worker is dealt exactly
    once."""
    if not 1 <= world_size <= virtual_workers:
        raise ValueError(f"world size {world_size} is not within 1..{virtual_workers}")
    small, larger = divmod(virtual_workers, world_size)
    sizes = [small] * (world_size - larger), [small + 1] * larger
    even, odd = sizes if small % 2 == 0 else reversed(sizes)
    return tuple(pairwise(accumulate(even + odd, initial=0)))
