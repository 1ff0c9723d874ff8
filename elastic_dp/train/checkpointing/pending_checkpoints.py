"""Checkpoints of which some parts are written: which parts are missing, who has them, and when one
is complete.

Here is no clock and no I/O. The rules:
- A checkpoint is complete when every part of one state is written, by whomever, and each member
  that is there has told its digest, also one that had nothing to write.
- A part whose writer is lost is requested from another member that has told that it holds the
  state; once from each.
- What is told late of a step before the newest commit record is of no use to anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_dp.checkpoint.checkpoint_writer import Share, missing
from elastic_dp.checkpoint.commit_record import Manifest
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.controller_link import WrittenParts


@dataclass
class PendingCheckpoint:
    """`first`: what the first member told of it."""

    first: WrittenParts
    shares: dict[WorkerId, list[Share]] = field(default_factory=dict)
    requested: dict[int, WorkerId] = field(default_factory=dict)  # from whom each part was
    stall_s: float = 0.0
    told_at: float = 0.0

    @property
    def step(self) -> int:
        return self.first.share.step

    @property
    def manifest(self) -> Manifest:
        return self.first.manifest

    @property
    def written(self) -> list[Share]:
        return [share for shares in self.shares.values() for share in shares]

    @property
    def all_parts(self) -> Sequence[int]:
        return range(len(self.manifest.layout.parts))

    def add(self, worker: WorkerId, written: WrittenParts, now: float) -> None:
        self.stall_s = max(self.stall_s, written.stall_s)
        self.shares.setdefault(worker, []).append(written.share)
        self.told_at = now

    def share_of(self, worker: WorkerId) -> Sequence[int]:
        """The parts that this one of its members is to write."""
        members = self.first.members
        return self.manifest.layout.share(members.index(worker), len(members))


@dataclass(frozen=True, slots=True)
class PartsRequest:
    """Have `worker` write these parts of the checkpoint of `step`, too."""

    worker: WorkerId
    step: int
    parts: Sequence[int]


@dataclass(frozen=True, slots=True)
class AlreadySealed:
    """`step` is the newest that is; whoever requested it again is told again."""

    step: int


class PendingCheckpoints:
    """Of one run."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCheckpoint] = {}
        self._committed = 0  # the newest
        self._refused: set[int] = set()  # steps of which the members hold different states
        self._lost: set[WorkerId] = set()
        self._abandoned: frozenset[WorkerId] = frozenset()  # lost in a lineage that was left
        self._rejected = -1  # what those made who began in this generation or before is wrong

    def all(self) -> list[PendingCheckpoint]:
        return list(self._pending.values())

    @property
    def steps(self) -> frozenset[int]:
        return frozenset(self._pending)

    def add(
        self, worker: WorkerId, written: WrittenParts, now: float
    ) -> PendingCheckpoint | AlreadySealed | None:
        """None: it counts for nothing."""
        step = written.share.step
        abandoned = worker in self._abandoned or written.lineage_id <= self._rejected
        if abandoned or step in self._refused:
            return None
        if step <= self._committed:
            return AlreadySealed(self._committed)
        one = self._pending.setdefault(step, PendingCheckpoint(written))
        one.add(worker, written, now)
        return one

    def lose(self, worker: WorkerId) -> None:
        self._lost.add(worker)

    def requests_for_lost(self, one: PendingCheckpoint) -> list[PartsRequest]:
        """For the shares of all members that are lost."""
        lost = self._lost.intersection(one.first.members)
        return [x for worker in lost for x in self._requests(one, one.share_of(worker))]

    def requests_after_loss(self, one: PendingCheckpoint, worker: WorkerId) -> list[PartsRequest]:
        """For the share of this one, and for what was requested from it."""
        again = [part for part, asked in one.requested.items() if asked == worker]
        for part in again:
            del one.requested[part]
        share = one.share_of(worker) if worker in one.first.members else ()
        return self._requests(one, [*again, *share])

    def requests_for_missing(self, one: PendingCheckpoint) -> list[PartsRequest]:
        """For whatever is not written; also what is in nobody's share, where members shared the
        writing by two memberships."""
        return self._requests(one, one.all_parts)

    def _requests(self, one: PendingCheckpoint, parts: Sequence[int]) -> list[PartsRequest]:
        """From a member that is there and has told that it holds this state; twice written does no
        harm."""
        there = [worker for worker in one.shares if worker not in self._lost]
        absent = set(missing(one.manifest, one.written)).intersection(parts)
        absent.difference_update(one.requested)
        if not there or not absent:
            return []
        one.requested.update(dict.fromkeys(absent, there[0]))
        return [PartsRequest(there[0], one.step, sorted(absent))]

    def is_complete(self, one: PendingCheckpoint, *, waits: bool = True) -> bool:
        """`waits`: for the digests of those who are there and have not told. False when a later one
        was committed meanwhile."""
        if one.step not in self._pending:
            return False
        silent = set(one.first.members).difference(one.shares, self._lost)
        return not missing(one.manifest, one.written) and not (silent and waits)

    # ---------------------------------------------------------------------- what became of them

    def begin_seal(self, step: int) -> None:
        """This one is committed now, and none before it any more."""
        self._pending = {s: other for s, other in self._pending.items() if s > step}

    def committed(self, step: int) -> None:
        self._committed = step

    def refuse(self, step: int) -> None:
        """The members hold different states."""
        self._refused.add(step)

    def reject(self, lineage_id: int) -> None:
        """What was made by those who began in generation `lineage_id` or before is wrong."""
        self._pending.clear()
        self._rejected, self._committed = lineage_id, 0

    def restart(self) -> None:
        """The run goes on from a checkpoint: of what came behind it nothing counts."""
        self._pending.clear()
        self._committed = 0  # what is newest by name may be damaged
        self._refused.clear()
        self._abandoned = frozenset(self._lost)
