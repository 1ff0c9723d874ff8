"""The ports of a session: messages to the controller, and the status that heartbeats carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_dp.checkpoint.checkpoint_writer import Share
from elastic_dp.checkpoint.commit_record import Manifest
from elastic_dp.coordinator.messages import Event, WorkerId


@dataclass(frozen=True, slots=True)
class WrittenParts:
    """What one member has written of a checkpoint.

    `members`: by rank, those whom this one shared the writing with; one that is a step behind may
    have others. `manifest`: what the checkpoint is. `naming`: how parameters are called
    (`checkpoint.naming`). `versions`: what it was made with. `job`, `data`: fingerprints of the
    code and the data set. `stall_s`: how long the snapshot kept this member from training.
    `lineage_id`: the generation in which the run began, or went back, whose state this is.
    """

    share: Share
    members: tuple[WorkerId, ...]
    manifest: Manifest
    naming: Mapping[str, Any]
    versions: Mapping[str, str]
    stall_s: float
    lineage_id: int = 0
    job: str = ""
    data: str = ""


class ControllerLink(Protocol):
    """Messages to the controller. Posting never waits and never fails: the controller asks again
    for what was lost."""

    def post(self, event: Event) -> None: ...

    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics; all workers send the same, the receiver keeps the first."""
        ...

    def say(self, text: str) -> None:
        """For whoever follows the run; any thread may call it."""
        ...

    def wrote(self, worker: WorkerId, written: WrittenParts) -> None:
        """Parts of a checkpoint are written; any thread may call it."""
        ...

    def skipped(self, row_groups: Sequence[str]) -> None:
        """All row groups that were left out so far; before this worker says that it has
        finished."""
        ...


class HeartbeatStatus(Protocol):
    """Where heartbeats look: written by the training thread, read by a process beside it."""

    def write(self, generation: int, step: int, phase: str) -> None: ...

    def write_speed(self, virtual_s: float) -> None:
        """Seconds for one virtual worker; 0: not known in this generation."""
        ...

    def write_fault(self, kind: str, text: str) -> None:
        """The device has failed (`kind`: a FaultKind), and this process ends now."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """When a generation began here, for those who measure pauses (seconds of `time.time`)."""

    generation: int
    formed_at: float
    copied_at: float  # its state is handed over, where it gives or takes any
    bytes_received: int
