"""Distributes virtual workers after a loss so that those which survivors have finished stay.

A step that was aborted starts again in the next generation, and each survivor has finished some or
all of its virtual workers in it (see train/step/finished_work.py). Contiguous ranges for a smaller
group move most of them to other workers, where they run again. Here every survivor keeps what it
had, as far as its new share allows, and only what the lost members had is distributed.

The price is in the steps that follow: a share of several ranges may have more partial sums (an
aligned block of a power of two each, see equal_ranges.py) to send. So contiguous ranges stay where
they let the step end as early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # virtual workers first..last-1
Share = tuple[Range, ...]  # in ascending order, with a gap between two of them


def retain_ranges(contiguous: Sequence[Range], previous: Sequence[Share]) -> tuple[Share, ...]:
    """Return the share of each rank.

    `contiguous` are the ranges of all ranks as they would be without regard to finished work; their
    sizes stay. `previous[r]` is what the worker of rank r had in the aborted generation, () if it
    was no member.
    """
    plain: tuple[Share, ...] = tuple((one,) for one in contiguous)
    retained = _retain([last - first for first, last in contiguous], previous)
    return retained if _price(retained, previous) < _price(plain, previous) else plain


def _retain(sizes: Sequence[int], previous: Sequence[Share]) -> tuple[Share, ...]:
    """Keep the first virtual workers of each share, which run first, and distribute the others."""
    kept = [[*_leaves(share)][:size] for share, size in zip(previous, sizes, strict=True)]
    taken = {leaf for leaves in kept for leaf in leaves}
    others = (leaf for leaf in range(sum(sizes)) if leaf not in taken)
    for leaves, size in zip(kept, sizes, strict=True):
        leaves += [leaf for _, leaf in zip(range(size - len(leaves)), others, strict=False)]
    return tuple(_ranges(sorted(leaves)) for leaves in kept)


def _price(shares: Sequence[Share], previous: Sequence[Share]) -> tuple[int, int, int]:
    """Return the most virtual workers that a rank must run now, then the most partial sums of a
    rank, then how many virtual workers all ranks must run.

    All that a worker had counts as finished, since the slowest worker of a step, for which the
    others wait, is as likely the lost one as any other.
    """
    new = [
        len(set(_leaves(share)).difference(_leaves(before)))
        for share, before in zip(shares, previous, strict=True)
    ]
    return max(new), max(_blocks(share) for share in shares), sum(new)


def _leaves(share: Share) -> Iterable[int]:
    return (leaf for first, last in share for leaf in range(first, last))


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
