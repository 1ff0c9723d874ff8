"""Divides the workers that a cluster has room for among its runs: a pure function.

- A run that trains keeps its minimum, whatever others want. So nobody is stopped for another run.
- Beyond the minimum, runs of higher priority come first. A run of lower priority shrinks for them.
- Runs of equal priority take nothing from each other. Free room goes to the one that began first.
- A run that has not begun is given nothing, unless its minimum fits.

All controllers of a cluster compute the same division from the same demands, so none of them leads
the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

NodeId = str
Resources = Mapping[str, float]
_TINY = 1e-6  # Ray counts resources in ten-thousandths


@dataclass(frozen=True, slots=True)
class RunDemand:
    """What one run wants and has. `min_workers` and `size` are workers, standby included. `nodes`
    has the node of each worker that has one. `needs` are the resources of a worker. `began_at`
    orders runs of equal priority."""

    name: str
    priority: int
    began_at: float
    min_workers: int
    size: int
    needs: Resources
    nodes: tuple[NodeId, ...] = ()
    usable: tuple[NodeId, ...] | None = None
    is_queued: bool = False

    @property
    def is_short(self) -> bool:
        """Whether the run wants more workers than have a node."""
        return len(self.nodes) < self.size


def worker_shares(
    demands: Iterable[RunDemand], nodes: Mapping[NodeId, Resources]
) -> dict[str, int]:
    """Return the number of workers that each run may have, standby included. `nodes` has the
    resources of each node for all these runs together: what is free, and what their workers hold.
    """
    ordered = sorted(demands, key=lambda run: (-run.priority, run.began_at, run.name))
    room = {node: dict(resources) for node, resources in nodes.items()}
    shares = {run.name: 0 for run in ordered}
    for run in ordered:
        if not run.is_queued:
            for node in run.nodes[: run.min_workers]:
                shares[run.name] += _take(room, node, run.needs, always=True)
    for _, equals in groupby(ordered, key=lambda run: run.priority):
        level = list(equals)
        for run in level:
            for node in run.nodes[shares[run.name] : run.size]:
                shares[run.name] += _take(room, node, run.needs)
        for run in level:
            least = run.min_workers if run.is_queued else 1
            wanted = max(0, run.size - shares[run.name])
            shares[run.name] += _take_anywhere(room, run, least, wanted)
    return shares


def limit_of(
    name: str, demands: Sequence[RunDemand], shares: Mapping[str, int], *, may_grow: bool
) -> int | None:
    """Return how many workers a run may have because of the others; None: as many as it wants. A
    run that trains is limited by runs of higher priority alone, one that is queued by all. If the
    cluster `may_grow`, only runs of higher priority that wait for workers limit it: otherwise what
    it wants beyond its share is a reason to add nodes."""
    others = [run for run in demands if run.name != name]
    own = next(run for run in demands if run.name == name)
    above = [run for run in others if run.priority > own.priority]
    if may_grow:
        limited = any(run.is_short for run in above)
    else:
        limited = bool(others if own.is_queued else above)
    return shares[name] if limited else None


def _take(
    room: dict[NodeId, dict[str, float]], node: NodeId, needs: Resources, *, always: bool = False
) -> bool:
    """Take the resources of a worker from a node, if it has them. Return whether the worker is
    there."""
    has = room.get(node, {})
    if not always and any(has.get(kind, 0.0) < need - _TINY for kind, need in needs.items()):
        return False
    for kind, need in needs.items():
        has[kind] = has.get(kind, 0.0) - need
    return True


def _take_anywhere(
    room: dict[NodeId, dict[str, float]], run: RunDemand, least: int, most: int
) -> int:
    """Take the resources of up to `most` workers from any nodes, or of none if they have not room
    for `least`. Return how many."""
    taken: list[NodeId] = []
    for node in sorted(room if run.usable is None else room.keys() & run.usable):
        while len(taken) < most and _take(room, node, run.needs):
            taken.append(node)
    if len(taken) >= min(least, most):
        return len(taken)
    for node in taken:
        for kind, need in run.needs.items():
            room[node][kind] += need
    return 0
