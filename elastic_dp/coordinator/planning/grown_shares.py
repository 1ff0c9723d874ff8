"""The shares of a membership in a step that has more virtual workers than it distributes.

A membership distributes the virtual workers of the first steps, V0. Where the batch has grown to V,
each of them, u, stands for a *block*: the virtual workers from ceil(u·V/V0) up to ceil((u+1)·V/V0)
of the step. So every member knows the shares of all for any V by arithmetic. Nothing is agreed on
when the batch grows, and the coordinator need not know that it does.

If V0 is not a multiple of the number of members, blocks would make the longest of equal shares
longer than it must be. Then equal shares of V take their place. (If a worker is lost there, what
the others have finished of the step runs again as far as their shares have moved.)
"""

from collections.abc import Iterable, Sequence

from elastic_dp.coordinator.planning.equal_ranges import ranges_by_node

Range = tuple[int, int]  # virtual workers first..last-1
Share = tuple[Range, ...]  # in ascending order, with a gap between two of them


def grown_shares(
    shares: Sequence[Share], total: int, nodes: Sequence[int], *, equal: bool
) -> tuple[Share, ...]:
    """Return the share of each rank in a step of `total` virtual workers.

    `shares` are those of the membership, `nodes` the numbers of consecutive ranks on one node.
    `equal`: contiguous shares are meant to be of equal size.
    """
    first = _count(shares)
    if total == first:
        return tuple(shares)
    blocks = tuple(
        tuple((_block(low, first, total), _block(high, first, total)) for low, high in share)
        for share in shares
    )
    if equal and all(len(share) == 1 for share in shares):
        even = tuple((one,) for one in ranges_by_node(total, nodes or (len(shares),)))
        if _longest(even) < _longest(blocks):
            return even
    return blocks


def whole_blocks(nodes: Iterable[Range], first: int, total: int) -> tuple[Range, ...]:
    """Return the ranges of the `first` virtual workers whose blocks lie whole within one of
    `nodes`, which are of `total`.
    """
    found = []
    for low, high in sorted(nodes):
        # u·total/first rounded up is at least `low`, and at most `high`
        begin, end = ((low - 1) * first // total + 1 if low else 0), high * first // total
        if begin < end:
            found.append((begin, end))
    return tuple(found)


def _block(u: int, first: int, total: int) -> int:
    return -(-u * total // first)


def _count(shares: Sequence[Share]) -> int:
    return sum(last - first for share in shares for first, last in share)


def _longest(shares: Sequence[Share]) -> int:
    return max(_count([share]) for share in shares)
