"""Chooses which workers leave when there are too many: pure functions of where they run.

Workers without a node leave first. Then whole nodes are emptied where possible, so that the cluster
can give them back: first nodes that draining workers leave anyway, then spot nodes, then the
others; within each kind, those with most workers first. Further workers leave the nodes on which
the fewest would remain. Among equals, the last in the list leave first.
"""

from collections.abc import Iterable, Sequence

from elastic_dp.coordinator.workers.worker_state import WorkerState


def choose_departing(
    workers: Sequence[WorkerState],
    count: int,
    others: Iterable[WorkerState] = (),
    draining: Iterable[WorkerState] = (),
) -> list[tuple[WorkerState, str]]:
    """Return at most `count` of `workers`, each with the reason why it leaves.

    `others` stay, and so do their nodes. `draining` workers leave in any case, so their nodes are
    emptied first.
    """
    if count <= 0:
        return []
    homeless = [worker for worker in reversed(workers) if not worker.location.node]
    chosen = [(worker, "the newest worker leaves first") for worker in homeless[:count]]
    emptying = {worker.location.node for worker in draining} - {""}
    nodes: dict[str, list[WorkerState]] = {}
    for worker in reversed(workers):
        if worker.location.node:
            nodes.setdefault(worker.location.node, []).append(worker)
    occupied = {worker.location.node for worker in others}

    def order(group: list[WorkerState]) -> tuple[bool, bool]:
        location = group[0].location
        return location.node not in emptying, not location.spot

    for node, group in sorted(nodes.items(), key=lambda item: (order(item[1]), -len(item[1]))):
        if node not in occupied and len(group) <= count - len(chosen):
            chosen += [(worker, _emptied(worker)) for worker in group]
            del nodes[node]
    for group in sorted(nodes.values(), key=lambda group: (order(group), len(group))):
        rest = group[: count - len(chosen)]
        chosen += [(worker, "other workers stay on its node") for worker in rest]
    return chosen


def _emptied(worker: WorkerState) -> str:
    kind = "spot node" if worker.location.spot else "node"
    return f"its {kind} {worker.location.node[:8]} becomes free"
