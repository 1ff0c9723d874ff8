"""What the journal tells about each worker of a run: where it is in its life, and its step times.

The names of workers are used again when a run is started again, so a worker is known by the number
of that start and its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from elastic_dp.report.report_model import GONE, WorkerCondition, WorkerRow
from elastic_dp.telemetry.phase_clock import PhaseTimes

MOST_WORKERS = 1000  # rows; those that are gone longest are dropped first


class WorkerHistories:
    """All workers of a run, in the order of their start."""

    def __init__(self) -> None:
        self._start = 0
        self._present: dict[str, WorkerRow] = {}
        self._all: list[WorkerRow] = []

    def begin(self, now: float) -> None:
        """The run starts again: workers of the start before are gone."""
        self.end(now)
        self._present.clear()
        self._start += 1

    def end(self, now: float) -> None:
        """The run is over."""
        for row in self._present.values():
            if row.condition not in GONE:
                row.condition, row.until = WorkerCondition.ENDED, now

    def is_gone(self, worker: str) -> bool:
        row = self._present.get(worker)
        return row is not None and row.condition in GONE

    def place(self, worker: str, node: str, now: float) -> None:
        self._of(worker, now).node = node

    def enter(self, worker: str, condition: WorkerCondition, now: float, reason: str = "") -> None:
        """A worker enters a part of its life. One that is gone stays so."""
        row = self._of(worker, now)
        if row.condition in GONE:
            return
        leaves = row.condition is WorkerCondition.LEAVING
        if leaves and condition not in (WorkerCondition.LEFT, WorkerCondition.LOST):
            return
        row.condition, row.reason = condition, reason or row.reason
        if condition in GONE:
            row.until = now

    def form(self, members: Iterable[str], step: int, now: float) -> list[str]:
        """A generation has these members. Return those that train for the first time."""
        joined = []
        for worker in members:
            row = self._of(worker, now)
            if row.condition is not WorkerCondition.TRAINING:
                joined.append(worker)
                row.seen_step = step
                self.enter(worker, WorkerCondition.TRAINING, now)
        return joined

    def report(self, worker: str, times: Sequence[float], step: int) -> None:
        """Take a worker's times. Those before its first generation are all zero."""
        row = self._present.get(worker)
        reported = PhaseTimes.of(tuple(map(float, times)))
        if row is None or not sum(row.times.values()) < sum(reported) < math.inf:
            return
        row.times = reported._asdict()
        row.steps += max(0, step - row.seen_step)
        row.seen_step = max(step, row.seen_step)
        if row.steps:
            row.step_s = sum(reported[: PhaseTimes._fields.index("checkpoint")]) / row.steps

    def rows(self) -> list[WorkerRow]:
        return [replace(row) for row in self._all]

    def _of(self, worker: str, now: float) -> WorkerRow:
        if worker not in self._present:
            row = self._present[worker] = WorkerRow(worker, max(1, self._start), now)
            self._all.append(row)
            if len(self._all) > 2 * MOST_WORKERS:
                gone = [each for each in self._all if each.condition in GONE]
                dropped = {id(each) for each in gone[: len(self._all) - MOST_WORKERS]}
                self._all = [each for each in self._all if id(each) not in dropped]
        return self._present[worker]
