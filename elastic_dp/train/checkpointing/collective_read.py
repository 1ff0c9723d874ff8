"""Reads the newest checkpoint with all members of a generation: each byte is read once, by one of
the members that need it, and moved to the others.

- Only rank 0 lists and reads commit records and chooses the checkpoint, so all members restore the
  same one.
- The members exchange bytes only after each has reported that what it has read is intact, into
  memory that does not hold state yet. If some is damaged, all members go back to the previous
  checkpoint.
- A member has no more in memory than what it needs, and the requests that are being read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

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
from elastic_dp.train.state.state_moves import UNIT_BYTES, StateUnit, hand_out, move

READ_REQUESTS = 16  # of a member at a time

# Bytes of tensors, by the tensor's name. Those of two members are equal or disjoint.
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
    it if that is None.

    Each member calls `enters` with "restore" before it reads, which may take as long as the store
    needs, and with "receive" when it waits only for peers. Rank 0 calls `damaged` for each
    checkpoint that is skipped. Raises CheckpointError if all checkpoints are damaged.
    """
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


class _Part(NamedTuple):
    """The bytes `start` ≤ i < `end` of a tensor, which are in a unit, and the ranks that need
    them."""

    unit: Unit
    start: int
    end: int
    ranks: Sequence[int]


class _Needs:
    """Which ranks need which bytes."""

    def __init__(self, needs: Sequence[Ranges] | None, world_size: int) -> None:
        self._everyone = None if needs is not None else range(world_size)
        by_tensor: defaultdict[str, defaultdict[tuple[int, int], list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for rank, ranges in enumerate(needs or ()):
            for tensor, some in ranges.items():
                for one in set(some):
                    by_tensor[tensor][one].append(rank)
        self._ranges = {tensor: sorted(found.items()) for tensor, found in by_tensor.items()}

    def parts(self, unit: Unit) -> list[_Part]:
        """Returns the bytes of a unit that somebody needs."""
        if self._everyone is not None:
            return [_Part(unit, unit.start, unit.end, self._everyone)]
        ranges = self._ranges.get(unit.tensor, ())
        number = max(0, bisect_right(ranges, unit.start, key=lambda one: one[0][0]) - 1)
        found = []
        for (a, b), ranks in ranges[number:]:
            if a >= unit.end:
                break
            start, end = max(a, unit.start), min(b, unit.end)
            if start < end:
                found.append(_Part(unit, start, end, ranks))
        return found


def _read(
    catalog: Catalog,
    commit: CommitRecord,
    group: ProcessGroup,
    needs: Sequence[Ranges] | None,
    enters: Callable[[str], None],
) -> ReadCheckpoint:
    """Raises CheckpointDamaged on all members, and GroupError."""
    rank, world_size = group.rank, group.world_size
    everything = {name: [(0, spec.nbytes)] for name, spec in commit.manifest.specs.items()}
    found = ReadCheckpoint(commit, everything if needs is None else needs[rank])
    shares = _shares(commit.manifest, _Needs(needs, world_size), world_size)
    for first in range(0, max(map(len, shares)), READ_REQUESTS):
        enters("restore")
        now = [share[first : first + READ_REQUESTS] for share in shares]
        memory: dict[Unit, torch.Tensor] = {}
        for request, _ in now[rank]:
            for unit in request.units:
                here = found.find(unit.tensor, unit.start, unit.end)
                memory[unit] = torch.empty(unit.nbytes, dtype=torch.uint8) if here is None else here
        wrong = _read_own(catalog, commit, [request for request, _ in now[rank]], memory)
        enters("receive")
        _refuse_damage(group, commit, wrong)
        units, have, need = list[StateUnit](), list[list[int]](), list[Sequence[int]]()
        for reader, share in enumerate(now):
            for _, parts in share:
                for some in _alike(parts):
                    flats = _flats(some, found, rank, memory if reader == rank else {})
                    nbytes = sum(part.end - part.start for part in some)
                    units.append(StateUnit(nbytes, partial(list, flats), partial(_write, flats)))
                    have.append([reader])
                    need.append(some[0].ranks)
        move(group, units, have, need)
    return found


def _shares(
    manifest: Manifest, needs: _Needs, world_size: int
) -> list[list[tuple[Request, list[_Part]]]]:
    """Returns what each rank reads, and the parts of it that somebody needs."""
    shares: list[list[tuple[Request, list[_Part]]]] = [[] for _ in range(world_size)]
    nbytes = [0] * world_size
    for request in requests(manifest):
        parts = [part for unit in request.units for part in needs.parts(unit)]
        if parts:
            candidates = {rank for part in parts for rank in part.ranks}
            reader = min(candidates, key=lambda rank: (nbytes[rank], rank))
            nbytes[reader] += request.nbytes
            shares[reader].append((request, parts))
    return shares


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


def _alike(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Returns the parts, cut and put together so that each list is about one unit of a move, for
    the same ranks."""
    found: list[list[_Part]] = []
    room = 0
    for part in parts:
        at = part.start
        while at < part.end:
            if not room or found[-1][0].ranks != part.ranks:
                found.append([])
                room = UNIT_BYTES
            end = min(part.end, at + room)
            found[-1].append(part._replace(start=at, end=end))
            room -= end - at
            at = end
    return found


def _flats(
    parts: Sequence[_Part], found: ReadCheckpoint, rank: int, memory: Mapping[Unit, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the memory of parts that this member has read, or is to receive; else nothing.
    `memory`: of units that it has read, some of which it only passes on."""
    flats = []
    for unit, start, end, ranks in parts:
        here = found.find(unit.tensor, start, end) if rank in ranks else None
        if unit in memory:
            flat = memory[unit][start - unit.start : end - unit.start]
            if here is not None and here.data_ptr() != flat.data_ptr():
                here.copy_(flat)
            flats.append(flat)
        elif here is not None:
            flats.append(here)
    return flats


def _write(flats: Sequence[torch.Tensor], content: torch.Tensor) -> None:
    for flat, part in zip(flats, content.split([len(flat) for flat in flats]), strict=True):
        flat.copy_(part)
