"""The number of virtual workers, which may grow with the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_dp.config.field_checks import whole_number
from elastic_dp.errors import SpecError

_EXAMPLE = "as in {0: 8, 2000: 16}"


def check_virtual_workers(given: Any, name: str) -> None:
    """Raises SpecError unless `given` is None, a number, or growing numbers by steps."""
    if not isinstance(given, Mapping):
        whole_number(name, given, 1)
        return
    for steps in given:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise SpecError(f"{name}: {steps!r} must be a number of steps, {_EXAMPLE}")
    if 0 not in given:
        raise SpecError(
            f"{name}: the number of the first step is missing; add that of 0, {_EXAMPLE}"
        )
    least = 0
    for steps in sorted(given):
        if given[steps] is None:
            raise SpecError(f"{name}[{steps}] is None, must be a whole number")
        whole_number(f"{name}[{steps}]", given[steps], 1)
        if given[steps] <= least:
            raise SpecError(
                f"{name}[{steps}] is {given[steps]}, and {least} before: the batch can only grow, "
                f"{_EXAMPLE}; leave this step out, or raise the number above {least}"
            )
        least = given[steps]


def by_step(virtual_workers: int | Mapping[int, int]) -> dict[int, int]:
    """The numbers by the step after which they hold, in order."""
    if isinstance(virtual_workers, int):
        return {0: virtual_workers}
    return {steps: virtual_workers[steps] for steps in sorted(virtual_workers)}
