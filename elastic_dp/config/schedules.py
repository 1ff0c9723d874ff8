"""Numbers that may change with the step: one number, or numbers by the step after which they hold,
as in `{0: 8, 2000: 16}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from elastic_dp.config.field_checks import whole_number
from elastic_dp.errors import SpecError

_GROWTH = "as in {0: 8, 2000: 16}"


def check_schedule(
    name: str, given: Any, example: str, check: Callable[[str, Any], None]
) -> dict[int, Any]:
    """Returns the numbers of the field `name` by the step after which they hold, in order.

    `example`: of numbers by steps. `check`: raises SpecError unless a number, whose name it gets,
    may be used. Raises SpecError.
    """
    if not isinstance(given, Mapping):
        check(name, given)
        return {0: given}
    for steps in given:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise SpecError(f"{name}: {steps!r} must be a number of steps, {example}")
    if 0 not in given:
        raise SpecError(f"{name}: the value of the first step is missing; add that of 0, {example}")
    before = None
    for steps in sorted(given):
        if given[steps] is None:
            raise SpecError(f"{name}[{steps}] is None: leave it out")
        check(f"{name}[{steps}]", given[steps])
        if given[steps] == before:
            raise SpecError(f"{name}[{steps}] is {before}, and {before} before: leave it out")
        before = given[steps]
    return by_step(given)


def check_virtual_workers(given: Any, name: str) -> None:
    """Raises SpecError unless `given` is None, a number, or growing numbers by steps."""
    numbers = check_schedule(name, given, _GROWTH, lambda each, n: whole_number(each, n, 1))
    for before, steps in pairwise(numbers):
        number, least = numbers[steps], numbers[before]
        if number < least:
            raise SpecError(
                f"{name}[{steps}] is {number}, and {least} before: the batch can only grow, "
                f"{_GROWTH}; leave this step out, or raise the number above {least}"
            )


def by_step(numbers: int | Mapping[int, int]) -> dict[int, int]:
    """The numbers by the step after which they hold, in order."""
    if isinstance(numbers, int):
        return {0: numbers}
    return {steps: numbers[steps] for steps in sorted(numbers)}


def stored(numbers: int | Mapping[int, int] | None) -> int | dict[str, int] | None:
    """The numbers as JSON has them: one that never changes as it is, others by texts."""
    if numbers is None:
        return None
    each = by_step(numbers)
    return each[0] if len(each) == 1 else {str(steps): number for steps, number in each.items()}
