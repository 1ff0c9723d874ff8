"""Distributes virtual workers over ranks: contiguous ranges of almost equal size.

Sizes differ by at most one. A worker sends one partial sum for each whole subtree (an aligned block
of a power of two) of the binary tree over 0..virtual_workers-1 that its range consists of. So the
ranges of even size come first: as long as only those are assigned, every range begins at an even
number and splits no pair.
"""

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
