"""Checks of single fields. Each raises SpecError with the field's name.

By hand and not by pydantic: its messages name the field and the type, these say what to do; configs
stay plain frozen dataclasses, which pickle and compare; and the command line starts without its
import.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from elastic_dp.errors import SpecError


def check_fields(config: Any, **least: float) -> None:
    """Check each field by its type: `bool`, `int`, `float`, `Literal`, a function, or None where
    its type or its default has it. `least`: by name, of numbers that have a least value. Fields of
    other types are not checked here.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        name, value = f"{type(config).__name__}.{field.name}", getattr(config, field.name)
        hint: Any = hints[field.name]
        kinds = hint, *get_args(hint)  # those of a union
        generics: list[Any] = [get_origin(kind) for kind in kinds]
        if value is None and type(None) not in kinds and field.default not in (None, MISSING):
            raise SpecError(f"{name} is None; leave it out for {field.default!r}")
        if value is None or Mapping in generics:
            continue
        words = [w for kind in kinds if get_origin(kind) is Literal for w in get_args(kind)]
        if words and (isinstance(value, str) or not {int, float} & {*kinds}):
            one_of(name, value, words)
        elif kinds == (bool,) and not isinstance(value, bool):
            raise SpecError(f"{name} is {value!r}, must be True or False")
        elif int in kinds:
            whole_number(name, value, least.get(field.name, -math.inf))
        elif float in kinds:
            at_least(name, value, least.get(field.name, -math.inf))
        elif Callable in generics and not callable(value):
            raise SpecError(f"{name} is {value!r}, must be a function, or None")


def at_least(name: str, value: float | None, minimum: float) -> None:
    """Check that the value is None or a finite number >= `minimum`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} is {value!r}, must be a number")
    if not _is_finite(value):
        raise SpecError(f"{name} is {value}, must be finite; for no limit leave it out")
    if value < minimum:
        raise SpecError(f"{name} is {value}, must be at least {minimum}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def whole_number(name: str, value: int | None, minimum: float) -> None:
    """Check that the value is None or an integer >= `minimum`."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise SpecError(f"{name} is {value!r}, must be a whole number")
    at_least(name, value, minimum)


def one_of(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Check that the value is one of `allowed`."""
    if value not in allowed:
        raise SpecError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


def valid_labels(names: Any) -> bool:
    """Return whether `names` is a list of valid names or values of Ray labels (Kubernetes'
    rules).
    """
    pattern = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    return is_list and all(isinstance(x, str) and re.fullmatch(pattern, x) for x in names)


def check_rewind(
    to_step: int, leave_out: tuple[int, int] | None, *, total: int | None, grows: bool
) -> None:
    """Check the steps of a rewind of a run of `total` steps, if that is known. `grows`: its batch
    does."""
    whole_number("to_step", to_step, 0)
    if leave_out is None:
        return
    if not isinstance(leave_out, tuple | list) or len(leave_out) != 2:
        raise SpecError(
            f"leave_out is {leave_out!r}, must be two steps, the first and the last one"
        )
    first, last = leave_out
    if None in (to_step, first, last):
        raise SpecError(f"to_step is {to_step!r} and leave_out {leave_out!r}: steps are numbers")
    whole_number("leave_out[0]", first, 1)
    whole_number("leave_out[1]", last, 1)
    if not to_step < first <= last:
        raise SpecError(
            f"leave_out is {first}..{last}, must be steps after to_step={to_step}, the first one "
            "first: what a checkpoint has learned cannot be left out of it"
        )
    if grows:
        raise SpecError(
            "leave_out needs steps of one size, and the batch of the run grows (virtual_workers or "
            "inner_steps by step): later steps cannot take the places of those left out"
        )
    if total is not None and (first > total or (first == 1 and last >= total)):
        raise SpecError(
            f"leave_out is {first}..{last}, and the run has {total} steps: "
            + ("none is left" if first == 1 else "it has none of these")
        )
