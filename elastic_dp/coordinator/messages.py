"""Events that workers and the cluster report, and commands that the coordinator answers with.

Events are in the past tense, commands in the imperative; all are frozen values without behaviour,
so a journal of them replays a run. Every message about a generation carries its number, and the
number fences it: a message of an older generation changes nothing. Messages may be late, doubled,
or out of order; identities (`worker`) are used once and never again.
"""

from dataclasses import dataclass
from enum import StrEnum

from elastic_dp.coordinator.membership import START as START
from elastic_dp.coordinator.membership import UNKNOWN_LOCATION as UNKNOWN_LOCATION
from elastic_dp.coordinator.membership import Member as Member
from elastic_dp.coordinator.membership import Membership as Membership
from elastic_dp.coordinator.membership import ReplicaMismatch as ReplicaMismatch
from elastic_dp.coordinator.membership import Signature as Signature
from elastic_dp.coordinator.membership import TrainingPosition as TrainingPosition
from elastic_dp.coordinator.membership import WorkerId as WorkerId
from elastic_dp.coordinator.membership import WorkerLocation as WorkerLocation

# ------------------------------------------------------------------------------------------------
# facts


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The process is up and asks how to begin; the user's train function has not run yet."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """The process runs there; said at its start, and again when it is asked to report itself."""

    worker: WorkerId
    location: WorkerLocation


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The train function reached `ctx.steps` for the first time: the model is built, and the worker
    waits for a generation."""

    worker: WorkerId
    signature: Signature
    can_source: (
        bool  # its initial weights may count (it is the source, or never asked whether it is)
    )


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """The training thread is out of `generation`, holds nothing of it in flight, and waits for the
    next.

    Answers AbortGeneration and EndGeneration, and is sent unasked when a collective or the forming
    failed (`unreachable` names whom it could not reach) or the lease ran out. It never resumes in
    `generation`. A worker that is told of a generation it never entered answers for it all the
    same.
    """

    worker: WorkerId
    generation: int
    position: TrainingPosition
    has_state: bool
    reason: str
    unreachable: tuple[WorkerId, ...] = ()
    # At the head of the loop: every body so far has run here. Only such a source can give its state
    # to a worker that has none; one that stopped inside an evaluation can serve those behind it,
    # but no joiner.
    at_head: bool = True
    lineage_id: int = 0  # `Membership.lineage_id` of the generation in which it got its state
    mismatch: ReplicaMismatch | None = None  # why nobody may go on from the state it holds


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A heartbeat, sent by a process beside the worker, so it needs nothing of the worker's
    Python."""

    worker: WorkerId
    generation: int  # the last generation it entered; 0: none yet
    step: int  # committed steps
    phase: str  # see `progress.ORDER`
    beat: int = 0  # counts this worker's heartbeats; the answer names the one it answers
    cpu_s: float = 0.0  # processor time that its process has used so far
    virtual_s: float = 0.0  # it computes for one virtual worker, in this generation; 0: not known


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """The train function returned after the run's last step. The worker stays, and can still be a
    source."""

    worker: WorkerId
    generation: int
    position: TrainingPosition
    digest: str  # SHA-256 of its final weights
    inexact_because: tuple[str, ...] = ()  # operations without a deterministic kernel
    reason: str = ""  # why the steps ended, the same for all members
    lineage_id: int = 0  # `Membership.lineage_id` of the generation in which it got its state


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """User code raised, or (with `facts`) the worker found that the job cannot go on. Ends the run,
    unless there is a budget for errors of user code. Said again and again, until the worker is
    released."""

    worker: WorkerId
    error: str  # one line
    traceback: str
    facts: tuple[str | int, ...] | None = None  # of an error of ours, to make it anew


class Cause(StrEnum):
    """Why a worker was lost, as far as it decides which budget it counts against."""

    UNKNOWN = "unknown"
    PREEMPTED = "preempted"  # its node was taken away: nobody's fault
    OUT_OF_MEMORY = "out of memory"
    DEVICE_FAULT = "device fault"  # of its GPU: counts as any loss
    RELEASED = "released"  # it was asked to leave, and did


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The process is gone for certain and will never act again (also when it left as asked). May
    come once more, when the cause is known."""

    worker: WorkerId
    reason: str
    cause: Cause = Cause.UNKNOWN
    micro_batch: tuple[int, int] | None = None  # (step, virtual worker) that it ran, where known


@dataclass(frozen=True, slots=True)
class StackTracesCaptured:
    """What the threads of a stuck worker were doing, taken before it was killed. Nothing follows
    from it."""

    worker: WorkerId
    stacks: str


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """Answer to ReportState (`asked` is that of the question), for a controller that must learn
    what there is.

    `signature` is None before the worker was ready; `generation` is 0 before it entered one;
    `stopped` says that it is out of `generation` and waits (it will not resume there).
    """

    worker: WorkerId
    generation: int
    position: TrainingPosition
    has_state: bool
    stopped: bool
    signature: Signature | None
    can_source: bool
    lineage_id: int = 0  # `Membership.lineage_id` of the generation in which it got its state
    asked: int = 0


@dataclass(frozen=True, slots=True)
class DrainNoticed:
    """The worker's node will vanish at `deadline` (same clock as `now`); None: no time is known."""

    worker: WorkerId
    deadline: float | None


