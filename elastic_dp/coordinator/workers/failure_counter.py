"""Limits how much may go wrong without a committed step in between, by kind of failure.

Budgets count incidents, not workers: the loss of a rack takes fifty workers in one incident, while
a sample that kills its worker causes a new incident each time. A loss belongs to a new incident if
the generation that it broke was formed after the last incident, or if the worker was requested
after it.

Lost workers, workers that run out of memory, and errors of user code have a budget each.
Preemptions are not counted. A worker that dies while it runs a micro-batch is also counted against
that micro-batch; otherwise one that crashes every worker that runs it would use up the cluster.

The cause of a loss may become known after the loss was counted. Then the loss is counted again for
its cause. What was counted stays counted: a step forgives it.
"""

import math
from dataclasses import dataclass, replace

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.workers.worker_state import Identities, WorkerState
from elastic_dp.wording import counted

FREE_LOSSES = 3  # losses that are retried without a pause
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class FailureBudget:
    """The incidents of one kind since the last committed step, and their limit."""

    limit: int
    free: int = 0  # incidents that cost no pause
    incidents: int = 0
    _generation: int = -1
    _identities: int = 0

    def count(self, generation: int, number: int, identities: int) -> bool:
        """Count a loss, unless it is part of the last incident. Return whether it was counted.

        `generation` is the one in which the worker with `number` was lost; `identities` is how many
        workers have been requested so far.
        """
        if self._is_known(generation, number):
            return False
        self._generation, self._identities = generation, identities
        self.incidents += 1
        return True

    def allows(self, generation: int, number: int) -> bool:
        """Return whether such a loss would stay within the budget."""
        return self._is_known(generation, number) or self.incidents < self.limit

    def _is_known(self, generation: int, number: int) -> bool:
        """Return whether the loss is part of the last incident."""
        known = generation <= self._generation and number <= self._identities
        return self.incidents > 0 and known

    @property
    def exhausted(self) -> bool:
        return self.incidents > self.limit

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt, with exponential backoff."""
        if self.incidents <= self.free:
            return 0.0
        return float(
            min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.incidents - self.free - 1, 16))
        )


class FailureCounter:
    """Counts failures against the run's budgets."""

    def __init__(self, run: RunState, generation: Generation, identities: Identities) -> None:
        self._run, self._generation, self._identities = run, generation, identities
        config = run.config
        self.losses = FailureBudget(config.max_losses_without_progress, FREE_LOSSES)
        self.memory = FailureBudget(config.max_out_of_memory)
        self.errors = FailureBudget(config.max_user_errors)
        # Number of deaths by (step, virtual worker), and the first that is over its limit.
        self._micro_batches: dict[tuple[int, int], int] = {}
        self._poison_micro_batch: tuple[int, int] | None = None
        self._furthest = 0
        self.user_error: m.WorkerFailed | None = None  # the last one that was retried
        self.retry_at = -math.inf  # before this no worker is started and no generation is formed
        self._out_of_memory = ""  # the last worker that ran out of memory, and its report
        # Workers that were lost since the last step, for an unknown cause.
        self._unknown_causes: dict[WorkerId, tuple[WorkerState, m.WorkerLost]] = {}

    def exhausted(self) -> str:
        """Return why the run must fail, or an empty string."""
        if self._poison_micro_batch is not None:
            step, virtual_worker = self._poison_micro_batch
            died = counted(self._micro_batches[self._poison_micro_batch], "worker")
            return (
                f"{died} died one after another while running virtual worker {virtual_worker} of "
                f"step {step}: its rows, or the code that runs on them, kill the process (a "
                "segmentation fault, out of memory, or an assert on the device)"
            )
        if self.memory.exhausted:
            return (
                f"workers ran out of memory {counted(self.memory.incidents, 'time')} without "
                f"a step in between; last: {self._out_of_memory or self._run.reason}. Lower "
                "micro_batch_size or DataConfig.memory_bytes (a checkpoint needs memory for "
                "another copy of the state), or request more with "
                'resources_per_worker={"memory": …}'
            )
        if self.losses.exhausted:
            lost = counted(self.losses.incidents, "loss", "losses")
            return f"{lost} without a step in between; last: {self._run.reason}"
        return ""

    def lost(self, worker: WorkerState, event: m.WorkerLost, now: float) -> None:
        """Count the loss of a worker that was not asked to leave."""
        if event.cause is m.Cause.UNKNOWN:
            self._unknown_causes[worker.id] = worker, event
        if event.cause is m.Cause.PREEMPTED:
            return
        if event.micro_batch is not None:
            self._count_death_in(*event.micro_batch)
        short = event.cause is m.Cause.OUT_OF_MEMORY
        if short:
            self._out_of_memory = f"{worker.id}: {event.reason}"
        self.count(worker, now, self.memory if short else None)

    def cause_learned(self, event: m.WorkerLost, now: float) -> None:
        """Correct the count of a loss whose cause, or whose micro-batch, becomes known only now."""
        if event.worker not in self._unknown_causes:
            return
        worker, said = self._unknown_causes[event.worker]
        if event.cause is not m.Cause.UNKNOWN:
            del self._unknown_causes[event.worker]
            at = event.micro_batch if said.micro_batch is None else None  # it is counted once
            self.lost(worker, replace(event, micro_batch=at), now)
        elif said.micro_batch is None and event.micro_batch is not None:
            self._unknown_causes[event.worker] = worker, event
            self._count_death_in(*event.micro_batch)

    def allows_user_error(self, worker: WorkerState) -> bool:
        """Return whether the budget lets another worker retry after an error of user code."""
        return self.errors.allows(self._generation.number, worker.number)

    def count(self, worker: WorkerState, now: float, budget: FailureBudget | None = None) -> None:
        """Count a failure and set `retry_at`. `budget` defaults to the budget of losses."""
        budget = budget or self.losses
        if budget.count(self._generation.number, worker.number, self._identities.given):
            self.retry_at = max(self.retry_at, now + budget.pause_s)

    def progressed(self, step: int) -> None:
        """Reset the budgets after a committed step, if it is beyond every earlier one: a run that
        went back to a checkpoint must get further than before.
        """
        if step <= self._furthest:
            return
        self._furthest = step
        for budget in (self.losses, self.memory, self.errors):
            budget.incidents = 0
        for at in [at for at in self._micro_batches if at[0] <= step]:
            del self._micro_batches[at]
        self.retry_at = -math.inf
        self._unknown_causes.clear()

    def _count_death_in(self, step: int, virtual_worker: int) -> None:
        """Count a death against its micro-batch, unless that was completed before."""
        if step > self._furthest:
            at = step, virtual_worker
            self._micro_batches[at] = deaths = self._micro_batches.get(at, 0) + 1
            if deaths > self._run.config.max_losses_of_micro_batch:
                self._poison_micro_batch = self._poison_micro_batch or at
