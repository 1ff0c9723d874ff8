"""Which workers have been silent for too long.

All have the same time, so a queue in the order of last being heard answers in O(1): the worker at
its front is the first to become overdue. Two things excuse silence: the coordinator itself was away
(no worker was heard), and a group that still makes steps, since it cannot without each of its
members.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from elastic_dp.coordinator.messages import WorkerId


class FailureDetector:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._heard: OrderedDict[WorkerId, float] = OrderedDict()
        self._overdue: set[WorkerId] = set()  # found so, and not forgotten yet
        self.excused: dict[WorkerId, float] = {}  # silent, but not judged before this
        self.awake_since = -math.inf
        self.due = math.inf  # when the next of them is overdue, as far as is known

    def heard(self, worker: WorkerId, now: float) -> None:
        self._heard[worker] = now
        self._heard.move_to_end(worker)
        self._overdue.discard(worker)
        if self.due == math.inf:
            self._look()

    def forget(self, worker: WorkerId) -> None:
        self._heard.pop(worker, None)
        self._overdue.discard(worker)
        self.excused.pop(worker, None)
        if not self._heard:
            self.due = math.inf

    @property
    def waiting(self) -> bool:
        """Whether anybody should be heard."""
        return bool(self._heard or self._overdue)

    def was_away(self, now: float) -> None:
        """The coordinator slept until `now`: who was silent meanwhile cannot be told."""
        self.awake_since = now
        self._look()

    def silent(
        self, now: float, patience_s: float, excused_until: Callable[[WorkerId], float]
    ) -> list[WorkerId]:
        """The workers to evict; one that is excused until later is looked at again then."""
        overdue = self._named_once(now) if now >= self.due + patience_s else []
        if not overdue and not self.excused:
            return []
        for worker in [worker for worker in self.excused if worker in self._heard]:
            del self.excused[worker]
        again = [worker for worker, until in self.excused.items() if now >= until + patience_s]
        silent: list[WorkerId] = []
        for worker in overdue + again:
            self.excused.pop(worker, None)
            until = excused_until(worker)
            if now < until:
                self.excused[worker] = until  # the group makes steps, so it lives
            else:
                silent.append(worker)
        return silent

    def _named_once(self, now: float) -> list[WorkerId]:
        """All that are overdue at `now`; none is named again before it is heard again."""
        late: list[WorkerId] = []
        while self._heard and now >= self.due:
            self._look()
            if now < self.due:
                break
            worker, _ = self._heard.popitem(last=False)
            late.append(worker)
            self._overdue.add(worker)
            self._look()
        return late

    def _look(self) -> None:
        first = next(iter(self._heard.values()), math.inf)
        self.due = max(first, self.awake_since) + self.timeout_s
