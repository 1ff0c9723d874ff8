"""Decides at the head of the loop whether this worker takes a checkpoint of the step that has
ended.

It first collects what is requested (`CheckpointRequest`), then decides what to do about it
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
    """A request for a checkpoint of `step`.

    It comes from the job (`is_due`) or from the controller, which names the `writers`.
    """

    step: int
    is_due: bool
    is_last: bool  # no checkpoint follows it, so training waits for it
    agreed_to_wait: bool  # the members skip it, because an upload of one of them is late
    writers: Sequence[WorkerId]


class CheckpointDecision(enum.Enum):
    TAKE = enum.auto()
    DEFER = enum.auto()  # it is requested again for a later step
    LEAVE_OUT = enum.auto()  # the controller requests it again if it still needs one


class RequestedCheckpoints:
    """The checkpoints that one worker takes between a step's body and the next step."""

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
        self._prepared = False  # for the first snapshot

    def take_if_requested(self, writers: tuple[WorkerId, ...] = ()) -> None:
        """Takes a checkpoint if one is requested. Returns when the state is copied.

        `writers` are the members that share the writing, if the controller names them.
        """
        self._take_if_requested(writers)
        self._state_is_not_needed()

    def _take_if_requested(self, writers: tuple[WorkerId, ...]) -> None:
        if not self._has_right_state() or self._state.record is None:
            return
        request = self._request(writers)
        if request is not None:
            self._reporter.report("keep")
            self._reporter.pass_point("keeping")
            self._act(request, self._decide(request))
            self._weights.compare_after(request.step)  # other members may have taken it
        elif not self._prepared:
            self._checkpointer.prepare(self._state)
        self._prepared = True
        self._control.upload_is_late(self._checkpointer.late)

    def take_without_controller(self) -> None:
        """Takes a last checkpoint without a controller, unless the body is running or a newer one
        exists."""
        if self._has_right_state() and self._state.holders.has_all:
            self._checkpointer.commit_without_controller(self._state, self._progress)
        self._state_is_not_needed()

    def _state_is_not_needed(self) -> None:
        """Tells the other processes of this worker, who help to gather the state."""
        if self._state.in_parts:
            self._control.agreed(False)

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
        """Waits for the previous upload within its patience, then decides."""
        if request.is_last:
            return CheckpointDecision.TAKE
        may = bool(request.writers) or not request.agreed_to_wait
        if may and self._checkpointer.ready(request.step):
            return CheckpointDecision.TAKE
        return CheckpointDecision.DEFER if request.is_due else CheckpointDecision.LEAVE_OUT

    def _act(self, request: CheckpointRequest, decision: CheckpointDecision) -> None:
        if decision is CheckpointDecision.TAKE:
            members = tuple(request.writers) or self._weights.members
            self._checkpointer.take(self._state, self._progress, members)
        elif decision is CheckpointDecision.DEFER:
            self._checkpointer.defer()
            self._control.request_checkpoint()


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
