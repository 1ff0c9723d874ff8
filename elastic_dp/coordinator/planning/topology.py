"""Which ranks share a node or a zone: pure functions over the locations of members.

Members on one node have consecutive ranks, and so have the nodes of one zone. Members that stay
keep their order, so nobody gets other virtual workers for the sake of a joiner's location: a joiner
comes behind the last member on its node, else behind the last one in its zone, else last. New nodes
come in decreasing order of their members, which lets the ranges of more nodes be whole subtrees
(`equal_ranges.ranges_by_node`).

A worker whose location is not known counts as the only one on its node.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from elastic_dp.coordinator.workers.worker_state import WorkerState

Topology = tuple[tuple[int, ...], ...]


def order_by_location(
    staying: Sequence[WorkerState], joining: Sequence[WorkerState]
) -> list[WorkerState]:
    """Return all workers in the order of their ranks."""
    order = [*staying, *joining]
    if not any(worker.location.node for worker in joining):
        return order
    last: dict[str, int] = {}  # index of the last staying member by node, and by zone
    for index, worker in enumerate(staying):
        last[_node(worker)] = last[_zone(worker)] = index
    count = Counter(_node(worker) for worker in joining)
    count.update(_zone(worker) for worker in joining)
    first: dict[str, int] = {}
    for index, worker in enumerate(joining):
        first.setdefault(_node(worker), index)
        first.setdefault(_zone(worker), index)

    def key(worker: WorkerState) -> tuple[Any, ...]:
        node, zone = _node(worker), _zone(worker)
        if node in last:
            return last[node], 1
        of_zone = -count[zone], first[zone]
        return last.get(zone, math.inf), 2, *of_zone, -count[node], first[node]

    placed = [((index, 0), worker) for index, worker in enumerate(staying)]
    placed += [(key(worker), worker) for worker in joining]
    return [worker for _, worker in sorted(placed, key=lambda one: one[0])]


def topology_of(members: Sequence[WorkerState]) -> Topology:
    """Return `Membership.topology` of these members, by rank."""
    nodes = [list(group) for _, group in groupby(members, _node)]
    by_zone = [list(group) for _, group in groupby(nodes, lambda node: _zone(node[0]))]
    levels: list[tuple[int, ...]] = []
    for sizes in (
        tuple(len(node) for node in nodes),
        tuple(sum(len(node) for node in zone) for zone in by_zone),
    ):
        if 1 < len(sizes) < len(members) and sizes not in levels:
            levels.append(sizes)
    return tuple(levels)


def _node(worker: WorkerState) -> str:
    return f"node {worker.location.node}" if worker.location.node else f"worker {worker.id}"


def _zone(worker: WorkerState) -> str:
    return f"zone {worker.location.zone}" if worker.location.zone else _node(worker)
