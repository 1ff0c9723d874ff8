"""Reads the line of bytes of a checkpoint of which each member needs only some slices.

Each member reads a share, as always, some blocks at a time, and sends the others what they need of
these. So nobody has more in memory than its own slices, and what is on its way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import read_blocks
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CheckpointDamaged
from elastic_dp.train.state.state_moves import StateUnit, move, units_of

READ_BLOCKS = 16  # of a member at a time


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
        units, have, need = list[StateUnit](), list[list[int]](), list[list[int]]()
        for reader, span in enumerate(spans):
            for (a, b), targets in _targets(needed, span).items():
                if reader == rank:
                    flat = window[a - mine.start : b - mine.start]
                elif rank in targets:
                    flat = found[targets[rank]][a - slices[targets[rank]].start :][: b - a]
                else:
                    flat = torch.empty(b - a, dtype=torch.uint8, device="meta")
                some = units_of(flat)
                units += some
                have += [[reader]] * len(some)
                need += [list(targets)] * len(some)
                if reader == rank and rank in targets:
                    number = targets[rank]
                    found[number][a - slices[number].start :][: b - a].copy_(flat)
        move(group, units, have, need)
    return found


def refuse_damage(group: ProcessGroup, commit: CommitRecord, wrong: str) -> None:
    """Raises CheckpointDamaged on all members if one of them has found something `wrong`."""
    reasons = [told.decode() for told in group.gather_bytes(wrong.encode()) if told]
    if reasons:
        raise CheckpointDamaged(commit.step, "; ".join(dict.fromkeys(reasons)))


def _targets(
    needed: Sequence[Sequence[Slice]], span: Slice
) -> dict[tuple[int, int], dict[int, int]]:
    """Returns the bytes of `span` that ranks need, and for each rank the number of its slice. Two
    slices are equal or disjoint."""
    found: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank, slices in enumerate(needed):
        for number, start, end in _cuts(slices, span):
            found[start, end][rank] = number
    return found


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
