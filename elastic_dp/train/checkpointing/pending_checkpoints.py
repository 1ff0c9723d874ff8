"""Checkpoints with some blobs written: which ones are missing, who has them, when one is complete.

The module has no clock and no I/O. The rules:

- A checkpoint is complete when every blob of one state is written, by any member, and each member
  that is present has reported its digest, even one that had nothing to write.
- A blob whose writer is lost is requested from another member that holds it.
- If the states of members differ, the one that most of them hold counts. If their weights differ,
  it counts only if no step follows, since the next step compares them.
- A late report about a step before the newest commit record is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_dp.checkpoint.checkpoint_writer import (
    WorkerBlobs,
    WrittenBlobs,
    differences,
    owed_blobs,
    written_manifest,
)
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.errors import StateDiffers

_NAMED = 5  # differences that an error names
_WEIGHTS = ("step.parameters", "step.buffers", "step.optimizer")


@dataclass
class PendingCheckpoint:
    """A checkpoint of which some blobs are written. `first` is the first report about it, and
    `began_at` the begin of the first snapshot."""

    first: WrittenBlobs
    written: list[WorkerBlobs] = field(default_factory=list)
    requested: dict[str, WorkerId] = field(default_factory=dict)  # of whom, by the blob's name
    stall_s: float = 0.0
    told_at: float = 0.0
    began_at: float = math.inf
    error: StateDiffers | None = None  # members hold different states
    weights_differ: bool = False

    @property
    def step(self) -> int:
        return self.first.blobs.step

    def add(self, written: WrittenBlobs, now: float) -> None:
        self.written.append(written.blobs)
        self.stall_s = max(self.stall_s, written.stall_s)
        self.told_at = now
        self.began_at = min(self.began_at, now - written.took_s)

    def states(self) -> list[list[WorkerBlobs]]:
        """Returns what members have reported, by their state; that of most members is first."""
        found: dict[str, list[WorkerBlobs]] = {}
        for one in self.written:
            found.setdefault(one.digest, []).append(one)
        return sorted(found.values(), key=lambda some: -len({one.writer for one in some}))

    def note_differences(self) -> None:
        """Notes which members hold another state than most, and what differs."""
        usual, *others = self.states()
        paths = differences(others[0][0].manifest, usual[0].manifest)
        names = ", ".join(map(_key_of, paths[:_NAMED])) + (", …" if len(paths) > _NAMED else "")
        odd = sorted({one.writer for some in others for one in some})
        self.error = StateDiffers(self.step, names, ", ".join(odd))
        self.weights_differ = any(path.startswith(_WEIGHTS) for path in paths)


@dataclass(frozen=True, slots=True)
class BlobsRequest:
    """A request that `worker` also writes the blobs with these names of the checkpoint of
    `step`."""

    worker: WorkerId
    step: int
    names: Sequence[str]


class PendingCheckpoints:
    """The pending checkpoints of one run."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCheckpoint] = {}
        self.committed_step = 0  # the newest
        self._lost: set[WorkerId] = set()
        self._abandoned: frozenset[WorkerId] = frozenset()  # lost in an abandoned lineage
        self._rejected = -1  # reports of this lineage or earlier ones are wrong

    def all(self) -> list[PendingCheckpoint]:
        return list(self._pending.values())

    @property
    def steps(self) -> frozenset[int]:
        return frozenset(self._pending)

    def add(self, worker: WorkerId, written: WrittenBlobs, now: float) -> PendingCheckpoint | None:
        """Records what a member wrote. Returns None if it is ignored."""
        step = written.blobs.step
        if worker in self._abandoned or written.lineage_id <= self._rejected:
            return None
        if step <= self.committed_step:
            return None
        one = self._pending.setdefault(step, PendingCheckpoint(written))
        one.add(written, now)
        return one

    def lose(self, worker: WorkerId) -> None:
        self._lost.add(worker)

    def silent(self, one: PendingCheckpoint) -> set[WorkerId]:
        """Returns the members that are present and have not reported."""
        reported = {report.writer for report in one.written}
        return set(one.first.members) - reported - self._lost

    def requests(self, one: PendingCheckpoint, *, all_missing: bool) -> list[BlobsRequest]:
        """Returns requests to members that hold blobs that lost members were to write, or any that
        are missing. Writing a blob twice does no harm."""
        usual, wanted = one.states()[0], set[str]()
        for name, planned in owed_blobs(usual).items():
            asked = one.requested.get(name)
            if asked in self._lost or (asked is None and (all_missing or planned & self._lost)):
                wanted.add(name)
        found = []
        for worker in dict.fromkeys(report.writer for report in usual):
            if worker in self._lost:
                continue
            held = {name for report in usual if report.writer == worker for name in report.planned}
            if mine := sorted(held & wanted):
                found.append(BlobsRequest(worker, one.step, tuple(mine)))
                one.requested |= dict.fromkeys(mine, worker)
                wanted.difference_update(mine)
        return found

    def complete(
        self, one: PendingCheckpoint, *, waits: bool, at_end: bool = False
    ) -> list[WorkerBlobs] | None:
        """Returns the reports that make the checkpoint, once all of it is written. With `waits`, it
        also needs the digests of all members that are present.

        `at_end`: members write nothing more. Then any state counts that is whole, or what is
        written of all of them: what is equal on all, as the weights are, is whole in that.
        """
        if one.step not in self._pending or (one.weights_differ and not at_end):
            return None  # a later one was committed meanwhile, or the next step decides
        if waits and self.silent(one):
            return None
        states = one.states()
        candidates = [*states, one.written] if at_end else states[:1]
        return next((some for some in candidates if written_manifest(some) is not None), None)

    # ------------------------------------------------------------------------------- outcomes

    def begin_commit(self, step: int) -> None:
        """Removes this checkpoint, which is about to be committed, and all earlier ones."""
        self._pending = {s: other for s, other in self._pending.items() if s > step}

    def reject(self, lineage_id: int) -> None:
        """Discards what was made in lineage `lineage_id` or an earlier one: it is wrong."""
        self._pending.clear()
        self._rejected, self.committed_step = lineage_id, 0

    def restart(self) -> None:
        """The run restarts from a checkpoint: later pending checkpoints are discarded."""
        self._pending.clear()
        self.committed_step = 0  # the newest one by name may be damaged
        self._abandoned = frozenset(self._lost)


def _key_of(path: str) -> str:
    """Returns the words of a user for a path in the state."""
    path = re.sub(r"^body\.user\.([^. ]+)", r"state['\1'].state_dict()", path)
    groups = r"^(?:body|step)\.held\.optimizers\.0\.groups\.(\d+)\.values\.(\w+)"
    return re.sub(groups, r"optimizer.param_groups[\1]['\2']", path)
