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
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from elastic_dp.checkpoint.checkpoint_writer import (
    WrittenBlobs,
    differences,
    owed_blobs,
    written_manifest,
)
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.errors import StateDiffers

_NAMED = 5  # differences that an error names
_WEIGHTS = ("step.parameters", "step.buffers", "step.optimizer")


@dataclass(frozen=True, slots=True)
class BlobsRequest:
    """Asks `worker` to write the blobs with these names, too, of the checkpoint of `step`."""

    worker: WorkerId
    step: int
    names: Sequence[str]


@dataclass
class PendingCheckpoint:
    """A checkpoint of which some blobs are written. `written`: the reports about it."""

    step: int
    written: list[WrittenBlobs] = field(default_factory=list)
    requested: dict[str, WorkerId] = field(default_factory=dict)  # of whom, by the blob's name
    stall_s: float = 0.0
    told_at: float = 0.0
    began_at: float = math.inf
    error: StateDiffers | None = None  # members hold different states
    weights_differ: bool = False

    def add(self, written: WrittenBlobs, now: float) -> None:
        self.written.append(written)
        self.stall_s = max(self.stall_s, written.stall_s)
        self.told_at = now
        self.began_at = min(self.began_at, now - written.took_s)

    def states(self) -> list[list[WrittenBlobs]]:
        """Returns what members have reported, by their state; that of most members is first."""
        found: dict[str, list[WrittenBlobs]] = {}
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

    def silent(self, lost: Set[WorkerId]) -> set[WorkerId]:
        """Returns the members that are present and have not reported."""
        return set(self.written[0].members) - {report.writer for report in self.written} - lost

    def requests(self, lost: Set[WorkerId], *, all_missing: bool) -> list[BlobsRequest]:
        """Returns requests to members that hold blobs that lost members were to write, or any that
        are missing. Writing a blob twice does no harm."""
        usual, wanted = self.states()[0], set[str]()
        for name, planned in owed_blobs(usual).items():
            asked = self.requested.get(name)
            if asked in lost or (asked is None and (all_missing or planned & lost)):
                wanted.add(name)
        found = []
        for worker in dict.fromkeys(report.writer for report in usual):
            if worker in lost:
                continue
            held = {name for report in usual if report.writer == worker for name in report.planned}
            if mine := sorted(held & wanted):
                found.append(BlobsRequest(worker, self.step, tuple(mine)))
                self.requested |= dict.fromkeys(mine, worker)
                wanted.difference_update(mine)
        return found

    def whole(self, *, at_end: bool) -> list[WrittenBlobs] | None:
        """Returns the reports that make the checkpoint, once all of it is written. `at_end`:
        members write nothing more. Then any state counts that is whole, or what is written of all
        of them: what is equal on all, as the weights are, is whole in that."""
        if self.weights_differ and not at_end:
            return None  # the next step decides
        candidates = [*self.states(), self.written] if at_end else self.states()[:1]
        return next((some for some in candidates if written_manifest(some) is not None), None)


def _key_of(path: str) -> str:
    """Returns the words of a user for a path in the state."""
    path = re.sub(r"^body\.user\.([^. ]+)", r"state['\1'].state_dict()", path)
    groups = r"^(?:body|step)\.held\.optimizers\.0\.groups\.(\d+)\.values\.(\w+)"
    return re.sub(groups, r"optimizer.param_groups[\1]['\2']", path)
