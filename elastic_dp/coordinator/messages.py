"""Events that workers and the cluster report, and commands with which the coordinator answers.

Events are in the past tense, commands in the imperative. All are frozen values, so a
journal of them replays a run. Every message about a generation carries its number, which fences it:
a message of an older generation changes nothing. Messages may be late, duplicated, or out of order.
Identities (`worker`) are never used twice.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from elastic_dp.coordinator.planning.grown_shares import Share, grown_shares
from elastic_dp.coordinator.planning.grown_shares import whole_blocks as whole_blocks

# ------------------------------------------------------------------------------------------------
# values

WorkerId = str  # such as "w7"; the coordinator numbers them and never uses one twice


class TrainingPosition(NamedTuple):
    """How far a worker's training has come; ordered, so the largest is the most advanced.

    `step` is the number of committed steps. `ended` is 1 if the run has ended after that step (the
    limit is reached, or the members agreed on a stop), else 0. `evaluations` is the number of
    evaluations since that step's commit.
    """

    step: int
    ended: int = 0
    evaluations: int = 0


START = TrainingPosition(0)


class WorkerLocation(NamedTuple):
    """Where a worker runs, as far as the cluster reports it."""

    node: str = ""  # "": not known
    spot: bool = False  # the node may be preempted
    zone: str = ""  # "": not known


UNKNOWN_LOCATION = WorkerLocation()


class Signature(NamedTuple):
    """What all members of a generation must have in common.

    Signatures are compared for equality; `lines` only serves to say what differs.
    """

    # Digest of the names, shapes and dtypes of all parameters and buffers, and of the optimizer's
    # parameter groups.
    layout: str
    data: str  # fingerprint of the data set
    kind: str  # what the bits depend on: device, instruction set, threads, library versions
    software: tuple[
        tuple[str, str], ...
    ] = ()  # what must be equal whatever the bits: (name, version)
    lines: bytes = b""  # the text of which `layout` is the digest, compressed


class ReplicaMismatch(NamedTuple):
    """Members of a generation hold different weights at the same step."""

    agreed: int  # the last step after which all members held the same weights
    # the members that differ from the majority; all members if there is no majority
    odd: tuple[WorkerId, ...]


class Member(NamedTuple):
    """One member of a generation; its index in `Membership.members` is its rank."""

    worker: WorkerId
    # Its virtual workers: first..last-1 for each (first, last), in ascending order with gaps. Where
    # the batch grows, those of the first steps; see `Membership.shares`.
    ranges: tuple[tuple[int, int], ...]
    position: TrainingPosition  # when the generation forms; meaningless without state
    has_state: bool  # it holds the complete state of `position`; otherwise it receives everything

    @property
    def num_virtual_workers(self) -> int:
        return sum(last - first for first, last in self.ranges)

    @property
    def virtual_workers(self) -> list[int]:
        return [v for first, last in self.ranges for v in range(first, last)]


@dataclass(frozen=True, slots=True)
class Membership:
    """Which workers train together in one generation, which virtual workers each runs, and the
    source of the state.

    Members without state receive everything from `source`; members with older state receive what
    the steps in between changed. `source` is one of the most advanced members with state, except
    where a run begins and no member has state. Then `source` is the worker whose initial weights
    count or, with `restore`, the worker that decides which committed checkpoint all members read.
    """

    generation: int
    members: tuple[Member, ...]
    source: WorkerId
    forming_timeout_s: float
    # The generation whose source gave the initial weights; every worker with state remembers it.
    lineage_id: int = 0
    restore: bool = False  # no member has state: all read the newest checkpoint
    # The numbers of consecutive ranks that share a node, then of those that share a zone. A level
    # at which nobody or everybody shares one is left out.
    topology: tuple[tuple[int, ...], ...] = ()
    # `PrepareGroup.number` of the preparation whose workers are the members; 0: there was none.
    prepared: int = 0
    # Some member is to leave soon: state that it may hold alone is copied before the first step.
    copies_first: bool = False

    def rank(self, worker: WorkerId) -> int:
        """Return the rank of `worker`. Raises StopIteration if it is not a member."""
        return next(rank for rank, member in enumerate(self.members) if member.worker == worker)

    def shares(self, virtual_workers: int, *, equal: bool) -> tuple[Share, ...]:
        """Return the ranges of each rank in a step of so many virtual workers; `equal` as in
        `grown_shares`.
        """
        shares = [member.ranges for member in self.members]
        nodes = self.topology[0] if self.topology else ()
        return grown_shares(shares, virtual_workers, nodes, equal=equal)


# ------------------------------------------------------------------------------------------------
# events


@dataclass(frozen=True, slots=True)
class Event:
    """A fact that the coordinator is told."""


@dataclass(frozen=True, slots=True)
class WorkerEvent(Event):
    """A fact about one worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerStarted(WorkerEvent):
    """The process is up and asks how to begin; the user's train function has not run yet."""


