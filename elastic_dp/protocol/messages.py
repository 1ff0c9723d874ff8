"""The words of the protocol: facts that workers and the cluster report, requests the coordinator makes.

Facts are in the past tense, requests in the imperative; all are frozen values without behaviour, so a journal
of them replays a run. Every message about a generation carries its number, and the number fences it: a message
of an older generation changes nothing. Messages may be late, doubled, or out of order; identities (`worker`)
are used once and never again.
"""

from dataclasses import dataclass
from typing import NamedTuple

WorkerId = str  # "w7": the coordinator counts them up and never uses one twice


class Place(NamedTuple):
    """How far a worker's training thread has come; ordered, so the largest is the most advanced.

    `step`: committed steps. `ended`: 1 when the run has ended after that step (limit reached or a stop
    agreed), else 0. `evaluations`: evaluations completed since that step's commit.
    """

    step: int
    ended: int = 0
    evaluations: int = 0


START = Place(0)


class Signature(NamedTuple):
    """What all members of a generation must have in common. Compared for equality, never parsed."""

    layout: str  # digest of every parameter's and buffer's name, shape and dtype, and of the optimizer's groups
    data: str  # fingerprint of the data set
    kind: str  # what decides the bits: device, instruction set, threads, library versions


class Seat(NamedTuple):
    """One member of a generation; its index in `Membership.seats` is its rank."""

    worker: WorkerId
    first: int  # its virtual workers are first..last-1
    last: int
    place: Place  # where it stands as the generation forms; meaningless while not `whole`
    whole: bool  # holds complete state of `place`; False: void, must be given everything


@dataclass(frozen=True, slots=True)
class Membership:
    """Who trains together in one generation, who runs which virtual workers, and whose state is the truth.

    Seats that are not whole receive everything from `source`; whole ones behind it receive what the steps
    between changed. `source` is always one of the whole seats with the greatest place, except in the very
    first generation of a run, where nobody is whole and `source` is the worker whose initial weights count.
    """

    generation: int
    seats: tuple[Seat, ...]
    source: WorkerId
    forming_timeout_s: float
    founded: int = (
        0  # the generation whose source gave the initial weights; whoever is whole remembers it
    )

    def rank(self, worker: WorkerId) -> int:
        return next(rank for rank, seat in enumerate(self.seats) if seat.worker == worker)


# ------------------------------------------------------------------------------------------------ facts


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The process is up and asks how to begin; the user's train function has not run yet."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The train function reached `ctx.steps` for the first time: model built, void, waiting for a generation."""

    worker: WorkerId
    signature: Signature
    can_source: (
        bool  # its initial weights may count (it is the source, or never asked whether it is)
    )


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """The training thread is out of `generation`, holds nothing of it in flight, and waits for the next.

    Answers AbortGeneration and EndGeneration, and is sent unasked when a collective or the forming failed
    (`unreachable` names whom it could not reach) or the lease ran out. It never resumes in `generation`.
    A worker that is told of a generation it never entered answers for it all the same.
    """

    worker: WorkerId
    generation: int
    place: Place
    whole: bool
    reason: str
    unreachable: tuple[WorkerId, ...] = ()
    # At the head of the loop: every body so far has run here. Only such a source can give a void worker its
    # state; one that stopped inside an evaluation can serve those behind it, but no joiner.
    at_head: bool = True
    founded: int = 0  # `Membership.founded` of the generation in which it became whole


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A heartbeat, sent by a process beside the worker, so it needs nothing of the worker's Python."""

    worker: WorkerId
    generation: int  # the last generation it entered; 0: none yet
    step: int  # committed steps
    phase: str  # "start", "wait", "form", "receive", "compute", "collective", "apply", "body", "evaluate", "done"
    beat: int = 0  # counts this worker's heartbeats; the answer names the one it answers


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """The train function returned after the run's last step. The worker stays, and can still be a source."""

    worker: WorkerId
    generation: int
    place: Place
    digest: str  # SHA-256 of its final weights
    inexact_because: tuple[str, ...] = ()  # operations without a deterministic kernel


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """User code raised, or the worker found that the job cannot go on. Ends the run."""

    worker: WorkerId
    error: str  # one line
    traceback: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The process is gone for certain and will never act again (also when it left as asked)."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """Answer to ReportYourself, for a controller that starts anew and must learn what there is.

    `signature` is None before the worker was ready; `generation` is 0 before it entered one; `stopped` says
    that it is out of `generation` and waits (it will not resume there).
    """

    worker: WorkerId
    generation: int
    place: Place
    whole: bool
    stopped: bool
    signature: Signature | None
    can_source: bool
    founded: int = 0  # `Membership.founded` of the generation in which it became whole


@dataclass(frozen=True, slots=True)
class DrainNoticed:
    """The worker's node will vanish at `deadline` (same clock as `now`); None: no time is known."""

    worker: WorkerId
    deadline: float | None


@dataclass(frozen=True, slots=True)
class SizeRequested:
    """An operator asks for another number of workers (within 1..virtual_workers)."""

    size: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """An operator, a time limit, or the job itself asks the run to end at the next step."""

    reason: str


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
    | WorkerReady
    | WorkerStopped
    | WorkerHeard
    | WorkerFinished
    | WorkerFailed
    | WorkerLost
    | WorkerReported
    | DrainNoticed
    | SizeRequested
    | StopRequested
    | GenerationClaimed
    | GenerationClaimLost
    | DeadlineReached
)

# --------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Ask the cluster for one more worker under this identity; it may stay pending for ever."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class BeginTraining:
    """Run the train function. `is_source`: this worker's initial weights are the ones that count."""

    worker: WorkerId
    is_source: bool


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Create the key of `generation`, which must not exist yet."""

    generation: int


@dataclass(frozen=True, slots=True)
class FormGeneration:
    """Form the process group of `membership`, hand over state, and train in it."""

    worker: WorkerId
    membership: Membership


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """Planned end: stop after `after_step`, or, having passed it, at the next boundary. The smallest counts."""

    worker: WorkerId
    generation: int
    after_step: int


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Unplanned end: leave `generation` and everything before it now, roll back, and answer WorkerStopped."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Answer to a heartbeat: a controller still leads. A worker that gets none for `lease_s` stops.

    The lease runs from the moment the heartbeat `beat` was sent, not from this answer's arrival: an answer
    that was long under way must not prolong the life of a worker that has been given up.
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


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Ask for the end of the run: the worker raises its stop flag in the next step's header."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class ReportYourself:
    """Say where you stand (WorkerReported)."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class FinishRun:
    """Every member finished: record the result."""

    place: Place
    digest: str
    reason: str
    digests_differ: bool = False  # members finished with different weights: not exact


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run cannot go on."""

    error: str
    traceback: str


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
    | FormGeneration
    | EndGeneration
    | AbortGeneration
    | RenewLease
    | ReleaseWorker
    | EvictWorker
    | StopTraining
    | ReportYourself
    | FinishRun
    | FailRun
    | StandDown
    | Explain
)
