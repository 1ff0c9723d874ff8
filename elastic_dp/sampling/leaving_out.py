"""The order of rows without those of some steps: later steps take their places."""

from __future__ import annotations

from typing import Any

from elastic_dp.errors import DataError
from elastic_dp.sampling.growing_order import GrowingOrder
from elastic_dp.sampling.order import RowOrder


class LeavingOut(RowOrder):
    """`base` without its steps `first` to `last`. Raises DataError
    for an order whose batch grows: its steps cannot take each other's places."""

    def __init__(self, base: RowOrder, first: int, last: int) -> None:
        assert 1 <= first <= last, (first, last)
        if isinstance(base, GrowingOrder):
            raise DataError(
                "the run leaves out the rows of some steps since it was rewound, and its batch "
                "grows (ScalingConfig.virtual_workers or inner_steps by step): use one number for "
                "all steps, or a new name= for a new run"
            )
        self.base, self.first, self.last = base, first, last
        self.identity, self.steps_per_epoch = base.identity, base.steps_per_epoch
        self.num_rows, self.virtual_workers = base.num_rows, base.virtual_workers
        self.micro_batch_size = base.micro_batch_size

    def open_row_groups(self, virtual_workers: int) -> int:
        return self.base.open_row_groups(virtual_workers)

    def steps_of(self, epochs: int) -> int:
        count = self.base.steps_of(epochs)
        return min(count, max(self.first - 1, count - (self.last - self.first + 1)))

    def epoch_of(self, step: int) -> int:
        return self.base.epoch_of(self._in_base(step))

    def rows(self, step: int, virtual_worker: int) -> int:
        return self.base.rows(self._in_base(step), virtual_worker)

    def locate(self, step: int, virtual_worker: int) -> Any:
        return self.base.locate(self._in_base(step), virtual_worker)

    def locate_each(self, steps: range, virtual_worker: int) -> list[Any]:
        return [self.locate(step, virtual_worker) for step in steps]

    def _in_base(self, step: int) -> int:
        return step if step < self.first else step + self.last - self.first + 1
