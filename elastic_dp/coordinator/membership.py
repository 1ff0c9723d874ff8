"""Workers, how far they are, where they run, what they must have in common, and who trains
together.

Values without behaviour, like the messages that are made of them (`messages`, from where all of
this is imported).
"""

from dataclasses import dataclass
from typing import NamedTuple

WorkerId = str  # "w7": the coordinator counts them up and never uses one twice


class TrainingPosition(NamedTuple):
    """How far a worker's training thread has come; ordered, so the largest is the most advanced.

    `step`: committed steps. `ended`: 1 when the run has ended after that step (limit reached or a
    stop agreed), else 0. `evaluations`: evaluations completed since that step's commit.
    """

    step: int
    ended: int = 0
    evaluations: int = 0


START = TrainingPosition(0)


class WorkerLocation(NamedTuple):
    """Where a worker runs, as far as the cluster says."""

    node: str = ""  # "": not known
    spot: bool = False  # its node may be taken away

    @property
    def stable(self) -> bool:
        """On a node that stays."""
        return self.node != "" and not self.spot


UNKNOWN_LOCATION = WorkerLocation()


class Signature(NamedTuple):
    """What all members of a generation must have in common. Compared for equality; `lines` only
    says what differs."""

    # digest of every parameter's and buffer's name, shape and dtype, and of the optimizer's groups
    layout: str
    data: str  # fingerprint of the data set
    kind: str  # what decides the bits: device, instruction set, threads, library versions
    software: tuple[
        tuple[str, str], ...
    ] = ()  # what must be equal whatever the bits: (name, version)
    lines: bytes = b""  # what `layout` is the digest of, compressed


class ReplicaMismatch(NamedTuple):
    """Members of a generation hold different weights, though they are at one step."""

    agreed: int  # the last step after which all were seen to hold the same
    odd: tuple[WorkerId, ...]  # those that differ from the majority; all, where there is none


class Member(NamedTuple):
    """One member of a generation; its index in `Membership.members` is its rank."""

    worker: WorkerId
    first: int  # its virtual workers are first..last-1
    last: int
    position: TrainingPosition  # as the generation forms; meaningless without state
    has_state: bool  # complete, of `position`; False: it must be given everything


@dataclass(frozen=True, slots=True)
class Membership:
    """Who trains together in one generation, who runs which virtual workers, and whose state is the
    truth.

    Members without state receive everything from `source`; those with state that are behind it
    receive what the steps between changed. `source` is always one of the most advanced members with
    state, except where a run begins: no member has state, and `source` is the worker whose initial
    weights count, or, with `restore`, the one that says which committed checkpoint all of them
    read.
    """

    generation: int
    members: tuple[Member, ...]
    source: WorkerId
    forming_timeout_s: float
    # The generation whose source gave the initial weights; every worker with state remembers it.
    lineage_id: int = 0
    restore: bool = False  # nobody holds anything: all take the state from the newest checkpoint

    def rank(self, worker: WorkerId) -> int:
        return next(rank for rank, member in enumerate(self.members) if member.worker == worker)
