"""Reads the line of bytes of a checkpoint of which each member needs only some slices.

Each member reads a share, as always, and sends the others what they need of it: some blocks at a
time. So nobody has more in memory than its own slices, and what is on its way.
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

ROUND_BYTES = 256 << 20  # that all members together read at a time


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
    layout, size = commit.manifest.layout, group.world_size
    shares = [layout.blocks_of(layout.share(rank, size)) for rank in range(size)]
    blocks = max(1, ROUND_BYTES // (size * layout.block_bytes))  # of each member in a round
    found = [torch.empty(end - start, dtype=torch.uint8) for start, end in needed[group.rank]]
    for first in range(0, max(map(len, shares)), blocks):
        enters("restore")
        now = [share[first : first + blocks] for share in shares]
        spans = [_span_of(layout.block_span(b) for b in some) for some in now]
        mine = spans[group.rank]
        window = torch.empty(mine.end - mine.start, dtype=torch.uint8)
        wrong = ""
        try:
            read_blocks(catalog, commit, now[group.rank], window, mine.start)
        except CheckpointDamaged as error:
            wrong = error.reason
        enters("receive")
        refuse_damage(group, commit, wrong)
        sent = [
            [window[a - mine.start : b - mine.start] for _, a, b in _cuts(slices, mine)]
            for slices in needed
        ]
        targets = [
            [found[n][a - needed[group.rank][n].start :][: b - a] for n, a, b in cuts]
            for cuts in (_cuts(needed[group.rank], span) for span in spans)
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
