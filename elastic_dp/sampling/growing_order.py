"""The order of rows where the batch changes: other steps over the same micro-batches.

The micro-batches and their order are those of a job whose steps all have V0 virtual workers, the
least number of any step. A step of V virtual workers takes the next V of them. So how many
micro-batches are taken after a step is arithmetic on the schedule, each row comes as often as
without it, and the streams that are read stay the same.

Which of its V micro-batches a virtual worker takes: they are sorted by the virtual worker of V0
that they belong to, and dealt in this order. So a worker with a range of virtual workers goes on
with the streams, and the row groups in memory, that it had before the batch changed.

A step belongs to one epoch. Micro-batches that are left at the end of an epoch and are too few for
a step are dropped, or make a short step, as `tail` says. A mixture has no epochs and no tail. Its
weights change where the V0 micro-batches of one step without growth begin: if they are to change
within such a step, up to V0 - 1 micro-batches later.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from elastic_dp.errors import DataError
from elastic_dp.sampling.order import BaseOrder, RowOrder
from elastic_dp.sampling.step_schedule import StepSchedule

_DEALS_KEPT = 64
_ENDLESS = 1 << 62  # micro-batches in the epoch of a mixture, which has no end


@dataclass(frozen=True, slots=True)
class _Growth:
    """The steps after `begin` steps, of `size` virtual workers. When it begins, `taken`
    micro-batches of `epoch` are taken."""

    begin: int
    size: int
    epoch: int
    taken: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step takes `count` micro-batches of `epoch`, from number `first` on."""

    epoch: int
    first: int
    count: int


class GrowingOrder(RowOrder):
    """Over `base`, an order of `schedule.least` virtual workers. Raises
    DataError if an epoch has too few rows for a step of `schedule.most`. A micro-batch beyond those
    of a step has no rows."""

    def __init__(self, base: BaseOrder, schedule: StepSchedule) -> None:
        assert base.virtual_workers == schedule.least, "the order of another schedule"
        self.base, self.schedule = base, schedule
        self.num_rows, self.micro_batch_size = base.num_rows, base.micro_batch_size
        self.virtual_workers = schedule.most
        # Which micro-batches there are does not depend on the schedule, whose future may change
        # between two starts of a run.
        self.identity = base.identity
        self._drops = base.tail == "drop"
        self._per_epoch = self._count_micro_batches()
        self._dealt = lru_cache(_DEALS_KEPT)(self._deal)
        self._stages: list[_Growth] = []
        for begin, size in zip(schedule.begins, schedule.numbers, strict=True):
            position = self._position(begin + 1) if begin else _Step(0, 0, size)
            self._stages.append(_Growth(begin, size, position.epoch, position.first))
        # In the first epoch; later ones may have fewer. Of a mixture: without growth.
        endless = self._per_epoch == _ENDLESS
        self.steps_per_epoch = base.steps_per_epoch if endless else self.steps_of(1)

    def _count_micro_batches(self) -> int:
        """Return how many micro-batches with rows an epoch has."""
        base, need = self.base, self.schedule.most
        if base.tail is None:
            return _ENDLESS
        if not self._drops:
            return -(-base.num_rows // base.micro_batch_size)
        count = base.steps_per_epoch * base.virtual_workers
        if count < need:
            raise DataError(
                f"an epoch has {count} micro-batches of {base.micro_batch_size} rows, fewer than "
                f"the {need} of the largest step; add rows, lower ScalingConfig.virtual_workers "
                'or inner_steps there, or set tail="short" for smaller last batches'
            )
        return count

    def steps_of(self, epochs: int) -> int:
        if not epochs:
            return 0
        stage = self._stages[bisect_right(self._stages, epochs - 1, key=lambda s: s.epoch) - 1]
        in_first = self._steps_for(self._per_epoch - stage.taken, stage.size)
        in_each = self._steps_for(self._per_epoch, stage.size)
        return stage.begin + in_first + (epochs - stage.epoch - 1) * in_each

    def epoch_of(self, step: int) -> int:
        position = self._position(step)
        turn = position.first // self.schedule.least
        return self.base.epoch_of(position.epoch * self.base.steps_per_epoch + turn + 1)

    def open_row_groups(self, virtual_workers: int) -> int:
        return self.base.open_row_groups(min(virtual_workers, self.schedule.least))

    def rows(self, step: int, virtual_worker: int) -> int:
        in_base = self._in_base(step, virtual_worker)
        return 0 if in_base is None else self.base.rows(*in_base)

    def locate(self, step: int, virtual_worker: int) -> Any:
        in_base = self._in_base(step, virtual_worker)
        return self.base.no_rows if in_base is None else self.base.locate(*in_base)

    def locate_each(self, steps: range, virtual_worker: int) -> list[Any]:
        return [self.locate(step, virtual_worker) for step in steps]

    # ---------------------------------------------------------------------------- private

    def _in_base(self, step: int, virtual_worker: int) -> tuple[int, int] | None:
        """Return the step and the virtual worker of the base order that have the micro-batch."""
        position, total = self._position(step), self.schedule.least
        if virtual_worker >= position.count:
            return None
        at = position.first % total
        number = position.first + self._dealt(at, position.count)[virtual_worker]
        before = position.epoch * self.base.steps_per_epoch
        return before + number // total + 1, number % total

    def _deal(self, at: int, count: int) -> list[int]:
        """Return the micro-batch of each virtual worker, counted from the first of the step, which
        is one of virtual worker `at` of the base order.
        """
        return sorted(range(count), key=lambda n: ((at + n) % self.schedule.least, n))

    def _position(self, step: int) -> _Step:
        assert step >= 1, "steps count from 1"
        stage = self._stages[bisect_right(self._stages, step - 1, key=lambda s: s.begin) - 1]
        after = step - 1 - stage.begin
        in_first = self._steps_for(self._per_epoch - stage.taken, stage.size)
        if after < in_first:
            epoch, first = stage.epoch, stage.taken + after * stage.size
        else:
            in_each = self._steps_for(self._per_epoch, stage.size)
            epochs, turn = divmod(after - in_first, in_each)
            epoch, first = stage.epoch + 1 + epochs, turn * stage.size
        return _Step(epoch, first, min(stage.size, self._per_epoch - first))

    def _steps_for(self, micro_batches: int, size: int) -> int:
        return micro_batches // size if self._drops else -(-micro_batches // size)
