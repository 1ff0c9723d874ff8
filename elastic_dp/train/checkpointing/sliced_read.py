"""Reads the line of bytes of a checkpoint of which each member needs only some slices.

Each member reads a share, as always, some blocks at a time, and sends the others what they need of
these. So nobody has more in memory than its own slices, and what is on its way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import read_blocks
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CheckpointDamaged

READ_BLOCKS = 16  # of a member at a time
SENT_BYTES = 4 << 20  # of what a member has read, to all others at a time


class Slice(NamedTuple):
    """The bytes `start` ≤ i < `end` of the line."""

    start: int
    end: int


def read_slices(
    catalog: Catalog,
    commit: CommitRecord,
    group: ProcessGroup,
    needed: Sequence[Sequence[Slice]],
    enters: Callable[[str], None],
) -> list[torch.Tensor]:
    """Returns the bytes of `needed[group.rank]`, each slice in memory of its own on the host.

    `needed` has the slices of each rank, in ascending order and without overlaps. `enters`: see
    `read_collectively`. Raises GroupError, and CheckpointDamaged on all members if some block that
    one of them has read is damaged.
    """
    layout, rank, slices = commit.manifest.layout, group.rank, needed[group.rank]
    shares = [
        layout.blocks_of(layout.share(one, group.world_size)) for one in range(group.world_size)
    ]
    found = [torch.empty(end - start, dtype=torch.uint8) for start, end in slices]
    for first in range(0, max(map(len, shares)), READ_BLOCKS):
        enters("restore")
        now = [share[first : first + READ_BLOCKS] for share in shares]
        spans = [_span_of(layout.block_span(b) for b in some) for some in now]
        mine = spans[rank]
        window = torch.empty(mine.end - mine.start, dtype=torch.uint8)
        wrong = ""
        try:
            read_blocks(catalog, commit, now[rank], window, mine.start)
        except CheckpointDamaged as error:
            wrong = error.reason
        enters("receive")
        refuse_damage(group, commit, wrong)
        for at in range(0, max(end - start for start, end in spans), SENT_BYTES):
            some = [Slice(start + at, min(start + at + SENT_BYTES, end)) for start, end in spans]
            sent = [
                [window[a - mine.start : b - mine.start] for _, a, b in _cuts(theirs, some[rank])]
                for theirs in needed
            ]
            targets = [
                [found[n][a - slices[n].start :][: b - a] for n, a, b in _cuts(slices, span)]
                for span in some
            ]
            _all_to_all(group, sent, targets)
    return found


def refuse_damage(group: ProcessGroup, commit: CommitRecord, wrong: str) -> None:
    """Raises CheckpointDamaged on all members if one of them has found something `wrong`."""
    reasons = [told.decode() for told in group.gather_bytes(wrong.encode()) if told]
    if reasons:
        raise CheckpointDamaged(commit.step, "; ".join(dict.fromkeys(reasons)))


def _span_of(blocks: Iterator[tuple[int, int]]) -> Slice:
    """Returns the span of adjacent blocks."""
    ends = list(blocks)
    return Slice(ends[0][0], ends[-1][1]) if ends else Slice(0, 0)


def _cuts(slices: Sequence[Slice], span: Slice) -> Iterator[tuple[int, int, int]]:
    """Yields the number of each slice that begins or goes on in `span`, and its bytes there."""
    number = max(0, bisect_right(slices, (span.start, 0)) - 1)
    while number < len(slices) and slices[number].start < span.end:
        start, end = max(slices[number].start, span.start), min(slices[number].end, span.end)
        if start < end:
            yield number, start, end
        number += 1


def _all_to_all(
    group: ProcessGroup,
    sent: Sequence[Sequence[torch.Tensor]],
    targets: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Sends the bytes `sent[r]` to rank r, and receives in `targets[r]` what it has sent."""
    none = torch.empty(0, dtype=torch.uint8)
    flat = torch.cat([none, *chain.from_iterable(sent)])
    sizes = [[sum(map(len, some)) for some in of_ranks] for of_ranks in (targets, sent)]
    arrived = torch.empty(sum(sizes[0]), dtype=torch.uint8)
    group.wait(group.all_to_all(arrived, flat, *sizes))
    into = list(chain.from_iterable(targets))
    for target, given in zip(into, arrived.split(list(map(len, into))), strict=True):
        target.copy_(given)
