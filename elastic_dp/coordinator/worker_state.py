"""What the coordinator knows of one worker, and the identities it gives out.

An identity is used once. A coordinator that took over cannot know how far the one before it
counted, so its identities carry the generation it claimed on arrival, which nobody else can own:
"w12", then "w7.1", "w7.2".
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_dp.coordinator.messages import (
    START,
    UNKNOWN_LOCATION,
    HeartbeatReceived,
    Signature,
    TrainingPosition,
    WorkerFinished,
    WorkerId,
    WorkerLocation,
    WorkerReported,
    WorkerStopped,
)


class Stage(StrEnum):
    STARTING = "starting"  # requested; may stay so for ever, and holds nobody up
    BUILDING = "building"  # runs the user's code up to the loop
    READY = "ready"  # has no state yet, waits to become a member
    MEMBER = "member"  # of the present generation
    RETAINED = "retained"  # no member any more, kept until the others have made a step without it
    LEAVING = "leaving"  # asked to leave
    EVICTED = "evicted"  # to be killed; not confirmed dead, so possibly alive
    UNREPORTED = "unreported"  # known to exist, has not reported its status yet (takeover)

    # An enum's own is a function of Python, and there may be thousands of workers to look up.
    __hash__ = str.__hash__


# Counted towards the number of workers wanted, unless their node is about to go.
PROVISIONED_STAGES = frozenset(
    {Stage.STARTING, Stage.BUILDING, Stage.READY, Stage.MEMBER, Stage.UNREPORTED}
)


@dataclass(slots=True, eq=False)
class HeartbeatProgress:
    """Where a worker is by its heartbeats, and how many have said the same since the first that
    did."""

    where: tuple[int, int, str] = (0, 0, "start")  # generation, step, phase
    beats: int = 0
    cpu_s: float = 0.0  # used meanwhile
    first_step: int | None = None  # committed before the first that its process makes
    _beat: int = -1
    _cpu_s_before: float = 0.0

    @property
    def phase(self) -> str:
        return self.where[2]

    def begin_at(self, step: int) -> None:
        self.first_step = step

    def restart(self) -> None:
        """What it was doing so far does not count."""
        self._cpu_s_before += self.cpu_s
        self.beats, self.cpu_s = 0, 0.0

    def heard(self, event: HeartbeatReceived) -> None:
        if event.beat <= self._beat:
            return  # late, or twice
        self._beat = event.beat
        where = (event.generation, event.step, event.phase)
        if where == self.where:
            self.beats += 1
            self.cpu_s = event.cpu_s - self._cpu_s_before
            return
        self.where, self.beats, self.cpu_s, self._cpu_s_before = where, 0, 0.0, event.cpu_s


@dataclass(slots=True, eq=False)
class WorkerState:
    """One identity. `position` and `has_state` are what it last reported, and hold only while it is
    stopped."""

    id: WorkerId
    number: int  # in the order of requests
    stage: Stage
    since: float  # when it came to this stage
    location: WorkerLocation = UNKNOWN_LOCATION
    renewed_at: float = -math.inf  # last answer to a heartbeat
    signature: Signature | None = None
    can_source: bool = False
    entered: int = 0  # last generation it is known to have entered
    position: TrainingPosition = START
    has_state: bool = False
    at_head: bool = True
    lineage_id: int = 0  # the lineage its state descends from
    finished: str | None = None  # digest of its final weights
    finished_because: str = ""
    draining: bool = False
    leave_at: float = math.inf  # when a notice forces it out, margin included
    leave_reason: str = ""
    failed_joins: int = 0
    reminded_beats: int = 0  # heartbeats since it was told what it has not acted on
    odd_beats: int = 0  # heartbeats that show it done, without its report
    progress: HeartbeatProgress = field(default_factory=HeartbeatProgress)
    stuck: bool = False  # evicted for that
    virtual_s: float = 0.0  # for one virtual worker, as last measured; 0: not known
    measured_in: int = 0  # in this generation

    def __repr__(self) -> str:
        return (
            f"{self.id}:{self.stage}{'' if not self.has_state else f'@{self.position.step}'}"
            f"{' draining' if self.draining else ''}{' finished' if self.finished else ''}"
        )

    # ------------------------------------------------------------------------- its life

    def move(self, stage: Stage, now: float) -> None:
        self.stage, self.since = stage, now

    def locate(self, location: WorkerLocation) -> None:
        self.location = location

    def renew(self, now: float) -> None:
        """Its lease runs from here."""
        self.renewed_at = now

    def became_ready(self, signature: Signature | None, can_source: bool) -> None:
        self.signature, self.can_source = signature, can_source

    def notice(self, leave_at: float | None, reason: str) -> bool:
        """Its node will go. Whether that says anything new; None: no other time than before."""
        before = self.draining, self.leave_at
        self.draining, self.leave_reason = True, reason
        if leave_at is not None:
            self.leave_at = leave_at
        return before != (self.draining, self.leave_at)

    def retain(self, reason: str) -> None:
        self.leave_reason = reason

    def mark_stuck(self, stuck: bool) -> None:
        self.stuck = stuck

    def touch(self, now: float) -> None:
        """It was told once more what it should do."""
        self.since = now

    # --------------------------------------------------------------- its part in a generation

    def enter(self, generation: int) -> None:
        self.entered, self.odd_beats, self.reminded_beats = generation, 0, 0

    def formed(self) -> None:
        self.failed_joins = 0

    def could_not_join(self) -> None:
        self.failed_joins += 1

    def measured(self, virtual_s: float, generation: int) -> None:
        self.virtual_s, self.measured_in = virtual_s, generation

    def told(self) -> None:
        """It has not acted on this yet."""
        self.reminded_beats = 0

    def count_reminder(self) -> int:
        self.reminded_beats += 1
        return self.reminded_beats

    def looked_done(self, limit: int) -> bool:
        """A heartbeat shows it done, without its report; whether that was so `limit` times."""
        self.odd_beats += 1
        if self.odd_beats < limit:
            return False
        self.odd_beats = 0
        return True

    def stopped(self, event: WorkerStopped) -> None:
        self.position, self.has_state, self.at_head = event.position, event.has_state, event.at_head
        if event.has_state:
            self.lineage_id = event.lineage_id

    def finish(self, event: WorkerFinished) -> None:
        self.finished, self.position, self.has_state = event.digest, event.position, True
        self.finished_because, self.lineage_id = event.reason, event.lineage_id
        self.at_head = True

    def reported(self, event: WorkerReported) -> None:
        self.signature, self.can_source = event.signature, event.can_source
        self.entered, self.lineage_id = event.generation, event.lineage_id
        self.position, self.has_state = event.position, event.has_state


class Identities:
    """Counts workers up; never gives the same identity twice."""

    def __init__(self) -> None:
        self.given = 0
        self.prefix = "w"

    def adopt(self, claimed: int) -> None:
        """From now on count under the generation claimed on arrival."""
        self.prefix = f"w{claimed}."

    def next(self) -> tuple[WorkerId, int]:
        self.given += 1
        return f"{self.prefix}{self.given}", self.given
