"""Decides who joins the next generation and who leaves: pure functions over the available workers.

Three things always hold. The source is one of the most advanced workers with state, never one
without. Members that stay keep their order, and joiners come after them or beside the members on
their node (`topology`). If a draining worker alone has the newest state, it stays a member until
that state is copied.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic_dp.coordinator.messages import Member, Membership, WorkerId
from elastic_dp.coordinator.planning.load_balancer import assign_ranges
from elastic_dp.coordinator.planning.retained_ranges import retain_ranges
from elastic_dp.coordinator.planning.scale_down import choose_departing
from elastic_dp.coordinator.planning.topology import order_by_location, topology_of
from elastic_dp.coordinator.workers.worker_state import WorkerState
from elastic_dp.wording import counted


@dataclass(frozen=True, slots=True)
class MemberSelection:
    """The members of the next generation, by rank, and the source of their state."""

    members: list[WorkerState]  # by rank
    source: WorkerState
    # members of the last generation, or workers with state, that are not members now
    left: list[WorkerState]
    reason: str
    some_leave: bool  # some members are to leave soon


def select_members(
    stopped: list[WorkerState],
    joiners: Iterable[WorkerState],
    *,
    size: int,
    least: int,
    virtual_workers: int,
    now: float,
    initial_source: WorkerState | None,
    some_lost: bool = False,
) -> MemberSelection:
    """Choose the members from `stopped` (by old rank) and `joiners` (without state).

    Together they must be at least `least`. `size` is the number of members to aim for.
    `initial_source` is the worker whose initial weights count before any worker has state. `now`
    decides which draining workers still have time. `some_lost`: members of the last generation are
    lost.
    """
    holders = [worker for worker in stopped if worker.has_state]
    top = max([worker.position for worker in holders], default=None)
    source = next((worker for worker in holders if worker.position == top), initial_source)
    assert source is not None, "no available worker has the state"
    # Only a source at the head of the loop can serve workers without state. Until it is there, the
    # workers with state train without them.
    copies = source.at_head or not source.has_state
    eligible = stopped if copies else holders
    new = list(joiners) if copies else []

    staying = [worker for worker in eligible if not worker.draining]
    draining = [worker for worker in eligible if worker.draining]
    gone = {worker for worker, _ in choose_departing(staying, len(staying) - size, new, draining)}
    staying = [worker for worker in staying if worker not in gone]
    taken = staying[:size]
    taken += new[: size - len(taken)]
    taken += [worker for worker in draining if now < worker.leave_at][: size - len(taken)]
    if len(taken) < least:  # better with a worker whose node is about to go than not at all
        taken += [worker for worker in draining if worker not in taken][: least - len(taken)]
    if not any(
        worker is source or (worker.has_state and worker.position == top) for worker in taken
    ):
        taken = [*taken[: min(size, virtual_workers - 1)], source]
    assert len(taken) >= least or not copies, (taken, least)

    kept: list[WorkerState] = []  # for now
    if any(worker.partial for worker in holders):
        alone = some_lost or any(worker.lacks_copies for worker in stopped)
        kept = _kept_for_now(stopped, taken, 0 if alone else 1)
        staying = [worker for worker in taken if worker in stopped]
        joining = [worker for worker in taken if worker not in stopped]
        taken = [*staying, *kept, *joining][:virtual_workers]
    chosen = set(taken)
    source = next(
        (worker for worker in taken if worker.has_state and worker.position == top), source
    )
    order = order_by_location(
        [worker for worker in stopped if worker in chosen],
        [worker for worker in new if worker in chosen],
    )
    left = [worker for worker in stopped if worker not in chosen]
    return MemberSelection(
        order,
        source,
        left,
        f"{counted(len(order), 'worker')}, state from {source.id}",
        some_leave=bool(kept) or len(order) > size or any(worker.draining for worker in order),
    )


def _kept_for_now(
    stopped: list[WorkerState], taken: list[WorkerState], leave: int
) -> list[WorkerState]:
    """Return who remains a member, though not in `taken`, if at most `leave` workers with a part of
    a sharded state leave now. Two workers hold each part: so one leaves at a time, and the others
    copy what it has held before the next one does. Where some part may have one holder, as behind a
    loss, nobody leaves before it is copied.
    """
    return [worker for worker in stopped if worker.partial and worker not in taken][leave:]


def membership_of(
    generation: int,
    selection: MemberSelection,
    virtual_workers: int,
    timeout_s: float,
    lineage_id: int,
    restore: bool,
    prepared: int,
) -> Membership:
    """Return the membership of `generation`, in which faster workers run more virtual workers.

    What members have finished of a step stays with them, see `retained_ranges`. Whoever is behind
    the source receives its state, and forgets what it has finished.
    """
    topology = topology_of(selection.members)
    speeds = [worker.virtual_s for worker in selection.members]
    ranges = assign_ranges(speeds, virtual_workers, topology[0] if topology else ())
    truth = selection.source.position
    finished = [
        worker.finished_nodes if worker.has_state and worker.position == truth else ()
        for worker in selection.members
    ]
    shares = retain_ranges(ranges, finished) if any(finished) else tuple((one,) for one in ranges)
    members = tuple(
        Member(worker.id, share, worker.position, worker.has_state)
        for worker, share in zip(selection.members, shares, strict=True)
    )
    source = selection.source.id
    return Membership(
        generation,
        members,
        source,
        timeout_s,
        lineage_id,
        restore,
        topology,
        prepared,
        selection.some_leave,
    )


def likely_members(
    members: Collection[WorkerState], ready: Iterable[WorkerState], size: int
) -> list[WorkerState]:
    """Return who will most likely be the members, by rank, once all `members` have stopped.

    Empty where that depends on what they say then: whether one must leave, and which.
    """
    if len(members) > size or any(worker.draining for worker in members):
        return []
    joining = [*ready][: size - len(members)]
    return order_by_location([*members], joining)


def members_to_exclude(
    pairs: Collection[tuple[WorkerId, WorkerId]],
    members: list[WorkerState],
    initial_source: WorkerId | None,
) -> list[WorkerState]:
    """Return the members to leave out so that all others can reach each other.

    `pairs` are the pairs of workers that could not reach each other; (w, w) means that w reached no
    member. The choice is greedy and aims at the fewest members. Workers without state go before
    those with state, and higher ranks before lower ones. One worker with the most advanced state
    (or the initial source, before any worker has state) always stays.
    """
    rank = {worker.id: index for index, worker in enumerate(members)}
    broken = {pair for pair in pairs if pair[0] in rank and pair[1] in rank}
    top = max((worker.position for worker in members if worker.has_state), default=None)
    heads = {worker.id for worker in members if worker.has_state and worker.position == top}
    if initial_source is not None and not heads:
        heads.add(initial_source)
    dropped: list[WorkerState] = []
    while broken:
        degree: Counter[WorkerId] = Counter()
        for one, other in broken:
            degree.update({one, other})
        candidates = [worker for worker in degree if heads != {worker}]
        if not candidates:
            break
        worst = max(candidates, key=lambda w: (degree[w], not members[rank[w]].has_state, rank[w]))
        heads.discard(worst)
        dropped.append(members[rank[worst]])
        broken = {pair for pair in broken if worst not in pair}
    return dropped
