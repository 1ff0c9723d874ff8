"""Reads the newest checkpoint with all members of a generation: each reads a share and sends it.

- Only rank 0 lists and reads commit records and chooses the checkpoint, so all members restore the
  same one.
- Each byte is read from the store once, whatever the number of members. Units of a sharded
  optimizer's state are read by the members that are to hold them, and are not sent.
- The members exchange bytes only after each has reported that what it has read is intact, into
  memory that does not hold state yet. If some is damaged, all members go back to the previous
  checkpoint.
- Of a state that is not sharded, members whose optimizer is keep what they need (sliced_read.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import (
    newest_first,
    read_own_range,
    read_unit,
    state_of,
    threads,
)
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.checkpoint.state_units import PlacedUnit, StateUnit
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CheckpointDamaged
from elastic_dp.train.checkpointing.sliced_read import Slice, read_slices, refuse_damage
from elastic_dp.train.sharding.checkpoint_units import StateCut
from elastic_dp.train.state.state_moves import hand_out, move, units_of

States = list[tuple[StateUnit, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """What a member has read, and received from others.

    `tensors` are those of the tree, by slot; those of which it has only some cuts are on the meta
    device. `states` are those of units: of its own with `is_own`, or else of all. `cut` has its own
    cuts, by `StateCut.of`; None: nothing was cut.
    """

    commit: CommitRecord
    tensors: Sequence[torch.Tensor]
    states: States
    is_own: bool = False
    cut: Mapping[tuple[int, str], torch.Tensor] | None = None


def read_collectively(
    catalog: Catalog,
    group: ProcessGroup,
    *,
    enters: Callable[[str], None],
    damaged: Callable[[CheckpointDamaged], None],
    own_units: Callable[[CommitRecord], list[PlacedUnit] | None] = lambda commit: None,
    cuts_of: Callable[[CommitRecord], Sequence[StateCut]] = lambda commit: (),
) -> ReadCheckpoint:
    """Returns the newest checkpoint that is whole, on the host: the same tensors on all members of
    `group`, and the states of units: of those that `own_units` returns, or of all if it returns
    None, as it does on all members or on none. `cuts_of`: the same on all members; what is cut is
    only where it is needed.

    Each member calls `enters` with "restore" before it reads, which may take as long as the store
    needs, and with "receive" when it waits only for peers. Rank 0 calls `damaged` for each
    checkpoint that is skipped. Raises CheckpointError if all checkpoints are damaged.
    """
    commits = newest_first(catalog, damaged)
    while True:
        enters("restore")
        commit = _of_all(group, next(commits) if group.rank == 0 else None)
        try:
            if cuts := cuts_of(commit):
                return _read_cut(catalog, commit, group, cuts, enters)
            line = torch.empty(commit.manifest.layout.total, dtype=torch.uint8)
            units = _Units(commit, own_units(commit), group)
            wrong = _read(catalog, commit, group, line, units)
            enters("receive")
            refuse_damage(group, commit, wrong)
        except CheckpointDamaged as error:
            if group.rank == 0:
                damaged(error)
            continue
        _share_line(commit, group, line)
        tensors = commit.manifest.layout.views(line)
        return ReadCheckpoint(commit, tensors, units.states(), units.is_own)


def _share_spans(group: ProcessGroup, line: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Gives all members the bytes of `line` that each has: rank r those of `spans[r]`."""
    shares = [units_of(line[start:end]) for start, end in spans]
    have = [[rank] for rank, units in enumerate(shares) for _ in units]
    units = [unit for some in shares for unit in some]
    move(group, units, have, [range(group.world_size)] * len(units))


def _share_line(commit: CommitRecord, group: ProcessGroup, line: torch.Tensor) -> None:
    """Gives all members the shares that each has read."""
    layout, size = commit.manifest.layout, group.world_size
    if size > 1:
        _share_spans(group, line, [layout.span(layout.share(r, size)) for r in range(size)])


