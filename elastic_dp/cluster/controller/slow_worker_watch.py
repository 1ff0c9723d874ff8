"""Watches for slow workers of a run by their heartbeats, records them in the journal, and reports
those that the job wants to be replaced."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.phase_clock import PhaseTimes
from elastic_dp.telemetry.slow_workers import (
    COST,
    SlowWorker,
    SlowWorkers,
    SlowWorkersFound,
    WorkerReport,
)

LOOKS = 10  # in a window; fewer, in proportion, for more members than
MEMBERS_PER_LOOK = 1000
REPEAT_S = 60.0  # between two reports of workers that are to be replaced
_IN_STEPS = ("data", "compute", "collective", "apply", "body", "evaluate", "keep")


class SlowWorkerWatch:
    """The controller's thread calls its methods. `replace_after_s`: `post` gets an event about the
    slowest of the workers that are slow for longer; None: never."""

    def __init__(
        self,
        journal: Journal,
        replace_after_s: float | None,
        post: Callable[[m.WorkerSlow], object],
    ) -> None:
        self._journal, self._post = journal, post
        self._replace_after_s = math.inf if replace_after_s is None else replace_after_s
        self.finder = SlowWorkers()
        self._nodes: dict[WorkerId, str] = {}
        self._generation = 0
        self._micro_batches: dict[WorkerId, int] = {}  # of a step, by member
        self._reports: dict[WorkerId, WorkerReport] = {}
        self._look_at = 0.0
        self._post_at = -math.inf
        self.found: tuple[SlowWorker, ...] = ()  # as recorded

    def placed(self, event: m.WorkerPlaced) -> None:
        self._nodes[event.worker] = event.location.node

    def heard(self, event: m.HeartbeatReceived, membership: m.Membership | None) -> None:
        if membership is None or event.generation != membership.generation:
            return
        if event.generation != self._generation:
            self._generation, self._reports = event.generation, {}
            numbers = {one.worker: one.num_virtual_workers for one in membership.members}
            self._micro_batches = {worker: number for worker, number in numbers.items() if number}
        number = self._micro_batches.get(event.worker)  # one that joins step by step has none
        if number is None or event.phase not in _IN_STEPS or not event.times:
            return
        report = event.step, PhaseTimes.of(event.times), number, event.virtual_s, event.sending_s
        self._reports[event.worker] = WorkerReport(*report)
        now = time.monotonic()
        if now >= self._look_at and len(self._reports) == len(self._micro_batches):
            longer = max(1.0, len(self._reports) / MEMBERS_PER_LOOK)
            self._look_at = now + self.finder.window_s / LOOKS * longer
            self.finder.look(now, self._generation, dict(self._reports))
            self._record(now)

    def lost(self, worker: WorkerId) -> None:
        if worker in self._micro_batches:
            self._micro_batches = {}  # this generation is over
        self.finder.forget([worker])
        self._record(time.monotonic())
        self._nodes.pop(worker, None)  # its name is not used again

    def _record(self, now: float) -> None:
        found = self.finder.found
        known = {one.worker: one for one in self.found}
        if found.keys() != known.keys() or any(
            one.phase != known[worker].phase or abs(one.cost - known[worker].cost) > COST
            for worker, one in found.items()
        ):
            ahead_s = time.time() - now
            self.found = tuple(
                replace(one, node=self._nodes.get(worker, ""), since=one.since + ahead_s)
                for worker, one in found.items()
            )
            self._journal.event(SlowWorkersFound(tuple(map(asdict, self.found))))
        due = [one for one in found.values() if now >= one.since + self._replace_after_s]
        if due and now >= self._post_at:
            self._post_at = now + REPEAT_S
            worst = max(due, key=lambda one: one.cost)
            self._post(m.WorkerSlow(worst.worker, worst.why))
