"""Reads the newest checkpoint with all members of a generation: each byte is read once, by one of
the members that need it, and moved to the others.

- Only rank 0 lists and reads commit records and chooses the checkpoint, so all members restore the
  same one.
- The members exchange bytes only after each has reported that what it has read is intact, into
  memory that does not hold state yet. If some is damaged, all members go back to the previous
  checkpoint.
- A member has no more in memory than what it needs, and the units that are being read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import (
    Request,
    newest_first,
    read_request,
    requests,
    threads,
    tree_of,
)
from elastic_dp.checkpoint.commit_record import CommitRecord, Manifest
from elastic_dp.checkpoint.layout import Unit
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CheckpointDamaged
from elastic_dp.train.state.state_moves import StateUnit, hand_out, move, units_of

READ_REQUESTS = 16  # of a member at a time

# Bytes of tensors, by the tensor's name.
Ranges = Mapping[str, Sequence[tuple[int, int]]]


class ReadCheckpoint:
    """What a member has read, and received from others, on the host."""

    def __init__(self, commit: CommitRecord, needed: Ranges) -> None:
        self.commit = commit
        self._memory = {
            name: [(a, b, torch.empty(b - a, dtype=torch.uint8)) for a, b in sorted(set(ranges))]
            for name, ranges in needed.items()
        }

    def find(self, tensor: str, start: int, end: int) -> torch.Tensor | None:
        """Returns these bytes of a tensor, without a copy, or None if they are not all here."""
        of_tensor = self._memory.get(tensor, ())
        number = bisect_right(of_tensor, start, key=lambda one: one[0]) - 1
        if number < 0 or of_tensor[number][1] < end:
            return None
        first, _, memory = of_tensor[number]
        return memory[start - first : end - first]

    def take(self, unit: Unit, content: torch.Tensor) -> None:
        """Keeps what this member needs of a unit, unless it was read into its place."""
        for first, last, memory in self._memory.get(unit.tensor, ()):
            for start, end in _cuts(unit, [(first, last)]):
                mine = memory[start - first : end - first]
                given = content[start - unit.start : end - unit.start]
                if mine.data_ptr() != given.data_ptr():
                    mine.copy_(given)

    def content(self, tensor: str, start: int, end: int) -> torch.Tensor:
        """Returns these bytes of a tensor, which are here."""
        found = self.find(tensor, start, end)
        assert found is not None, (tensor, start, end)
        return found

    def tree(self, manifest: Manifest) -> Any:
        """Returns the state that a manifest describes, whose tensors are all here."""
        specs = manifest.specs.items()
        return tree_of(manifest, {name: self.content(name, 0, one.nbytes) for name, one in specs})


def read_collectively(
    catalog: Catalog,
    group: ProcessGroup,
    *,
    enters: Callable[[str], None],
    damaged: Callable[[CheckpointDamaged], None],
    needs_of: Callable[[Manifest], Sequence[Ranges] | None] = lambda manifest: None,
) -> ReadCheckpoint:
    """Returns the newest checkpoint that is whole: what `needs_of` returns for each rank, or all of
    it if that is None. Each member calls `enters` with "restore" before it reads, which may take as
    long as the store needs, and with "receive" when it waits only for peers. Rank 0 calls `damaged`
    for each checkpoint that is skipped. Raises CheckpointError if all checkpoints are damaged."""
    commits = newest_first(catalog, damaged)
    while True:
        enters("restore")
        commit = _of_all(group, next(commits) if group.rank == 0 else None)
        try:
            return _read(catalog, commit, group, needs_of(commit.manifest), enters)
        except CheckpointDamaged as error:
            if group.rank == 0:
                damaged(error)


def _of_all(group: ProcessGroup, commit: CommitRecord | None) -> CommitRecord:
    """Returns the commit record of rank 0 on all members."""
    content = b"" if commit is None else commit.step.to_bytes(8, "little") + commit.to_bytes()
    told = hand_out(group, content, 0, range(group.world_size))
    return commit or CommitRecord.from_bytes(told[8:], int.from_bytes(told[:8], "little"))


def _read(
    catalog: Catalog,
    commit: CommitRecord,
    group: ProcessGroup,
    needs: Sequence[Ranges] | None,
    enters: Callable[[str], None],
) -> ReadCheckpoint:
    """Raises CheckpointDamaged on all members, and GroupError."""
    if needs is None:
        specs = commit.manifest.specs
        needs = [{name: [(0, one.nbytes)] for name, one in specs.items()}] * group.world_size
    found = ReadCheckpoint(commit, needs[group.rank])
    shares, are_whole = _shares(commit.manifest, needs)
    # Units that are kept in part need more memory until they are.
    at_once = READ_REQUESTS if are_whole else max(1, READ_REQUESTS // group.world_size)
    for first in range(0, max(map(len, shares)), at_once):
        enters("restore")
        now = [
            (rank, one) for rank, some in enumerate(shares) for one in some[first : first + at_once]
        ]
        memory: dict[Unit, torch.Tensor] = {}
        units, have, need = list[StateUnit](), list[list[int]](), list[Sequence[int]]()
        for reader, (request, ranks_of) in now:
            pairs = zip(ranks_of, request.units, strict=True)
            for ranks, some in groupby(pairs, key=itemgetter(0)):
                is_mine, flats = group.rank == reader or group.rank in ranks, []
                for _, unit in some:
                    flat = found.find(unit.tensor, unit.start, unit.end)
                    if flat is None:
                        device = "cpu" if is_mine else "meta"
                        flat = torch.empty(unit.nbytes, dtype=torch.uint8, device=device)
                    if is_mine:
                        memory[unit] = flat
                    flats.append(flat)
                parts = units_of(*flats)
                units += parts
                have += [[reader]] * len(parts)
                need += [ranks] * len(parts)
        wrong = _read_own(catalog, commit, [q for r, (q, _) in now if r == group.rank], memory)
        enters("receive")
        _refuse_damage(group, commit, wrong)
        move(group, units, have, need)
        if not are_whole:
            for unit, flat in memory.items():
                found.take(unit, flat)
    return found


def _shares(
    manifest: Manifest, needs: Sequence[Ranges]
) -> tuple[list[list[tuple[Request, list[list[int]]]]], bool]:
    """Returns what each rank reads and who needs it, and whether all need whole units."""
    shares: list[list[tuple[Request, list[list[int]]]]] = [[] for _ in needs]
    nbytes, are_whole = [0] * len(needs), True
    for request in requests(manifest):
        ranks_of = []
        for unit in request.units:
            cuts = [_cuts(unit, ranges.get(unit.tensor, ())) for ranges in needs]
            ranks_of.append([rank for rank, some in enumerate(cuts) if some])
            are_whole &= all(some in ([], [(unit.start, unit.end)]) for some in cuts)
        if candidates := {rank for ranks in ranks_of for rank in ranks}:
            reader = min(candidates, key=lambda rank: (nbytes[rank], rank))
            nbytes[reader] += request.nbytes
            shares[reader].append((request, ranks_of))
    return shares, are_whole


def _cuts(unit: Unit, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the bytes of a unit that are in these ranges of its tensor."""
    inside = ((max(a, unit.start), min(b, unit.end)) for a, b in ranges)
    return [(start, end) for start, end in inside if start < end]


def _read_own(
    catalog: Catalog,
    commit: CommitRecord,
    own: Sequence[Request],
    memory: Mapping[Unit, torch.Tensor],
) -> str:
    """Reads these requests. Returns what is wrong with them, or an empty text."""

    def read(request: Request) -> None:
        read_request(catalog, commit, request, [memory[unit] for unit in request.units])

    try:
        with ThreadPoolExecutor(threads(catalog)) as executor:
            list(executor.map(read, own))
    except CheckpointDamaged as error:
        return error.reason
    return ""


def _refuse_damage(group: ProcessGroup, commit: CommitRecord, wrong: str) -> None:
    """Raises CheckpointDamaged on all members if one of them has found something `wrong`."""
    reasons = [told.decode() for told in group.gather_bytes(wrong.encode()) if told]
    if reasons:
        raise CheckpointDamaged(commit.step, "; ".join(dict.fromkeys(reasons)))
