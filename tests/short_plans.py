"""Data sets of tests are tiny, and so are their micro-batches. Of each that is opened, thousands
would be planned ahead, for seconds; here some dozens of steps are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from elastic_dp.data.pipeline import planner


@contextlib.contextmanager
def short_plans() -> Iterator[None]:
    with (
        mock.patch.object(planner, "MICRO_BATCHES_PLANNED", 1 << 8),
        mock.patch.object(planner, "ROWS_AT_ONCE", 1 << 7),
    ):
        yield
