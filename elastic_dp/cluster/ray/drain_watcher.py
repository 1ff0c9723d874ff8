"""Notices that a node will be taken away: a thread polls Ray's draining nodes, and posts a notice
for each worker there, and one if it is the head node.

Ray knows in advance: a SIGTERM to `ray start --block` (a pod is deleted, a machine is taken back),
the autoscaler, and `ray drain-node` each mark a node as draining, mostly with a deadline.

- A notice is posted once for each worker and deadline, also for a worker that starts on a node that
  already drains.
- A failed poll (the head node is unavailable) is repeated soon, and said if it fails for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.coordinator.messages import DrainNoticed, HeadDrainNoticed, WorkerId

_EVERY_S = 0.5


class DrainWatcher:
    """Posts drain notices.

    `draining()` returns node -> deadline in milliseconds of the wall clock, 0 if it is not known.
    `nodes()` returns each worker with each of its nodes, `head()` the head node; they are called
    only while a node drains.
    """

    def __init__(
        self,
        draining: Callable[[], Mapping[str, int]],
        nodes: Callable[[], Iterable[tuple[WorkerId, str]]],
        head: Callable[[], str],
        post: Callable[[DrainNoticed | HeadDrainNoticed], None],
        say: Callable[[str], None],
    ) -> None:
        self._notice = OutageNotice("the watch for nodes that are taken away", say)
        self._draining, self._nodes, self._head, self._post = draining, nodes, head, post
        self._told_of_head: int | None = None
        self._told: dict[tuple[WorkerId, str], int] = {}

    def start(self, ended: threading.Event) -> threading.Thread:
        """Watch until the run has `ended`."""
        return self._notice.watch(_EVERY_S, ended, lambda: self.poll(time.monotonic(), time.time()))

    def poll(self, now: float, wall: float) -> None:
        """Look once. `now` is of the clock of the controller's deadlines (monotonic), `wall` of the
        wall clock.
        """
        draining = self._draining()
        nodes = dict.fromkeys(self._nodes()) if draining else {}

        def at(deadline_ms: int) -> float | None:
            return now + deadline_ms / 1000 - wall if deadline_ms else None

        of_head = draining.get(self._head()) if draining else None
        if of_head is not None and of_head != self._told_of_head:
            self._post(HeadDrainNoticed(at(of_head)))
        self._told_of_head = of_head
        self._told = {pair: told for pair, told in self._told.items() if pair in nodes}
        for worker, node in nodes:
            deadline_ms = draining.get(node)
            if deadline_ms is not None and self._told.get((worker, node)) != deadline_ms:
                self._told[worker, node] = deadline_ms
                self._post(DrainNoticed(worker, at(deadline_ms)))
