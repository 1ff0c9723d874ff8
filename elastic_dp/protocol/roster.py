"""What the coordinator knows of each worker, and the identities it gives out.

An identity is used once. A coordinator that took over cannot know how far the one before it counted, so its
identities carry the generation it claimed on arrival, which nobody else can own: "w12", then "w7.1", "w7.2".
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from elastic_dp.protocol.messages import START, Place, Signature, WorkerId


class Stage(StrEnum):
    STARTING = "starting"  # asked for; may stay so for ever, and holds nobody up
    BUILDING = "building"  # runs the user's code up to the loop
    READY = "ready"  # void, waits for a seat
    MEMBER = "member"  # has a seat in the present generation
    LEAVER = "leaver"  # lost its seat, kept until the others have made a step without it
    LEAVING = "leaving"  # asked to leave
    EVICTED = "evicted"  # to be killed; not confirmed dead, so possibly alive
    SURVEYED = "surveyed"  # known to exist, has not said yet where it stands


# Counted towards the number of workers wanted, unless their node is about to go.
USEFUL = frozenset({Stage.STARTING, Stage.BUILDING, Stage.READY, Stage.MEMBER, Stage.SURVEYED})


@dataclass(slots=True, eq=False)
class Worker:
    """One identity. `place` and `whole` are what it last reported, and stand only while it is stopped."""

    id: WorkerId
    number: int  # in the order of asking
    stage: Stage
    since: float  # when it came to this stage
    renewed_at: float = -math.inf  # last answer to a heartbeat
    signature: Signature | None = None
    can_source: bool = False
    entered: int = 0  # last generation it is known to have entered
    place: Place = START
    whole: bool = False
    at_head: bool = True
    founded: int = 0  # the beginning its state descends from
    finished: str | None = None  # digest of its final weights
    draining: bool = False
    leave_at: float = math.inf  # when a notice forces it out, margin included
    leave_reason: str = ""
    failed_joins: int = 0
    reminded_beats: int = 0  # heartbeats since it was told what it has not acted on
    odd_beats: int = 0  # heartbeats that show it done, without its report

    def __repr__(self) -> str:
        return (
            f"{self.id}:{self.stage}{'' if not self.whole else f'@{self.place.step}'}"
            f"{' draining' if self.draining else ''}{' finished' if self.finished else ''}"
        )


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
