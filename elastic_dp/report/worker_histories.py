"""What the journal tells about each worker of a run: where it is in its life, and its step times.

The names of workers are used again when a run is started again, so a worker is known by the number
of that start and its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_dp.report.report_model import WorkerCondition, WorkerRow
from elastic_dp.telemetry.phase_clock import PhaseTimes

MOST_WORKERS = 1000  # rows; those that are gone longest are dropped first
_GONE = (WorkerCondition.LEFT, WorkerCondition.LOST, WorkerCondition.ENDED)


@dataclass(slots=True)
class _History:
    name: str
    start: int
    since: float
    condition: WorkerCondition = WorkerCondition.WAITING
    node: str = ""
    until: float | None = None
    reason: str = ""
    steps: int = 0
    seen_step: int = 0  # the run's step when the worker last reported
    times: PhaseTimes = field(default_factory=PhaseTimes)

    def row(self) -> WorkerRow:
        times = self.times
        in_steps = times.data + times.compute + times.collective + times.other
        return WorkerRow(
            name=self.name,
            start=self.start,
            node=self.node,
            condition=self.condition,
            since=self.since,
            until=self.until,
            steps=self.steps,
            step_s=in_steps / self.steps if self.steps else None,
            times=times._asdict(),
            reason=self.reason,
        )


class WorkerHistories:
    """All workers of a run, in the order of their start."""

    def __init__(self) -> None:
        self._start = 0
        self._present: dict[str, _History] = {}
        self._all: list[_History] = []

    def begin(self, now: float) -> None:
        """The run starts again: workers of the start before are gone."""
        self.end(now)
        self._present.clear()
        self._start += 1

    def end(self, now: float) -> None:
        """The run is over."""
        for history in self._present.values():
            if history.condition not in _GONE:
                history.condition, history.until = WorkerCondition.ENDED, now

    def is_gone(self, worker: str) -> bool:
        history = self._present.get(worker)
        return history is not None and history.condition in _GONE

    def place(self, worker: str, node: str, now: float) -> None:
        self._of(worker, now).node = node

    def enter(self, worker: str, condition: WorkerCondition, now: float, reason: str = "") -> None:
        """A worker enters a part of its life. One that is gone stays so."""
        history = self._of(worker, now)
        if history.condition in _GONE:
            return
        leaves = history.condition is WorkerCondition.LEAVING
        if leaves and condition not in (WorkerCondition.LEFT, WorkerCondition.LOST):
            return
        history.condition, history.reason = condition, reason or history.reason
        if condition in _GONE:
            history.until = now

    def form(self, members: Iterable[str], step: int, now: float) -> list[str]:
        """A generation has these members. Return those that train for the first time."""
        joined = []
        for worker in members:
            history = self._of(worker, now)
            if history.condition is not WorkerCondition.TRAINING:
                joined.append(worker)
                history.seen_step = step
                self.enter(worker, WorkerCondition.TRAINING, now)
        return joined

    def report(self, worker: str, times: Sequence[float], step: int) -> None:
        """Take a worker's times. Those before its first generation are all zero."""
        history = self._present.get(worker)
        reported = PhaseTimes.of(tuple(map(float, times)))
        if history is None or not sum(history.times) < sum(reported) < math.inf:
            return
        history.times = reported
        history.steps += max(0, step - history.seen_step)
        history.seen_step = max(step, history.seen_step)

    def rows(self) -> list[WorkerRow]:
        return [history.row() for history in self._all]

    def _of(self, worker: str, now: float) -> _History:
        if worker not in self._present:
            history = self._present[worker] = _History(worker, max(1, self._start), now)
            self._all.append(history)
            if len(self._all) > 2 * MOST_WORKERS:
                gone = [each for each in self._all if each.condition in _GONE]
                dropped = {id(each) for each in gone[: len(self._all) - MOST_WORKERS]}
                self._all = [each for each in self._all if id(each) not in dropped]
        return self._present[worker]
