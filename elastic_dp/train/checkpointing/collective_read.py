"""Reads the newest checkpoint with all members of a generation: each reads a share and sends it.

- Only rank 0 lists and reads commit records and chooses the checkpoint, so all members restore the
  same one.
- Each byte is read from the store once, whatever the number of members. Units of a sharded
  optimizer's state are read by the members that are to hold them, and are not sent.
- The members exchange bytes only after each has reported that its share is intact, into memory that
  does not hold state yet. If one share is damaged, all members go back to the previous checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_files import threads
from elastic_dp.checkpoint.checkpoint_reader import newest_first, read_own_range
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.checkpoint.state_units import PlacedUnit, StateUnit
from elastic_dp.checkpoint.unit_reader import read_unit, state_of
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import exchange_spans, pack_payload, receive, send
from elastic_dp.errors import CheckpointDamaged

States = list[tuple[StateUnit, dict[str, Any]]]


def read_collectively(
    catalog: Catalog,
    group: ProcessGroup,
    *,
    enters: Callable[[str], None],
    damaged: Callable[[CheckpointDamaged], None],
    own_units: Callable[[CommitRecord], list[PlacedUnit] | None] = lambda commit: None,
    types: Mapping[str, type] | None = None,
) -> tuple[CommitRecord, torch.Tensor, States]:
    """Returns the commit record and its line of bytes on the host, the same on all members of
    `group`, and the states of units: of those that `own_units` returns, or of all if it returns
    None, as it does on all members or on none. All are on the host. `types`: see `decode`.

    Each member calls `enters` with "restore" before it reads, which may take as long as the store
    needs, and with "receive" when it waits only for peers. Rank 0 calls `damaged` for each
    checkpoint that is skipped. Raises CheckpointError if all checkpoints are damaged.
    """
    commits = newest_first(catalog, damaged)
    while True:
        enters("restore")
        commit = _of_all(group, next(commits) if group.rank == 0 else None)
        layout, size = commit.manifest.layout, group.world_size
        line = torch.empty(layout.total, dtype=torch.uint8)
        units = _Units(commit, own_units(commit), group)
        wrong = _read(catalog, commit, group, line, units)
        enters("receive")
        reasons = [told.decode() for told in group.gather_bytes(wrong.encode()) if told]
        if not reasons:
            if size > 1:
                exchange_spans(
                    group, line, [layout.span(layout.share(r, size)) for r in range(size)]
                )
            return commit, line, units.states(types)
        if group.rank == 0:
            damaged(CheckpointDamaged(commit.step, "; ".join(dict.fromkeys(reasons))))


def _of_all(group: ProcessGroup, commit: CommitRecord | None) -> CommitRecord:
    """Returns the commit record of rank 0 on all members."""
    if group.world_size == 1:
        assert commit is not None
        return commit
    if group.rank == 0:
        assert commit is not None
        send(group, pack_payload(commit.step.to_bytes(8, "little") + commit.to_bytes()))
        return commit
    given, _ = receive(group, torch.device("cpu"))
    return CommitRecord.from_bytes(given[8:], int.from_bytes(given[:8], "little"))


class _Units:
    """The units that this member reads: those that it is to hold, or a share of all, which members
    then send each other."""

    def __init__(
        self, commit: CommitRecord, own: list[PlacedUnit] | None, group: ProcessGroup
    ) -> None:
        table = commit.manifest.units
        self._commit, self._group = commit, group
        self._is_own = own is not None
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

    def states(self, types: Mapping[str, type] | None) -> States:
        """Returns the states of all units, of which the others have read their shares."""
        if not self._is_own and self._group.world_size > 1 and len(self._line):
            shares = [self._share(rank) for rank in range(self._group.world_size)]
            spans = [(self._ends[first], self._ends[last]) for first, last in shares]
            exchange_spans(self._group, self._line, spans)
        content: Any = self._line.numpy()
        target = memoryview(content)
        return [
            (one.unit, state_of(one.unit.kind, target[start:end], types=types))
            for one, start, end in zip(self._units, self._ends, self._ends[1:], strict=False)
        ]

    def _share(self, rank: int) -> tuple[int, int]:
        """Returns which of the units a rank reads."""
        count, size = len(self._units), self._group.world_size
        return (0, count) if self._is_own else (count * rank // size, count * (rank + 1) // size)


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
