"""How many virtual workers a step has, where the batch grows over the run.

The number is a function of the step alone, so nothing about it is stored or agreed on. It never
falls: a worker has at least one virtual worker in every step, however many workers the first steps
allow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping


class BatchSchedule:
    """`virtual_workers` is one number, or numbers by the step after which they hold, from 0 on."""

    def __init__(self, virtual_workers: int | Mapping[int, int]) -> None:
        if isinstance(virtual_workers, int):
            virtual_workers = {0: virtual_workers}
        self.begins = tuple(sorted(virtual_workers))
        self.sizes = tuple(virtual_workers[begin] for begin in self.begins)
        assert self.begins[0] == 0 and [*self.sizes] == sorted(self.sizes), "checked by config"

    @property
    def first(self) -> int:
        """The number of the first steps, which is the smallest."""
        return self.sizes[0]

    @property
    def last(self) -> int:
        """The number of the last steps, which is the largest."""
        return self.sizes[-1]

    def at(self, step: int) -> int:
        """Return the number of virtual workers of `step`, from 1."""
        return self.sizes[self.stage_of(step)]

    def stage_of(self, step: int) -> int:
        """Return the number of the stage, from 0, to which `step` belongs."""
        assert step >= 1, "steps count from 1"
        return bisect_right(self.begins, step - 1) - 1

    def micro_batches(self, steps: int) -> int:
        """Return how many micro-batches the first `steps` steps have."""
        ends = [*self.begins[1:], steps]
        return sum(
            size * (min(end, steps) - begin)
            for begin, end, size in zip(self.begins, ends, self.sizes, strict=True)
            if begin < steps
        )
