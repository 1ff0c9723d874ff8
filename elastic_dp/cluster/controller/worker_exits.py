"""Which workers were told to leave, which died before that, and why.

Several sources report the end of one worker: its heartbeat sidecar, its pipe, or Ray. The first
report counts as the loss; a later one is news only if it knows the cause.
"""

from __future__ import annotations

import dataclasses

from elastic_dp.coordinator.messages import Cause, Event, WorkerId, WorkerLost

LEFT = "left, as it was asked to"


class WorkerExits:
    """The ends of workers, expected and unexpected."""

    def __init__(self) -> None:
        # A worker that has not begun has no user code to unwind, so nobody waits for its end.
        self.begun: set[WorkerId] = set()
        self.released: set[WorkerId] = set()  # told to leave: their end is no loss
        self.evicted: set[WorkerId] = set()  # a loss, even if the run ends before the worker
        # Reported by their sidecars before they were released. The event may wait in the inbox
        # until then; the last output comes by then.
        self.died: set[WorkerId] = set()
        self.causes: dict[WorkerId, Cause] = {}  # of those that have ended

    def was_unasked(self, worker: WorkerId) -> bool:
        """Return whether it ended, or would end now, without having been told to."""
        return worker in self.died or worker not in self.released

    def relabel(self, event: Event) -> Event:
        """Return the event; the end of a worker that was told to leave gets the cause RELEASED."""
        match event:
            case WorkerLost(worker=worker, cause=Cause.UNKNOWN) if not self.was_unasked(worker):
                return dataclasses.replace(event, reason=LEFT, cause=Cause.RELEASED)
        return event

    def learn(self, worker: WorkerId, cause: Cause) -> bool:
        """Note the end of a worker. Return whether that it ended, or why, was not known yet."""
        known = self.causes.get(worker)
        if known is cause or known not in (None, Cause.UNKNOWN):
            return False
        self.causes[worker] = cause
        return True
