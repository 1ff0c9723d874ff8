"""The ports of a session: messages to the controller, and the status in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_dp.checkpoint.checkpoint_writer import WorkerBlobs
from elastic_dp.coordinator.messages import Event, WorkerId
from elastic_dp.distributed.rendezvous import MemberRecord
from elastic_dp.train.generations.worker_progress import LogCall


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """What one member has written of a checkpoint.

    - `members` are those that shared the writing, by rank; a member that is a step behind may have
      others.
    - `naming` has the tensors' names (checkpoint/state_dict_names.py), `versions` the software that
      wrote them.
    - `job` and `data` are fingerprints of the code and the data set.
    - `stall_s` is how long the snapshot blocked this member's training, in seconds.
    - `took_s` is the time from the begin of the snapshot to this report, in seconds.
    - `lineage_id` is the generation in which the run of this state began or went back.
    """

    blobs: WorkerBlobs
    members: tuple[WorkerId, ...]
    naming: Mapping[str, Any]
    versions: Mapping[str, str]
    stall_s: float
    lineage_id: int = 0
    job: str = ""
    data: str = ""
    took_s: float = 0.0


class ControllerLink(Protocol):
    """Messages to the controller.

    Posting never waits and never fails: the controller asks again for what was lost.
    """

    def post(self, event: Event) -> None: ...

    def register(self, record: MemberRecord) -> None:
        """Registers a process for a group that forms. The records of all members are delivered to
        its `Rendezvous`. Any thread may call it."""
        ...

    def log(self, call: LogCall, previous: LogCall | None, metrics: Mapping[str, Any]) -> None:
        """Records metrics. All workers send the same, and the receiver keeps the first.

        `previous` is the call before this one, if it is known. The receiver asks again for what it
        lacks.
        """
        ...

    def say(self, text: str) -> None:
        """Sends a message for the user. Any thread may call it."""
        ...

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        """Reports written parts of a checkpoint. Any thread may call it."""
        ...

    def skipped(self, row_groups: Sequence[str]) -> None:
        """Reports all row groups skipped so far, before this worker reports that it has
        finished."""
        ...


class HeartbeatStatus(Protocol):
    """The status in heartbeats: the training thread writes it, a process beside it reads it."""

    def write(self, generation: int, step: int, phase: str) -> None: ...

    def write_speed(self, virtual_s: float) -> None:
        """Writes the seconds for one virtual worker; 0 if unknown in this generation."""
        ...

    def write_fault(self, kind: str, text: str) -> None:
        """The device has failed (`kind`: a FaultKind), and this process ends now."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """When a generation began on this worker, to measure pauses (seconds of `time.time`)."""

    generation: int
    formed_at: float
    copied_at: float  # when a transfer of its state has ended, if there was one
    bytes_received: int
