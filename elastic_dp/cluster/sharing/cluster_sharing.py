"""Limits one run of a cluster for the others, and lets it begin when there is room for it.

Every controller computes the same division of the published demands (`cluster_shares`), and Ray
gives the places that a run leaves to whoever waits for them, so no controller leads the others, and
none has to answer. A run that is alone on its cluster is never limited, and never waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

import ray

from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.ray import worker_placement
from elastic_dp.cluster.sharing.cluster_room import ClusterRoom
from elastic_dp.cluster.sharing.published_demands import PublishedDemands
from elastic_dp.config import ScalingConfig
from elastic_dp.coordinator.messages import SizeLimited
from elastic_dp.coordinator.planning.cluster_shares import RunDemand, limit_of, worker_shares
from elastic_dp.threads import background
from elastic_dp.wording import counted

_EVERY_S = 0.4  # a run of higher priority gets its first workers within two seconds


class ClusterSharing:
    """Limits one run for the others. `admit` waits until the run may begin; `start` watches it from
    then on, and calls `post` with a changed limit.

    `sizes` returns the minimum and the size that the run asks for; `held` returns the node of each
    worker that has a process.
    """

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        began_at: float,
        sizes: Callable[[], tuple[int, int]],
        held: Callable[[], Iterable[str]],
        post: Callable[[SizeLimited], None],
        say: Callable[[str], None],
    ) -> None:
        self._name, self._scaling, self._began_at = name, scaling, began_at
        self._sizes, self._held, self._post, self._say = sizes, held, post, say
        self._demands, self._room = PublishedDemands(name), ClusterRoom()
        self._notice = OutageNotice("the division of the cluster among its runs", say)
        self._told: int | None = None
        self.queued_because = ""

    def admit(self, is_over: Callable[[], bool]) -> None:
        """Wait until the run's minimum fits beside the other runs, or it `is_over`."""
        said = ""
        while not is_over() and not self._notice.attempt(self._has_room):
            if said != self.queued_because:
                self._say(self.queued_because)
                said = self.queued_because
            time.sleep(_EVERY_S)
        self.queued_because = ""

    def _has_room(self) -> bool:
        """Return whether the run's minimum fits; `queued_because` says why not."""
        limit, others = self._look(time.monotonic(), is_queued=True)
        least = self._sizes()[0] + self._scaling.standby
        if limit is None or limit >= least:
            return True
        names = ", ".join(sorted(run.name for run in others))
        self.queued_because = (
            f"queued: its {counted(least, 'worker')} (min_workers) do not fit beside the "
            f"other runs of the cluster ({names})"
        )
        return False

    def start(self, ended: threading.Event) -> None:
        """Watch until the run has `ended`."""
        background("cluster sharing", lambda: self._watch(ended)).start()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_EVERY_S):
            self._notice.attempt(self._limit)
        with contextlib.suppress(Exception):
            self._demands.withdraw()

    def _limit(self) -> None:
        limit, others = self._look(time.monotonic(), is_queued=False)
        least, _ = self._sizes()
        most = None if limit is None else max(least, limit - self._scaling.standby)
        if most != self._told:
            self._post(SizeLimited(most, self._why(most, others)))
            self._told = most

    def _look(self, now: float, *, is_queued: bool) -> tuple[int | None, list[RunDemand]]:
        """Return how many workers, standby included, the other runs leave to this one (None: no
        limit), and the demands of the others.
        """
        others = self._demands.others(now)
        own = self._demand(is_queued, with_nodes=bool(others))
        self._demands.publish(own)
        if not others:
            return None, others
        every = [own, *others]
        shares = worker_shares(every, self._room.of(every, now))
        return limit_of(self._name, every, shares, may_grow=self._room.may_grow(now)), others

    def _demand(self, is_queued: bool, with_nodes: bool) -> RunDemand:
        scaling, (least, size) = self._scaling, self._sizes()
        asked = worker_placement.placement_preferences(scaling, [])
        usable = None
        if asked and with_nodes:
            alive = [node for node in ray.nodes() if node["Alive"]]
            usable = tuple(
                node["NodeID"]
                for node in alive
                if not worker_placement.why_none_matches(asked, [node["Labels"]])
            )
        return RunDemand(
            name=self._name,
            priority=scaling.priority,
            began_at=self._began_at,
            min_workers=least + scaling.standby,
            size=size + scaling.standby,
            needs=dict(scaling.resources_per_worker),
            nodes=tuple(self._held()) if with_nodes else (),
            usable=usable,
            is_queued=is_queued,
        )

    def _why(self, most: int | None, others: Iterable[RunDemand]) -> str:
        above = [run for run in others if run.priority > self._scaling.priority]
        if most is None or not above:
            return "no run of higher priority limits it"
        first = max(above, key=lambda run: (run.is_short, run.priority))
        return (
            f"run {first.name!r} has priority {first.priority}, this one {self._scaling.priority}"
        )
