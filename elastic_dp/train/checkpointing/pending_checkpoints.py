"""Checkpoints with some blobs written: which ones are missing, who has them, when one is complete.

The module has no clock and no I/O. The rules:

- A checkpoint is complete when every blob of one state is written, by any member, and each member
  that is present has reported its digest, even one that had nothing to write.
- A blob whose writer is lost is requested from another member that holds it, once from each member.
- If the states of members differ, the state that most of them hold is committed, and the others'
  reports are ignored.
- A late report about a step before the newest commit record is ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from elastic_dp.checkpoint.checkpoint_writer import WorkerBlobs, owed_blobs, written_manifest
from elastic_dp.checkpoint.commit_record import Manifest
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.controller_link import WrittenBlobs


@dataclass
class PendingCheckpoint:
    """A checkpoint of which some blobs are written. `first` is the first report about it, and
    `began_at` the begin of the first snapshot.
    """

    first: WrittenBlobs
    blobs: dict[WorkerId, list[WorkerBlobs]] = field(default_factory=dict)
    # The member that each blob was requested from, by name.
    requested: dict[str, WorkerId] = field(default_factory=dict)
    stall_s: float = 0.0
    told_at: float = 0.0
    began_at: float = math.inf
    reports: dict[WorkerId, WrittenBlobs] = field(default_factory=dict)  # the newest of each
    # All that was reported, with whatever state.
    all_written: list[WorkerBlobs] = field(default_factory=list)
    odd: set[WorkerId] = field(default_factory=set)  # members with another state
    held_back: bool = False  # committed only if nothing follows
    error: Exception | None = None  # the run's, once this is committed

    @property
    def step(self) -> int:
        return self.first.blobs.step

    @property
    def written(self) -> list[WorkerBlobs]:
        return [one for told in self.blobs.values() for one in told]

    @property
    def is_divided(self) -> bool:
        """Whether members hold parts of the optimizer's state."""
        return any(one.manifest.entries for one in self.written)

    @property
    def is_written(self) -> bool:
        """Whether all blobs are written."""
        return written_manifest(self.written) is not None

    @property
    def differs(self) -> bool:
        """Whether the members that have reported hold different states."""
        return len({one.digest for one in self.written}) > 1

    def pair(self) -> tuple[WrittenBlobs, WrittenBlobs] | None:
        """Returns reports of two members with different states."""
        first, *others = self.reports.values()
        found = (one for one in others if one.blobs.digest != first.blobs.digest)
        other = next(found, None)
        return None if other is None else (first, other)

    def keep_majority(self) -> None:
        """Ignores the members that do not hold the state that most of them hold, or the first."""
        digests = [one.blobs.digest for one in self.reports.values()]
        chosen = max(digests, key=digests.count)
        self.odd = {w for w, one in self.reports.items() if one.blobs.digest != chosen}
        self.first = next(one for one in self.reports.values() if one.blobs.digest == chosen)
        self.blobs = {w: told for w, told in self.blobs.items() if w not in self.odd}
        self.requested = {x: w for x, w in self.requested.items() if w not in self.odd}

    def replace(self, manifest: Manifest) -> None:
        """Takes this state, all of which is written, in place of those that members hold."""
        names, writer = manifest.headers.keys(), self.first.blobs.writer
        blobs = WorkerBlobs(writer, manifest, dict.fromkeys(names, writer), frozenset(names))
        self.first, self.blobs = dataclasses.replace(self.first, blobs=blobs), {writer: [blobs]}

    def add(self, worker: WorkerId, written: WrittenBlobs, now: float) -> None:
        if worker in self.odd:
            return
        self.reports[worker] = written
        self.all_written.append(written.blobs)
        self.stall_s = max(self.stall_s, written.stall_s)
        self.blobs.setdefault(worker, []).append(written.blobs)
        self.told_at = now
        self.began_at = min(self.began_at, now - written.took_s)


@dataclass(frozen=True, slots=True)
class BlobsRequest:
    """A request that `worker` also writes the blobs with these names of the checkpoint of
    `step`."""

    worker: WorkerId
    step: int
    names: Sequence[str]


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
        self, worker: WorkerId, written: WrittenBlobs, now: float
    ) -> PendingCheckpoint | AlreadyCommitted | None:
        """Records what a member wrote. Returns None if it is ignored."""
        step = written.blobs.step
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

    def requests_for_lost(self, one: PendingCheckpoint) -> list[BlobsRequest]:
        """Returns requests for what lost members were to write."""
        return self._requests(one, self._lost)

    def requests_after_loss(self, one: PendingCheckpoint, worker: WorkerId) -> list[BlobsRequest]:
        """Returns requests for what a lost member was to write, and for what was requested from
        it."""
        again = {name for name, asked in one.requested.items() if asked == worker}
        for name in again:
            del one.requested[name]
        return self._requests(one, self._lost, again)

    def requests_for_missing(self, one: PendingCheckpoint) -> list[BlobsRequest]:
        """Returns requests for all missing blobs."""
        return self._requests(one, None)

    def _requests(
        self,
        one: PendingCheckpoint,
        writers: Collection[WorkerId] | None,
        names: Collection[str] = (),
    ) -> list[BlobsRequest]:
        """Returns requests for blobs that are not written, which these `writers`, or any, were to
        write, and for these `names`, to members that are present and hold them.

        Writing a blob twice does no harm.
        """
        owed = owed_blobs(one.written)
        wanted = {
            name
            for name, planned in owed.items()
            if name not in one.requested
            and (writers is None or name in names or not planned.isdisjoint(writers))
        }
        found = []
        for worker, told in one.blobs.items():
            if worker in self._lost:
                continue
            mine = sorted({name for report in told for name in report.planned if name in wanted})
            if mine:
                found.append(BlobsRequest(worker, one.step, tuple(mine)))
                one.requested |= dict.fromkeys(mine, worker)
                wanted.difference_update(mine)
        return found

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
