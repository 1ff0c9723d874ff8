"""Which workers were told to leave, which died before that, and why.

Several sources report the end of one worker: its heartbeat sidecar, its pipe, or Ray. The first
report counts as the loss; a later one is news only if it knows the cause.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from elastic_dp.coordinator.messages import Cause, Event, WorkerId, WorkerLost

LEFT = "left, as it was asked to"


class ExitReport(Enum):
    FIRST = "the worker was not known to have ended"
    EXPLAINS = "its end was known, but not its cause"
    REPEATS = "nothing new"


class WorkerExits:
    """The ends of workers, expected and unexpected."""

    def __init__(self) -> None:
        self._begun: set[WorkerId] = set()
        self._released: set[WorkerId] = set()
        self._evicted: set[WorkerId] = set()
        self._died: set[WorkerId] = set()  # reported by their sidecars before they were released
        self._causes: dict[WorkerId, Cause] = {}

    def begin(self, *workers: WorkerId) -> None:
        self._begun.update(workers)

    def holds_nothing(self, worker: WorkerId) -> bool:
        """Whether a worker has not begun: there is no user code to unwind, so nothing to wait
        for.
        """
        return worker not in self._begun

    def release(self, worker: WorkerId) -> None:
        """Record that a worker was told to leave; its end is no loss from now on."""
        self._released.add(worker)

    def is_released(self, worker: WorkerId) -> bool:
        return worker in self._released

    def evict(self, worker: WorkerId) -> None:
        """Record that a worker was evicted: a loss, even if the run ends before the worker."""
        self._evicted.add(worker)

    def is_evicted(self, worker: WorkerId) -> bool:
        return worker in self._evicted

    def heard_death(self, worker: WorkerId) -> None:
        """Record a death that a sidecar reported.

        The event may wait in the inbox until the worker is released; its last output comes by then.
        """
        if worker not in self._released:
            self._died.add(worker)

    def was_unasked(self, worker: WorkerId) -> bool:
        """Return whether it ended, or would end now, without having been told to."""
        return worker in self._died or worker not in self._released

    def relabel(self, event: Event) -> Event:
        """Return the event; the end of a worker that was told to leave gets the cause RELEASED."""
        match event:
            case WorkerLost(worker=worker, cause=Cause.UNKNOWN) if not self.was_unasked(worker):
                return dataclasses.replace(event, reason=LEFT, cause=Cause.RELEASED)
        return event

    def report(self, worker: WorkerId, cause: Cause) -> ExitReport:
        known = self._causes.get(worker)
        self._causes[worker] = cause if known in (None, Cause.UNKNOWN) else known
        if known is None:
            return ExitReport.FIRST
        return ExitReport.REPEATS if known is self._causes[worker] else ExitReport.EXPLAINS
