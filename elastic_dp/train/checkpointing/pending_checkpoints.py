"""Checkpoints with some parts written: which parts are missing, who has them, when one is complete.

The module has no clock and no I/O. The rules:

- A checkpoint is complete when every part of one state is written, by any member, and each member
  that is present has reported its digest, even one that had nothing to write.
- A part whose writer is lost is requested from another member that has reported the same state,
  once from each member. A file of units is requested from one that holds them.
- Members whose states differ are asked for the digests of all tensors. The state that most of them
  hold is committed, and the others' reports are ignored.
- A late report about a step before the newest commit record is ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic_dp.checkpoint.checkpoint_writer import (
    WorkerParts,
    WorkerUnits,
    all_units_are_written,
    missing,
    written_files,
)
from elastic_dp.checkpoint.commit_record import Manifest
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.controller_link import WrittenParts


@dataclass
class PendingCheckpoint:
    """A checkpoint of which some parts are written. `first` is the first report about it, and
    `began_at` the begin of the first snapshot.
    """

    first: WrittenParts
    shares: dict[WorkerId, list[WorkerParts]] = field(default_factory=dict)
    units: dict[WorkerId, list[WorkerUnits]] = field(default_factory=dict)
    # The member that each part, or file of units by its name, was requested from.
    requested: dict[int | str, WorkerId] = field(default_factory=dict)
    stall_s: float = 0.0
    told_at: float = 0.0
    began_at: float = math.inf
    reports: dict[WorkerId, WrittenParts] = field(default_factory=dict)  # the newest of each
    # All that was reported, with whatever state.
    all_written: list[tuple[Manifest, WorkerParts]] = field(default_factory=list)
    compared: set[WorkerId] = field(default_factory=set)  # asked for the digests of all tensors
    odd: set[WorkerId] = field(default_factory=set)  # members with another state
    held_back: bool = False  # committed only if nothing follows
    error: Exception | None = None  # the run's, once this is committed

    @property
    def step(self) -> int:
        return self.first.share.step

    @property
    def manifest(self) -> Manifest:
        return self.first.manifest

    @property
    def written(self) -> list[WorkerParts]:
        return [share for shares in self.shares.values() for share in shares]

    @property
    def all_units(self) -> list[WorkerUnits]:
        return [told for several in self.units.values() for told in several]

    @property
    def is_written(self) -> bool:
        """Whether all parts and all units are written."""
        return not missing(self.manifest, self.written) and all_units_are_written(self.all_units)

    @property
    def all_parts(self) -> Sequence[int]:
        return range(len(self.manifest.layout.parts))

    @property
    def differs(self) -> bool:
        """Whether the members that have reported hold different states."""
        return len({share.digest for share in self.written}) > 1

    def pair(self, *, waits: bool) -> tuple[WrittenParts, WrittenParts] | None:
        """Returns reports of two members with different states. With `waits`, only reports that
        have the digests of all tensors."""
        reports = [one for one in self.reports.values() if one.tensors or not waits]
        first = next(iter(reports), None)
        other = (one for one in reports if first and one.share.digest != first.share.digest)
        found = next(other, None)
        return None if first is None or found is None else (first, found)

    def keep_majority(self) -> None:
        """Ignores the members that do not hold the state that most of them hold, or the first."""
        digests = [one.share.digest for one in self.reports.values()]
        chosen = max(digests, key=digests.count)
        self.odd = {w for w, one in self.reports.items() if one.share.digest != chosen}
        self.first = next(one for one in self.reports.values() if one.share.digest == chosen)
        self.shares = {w: shares for w, shares in self.shares.items() if w not in self.odd}
        self.units = {w: units for w, units in self.units.items() if w not in self.odd}
        self.requested = {x: w for x, w in self.requested.items() if w not in self.odd}

    def replace(self, manifest: Manifest, share: WorkerParts) -> None:
        """Takes this state in place of those that members hold."""
        self.first = dataclasses.replace(self.first, manifest=manifest, share=share)
        self.shares = {share.writer: [share]}

    def add(self, worker: WorkerId, written: WrittenParts, now: float) -> None:
        if worker in self.odd:
            return
        self.reports[worker] = written
        self.all_written.append((written.manifest, written.share))
        self.stall_s = max(self.stall_s, written.stall_s)
        self.shares.setdefault(worker, []).append(written.share)
        if written.units is not None:
            self.units.setdefault(worker, []).append(written.units)
        self.told_at = now
        self.began_at = min(self.began_at, now - written.took_s)

    def share_of(self, worker: WorkerId) -> Sequence[int]:
        """Returns the parts that this member is to write."""
        members = self.first.members
        return self.manifest.layout.share(members.index(worker), len(members))


@dataclass(frozen=True, slots=True)
class PartsRequest:
    """A request that `worker` also writes these parts of the checkpoint of `step`, and the files of
    units with these names."""

    worker: WorkerId
    step: int
    parts: Sequence[int]
    units: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """`step` is the newest committed one. A member that reports it again is told so again."""

    step: int


class PendingCheckpoints:
    """The pending checkpoints of one run."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCheckpoint] = {}
        self._committed = 0  # the newest
        self._lost: set[WorkerId] = set()
        self._abandoned: frozenset[WorkerId] = frozenset()  # lost in an abandoned lineage
        self._rejected = -1  # reports of this lineage or earlier ones are wrong

    def all(self) -> list[PendingCheckpoint]:
        return list(self._pending.values())

    @property
    def steps(self) -> frozenset[int]:
        return frozenset(self._pending)

    def add(
        self, worker: WorkerId, written: WrittenParts, now: float
    ) -> PendingCheckpoint | AlreadyCommitted | None:
        """Records what a member wrote. Returns None if it is ignored."""
        step = written.share.step
        abandoned = worker in self._abandoned or written.lineage_id <= self._rejected
        if abandoned:
            return None
        if step <= self._committed:
            return AlreadyCommitted(self._committed)
        one = self._pending.setdefault(step, PendingCheckpoint(written))
        one.add(worker, written, now)
        return one

    def lose(self, worker: WorkerId) -> None:
        self._lost.add(worker)

    def requests_for_lost(self, one: PendingCheckpoint) -> list[PartsRequest]:
        """Returns requests for the shares of all lost members."""
        lost = self._lost.intersection(one.first.members)
        parts = [x for worker in lost for x in self._requests(one, one.share_of(worker))]
        return [*parts, *self._unit_requests(one, self._lost.__contains__)]

    def requests_after_loss(self, one: PendingCheckpoint, worker: WorkerId) -> list[PartsRequest]:
        """Returns requests for the share of a lost member and for what was requested from it."""
        again = [item for item, asked in one.requested.items() if asked == worker]
        for item in again:
            del one.requested[item]
        share = one.share_of(worker) if worker in one.first.members else ()
        parts = [*(item for item in again if isinstance(item, int)), *share]
        of_units = self._unit_requests(one, self._lost.__contains__)
        return [*self._requests(one, parts), *of_units]

    def requests_for_missing(self, one: PendingCheckpoint) -> list[PartsRequest]:
        """Returns requests for all missing parts.

        They include parts in the share of no member, where members divided the writing by two
        memberships.
        """
        return [*self._requests(one, one.all_parts), *self._unit_requests(one, lambda _: True)]

    def _unit_requests(
        self, one: PendingCheckpoint, of_writer: Callable[[WorkerId], bool]
    ) -> list[PartsRequest]:
        """Returns requests for files of units that are not written, of the writers for which
        `of_writer` is true, to members that are present and hold the units."""
        places = {u.place for file in written_files(one.all_units).values() for u in file.units}
        names: dict[WorkerId, list[str]] = {}
        for worker, told in one.units.items():
            if worker in self._lost:
                continue
            for report in told:
                for writer, file in zip(report.planned, report.held, strict=True):
                    covered = all(unit.place in places for unit in file.units)
                    if of_writer(writer) and not covered and file.name not in one.requested:
                        one.requested[file.name] = worker
                        names.setdefault(worker, []).append(file.name)
        return [PartsRequest(worker, one.step, (), tuple(some)) for worker, some in names.items()]

    def _requests(self, one: PendingCheckpoint, parts: Sequence[int]) -> list[PartsRequest]:
        """Returns requests to one member that is present and has reported this state.

        Writing a part twice does no harm.
        """
        there = [worker for worker in one.shares if worker not in self._lost]
        absent = set(missing(one.manifest, one.written)).intersection(parts)
        absent.difference_update(one.requested)
        if not there or not absent:
            return []
        one.requested.update(dict.fromkeys(absent, there[0]))
        return [PartsRequest(there[0], one.step, sorted(absent))]

    def is_complete(self, one: PendingCheckpoint, *, waits: bool = True) -> bool:
        """Returns whether the checkpoint can be committed. False if a later one was committed
        meanwhile.

        With `waits`, it also needs the digests of all members that are present.
        """
        if one.step not in self._pending:
            return False
        if one.differs or (one.held_back and waits):
            return False
        return one.is_written and not (waits and self.silent(one))

    def silent(self, one: PendingCheckpoint) -> set[WorkerId]:
        """Returns the members that are present and have not reported."""
        return set(one.first.members).difference(one.reports, self._lost)

    def comparisons(self, one: PendingCheckpoint) -> list[PartsRequest]:
        """Returns requests for the digests of all tensors, once to each member."""
        asked = set(one.reports).difference(self._lost, one.compared)
        one.compared |= asked
        return [PartsRequest(worker, one.step, ()) for worker in sorted(asked)]

    # ------------------------------------------------------------------------------- outcomes

    def begin_commit(self, step: int) -> None:
        """Removes this checkpoint, which is about to be committed, and all earlier ones."""
        self._pending = {s: other for s, other in self._pending.items() if s > step}

    def committed(self, step: int) -> None:
        self._committed = step

    def reject(self, lineage_id: int) -> None:
        """Discards what was made in lineage `lineage_id` or an earlier one: it is wrong."""
        self._pending.clear()
        self._rejected, self._committed = lineage_id, 0

    def restart(self) -> None:
        """The run restarts from a checkpoint: later pending checkpoints are discarded."""
        self._pending.clear()
        self._committed = 0  # the newest one by name may be damaged
        self._abandoned = frozenset(self._lost)