@dataclass(frozen=True, slots=True)
class WorkerPlaced(WorkerEvent):
    """The process runs at `location`. Sent when it starts, and again with each WorkerReported."""

    location: WorkerLocation


@dataclass(frozen=True, slots=True)
class WorkerReady(WorkerEvent):
    """The train function reached `ctx.steps` for the first time: the model is built, and the worker
    waits for a generation.
    """

    signature: Signature
    can_source: bool  # its initial weights may count: it was not told otherwise


@dataclass(frozen=True, slots=True)
class WorkerStopped(WorkerEvent):
    """The training thread has left `generation`, has no operation of it in flight, and waits for
    the next.

    It answers AbortGeneration and EndGeneration, and is also sent when a collective or the forming
    failed or the lease expired. `unreachable` lists the members that did not register in time; the
    controller adds it where `members_missing` is set. The worker never resumes in `generation`. A
    worker that is told to leave a generation that it never entered answers all the same.
    """

    generation: int
    position: TrainingPosition
    has_state: bool
    reason: str
    unreachable: tuple[WorkerId, ...] = ()
    # The worker is at the head of the loop: every loop body so far has run here. Only then can it
    # be the source for a worker without state. A worker that stopped inside an evaluation can serve
    # members that are behind it, but no joiner.
    at_head: bool = True
    lineage_id: int = 0  # `Membership.lineage_id` of the generation in which it got its state
    mismatch: ReplicaMismatch | None = None  # why training cannot continue from this state
    # Subtrees of virtual workers (first..last-1) whose sums it has finished in the step after
    # `position`, and keeps for the next attempt.
    finished: tuple[tuple[int, int], ...] = ()
    # The state is sharded, and the worker holds only a part of it. Two workers hold each part.
    partial: bool = False
    lacks_copies: bool = False  # some part has one holder, as far as this worker knows
    # Some part was held by lost workers alone, so no member can continue.
    pieces_lost: bool = False
    members_missing: bool = False  # not all members registered in time


@dataclass(frozen=True, slots=True)
class HeartbeatReceived(WorkerEvent):
    """A heartbeat. A sidecar process sends it, so it does not depend on the worker's Python
    threads.
    """

    generation: int  # the last generation that the worker entered; 0: none yet
    step: int  # committed steps
    phase: str  # see `hang_detector.PHASE_ORDER`
    beat: int = 0  # counts this worker's heartbeats; the answer names the one it answers
    cpu_s: float = 0.0  # processor time that the worker has used so far
    virtual_s: float = 0.0  # time to compute one virtual worker in this generation; 0: not known
    # seconds by what the worker did, for reports alone (`telemetry.phase_clock.PhaseTimes`)
    times: tuple[float, ...] = ()
    store_retries: int = 0  # requests to stores that the worker has retried, for reports alone
    sending_s: float = 0.0  # of this generation, for reports alone (`distributed.link_times`)
    # (body, calls of ctx.evaluate in it, whether the body has ended), of a body that the worker has
    # run itself. Body 2 * s is that of step s, 2 * s + 1 what follows the loop that ended with s.
    evaluations: tuple[int, int, bool] = (0, 0, False)


