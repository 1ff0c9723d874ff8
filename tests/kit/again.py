"""Tests of other files once more, in another setting."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def again(test: Callable[..., None], marks: Any = (), **values: Iterable[Any]) -> list[Any]:
    """Parameters `rerun`: the test with each combination of these values of its arguments, and with
    fixtures for the others."""

    def bound(given: dict[str, Any]) -> Callable[[pytest.FixtureRequest], None]:
        def rerun(request: pytest.FixtureRequest) -> None:
            names = inspect.signature(test).parameters
            test(**{n: given[n] if n in given else request.getfixturevalue(n) for n in names})

        return rerun

    found = [dict(zip(values, some, strict=True)) for some in product(*values.values())]
    name = test.__name__.removeprefix("test_")
    named = [[getattr(x, "__name__", str(x)) for x in given.values()] for given in found]
    return [
        pytest.param(bound(given), id="-".join([name, *words]), marks=marks)
        for given, words in zip(found, named, strict=True)
    ]


def slow(test: Callable[..., None], **values: Iterable[Any]) -> list[Any]:
    return again(test, pytest.mark.slow, **values)
