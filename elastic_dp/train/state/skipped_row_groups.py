"""The row groups that a run skips because they cannot be decoded."""

from __future__ import annotations

from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.step.batch_source import BatchSource


class SkippedRowGroups:
    """The names of a run's skipped row groups."""

    def __init__(self, state: TrainState, data: BatchSource) -> None:
        self._state, self._data = state, data
        self._reported: set[int] = set()

    def names(self) -> tuple[str, ...]:
        """Returns the names of all skipped row groups."""
        return tuple(map(self._data.describe_row_group, sorted(self._state.bad_row_groups)))

    def not_reported_yet(self) -> tuple[str, ...]:
        """Returns the names of newly skipped row groups, each one once."""
        new = self._state.bad_row_groups - self._reported
        self._reported |= new
        return tuple(map(self._data.describe_row_group, sorted(new)))
