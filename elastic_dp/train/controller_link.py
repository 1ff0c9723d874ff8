"""The ports of a session: messages to the controller, and the status in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from elastic_dp.coordinator.messages import Event, WorkerId
from elastic_dp.distributed.rendezvous import MemberRecord
from elastic_dp.train.generations.worker_progress import LogCall

if TYPE_CHECKING:
    from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs


class ControllerLink(Protocol):
    """Messages to the controller. Classes that are derived from it leave out those that nobody
    reads. Posting never waits and never fails: the controller asks again for what was lost."""

    def post(self, event: Event) -> None: ...

    def register(self, record: MemberRecord) -> None:
        """Registers a process for a group that forms. The records of all members are delivered to
        its `Rendezvous`. Any thread may call it."""
        ...

    def log(self, call: LogCall, previous: LogCall | None, metrics: Mapping[str, Any]) -> None:
        """Records metrics. All workers send the same, and the receiver keeps the first. `previous`
        is the call before this one, if it is known. The receiver asks again for what it lacks."""
        return

    def flush(self) -> None:
        """Sends what is held of metrics. Returns when it is sent."""
        return

    def say(self, text: str) -> None:
        """Sends a message for the user. Any thread may call it."""
        return

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        """Reports written parts of a checkpoint. Any thread may call it."""
        return

    def skipped(self, row_groups: Sequence[str]) -> None:
        """Reports all row groups skipped so far, before this worker has finished."""
        return


class HeartbeatStatus(Protocol):
    """The status in heartbeats: the training thread writes it, a process beside it reads it."""

    def write(self, generation: int, step: int, phase: str) -> None:
        return

    def write_evaluations(self, body: int, count: int, *, ended: bool) -> None:
        """Writes how often this worker has called ctx.evaluate in a loop body, so far or, if it has
        ended, in all. `body`: see `HeartbeatReceived.evaluations`."""
        return

    def write_speed(self, virtual_s: float) -> None:
        """Writes the seconds for one virtual worker; 0 if unknown in this generation."""
        return

    def write_sending(self, sending_s: float) -> None:
        """Writes `link_times.sending_s` of the present group."""
        return

    def write_fault(self, kind: str, text: str) -> None:
        """The device has failed (`kind`: a FaultKind), and this process ends now."""
        return
