"""At the head of the loop: whether this worker takes part in a checkpoint of the step whose body
has ended.

First what is asked for, by whom (`CheckpointRequest`); then what is done about it
(`CheckpointDecision`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.train.checkpointing.worker_checkpointer import WorkerCheckpointer
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.generations.worker_progress import WorkerProgress
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.user_loop import UserLoop


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A checkpoint of `step` is asked for by the job (`is_due`) or by the controller, which names
    the `writers`."""

    step: int
    is_due: bool
    is_last: bool  # no other one comes behind it, so it is waited for
    agreed_to_wait: bool  # the members leave it out, as an upload of one of them is late
    writers: Sequence[WorkerId]


class CheckpointDecision(enum.Enum):
    TAKE = enum.auto()
    DEFER = enum.auto()  # the same is asked for once more, of a later step
    LEAVE_OUT = enum.auto()  # the controller asks again, if it still wants one


class StepBoundaryCheckpoints:
    def __init__(
        self,
        checkpointer: WorkerCheckpointer,
        state: TrainState,
        weights: WeightComparison,
        progress: WorkerProgress,
        loop: UserLoop,
        control: WorkerControl,
        reporter: PhaseReporter,
    ) -> None:
        self._checkpointer, self._state, self._weights = checkpointer, state, weights
        self._progress, self._loop = progress, loop
        self._control, self._reporter = control, reporter

    def take_if_requested(self, writers: tuple[WorkerId, ...] = ()) -> None:
        """Returns when the state is copied. `writers`: they share the writing, as the controller
        says."""
        if not self._has_right_state() or self._state.record is None:
            return
        request = self._request(writers)
        if request is not None:
            self._reporter.report("keep")
            self._reporter.pass_point("keeping")
            self._act(request, self._decide(request))
            self._weights.compare_after(request.step)  # others may have taken it
        self._control.upload_is_late(self._checkpointer.late)

    def take_without_controller(self) -> None:
        """A last checkpoint without a controller, where a body has ended and nothing is newer."""
        if self._has_right_state():
            progress = self._progress
            self._checkpointer.commit_without_controller(
                self._state, progress.position.step, progress.evaluations
            )

    def _has_right_state(self) -> bool:
        right = self._progress.has_state and self._weights.mismatch is None
        return right and not self._loop.in_body

    def _request(self, writers: tuple[WorkerId, ...]) -> CheckpointRequest | None:
        record, step = self._state.record, self._progress.position.step
        assert record is not None
        interrupted, ended = bool(self._control.interrupted), bool(self._progress.position.ended)
        due = self._checkpointer.due(step, record.kept or interrupted, ended)
        if not due and (not writers or self._checkpointer.writing(step)):
            return None
        return CheckpointRequest(step, due, ended or interrupted, record.late, writers)

    def _decide(self, request: CheckpointRequest) -> CheckpointDecision:
        """Waits for the upload before this one, within its patience."""
        if request.is_last:
            return CheckpointDecision.TAKE
        may = bool(request.writers) or not request.agreed_to_wait
        if may and self._checkpointer.ready(request.step):
            return CheckpointDecision.TAKE
        return CheckpointDecision.DEFER if request.is_due else CheckpointDecision.LEAVE_OUT

    def _act(self, request: CheckpointRequest, decision: CheckpointDecision) -> None:
        if decision is CheckpointDecision.TAKE:
            self._checkpointer.take(
                self._state,
                request.step,
                self._progress.evaluations,
                tuple(request.writers) or self._weights.members,
                self._progress.lineage_id,
            )
        elif decision is CheckpointDecision.DEFER:
            self._checkpointer.defer()
            self._control.request_checkpoint()
