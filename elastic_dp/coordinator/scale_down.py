"""Which workers leave when there are too many: pure, from where they run.

A worker that has no node yet goes before all others. Then nodes are emptied, as far as that many
are to leave, so that the cluster can give them back: those that some workers leave anyhow (they
drain), then those that may be taken away at any time, then the others; of each kind those with most
workers first. Workers that must leave beyond that leave from where the fewest would remain. Among
equals the last of the list go. A floor of workers on nodes that stay is left as long as others can
go instead.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from elastic_dp.coordinator.worker_state import WorkerState


def choose_departing(
    workers: Sequence[WorkerState],
    count: int,
    others: Iterable[WorkerState] = (),
    floor: int = 0,
    draining: Iterable[WorkerState] = (),
) -> list[tuple[WorkerState, str]]:
    """At most `count` of `workers`, each with the reason; `others` stay, and so do their nodes.
    `floor`: of all of them, so many on nodes that may not be taken away are to be left. `draining`
    leave in any case, so their nodes are emptied first."""
    if count <= 0:
        return []
    homeless = [worker for worker in reversed(workers) if not worker.location.node]
    chosen = [(worker, "the last to come goes first") for worker in homeless[:count]]
    if len(chosen) == count:
        return chosen
    others, emptying = list(others), {worker.location.node for worker in draining} - {""}
    missing = floor - sum(worker.location.stable for worker in others)
    held = _held(workers, max(0, min(missing, len(workers) - count)), emptying)
    nodes: dict[str, list[WorkerState]] = {}
    for worker in reversed(workers):
        if worker.location.node and worker not in held:
            nodes.setdefault(worker.location.node, []).append(worker)
    occupied = {worker.location.node for worker in (*others, *held)}
    for node, group in sorted(nodes.items(), key=lambda item: _to_empty(item[1], emptying)):
        if node not in occupied and len(group) <= count - len(chosen):
            chosen += [(worker, _emptied(worker)) for worker in group]
            del nodes[node]
    for group in sorted(nodes.values(), key=lambda group: _to_thin(group, emptying)):
        rest = group[: max(0, count - len(chosen))]
        chosen += [(worker, "others stay on its node") for worker in rest]
    return chosen


def _held(
    workers: Sequence[WorkerState], count: int, emptying: Collection[str]
) -> set[WorkerState]:
    """For the floor: from nodes that nobody leaves, and from those with most of them, so that the
    others can be emptied."""
    stable = [worker for worker in workers if worker.location.stable] if count else []
    on = Counter(worker.location.node for worker in stable)
    stable.sort(key=lambda w: (w.location.node in emptying, -on[w.location.node], w.location.node))
    return set(stable[:count])


def _to_empty(group: list[WorkerState], emptying: Collection[str]) -> tuple[bool, bool, int]:
    location = group[0].location
    return location.node not in emptying, not location.spot, -len(group)


def _to_thin(group: list[WorkerState], emptying: Collection[str]) -> tuple[bool, bool, int]:
    location = group[0].location
    return location.node not in emptying, not location.spot, len(group)


def _emptied(worker: WorkerState) -> str:
    kind = "spot node" if worker.location.spot else "node"
    return f"its {kind} {worker.location.node[:8]} becomes free"
