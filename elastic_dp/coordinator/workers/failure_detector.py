"""Decides which workers have been silent for too long.

All workers have the same timeout, so a queue ordered by when each was last heard answers in O(1):
the worker at its front is the first to become overdue. Two things excuse silence: the coordinator
itself was away (it heard no worker at all), or the group still makes steps, which it cannot do
without each of its members.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from elastic_dp.coordinator.messages import WorkerId


class FailureDetector:
    """A queue of workers by the time of their last message. `timeout_s` is the silence that is too
    long.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._heartbeat_received: OrderedDict[WorkerId, float] = OrderedDict()
        # workers that are overdue, and the time before which they are not evicted
        self.excused: dict[WorkerId, float] = {}
        self.awake_since = -math.inf
        self.due = math.inf  # when the next worker becomes overdue, as far as is known

    def heard_from(self, worker: WorkerId, now: float) -> None:
        """Record that a message of the worker arrived."""
        self._heartbeat_received[worker] = now
        self._heartbeat_received.move_to_end(worker)
        self.excused.pop(worker, None)
        if self.due == math.inf:
            self._look()

    def forget(self, worker: WorkerId) -> None:
        """Stop watching the worker."""
        self._heartbeat_received.pop(worker, None)
        self.excused.pop(worker, None)
        if not self._heartbeat_received:
            self.due = math.inf

    @property
    def watches_any(self) -> bool:
        """Whether any worker is watched."""
        return bool(self._heartbeat_received or self.excused)

    def was_away(self, now: float) -> None:
        """Record that the coordinator slept until `now`: silence until then proves nothing."""
        self.awake_since = now
        self._look()

    def silent_workers(
        self, now: float, patience_s: float, excused_until: Callable[[WorkerId], float]
    ) -> list[WorkerId]:
        """Return the workers to evict, and look again later at those that are excused until then.

        A worker is overdue `patience_s` after its timeout. `excused_until(worker)` is the time
        before which it may not be evicted.
        """
        overdue = self._take_overdue(now) if now >= self.due + patience_s else []
        again = [worker for worker, until in self.excused.items() if now >= until + patience_s]
        silent: list[WorkerId] = []
        for worker in overdue + again:
            self.excused.pop(worker, None)
            until = excused_until(worker)
            if now < until:
                self.excused[worker] = until  # the group makes steps, so the worker is alive
            else:
                silent.append(worker)
        return silent

    def _take_overdue(self, now: float) -> list[WorkerId]:
        """Remove and return all workers that are overdue at `now`."""
        late: list[WorkerId] = []
        while self._heartbeat_received and now >= self.due:
            self._look()
            if now < self.due:
                break
            worker, _ = self._heartbeat_received.popitem(last=False)
            late.append(worker)
            self._look()
        return late

    def _look(self) -> None:
        first = next(iter(self._heartbeat_received.values()), math.inf)
        self.due = max(first, self.awake_since) + self.timeout_s