@dataclass(frozen=True, slots=True)
class WorkerFinished(WorkerEvent):
    """The train function returned after the run's last step. The worker stays and can still be a
    source.
    """

    generation: int
    position: TrainingPosition
    digest: str  # SHA-256 of its final weights
    inexact_because: tuple[str, ...] = ()  # operations without a deterministic kernel
    reason: str = ""  # why the steps ended, the same for all members
    lineage_id: int = 0  # `Membership.lineage_id` of the generation in which it got its state


@dataclass(frozen=True, slots=True)
class WorkerFailed(WorkerEvent):
    """User code raised or, if `facts` is set, the worker found that the job cannot continue.

    It ends the run, unless the budget for errors of user code allows another attempt. The worker
    repeats it until it is released.
    """

    error: str  # one line
    traceback: str
    # the arguments of an error of this package, to create it again
    facts: tuple[str | int, ...] | None = None


class Cause(StrEnum):
    """Why a worker was lost; it decides which budget the loss counts against."""

    UNKNOWN = "unknown"
    PREEMPTED = "preempted"  # its node was taken away
    OUT_OF_MEMORY = "out of memory"
    DEVICE_FAULT = "device fault"  # of its GPU: counts as any loss
    RELEASED = "released"  # it was asked to leave, and did


@dataclass(frozen=True, slots=True)
class WorkerLost(WorkerEvent):
    """The process has certainly ended and will never act again, also if it left as asked.

    It may be sent again when the cause is known.
    """

    reason: str
    cause: Cause = Cause.UNKNOWN
    # (step, virtual worker) that the worker ran, if known
    micro_batch: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class StackTracesCaptured(WorkerEvent):
    """The stack traces of a stuck worker, taken before it was killed. They have no effect."""

    stacks: str


@dataclass(frozen=True, slots=True)
class WorkerReported(WorkerEvent):
    """Answer to ReportState, for a controller that takes over; `asked` is that of the question.

    `signature` is None before the worker was ready. `generation` is 0 before it entered one.
    `stopped` says that the worker has left `generation` and waits; it will not resume there.
    """

    generation: int
    position: TrainingPosition
    has_state: bool
    stopped: bool
    signature: Signature | None
    can_source: bool
    lineage_id: int = 0  # `Membership.lineage_id` of the generation in which it got its state
    asked: int = 0


@dataclass(frozen=True, slots=True)
class DrainNoticed(WorkerEvent):
    """The worker's node will go away at `deadline` (same clock as `now`); None: the time is not
    known.
    """

    deadline: float | None


@dataclass(frozen=True, slots=True)
class WorkerSlow(WorkerEvent):
    """The worker has slowed the run down for so long that the job wants it to be replaced."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeadDrainNoticed(Event):
    """The cluster's head node will go away at `deadline` (same clock as `now`), and the run's
    controller and driver with it; None: the time is not known.
    """

    deadline: float | None


@dataclass(frozen=True, slots=True)
class SizeRequested(Event):
    """An operator requests another number of workers, and optionally another minimum.

    `size` is within 1..virtual_workers, `min_workers` within 1..size.
    """

    size: int
    min_workers: int | None = None  # None: as many as before


@dataclass(frozen=True, slots=True)
class SizeLimited(Event):
    """Other runs of the cluster leave room for at most so many workers; None: as many as requested.

    The minimum is never limited.
    """

    most: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """An operator, a time limit, or the job itself requests the end of the run after the next
    step.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested(Event):
    """An operator or the schedule requests a checkpoint of one of the next steps."""


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(Event):
    """The complete state after `step` is in the storage. `duration_s`: from the first member's
    snapshot to the commit; 0 if it is not known.
    """

    step: int
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointFound(Event):
    """Answer to FindCheckpoint: the step of the newest committed checkpoint; None: there is
    none.
    """

    step: int | None


@dataclass(frozen=True, slots=True)
class GenerationClaimed(Event):
    """This controller wrote the create-only key of `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class GenerationClaimLost(Event):
    """Another controller owns `generation` and leads; this one must end itself."""

    generation: int


@dataclass(frozen=True, slots=True)
class DeadlineReached(Event):
    """Time has passed. It changes nothing before the coordinator's own deadline."""


