"""What the other processes of a worker do where its first one takes a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.state.train_state import TrainState


class FollowerCheckpoints:
    """In the place of `RequestedCheckpoints`: takes part as often as the state is gathered,
    until the first process says that it has done."""

    def __init__(self, state: TrainState, control: WorkerControl, reporter: PhaseReporter) -> None:
        self._state, self._control, self._reporter = state, control, reporter

    def take_if_requested(self, writers: Sequence[WorkerId] = ()) -> None:
        self._help()

    def take_without_controller(self) -> None:
        self._help()

    def _help(self) -> None:
        while self._control.agreed(False):
            self._reporter.pass_point("keeping")
            self._state.gather()
