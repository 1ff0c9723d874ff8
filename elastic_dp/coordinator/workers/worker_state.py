"""What the coordinator knows about one worker, and the identities of workers.

Identities are used once. A coordinator that takes over cannot know how far the previous one
counted, so its identities carry the generation that it claimed, which no other controller can own:
"w12", then "w7.1", "w7.2".
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerId


class Stage(StrEnum):
    """The stages of a worker's life."""

    STARTING = "starting"  # requested; may stay pending for ever, and nothing waits for it
    BUILDING = "building"  # runs the user's code up to the loop
    READY = "ready"  # has no state yet, waits to become a member
    MEMBER = "member"  # of the present generation
    RETAINED = "retained"  # not a member any more; kept until the others have made a step
    LEAVING = "leaving"  # asked to leave
    EVICTED = "evicted"  # told to be killed; not confirmed dead, so perhaps alive
    UNREPORTED = "unreported"  # exists, but has not reported its state yet (takeover)

    # An enum's own hash is a Python function, which is slow for thousands of workers.
    __hash__ = str.__hash__


# Workers in these stages count towards the number of workers wanted, unless they drain.
PROVISIONED_STAGES = frozenset(
    {Stage.STARTING, Stage.BUILDING, Stage.READY, Stage.MEMBER, Stage.UNREPORTED}
)


@dataclass(slots=True, eq=False)
class HeartbeatProgress:
    """The position in a worker's latest heartbeat, and how many heartbeats have repeated it."""

    where: tuple[int, int, str] = (0, 0, "start")  # generation, step, phase
    beats: int = 0
    cpu_s: float = 0.0  # processor time used since the position was first reported
    first_step: int | None = None  # the committed step after which the process makes its first one
    _beat: int = -1
    _cpu_s_before: float = 0.0

    @property
    def phase(self) -> str:
        return self.where[2]

    def repeats(self, generation: int, phase: str) -> int:
        """Return how many heartbeats have repeated this phase; 0 if the latest has another one."""
        return self.beats if self.where[::2] == (generation, phase) else 0

    def restart(self) -> None:
        """Count from now on: what the worker did so far does not matter."""
        self._cpu_s_before += self.cpu_s
        self.beats, self.cpu_s = 0, 0.0

    def record(self, event: m.HeartbeatReceived) -> None:
        """Take a heartbeat."""
        if event.beat <= self._beat:
            return  # late, or a duplicate
        self._beat = event.beat
        where = (event.generation, event.step, event.phase)
        if where == self.where:
            self.beats += 1
            self.cpu_s = event.cpu_s - self._cpu_s_before
            return
        self.where, self.beats, self.cpu_s, self._cpu_s_before = where, 0, 0.0, event.cpu_s


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker. `position` and `has_state` are its last report, and valid only while it is
    stopped.
    """

    id: WorkerId
    number: int  # in the order of requests
    stage: Stage
    since: float  # when it entered this stage
    location: m.WorkerLocation = m.UNKNOWN_LOCATION
    renewed_at: float = -math.inf  # when a heartbeat was last answered
    signature: m.Signature | None = None
    can_source: bool = False
    entered: int = 0  # the last generation it is known to have entered
    position: m.TrainingPosition = m.START
    has_state: bool = False
    at_head: bool = True
    lineage_id: int = 0  # the lineage that its state descends from
    # subtrees that it has finished in the step after `position`, see WorkerStopped
    finished_nodes: tuple[tuple[int, int], ...] = ()
    partial: bool = False  # it holds only a part of a sharded state
    lacks_copies: bool = False  # see `WorkerStopped.lacks_copies`
    finished: str | None = None  # digest of its final weights
    finished_because: str = ""
    draining: bool = False
    leave_at: float = math.inf  # when a drain notice forces it out, margin included
    leave_reason: str = ""
    failed_joins: int = 0
    reminded_beats: int = 0  # heartbeats since it was sent a command that it has not acted on
    progress: HeartbeatProgress = field(default_factory=HeartbeatProgress)
    stuck: bool = False  # evicted because it was stuck
    virtual_s: float = 0.0  # time for one virtual worker, as last measured; 0: not known
    measured_in: int = 0  # the generation of that measurement

    def __repr__(self) -> str:
        return (
            f"{self.id}:{self.stage}{'' if not self.has_state else f'@{self.position.step}'}"
            f"{' draining' if self.draining else ''}{' finished' if self.finished else ''}"
        )

    # ------------------------------------------------------------------------- its life

    def move(self, stage: Stage, now: float) -> None:
        self.stage, self.since = stage, now

    def notice(self, leave_at: float | None, reason: str) -> bool:
        """Take a drain notice; `leave_at` None leaves the time as it is. Return whether it changes
        anything.
        """
        before = self.draining, self.leave_at
        self.draining, self.leave_reason = True, reason
        if leave_at is not None:
            self.leave_at = leave_at
        return before != (self.draining, self.leave_at)

    # --------------------------------------------------------------- its part in a generation

    def enter(self, generation: int) -> None:
        self.entered, self.reminded_beats = generation, 0

    def stopped(self, event: m.WorkerStopped) -> None:
        self.position, self.has_state, self.at_head = event.position, event.has_state, event.at_head
        self.finished_nodes = event.finished
        self.partial, self.lacks_copies = event.partial, event.lacks_copies
        if event.has_state:
            self.lineage_id = event.lineage_id

    def finish(self, event: m.WorkerFinished) -> None:
        self.finished, self.position, self.has_state = event.digest, event.position, True
        self.finished_because, self.lineage_id = event.reason, event.lineage_id
        self.at_head, self.finished_nodes = True, ()

    def reported(self, event: m.WorkerReported) -> None:
        self.signature, self.can_source = event.signature, event.can_source
        self.entered, self.lineage_id = event.generation, event.lineage_id
        self.position, self.has_state = event.position, event.has_state


class Identities:
    """Numbers workers; never gives the same identity twice."""

    def __init__(self) -> None:
        self.given = 0
        self.prefix = "w"

    def next(self) -> tuple[WorkerId, int]:
        self.given += 1
        return f"{self.prefix}{self.given}", self.given
