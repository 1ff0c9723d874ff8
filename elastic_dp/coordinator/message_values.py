"""The values that messages hold: workers, their positions and locations, signatures,
memberships.

Import them from `messages`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from elastic_dp.coordinator.planning.grown_shares import Share, grown_shares

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

    @property
    def stable(self) -> bool:
        """Whether the worker is known to run on an on-demand node."""
        return self.node != "" and not self.spot


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
    # Some member is to leave soon: parts of a sharded state that one member holds are copied before
    # the first step.
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
