"""Limits one run of a cluster for the others, and lets it begin when there is room for it.

Every controller computes the same division of the published demands (`cluster_shares`), and Ray
gives the places that a run leaves to whoever waits for them, so no controller leads the others, and
none has to answer. A run that is alone on its cluster is never limited, and never waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.ray import private, worker_placement
from elastic_dp.config import ScalingConfig
from elastic_dp.coordinator.messages import SizeLimited
from elastic_dp.extensions.sharing.cluster_shares import RunDemand, limit_of, worker_shares
from elastic_dp.threads import background
from elastic_dp.wording import counted

_WINDOW_S = 10.0
_PREFIX = "elastic_dp_demand/"
_STALE_S = 10.0
_EVERY_S = 0.4  # a run of higher priority gets its first workers within two seconds


class ClusterSharing:
    """Limits one run for the others. `admit` waits until the run may begin; `start` watches it from
    then on, and calls `post` with a changed limit. `sizes` returns the minimum and the size that
    the run asks for; `held` returns the node of each worker that has a process."""

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        *,
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
        limit), and the demands of the others."""
        others = self._demands.others(now)
        own = self._demand(is_queued, with_nodes=bool(others))
        self._demands.publish(own)
        if not others:
            return None, others
        every = [own, *others]
        shares = worker_shares(every, self._room.of(every, now))
        limit = limit_of(self._name, every, shares, may_grow=self._room.may_grow(now))
        return None if limit is None else limit // self._scaling.nodes_per_worker, others

    def _demand(self, is_queued: bool, with_nodes: bool) -> RunDemand:
        scaling, (least, size) = self._scaling, self._sizes()
        nodes = scaling.nodes_per_worker  # each counts as a worker
        selector = worker_placement.node_selector(scaling)
        usable = None
        if selector and with_nodes:
            alive = [node for node in ray.nodes() if node["Alive"]]
            fitting = (n for n in alive if worker_placement.matches(selector, n["Labels"]))
            usable = tuple(node["NodeID"] for node in fitting)
        return RunDemand(
            name=self._name,
            priority=scaling.priority,
            began_at=self._began_at,
            min_workers=nodes * (least + scaling.standby),
            size=nodes * (size + scaling.standby),
            needs=dict(scaling.resources_per_node),
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


class PublishedDemands:
    """What each run of the cluster asks for and has, as an entry of Ray's GCS. An entry that has
    not changed for `_STALE_S` belongs to a controller that is gone. Clocks of several machines are
    not compared."""

    def __init__(self, name: str) -> None:
        self._key, self._beat = f"{_PREFIX}{name}".encode(), 0
        self._seen: dict[bytes, tuple[bytes, float]] = {}  # value, and since when it is the same

    def publish(self, demand: RunDemand) -> None:
        self._beat += 1
        value = {"beat": self._beat} | dataclasses.asdict(demand)
        private.kv_put(self._key, json.dumps(value).encode())

    def withdraw(self) -> None:
        private.kv_delete(self._key)

    def others(self, now: float) -> list[RunDemand]:
        """Return what the controllers of other runs have published, if they still do."""
        found, seen = [], {}
        for key in private.kv_list(_PREFIX.encode()):
            value = private.kv_get(key)
            if key == self._key or value is None:
                continue
            before, since = self._seen.get(key, (b"", now))
            seen[key] = (value, since if value == before else now)
            if now - seen[key][1] < _STALE_S:
                found.append(_demand(json.loads(value)))
        self._seen = seen
        return found


def _demand(fields: Mapping[str, Any]) -> RunDemand:
    known = {field.name for field in dataclasses.fields(RunDemand)}
    given = {name: value for name, value in fields.items() if name in known}
    usable = given.get("usable")
    lists = {"nodes": tuple(given["nodes"]), "usable": None if usable is None else tuple(usable)}
    return RunDemand(**given | lists)


class ClusterRoom:
    """The resources of each node that the runs of this package can have, from one look to the next.
    What other programs use is what is neither free nor held by a run. A worker that has just got
    its place is not published yet, so the smallest value of the last `_WINDOW_S` counts."""

    def __init__(self) -> None:
        self._foreign: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._may_grow, self._asked_at = False, -_WINDOW_S

    def of(self, demands: Iterable[RunDemand], now: float) -> dict[str, dict[str, float]]:
        """Return what is free or held by the runs. Raises what Ray raises."""
        totals, free = private.total_resources(), private.free_resources()
        draining = private.draining_nodes()
        ours: Counter[tuple[str, str]] = Counter()
        for run in demands:
            for node in run.nodes:
                for kind, need in run.needs.items():
                    ours[node, kind] += need  # type: ignore[assignment]
        used: Counter[tuple[str, str]] = Counter()
        for node, resources in totals.items():
            for kind, total in resources.items():
                used[node, kind] = max(  # type: ignore[assignment]
                    0.0, total - free.get(node, {}).get(kind, 0.0) - ours[node, kind]
                )
        self._foreign.append((now, used))
        while now - self._foreign[0][0] > _WINDOW_S:
            self._foreign.popleft()
        return {
            node: {
                kind: total - min(seen[node, kind] for _, seen in self._foreign)
                for kind, total in resources.items()
            }
            for node, resources in totals.items()
            if node not in draining
        }

    def may_grow(self, now: float) -> bool:
        """Return whether an autoscaler adds nodes to this cluster."""
        if now - self._asked_at >= _WINDOW_S:
            self._may_grow, self._asked_at = private.has_autoscaler(), now
        return self._may_grow