def _read_cut(
    catalog: Catalog,
    commit: CommitRecord,
    group: ProcessGroup,
    cuts: Sequence[StateCut],
    enters: Callable[[str], None],
) -> ReadCheckpoint:
    """Reads a checkpoint without units. Raises CheckpointDamaged on all members, and GroupError."""
    layout, rank = commit.manifest.layout, group.rank
    sizes = [spec.nbytes for spec in layout.specs]
    apart = {cut.slot for cut in cuts}
    whole = {
        slot: Slice(at, at + sizes[slot])
        for slot, at in enumerate(layout.offsets)
        if slot not in apart
    }
    needed = [list(whole.values()) for _ in range(group.world_size)]
    mine: dict[tuple[int, str], Slice] = {}
    for cut in cuts:
        at = layout.offsets[cut.slot]
        span = Slice(at + cut.first, at + cut.last)
        for holder in cut.ranks:
            needed[holder].append(span)
        if rank in cut.ranks:
            mine[cut.of] = span
    needed = [sorted(set(slices)) for slices in needed]  # an empty one may be there twice
    read = read_slices(catalog, commit, group, needed, enters)
    by_slice = dict(zip(needed[rank], read, strict=True))
    tensors = [
        spec.view(
            by_slice[whole[slot]]
            if slot in whole
            else torch.empty(sizes[slot], dtype=torch.uint8, device="meta")
        )
        for slot, spec in enumerate(layout.specs)
    ]
    specs = {cut.of: layout.specs[cut.slot] for cut in cuts}
    found = {
        of: specs[of].view(by_slice[span])
        if span.end - span.start == specs[of].nbytes
        else by_slice[span].view(specs[of].torch_dtype)
        for of, span in mine.items()
    }
    return ReadCheckpoint(commit, tensors, [], cut=found)


def _of_all(group: ProcessGroup, commit: CommitRecord | None) -> CommitRecord:
    """Returns the commit record of rank 0 on all members."""
    content = b"" if commit is None else commit.step.to_bytes(8, "little") + commit.to_bytes()
    told = hand_out(group, content, 0, range(group.world_size))
    return commit or CommitRecord.from_bytes(told[8:], int.from_bytes(told[:8], "little"))


class _Units:
    """The units that this member reads: those that it is to hold, or a share of all, which members
    then send each other."""

    def __init__(
        self, commit: CommitRecord, own: list[PlacedUnit] | None, group: ProcessGroup
    ) -> None:
        table = commit.manifest.units
        self._commit, self._group = commit, group
        self.is_own = own is not None
        if own is None:
            own = [] if table is None else list(table.units.values())
        self._units = own
        self._ends = list(accumulate((one.unit.kind.nbytes for one in own), initial=0))
        self._line = torch.empty(self._ends[-1], dtype=torch.uint8)

    def read(self, catalog: Catalog) -> None:
        """Reads them. Raises CheckpointDamaged."""
        content: Any = self._line.numpy()
        target = memoryview(content)
        first, last = self._share(self._group.rank)
        with ThreadPoolExecutor(threads(catalog)) as executor:
            list(
                executor.map(
                    lambda n: read_unit(
                        catalog,
                        self._commit,
                        self._units[n],
                        target[self._ends[n] : self._ends[n + 1]],
                    ),
                    range(first, last),
                )
            )

    def states(self) -> States:
        """Returns the states of all units, of which the others have read their shares."""
        if not self.is_own and self._group.world_size > 1 and len(self._line):
            shares = [self._share(rank) for rank in range(self._group.world_size)]
            spans = [(self._ends[first], self._ends[last]) for first, last in shares]
            _share_spans(self._group, self._line, spans)
        content: Any = self._line.numpy()
        target = memoryview(content)
        return [
            (one.unit, state_of(one.unit.kind, target[start:end]))
            for one, start, end in zip(self._units, self._ends, self._ends[1:], strict=False)
        ]

    def _share(self, rank: int) -> tuple[int, int]:
        """Returns which of the units a rank reads."""
        count, size = len(self._units), self._group.world_size
        return (0, count) if self.is_own else (count * rank // size, count * (rank + 1) // size)


def _read(
    catalog: Catalog, commit: CommitRecord, group: ProcessGroup, line: torch.Tensor, units: _Units
) -> str:
    """Reads this member's share of the line, and its units. Returns what is wrong with them, or an
    empty text."""
    try:
        read_own_range(catalog, commit, group.rank, group.world_size, line)
        units.read(catalog)
    except CheckpointDamaged as error:
        return error.reason
    return ""
