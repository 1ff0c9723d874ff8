"""Which virtual workers each member of a generation runs in a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from elastic_dp.coordinator.messages import Membership
from elastic_dp.distributed.reduction_tree import Share
from elastic_dp.sampling.step_schedule import StepSchedule


class WorkShares:
    """`virtual_workers`: their number, by step. `equal`: members are meant to run equally many."""

    def __init__(self, virtual_workers: StepSchedule, *, equal: bool) -> None:
        self._schedule, self._equal = virtual_workers, equal
        self.least = virtual_workers.least
        self.membership: Membership | None = None  # of the present generation, with this rank
        self.rank = 0
        self.joining: frozenset[int] = frozenset()  # ranks without virtual workers; gradual_join.py

    def open(self, membership: Membership, rank: int) -> None:
        self.membership, self.rank = membership, rank

    def virtual_workers(self, step: int) -> int:
        return self._schedule.at(step)

    def of_all(self, step: int) -> Sequence[Share]:
        """Returns the share of each rank."""
        assert self.membership is not None
        return self._of(self.membership, step)

    def of_rank(self, membership: Membership, rank: int, step: int) -> list[int]:
        """Returns the virtual workers of a rank of this membership."""
        return [v for first, last in self._of(membership, step)[rank] for v in range(first, last)]

    def _of(self, membership: Membership, step: int) -> Sequence[Share]:
        total, ranks = self._schedule.at(step), range(len(membership.members))
        if not self.joining:
            return membership.shares(total, equal=self._equal)
        others = [rank for rank in ranks if rank not in self.joining]
        ends = [total * number // len(others) for number in range(len(others) + 1)]
        ranges = dict(zip(others, pairwise(ends), strict=True))
        return [(ranges[rank],) if rank in ranges else () for rank in ranks]
