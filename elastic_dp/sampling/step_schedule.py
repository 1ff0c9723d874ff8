"""A whole number that each step has, such as how many virtual workers, where it changes over the
run.

The number is a function of the step alone, so nothing about it is stored or agreed on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping


class StepSchedule:
    """`numbers` is one number, or numbers by the step after which they hold, from 0 on."""

    def __init__(self, numbers: int | Mapping[int, int]) -> None:
        if isinstance(numbers, int):
            numbers = {0: numbers}
        self.begins = tuple(sorted(numbers))
        self.numbers = tuple(numbers[begin] for begin in self.begins)
        assert self.begins[0] == 0, "checked by config"

    @property
    def least(self) -> int:
        return min(self.numbers)

    @property
    def most(self) -> int:
        return max(self.numbers)

    def at(self, step: int) -> int:
        """Return the number of `step`, from 1."""
        return self.numbers[self.stage_of(step)]

    def stage_of(self, step: int) -> int:
        """Return the number of the stage, from 0, to which `step` belongs."""
        assert step >= 1, "steps count from 1"
        return bisect_right(self.begins, step - 1) - 1

    def begin_of(self, step: int) -> int:
        """Return after which step the stage of `step` begins."""
        return self.begins[self.stage_of(step)]

    def total(self, steps: int) -> int:
        """Return the sum of the numbers of the first `steps` steps."""
        ends = [*self.begins[1:], steps]
        return sum(
            number * (min(end, steps) - begin)
            for begin, end, number in zip(self.begins, ends, self.numbers, strict=True)
            if begin < steps
        )
