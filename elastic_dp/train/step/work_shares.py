"""Which virtual workers each member of a generation runs in a step."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_dp.coordinator.messages import Membership
from elastic_dp.distributed.reduction_tree import Share
from elastic_dp.sampling import StepSchedule


class WorkShares:
    """`virtual_workers`: their number, by step. `equal`: members are meant to run equally many."""

    def __init__(self, virtual_workers: StepSchedule, *, equal: bool) -> None:
        self._schedule, self._equal = virtual_workers, equal
        self.least = virtual_workers.least
        self.membership: Membership | None = None  # of the present generation, with this rank
        self.rank = 0

    def open(self, membership: Membership, rank: int) -> None:
        self.membership, self.rank = membership, rank

    def virtual_workers(self, step: int) -> int:
        return self._schedule.at(step)

    def of_all(self, step: int) -> Sequence[Share]:
        """Returns the share of each rank."""
        assert self.membership is not None
        return self.membership.shares(self._schedule.at(step), equal=self._equal)

    def of_rank(self, membership: Membership, rank: int, step: int) -> list[int]:
        """Returns the virtual workers of a rank of this membership."""
        shares = membership.shares(self._schedule.at(step), equal=self._equal)
        return [v for first, last in shares[rank] for v in range(first, last)]