# ---------------------------------------------------------------------------------------------
# commands


@dataclass(frozen=True, slots=True)
class Command:
    """A request of the coordinator."""


@dataclass(frozen=True, slots=True)
class WorkerCommand(Command):
    """A request that concerns one worker. The controller sends it there, unless it acts itself."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class StartWorker(WorkerCommand):
    """Ask the cluster for one more worker with this identity; it may stay pending for ever."""


@dataclass(frozen=True, slots=True)
class BeginTraining(WorkerCommand):
    """Run the train function. `is_source`: the initial weights of this worker count."""

    is_source: bool


@dataclass(frozen=True, slots=True)
class ClaimGeneration(Command):
    """Create the key of `generation`, which must not exist yet."""

    generation: int


@dataclass(frozen=True, slots=True)
class FindCheckpoint(Command):
    """Look for the newest committed checkpoint, however long the storage takes: no worker has the
    state.

    `at_most`: checkpoints after this step are wrong and do not belong to the run any more.
    """

    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class FormGeneration(Command):
    """To every member: form the process group of `membership`, transfer state, and train."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class PrepareGroup(Command):
    """To every one of `workers`: connect as the process group of `generation`, in the background.

    The workers will most likely be its members, by rank, and may still be in the generation before.
    It is only a preparation: FormGeneration says who the members are, and by `Membership.prepared`
    whether they are these. If they are others, what was prepared is thrown away.
    """

    generation: int
    number: int  # grows with each preparation; no other controller uses the same
    workers: tuple[WorkerId, ...]
    forming_timeout_s: float


@dataclass(frozen=True, slots=True)
class EndGeneration(WorkerCommand):
    """Planned end: leave after `after_step` or, if that has passed, at the next boundary.

    If it is sent more than once, the smallest `after_step` counts.
    """

    generation: int
    after_step: int


@dataclass(frozen=True, slots=True)
class AbortGeneration(WorkerCommand):
    """Unplanned end: leave `generation` and every earlier one now, roll back, and answer
    WorkerStopped.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class RenewLease(WorkerCommand):
    """Answer to a heartbeat: a controller still leads. A worker without an answer for `lease_s`
    stops.

    The lease runs from the time at which heartbeat `beat` was sent, not from the arrival of this
    answer: a delayed answer must not prolong the life of an evicted worker.
    """

    beat: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseWorker(WorkerCommand):
    """Unwind the train function and exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class EvictWorker(WorkerCommand):
    """Kill the process: it is frozen, stuck, unknown, or did not leave when released."""

    reason: str
    stuck: bool = False  # capture its stack traces first


@dataclass(frozen=True, slots=True)
class AvoidNode(WorkerCommand):
    """Start no worker on the node of `worker` for a while, if another node could hold it."""


@dataclass(frozen=True, slots=True)
class StopTraining(WorkerCommand):
    """End the run: the worker sets the stop flag in the header of its next step."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakeCheckpoint(WorkerCommand):
    """Make a checkpoint of the next step: the worker asks all members in that step's header."""


@dataclass(frozen=True, slots=True)
class WriteDrainCheckpoint(WorkerCommand):
    """Out of `generation` and at the head of the loop: write a checkpoint of the state that you
    hold.

    `writers` hold the same state and share the writing.
    """

    generation: int
    writers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ReportState(WorkerCommand):
    """Answer with WorkerReported. `asked` is a number that grows with each claimed generation."""

    asked: int = 0


@dataclass(frozen=True, slots=True)
class FinishRun(Command):
    """Every member finished: record the result."""

    position: TrainingPosition
    digest: str
    reason: str
    digests_differ: bool = False  # members finished with different weights: not exact


@dataclass(frozen=True, slots=True)
class FailRun(Command):
    """The run cannot continue. `worker` and `facts` are those of the WorkerFailed that is the
    cause, if any.
    """

    error: str
    traceback: str
    worker: WorkerId = ""
    facts: tuple[str | int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StandDown(Command):
    """Another controller leads: end this controller, and leave all workers alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Explain(Command):
    """A decision and its reason, in words for users; the controller logs it."""

    text: str
