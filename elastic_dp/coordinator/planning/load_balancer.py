"""Distributes virtual workers over ranks by measured speed, and decides when to redistribute them.

Every rank has at least one virtual worker, and the ranges are in the order of ranks. The sums, and
so the bits of the result, do not depend on the split. A worker without a measurement counts as the
median of the others. If no worker is measured, or the step would gain too little, the ranges are
equal (`equal_ranges.ranges_by_node`).

The running generation is ended for a better split only if all its members were measured in it, and
at most once in `MIN_INTERVAL_S`, so fluctuating speeds cannot cause one pause after another.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.planning.equal_ranges import ranges_by_node

MIN_GAIN = 0.1  # fraction by which a step must get shorter
MIN_INTERVAL_S = 60.0  # least time between two generations that were ended for a better split
CHECK_INTERVAL_S = (
    1.0  # time between two checks; longer, in proportion, for more members than this:
)
MEMBERS_PER_INTERVAL = 1000

Ranges = tuple[tuple[int, int], ...]


def assign_ranges(
    seconds: Sequence[float], virtual_workers: int, nodes: Sequence[int] = ()
) -> Ranges:
    """Return [(first, last)] by rank, with more virtual workers for faster ranks.

    `seconds` is the time that each rank needs for one virtual worker; 0 if it is not known. `nodes`
    are the numbers of consecutive ranks on one node.
    """
    even = ranges_by_node(virtual_workers, nodes or (len(seconds),))
    known = [s for s in seconds if s]
    if not known:
        return even
    usual = median(known)
    filled = [s or usual for s in seconds]
    uneven = _fastest(filled, virtual_workers)
    return uneven if _is_worth_a_pause(longest_s(even, filled), longest_s(uneven, filled)) else even


def longest_s(ranges: Ranges, seconds: Sequence[float]) -> float:
    """Return how many seconds the slowest rank computes in a step."""
    return max((last - first) * s for (first, last), s in zip(ranges, seconds, strict=True))


def _is_worth_a_pause(now_s: float, then_s: float) -> bool:
    """Return whether a step of `then_s` is enough shorter than one of `now_s`."""
    return then_s < (1.0 - MIN_GAIN) * now_s


def _fastest(seconds: Sequence[float], virtual_workers: int) -> Ranges:
    """Give each rank one virtual worker, and each further one to the rank that would finish it
    first.
    """
    sizes = [1] * len(seconds)
    done = [(2 * s, rank) for rank, s in enumerate(seconds)]
    heapq.heapify(done)
    for _ in range(virtual_workers - len(seconds)):
        _, rank = done[0]
        sizes[rank] += 1
        heapq.heapreplace(done, ((sizes[rank] + 1) * seconds[rank], rank))
    return tuple(pairwise(accumulate(sizes, initial=0)))


class LoadBalancer:
    """Decides whether the running generation should end for a better split of virtual workers."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._look_at = -math.inf

    def reason_to_rebalance(self, now: float) -> str | None:
        """Return why the generation should end for another split, or None. The caller must then end
        it.
        """
        generation = self._generation
        if now < self._look_at:
            return None
        members, membership = [*generation.members.values()], generation.membership
        self._look_at = now + CHECK_INTERVAL_S * max(1.0, len(members) / MEMBERS_PER_INTERVAL)
        assert membership is not None
        if any(worker.measured_in != generation.number for worker in members):
            return None
        if len(members) < len(membership.members):
            return None  # a member has finished and is gone
        seconds = [worker.virtual_s for worker in members]
        sizes = [member.num_virtual_workers for member in membership.members]
        virtual_workers = sum(sizes)
        now_s = max(size * s for size, s in zip(sizes, seconds, strict=True))
        if not _is_worth_a_pause(now_s, virtual_workers / sum(1.0 / s for s in seconds)):
            return None  # not even a perfect split would help
        nodes = membership.topology[0] if membership.topology else ()
        better = assign_ranges(seconds, virtual_workers, nodes)
        then_s = longest_s(better, seconds)
        if not _is_worth_a_pause(now_s, then_s):
            return None
        self._look_at = now + MIN_INTERVAL_S
        slowest = max(members, key=lambda worker: worker.virtual_s)
        return (
            f"{slowest.id} needs {_ms(slowest.virtual_s)} for a virtual worker, the fastest "
            f"{_ms(min(seconds))}; a split by speed shortens the computation of a step from "
            f"{_ms(now_s)} to {_ms(then_s)}"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
