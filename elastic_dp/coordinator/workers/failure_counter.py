"""Counts each failure against one of the budgets of failure_budgets.py, and sets how long to wait
before the next attempt.

The cause of a loss may become known after the loss was counted. Then the loss is counted again for
its real cause, and taken back from the budget that it was first counted against.
"""

import math
from dataclasses import replace

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.workers.failure_budgets import FailureBudget, FailureBudgets
from elastic_dp.coordinator.workers.worker_state import Identities, WorkerState

NOBODY: tuple[WorkerId, int] = ("", -1)


class FailureCounter:
    """Counts failures against the run's budgets."""

    def __init__(self, run: RunState, generation: Generation, identities: Identities) -> None:
        self._run, self._generation, self._identities = run, generation, identities
        self.budgets = FailureBudgets(run.config.limits)
        self.user_error: m.WorkerFailed | None = None  # the last one that was retried
        self.retry_at = -math.inf  # before this no worker is started and no generation is formed
        self._retry_before = -math.inf  # `retry_at` before the last incident
        self._out_of_memory = ""  # the last worker that ran out of memory, and its report
        # The worker that the last incident was counted for, and its generation. The id is "" if a
        # member stopped, which does not say which worker was lost.
        self._blamed: tuple[WorkerId, int] = NOBODY
        # Workers that were lost since the last step, for an unknown cause.
        self._unknown_causes: dict[WorkerId, tuple[WorkerState, m.WorkerLost]] = {}

    def exhausted(self) -> str:
        """Return why the run must fail, or an empty string."""
        last = self._out_of_memory if self.budgets.memory.exhausted else ""
        return self.budgets.exhausted(last or self._run.reason)

    def lost(self, worker: WorkerState, event: m.WorkerLost, now: float) -> None:
        """Count the loss of a worker that was not asked to leave."""
        if event.cause is m.Cause.UNKNOWN:
            self._unknown_causes[worker.id] = worker, event
        elif self._blamed in ((worker.id, worker.entered), ("", worker.entered)):
            self.budgets.losses.uncount()
            self._blamed, self.retry_at = NOBODY, self._retry_before
        if event.cause is m.Cause.PREEMPTED:
            return
        if event.micro_batch is not None:
            self.budgets.count_death_in(*event.micro_batch)
        short = event.cause is m.Cause.OUT_OF_MEMORY
        if short:
            self._out_of_memory = f"{worker.id}: {event.reason}"
        self.count(worker, now, self.budgets.memory if short else None, worker.id)

    def cause_learned(self, event: m.WorkerLost, now: float) -> None:
        """Correct the count of a loss whose cause, or whose micro-batch, becomes known only now."""
        if event.worker not in self._unknown_causes:
            return
        worker, said = self._unknown_causes[event.worker]
        if event.cause is not m.Cause.UNKNOWN:
            del self._unknown_causes[event.worker]
            if said.micro_batch is not None:
                self.budgets.uncount_death_in(*said.micro_batch)
            at = said.micro_batch or event.micro_batch
            self.lost(worker, replace(event, micro_batch=at), now)
        elif said.micro_batch is None and event.micro_batch is not None:
            self._unknown_causes[event.worker] = worker, event
            self.budgets.count_death_in(*event.micro_batch)

    def allows_user_error(self, worker: WorkerState) -> bool:
        """Return whether the budget lets another worker retry after an error of user code."""
        return self.budgets.errors.allows(self._generation.number, worker.number)

    def user_code_raised(self, event: m.WorkerFailed) -> None:
        self.user_error = event

    def count(
        self,
        worker: WorkerState,
        now: float,
        budget: FailureBudget | None = None,
        blamed: WorkerId | None = None,
    ) -> None:
        """Count a failure and set `retry_at`. `budget` defaults to the budget of losses.

        `blamed` is the worker that may turn out to be innocent; "" stands for any worker that was
        lost.
        """
        budget = budget or self.budgets.losses
        if budget.count(self._generation.number, worker.number, self._identities.given):
            if budget is self.budgets.losses:
                self._retry_before = self.retry_at
                self._blamed = NOBODY if blamed is None else (blamed, worker.entered)
            self.retry_at = max(self.retry_at, now + budget.pause_s)

    def progressed(self, step: int) -> None:
        """Reset the budgets after a committed step."""
        if self.budgets.progressed(step):
            self.retry_at = -math.inf
            self._unknown_causes.clear()
            self._blamed = NOBODY
