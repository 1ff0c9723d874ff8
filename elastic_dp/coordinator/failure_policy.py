"""What the loss of a worker costs: which budget it counts against, and how long to wait before the
next attempt.

A cause may become known only after the loss was counted. Then the loss is counted again for what it
was, and taken back from the budget that it was counted against before.
"""

import math
from dataclasses import replace

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.budget import Budget, Budgets
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.worker_state import Identities, WorkerState

NOBODY: tuple[WorkerId, int] = ("", -1)


class FailurePolicy:
    def __init__(self, run: RunState, generation: Generation, identities: Identities) -> None:
        self._run, self._generation, self._identities = run, generation, identities
        self.budgets = Budgets(run.config)
        self.user_error: m.WorkerFailed | None = None  # the last that was retried
        self.retry_at = -math.inf  # no worker is started, and no generation formed, before
        self._retry_before = -math.inf  # the last incident
        self._out_of_memory = ""  # the last worker that was, and what it said
        # For the last incident: who, in which generation; "": any, since a member stopped.
        self._blamed: tuple[WorkerId, int] = NOBODY
        # Lost since the last step, for a reason that is not known.
        self._unexplained: dict[WorkerId, tuple[WorkerState, m.WorkerLost]] = {}

    def exhausted(self) -> str:
        """Why the run has to fail, in words; empty while it has not."""
        short = self._out_of_memory if self.budgets.memory.exhausted else ""
        return self.budgets.exhausted(short or self._run.reason)

    def lost(self, worker: WorkerState, event: m.WorkerLost, now: float) -> None:
        """A loss that nobody asked for."""
        if event.cause is m.Cause.UNKNOWN:
            self._unexplained[worker.id] = worker, event
        elif self._blamed in ((worker.id, worker.entered), ("", worker.entered)):
            self.budgets.losses.take_back()
            self._blamed, self.retry_at = NOBODY, self._retry_before
        if event.cause is m.Cause.PREEMPTED:
            return
        if event.micro_batch is not None:
            self.budgets.died_in(*event.micro_batch)
        short = event.cause is m.Cause.OUT_OF_MEMORY
        if short:
            self._out_of_memory = f"{worker.id}: {event.reason}"
        self.count(worker, now, self.budgets.memory if short else None, worker.id)

    def explained(self, event: m.WorkerLost, now: float) -> None:
        """The worker is known to be lost, and was counted without a cause, or without its
        micro-batch."""
        if event.worker not in self._unexplained:
            return
        worker, said = self._unexplained[event.worker]
        if event.cause is not m.Cause.UNKNOWN:
            del self._unexplained[event.worker]
            if said.micro_batch is not None:
                self.budgets.did_not_die_in(*said.micro_batch)
            at = said.micro_batch or event.micro_batch
            self.lost(worker, replace(event, micro_batch=at), now)
        elif said.micro_batch is None and event.micro_batch is not None:
            self._unexplained[event.worker] = worker, event
            self.budgets.died_in(*event.micro_batch)

    def allows_user_error(self, worker: WorkerState) -> bool:
        """Whether another worker may try again."""
        return self.budgets.errors.allows(self._generation.number, worker.number)

    def user_code_raised(self, event: m.WorkerFailed) -> None:
        self.user_error = event

    def count(
        self,
        worker: WorkerState,
        now: float,
        budget: Budget | None = None,
        blamed: WorkerId | None = None,
    ) -> None:
        """`blamed`: the worker that may turn out to be innocent; "": any that was lost, as a stop
        does not say."""
        budget = budget or self.budgets.losses
        if budget.counts(self._generation.number, worker.number, self._identities.given):
            if budget is self.budgets.losses:
                self._retry_before = self.retry_at
                self._blamed = NOBODY if blamed is None else (blamed, worker.entered)
            self.retry_at = max(self.retry_at, now + budget.pause_s)

    def progressed(self, step: int) -> None:
        """A step was made: losses are forgiven."""
        if self.budgets.progressed(step):
            self.retry_at = -math.inf
            self._unexplained.clear()
            self._blamed = NOBODY
