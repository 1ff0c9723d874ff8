"""The micro-batches of virtual workers that make several inner steps in a step.

The data set is opened for H times as many virtual workers as the job has, if a step has H inner
steps: inner step h of virtual worker v has micro-batch v * H + h. So the order of rows, the end of
an epoch and reading ahead are those of any run, and where H changes with the step, those of a batch
that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.step.batch_source import RowSource
from elastic_dp.train.step.micro_batch import MicroBatchResult, MicroBatchRunner, not_finite_loss


class InnerRows:
    """Implements `RowSource`: a virtual worker has the rows of all its inner steps. `each` has
    their micro-batches."""

    def __init__(self, each: RowSource, inner_steps: StepSchedule) -> None:
        self._each, self._inner_steps = each, inner_steps

    def keys(self, step: int, virtual_worker: int) -> range:
        """Returns the numbers of its micro-batches, in the order of its inner steps."""
        count = self._inner_steps.at(step)
        return range(virtual_worker * count, (virtual_worker + 1) * count)

    def keys_with_rows(self, step: int, virtual_worker: int) -> list[int]:
        """Returns those that are not empty, as some are in a short last step of an epoch."""
        return [k for k in self.keys(step, virtual_worker) if self._each.rows(step, k)]

    def virtual_worker(self, step: int, key: int) -> int:
        return key // self._inner_steps.at(step)

    def name(self, step: int, key: int) -> str:
        """Returns a name for messages."""
        v, number = divmod(key, self._inner_steps.at(step))
        return f"virtual worker {v}, inner step {number + 1}"

    def epoch_of(self, step: int) -> int:
        return self._each.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._each.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        return sum(self._each.rows(step, key) for key in self.keys(step, virtual_worker))

    def describe(self, step: int, virtual_worker: int) -> str:
        first, *more = self.keys_with_rows(step, virtual_worker)
        described = self._each.describe(step, first)
        return f"{described}, and {len(more)} more micro-batches" if more else described

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._each.read_ahead(step, [key for v in virtual_workers for key in self.keys(step, v)])

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        each = (self._each.bad_row_groups(step, key) for key in self.keys(step, virtual_worker))
        return frozenset[int]().union(*each)

    def check_bad(self, row_groups: Iterable[int]) -> None:
        self._each.check_bad(row_groups)

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        self._each.mark_bad(row_groups)


class InnerMicroBatches(MicroBatchRunner):
    """Runs the micro-batches of inner steps, each with a number of its own, in the place of that of
    the virtual worker."""

    several = True

    def __init__(self, rows: InnerRows, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.rows = rows

    def _virtual_worker(self, step: int, v: int) -> int:
        return self.rows.virtual_worker(step, v)

    def _name(self, step: int, v: int) -> str:
        return self.rows.name(step, v)

    def _without_gradient(self, step: int, v: int, result: MicroBatchResult) -> NoReturn:
        where, described = self.rows.name(step, v), self._data.describe(step, v)
        raise not_finite_loss(result.loss, step, where, described)
