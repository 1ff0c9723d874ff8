"""What each run of a cluster asks for and has, as an entry of Ray's GCS.

An entry that has not changed for `_STALE_S` belongs to a controller that is gone. Clocks of several
machines are not compared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from elastic_dp.cluster.ray import private
from elastic_dp.coordinator.planning.cluster_shares import RunDemand

_PREFIX = "elastic_dp_demand/"
_STALE_S = 10.0


class PublishedDemands:
    """The demands of all runs of this cluster, in Ray's GCS."""

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
