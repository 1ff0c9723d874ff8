"""How far a run has come, whether its weights are exact, how it ended, and its stored result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_dp.cluster.runs.controller_state import ControllerState
from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import FailRun, FinishRun, StandDown
from elastic_dp.run_record import Result, RunLimits, RunOutcome, write_result
from elastic_dp.train.exactness.machine_kind import why_inexact
from elastic_dp.train.interruption import TIME_IS_UP


class RunReport:
    """The report of a run. `outcome` is that of a previous controller, if it had ended the run."""

    def __init__(self, spec: JobSpec, url: str | None, outcome: RunOutcome | None) -> None:
        self._spec, self._url = spec, url
        self.outcome = outcome or RunOutcome()
        self._inexact: dict[str, None] = {}  # an ordered set of reasons

    @property
    def has_ended(self) -> bool:
        return bool(self.outcome.reason)

    def inexact_because(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Return why the weights are not exact. `kinds` are those of the machines that made
        steps.
        """
        return why_inexact(tuple(self._inexact), kinds)

    def add_inexact(self, reasons: Iterable[str]) -> None:
        self._inexact |= dict.fromkeys(reasons)

    def end(self, command: FinishRun | FailRun | StandDown, generations: int) -> RunOutcome:
        outcome = self.outcome
        outcome.generations = generations
        match command:
            case FinishRun(position=position, digest=digest, reason=reason, digests_differ=differ):
                if differ:
                    self.add_inexact(["workers finished with different weights"])
                outcome.step, outcome.digest, outcome.reason = position.step, digest, reason
                outcome.inexact_because = tuple(self._inexact)
            case FailRun(error=error, traceback=text, worker=worker, facts=facts):
                outcome.reason, outcome.error, outcome.traceback = "failed", error, text
                outcome.error_worker, outcome.error_facts = worker, facts
            case StandDown(reason=reason):
                outcome.error = outcome.reason = reason
        return outcome

    def close(self, state: ControllerState, generations: int, metrics: Mapping[str, Any]) -> None:
        """Complete the outcome when everything has ended; it has a result unless the run failed."""
        outcome, earlier = self.outcome, state.earlier
        outcome.wall_s = time.time() - state.started_at + earlier.wall_s
        outcome.workers_lost = state.lost + earlier.workers_lost
        outcome.generations = max(outcome.generations, generations + earlier.generations)
        if outcome.error is None:
            outcome.result = Result(
                name=self._spec.name,
                path=self._url or "",
                step=outcome.step,
                reason=outcome.reason,
                weights_sha256=outcome.digest,
                exact=self._spec.exact and not outcome.inexact_because,
                inexact_because=outcome.inexact_because,
                skipped=outcome.skipped,
                metrics=dict(metrics),
                generations=outcome.generations,
                workers_lost=outcome.workers_lost,
                wall_s=outcome.wall_s,
            )

    def write_result(self, state: ControllerState) -> None:
        """Write the result to the run's folder. Raises what the store raises.

        The controller does this, because no driver may be attached.
        """
        if self.outcome.result is not None and self._url is not None:
            stopped = state.stop is not None and state.stop.reason != TIME_IS_UP
            write_result(self._url, self.outcome.result, RunLimits.of(self._spec, stopped))
