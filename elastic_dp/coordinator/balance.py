"""How many virtual workers each rank runs where workers differ in speed, and when dealing them anew
is worth a pause.

Always: every rank has at least one, and ranges lie in the order of ranks, so the sums, and with
them the bits, are those of any other split. A worker that is not measured yet counts as the median
of the others; where nobody is, or the step would gain too little, all get as many (`shares`). A
generation is ended for this only if all its members were measured in it, and not soon after the
last time, so speeds that waver cost a pause now and then, and not one after another. Where no split
helps any more, because one that runs a single virtual worker is still the one that all wait for,
and has been for long, it is named, for a standby to take its place.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.shares import shares
from elastic_dp.coordinator.worker_state import WorkerState

MARGIN = 0.1  # by so much of itself a step must get shorter
REST_S = 60.0  # from one generation that was ended for this to the next
SLOW_MARGIN = 0.2  # by so much of a step one that runs the least keeps all others waiting
LOOK_S = 1.0  # from one look to the next, and longer where there are more than so many members:
LOOKED_AT = 1000

Ranges = tuple[tuple[int, int], ...]


def deal(seconds: Sequence[float], virtual_workers: int) -> Ranges:
    """[(first, last)] by rank, like `shares`. `seconds`: what each rank needs for one; 0: not
    known."""
    even = shares(virtual_workers, len(seconds))
    known = [s for s in seconds if s]
    if not known:
        return even
    usual = median(known)
    filled = [s or usual for s in seconds]
    uneven = _fastest(filled, virtual_workers)
    return uneven if _pays(longest(even, filled), longest(uneven, filled)) else even


def longest(ranges: Ranges, seconds: Sequence[float]) -> float:
    """How long the last one computes in a step."""
    return max((last - first) * s for (first, last), s in zip(ranges, seconds, strict=True))


def _pays(now_s: float, then_s: float) -> bool:
    return then_s < (1.0 - MARGIN) * now_s


def _fastest(seconds: Sequence[float], virtual_workers: int) -> Ranges:
    """One each; every further one to the rank that would be done with it first."""
    sizes = [1] * len(seconds)
    done = [(2 * s, rank) for rank, s in enumerate(seconds)]
    heapq.heapify(done)
    for _ in range(virtual_workers - len(seconds)):
        _, rank = done[0]
        sizes[rank] += 1
        heapq.heapreplace(done, ((sizes[rank] + 1) * seconds[rank], rank))
    return tuple(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True, slots=True)
class _Slow:
    """All others waited for it, in each look since then."""

    worker: WorkerId
    since: float
    seen_in: int  # the generation of the newest look


class Balance:
    def __init__(self, generation: Generation, slow_s: float) -> None:
        self._generation, self._slow_s = generation, slow_s
        self._look_at = -math.inf
        self._slow: _Slow | None = None
        self._replaced_at = -math.inf

    def why_change(self, now: float) -> str | None:
        """Why the running generation should end for another split. The caller ends it then."""
        generation = self._generation
        if now < self._look_at:
            return None
        members, membership = [*generation.members.values()], generation.membership
        self._look_at = now + LOOK_S * max(1.0, len(members) / LOOKED_AT)
        assert membership is not None
        if any(worker.measured_in != generation.number for worker in members):
            return None
        if len(members) < len(membership.members):
            return None  # one has finished, and is gone
        seconds = [worker.virtual_s for worker in members]
        ranges = tuple((member.first, member.last) for member in membership.members)
        self._note_slow(members, ranges, now)
        now_s, virtual_workers = longest(ranges, seconds), membership.members[-1].last
        if not _pays(now_s, virtual_workers / sum(1.0 / s for s in seconds)):
            return None  # not even if they could be split
        better = deal(seconds, virtual_workers)
        then_s = longest(better, seconds)
        if not _pays(now_s, then_s):
            return None
        self._look_at = now + REST_S
        slowest = max(members, key=lambda worker: worker.virtual_s)
        return (
            f"{slowest.id} needs {_ms(slowest.virtual_s)} for a virtual worker, the others "
            f"{_ms(min(seconds))} or more; "
            f"dealt by speed, a step computes for {_ms(then_s)} instead of {_ms(now_s)}"
        )

    def _note_slow(self, members: Sequence[WorkerState], ranges: Ranges, now: float) -> None:
        spans = zip(ranges, members, strict=True)
        took = [((last - first) * worker.virtual_s, worker.id) for (first, last), worker in spans]
        most_s, slowest = max(took)
        next_s = max([s for s, worker in took if worker != slowest], default=math.inf)
        first, last = ranges[[worker.id for worker in members].index(slowest)]
        if last - first > 1 or next_s > (1.0 - SLOW_MARGIN) * most_s:
            self._slow = None
        else:
            since = self._slow.since if self._slow and self._slow.worker == slowest else now
            self._slow = _Slow(slowest, since, self._generation.number)

    def too_slow(self, now: float) -> WorkerId | None:
        """A member that a standby should replace. Seldom: the caller asks it to leave then."""
        slow = self._slow
        if slow is None or slow.seen_in != self._generation.number:
            return None
        if now < max(slow.since + self._slow_s, self._replaced_at + 2 * self._slow_s):
            return None
        self._slow, self._replaced_at = None, now
        return slow.worker


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
