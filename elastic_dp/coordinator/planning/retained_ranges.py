"""Distributes virtual workers so that those which members have finished of a step stay with them.

A step that was cut starts again in the next generation. Each member has told which subtrees of
virtual workers it has finished in it (see train/step/leaf_runner.py). Contiguous ranges for a
group of another size move many of them to other members, where they run again. Here every member
keeps what it has finished, as far as its new share allows, and the others are distributed.

The price is in the steps that follow: a share of several ranges may have more partial sums (an
aligned block of a power of two each, see equal_ranges.py) to send. So contiguous ranges stay where
they let the step end as early.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # virtual workers first..last-1
Share = tuple[Range, ...]  # in ascending order, with a gap between two of them


def retain_ranges(
    contiguous: Sequence[Range], finished: Sequence[Sequence[Range]]
) -> tuple[Share, ...]:
    """Return the share of each rank.

    `contiguous` are the ranges of all ranks as they would be without regard to finished work; their
    sizes stay. `finished[r]` are the subtrees that the worker of rank r has finished; each is used
    as a whole or not at all.
    """
    plain: tuple[Share, ...] = tuple((one,) for one in contiguous)
    retained = _retain([last - first for first, last in contiguous], finished)
    return retained if _price(retained, finished) < _price(plain, finished) else plain


def _retain(sizes: Sequence[int], finished: Sequence[Sequence[Range]]) -> tuple[Share, ...]:
    """Keep the finished subtrees of each rank that fit into its share, and distribute the rest.

    Two workers may have finished the same virtual worker, one after the other.
    """
    taken: set[int] = set()
    kept: list[list[int]] = []
    for nodes, size in zip(finished, sizes, strict=True):
        leaves: list[int] = []
        for node in itertools.starmap(range, nodes):
            if len(leaves) + len(node) <= size and taken.isdisjoint(node):
                leaves += node
        kept.append(leaves)
        taken.update(leaves)
    others = (leaf for leaf in range(sum(sizes)) if leaf not in taken)
    for leaves, size in zip(kept, sizes, strict=True):
        leaves += [leaf for _, leaf in zip(range(size - len(leaves)), others, strict=False)]
    return tuple(_ranges(sorted(leaves)) for leaves in kept)


def _price(shares: Sequence[Share], finished: Sequence[Sequence[Range]]) -> tuple[int, int, int]:
    """Return the most virtual workers that a rank must run now, then the most partial sums of a
    rank, then how many virtual workers all ranks must run.
    """
    new = [_to_run(share, nodes) for share, nodes in zip(shares, finished, strict=True)]
    return max(new), max(_blocks(share) for share in shares), sum(new)


def _to_run(share: Share, nodes: Iterable[Range]) -> int:
    """Return how many virtual workers of the share are not in a finished subtree that it holds."""
    used = sum(
        last - first
        for first, last in nodes
        if any(low <= first and last <= high for low, high in share)
    )
    return sum(last - first for first, last in share) - used


def _ranges(leaves: Sequence[int]) -> Share:
    starts = [v for i, v in enumerate(leaves) if i == 0 or leaves[i - 1] != v - 1]
    ends = [v + 1 for i, v in enumerate(leaves) if i + 1 == len(leaves) or leaves[i + 1] != v + 1]
    return tuple(zip(starts, ends, strict=True))


def _blocks(share: Share) -> int:
    """Return the number of aligned blocks of a power of two that the ranges consist of."""
    count = 0
    for first, last in share:
        while first < last:
            room = 1 << (last - first).bit_length() - 1
            first += min(first & -first, room) or room
            count += 1
    return count