@dataclass(frozen=True, slots=True)
class SizeRequested:
    """An operator asks for another number of workers (within 1..virtual_workers), or of those that
    training needs."""

    size: int
    min_workers: int | None = None  # None: as many as before


@dataclass(frozen=True, slots=True)
class StopRequested:
    """An operator, a time limit, or the job itself asks the run to end at the next step."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """An operator, or its time, asks for a checkpoint of one of the next steps."""


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The whole state after `step` is in the storage."""

    step: int


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """Answer to FindCheckpoint: the newest committed one is of `step`. None: there is none."""

    step: int | None


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    """The create-only key of `generation` was written by us."""

    generation: int


@dataclass(frozen=True, slots=True)
class GenerationClaimLost:
    """Somebody else owns `generation`: another controller leads, this one must end itself."""

    generation: int


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """Time passed; changes nothing unless the coordinator's own deadline has come."""


Event = (
    WorkerStarted
    | WorkerPlaced
    | WorkerReady
    | WorkerStopped
    | HeartbeatReceived
    | WorkerFinished
    | WorkerFailed
    | WorkerLost
    | StackTracesCaptured
    | WorkerReported
    | DrainNoticed
    | SizeRequested
    | StopRequested
    | CheckpointRequested
    | CheckpointCommitted
    | CheckpointFound
    | GenerationClaimed
    | GenerationClaimLost
    | DeadlineReached
)

# ---------------------------------------------------------------------------------------------
# requests


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Ask the cluster for one more worker under this identity; it may stay pending for ever."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class BeginTraining:
    """Run the train function. `is_source`: this worker's initial weights are the ones that
    count."""

    worker: WorkerId
    is_source: bool


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Create the key of `generation`, which must not exist yet."""

    generation: int


@dataclass(frozen=True, slots=True)
class FindCheckpoint:
    """No worker has the run's state: look for the newest committed checkpoint, however long the
    storage takes.

    `at_most`: what was made after this step is wrong, and no part of the run's history any more.
    """

    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class FormGeneration:
    """To every member: form the process group of `membership`, hand over state, and train in it."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """Planned end: stop after `after_step`, or, having passed it, at the next boundary. The
    smallest counts."""

    worker: WorkerId
    generation: int
    after_step: int


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Unplanned end: leave `generation` and everything before it now, roll back, and answer
    WorkerStopped."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Answer to a heartbeat: a controller still leads. A worker that gets none for `lease_s` stops.

    The lease runs from the moment the heartbeat `beat` was sent, not from this answer's arrival: an
    answer that was long under way must not prolong the life of an evicted worker.
    """

    worker: WorkerId
    beat: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Leave politely now: unwind the train function and exit."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class EvictWorker:
    """Kill the process; it is frozen, stuck, foreign, or no longer wanted and did not leave."""

    worker: WorkerId
    reason: str
    stuck: bool = False  # first ask what its threads are doing


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Ask for the end of the run: the worker raises its stop flag in the next step's header."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Have all members make a checkpoint of the next step: the worker says so in that step's
    header."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WriteDrainCheckpoint:
    """Out of `generation`, and at the head of the loop: make a checkpoint of the state that you
    hold.

    `writers` hold the same, and share the writing.
    """

    worker: WorkerId
    generation: int
    writers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ReportState:
    """Say where you stand (WorkerReported). `asked` is a number that grows with each generation
    that is claimed."""

    worker: WorkerId
    asked: int = 0


@dataclass(frozen=True, slots=True)
class FinishRun:
    """Every member finished: record the result."""

    position: TrainingPosition
    digest: str
    reason: str
    digests_differ: bool = False  # members finished with different weights: not exact


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run cannot go on. `worker` and `facts`: of the WorkerFailed that says why, if one
    does."""

    error: str
    traceback: str
    worker: WorkerId = ""
    facts: tuple[str | int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StandDown:
    """Another controller leads: end this controller, touch no worker."""

    reason: str


@dataclass(frozen=True, slots=True)
class Explain:
    """A decision and its reason, in words a user can read; the edge logs it."""

    text: str


Command = (
    StartWorker
    | BeginTraining
    | ClaimGeneration
    | FindCheckpoint
    | FormGeneration
    | EndGeneration
    | AbortGeneration
    | RenewLease
    | ReleaseWorker
    | EvictWorker
    | StopTraining
    | TakeCheckpoint
    | WriteDrainCheckpoint
    | ReportState
    | FinishRun
    | FailRun
    | StandDown
    | Explain
)
