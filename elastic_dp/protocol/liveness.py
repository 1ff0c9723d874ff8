"""Who has been silent for too long.

All wait equally long, so a queue in the order of last being heard answers in O(1): whoever is at its front is
the first to become overdue. Two things excuse silence: the coordinator itself was away (nothing was heard of
anybody), and a group that still makes steps, since it cannot without each of its members.
"""

import math
from collections import OrderedDict

from elastic_dp.protocol.messages import WorkerId


class Liveness:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._heard: OrderedDict[WorkerId, float] = OrderedDict()
        self._overdue: set[WorkerId] = set()  # found so, and not forgotten yet
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
        if not self._heard:
            self.due = math.inf

    def knows(self, worker: WorkerId) -> bool:
        return worker in self._heard

    @property
    def waiting(self) -> bool:
        """Whether anybody should be heard."""
        return bool(self._heard or self._overdue)

    def was_away(self, now: float) -> None:
        """The coordinator slept until `now`: who was silent meanwhile cannot be told."""
        self.awake_since = now
        self._look()

    def overdue(self, now: float) -> list[WorkerId]:
        """All that are overdue at `now`; each is named once, until heard again."""
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
