"""Who sits in the next generation: pure choices over the workers that are at hand.

Always: the source is a most advanced whole worker; nobody void is a source; those who stay keep their order, and
joiners come after. A worker that must leave but alone holds the newest state keeps a seat for the copy.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic_dp.protocol.balance import deal
from elastic_dp.protocol.messages import Membership, Seat, WorkerId
from elastic_dp.protocol.scale_down import choose_departing
from elastic_dp.protocol.worker_state import WorkerState
from elastic_dp.wording import counted


@dataclass(frozen=True, slots=True)
class Assignment:
    seated: list[WorkerState]  # by rank
    source: WorkerState
    left: list[WorkerState]  # had a seat, or state, and get none now
    reason: str


def assign_members(
    stopped: list[WorkerState],
    joiners: Iterable[WorkerState],
    *,
    size: int,
    least: int,
    virtual_workers: int,
    now: float,
    initial_source: WorkerState | None,
    floor: int = 0,
) -> Assignment:
    """Seat `stopped` (by old rank) and `joiners` (void), who are at least `least` together.

    `initial_source`: before anybody holds the run's state, the worker whose initial weights count. `floor`: see `leavers`.
    """
    whole = [worker for worker in stopped if worker.has_state]
    top = max([worker.position for worker in whole], default=None)
    source = next((worker for worker in whole if worker.position == top), initial_source)
    assert source is not None, "nobody at hand holds the state"
    # Void workers need a source at the head of the loop; until then those who are whole go on alone.
    copies = source.at_head or not source.has_state
    eligible = stopped if copies else whole
    new = list(joiners) if copies else []

    staying = [worker for worker in eligible if not worker.draining]
    going = [worker for worker in eligible if worker.draining]
    gone = {
        worker for worker, _ in choose_departing(staying, len(staying) - size, new, floor, going)
    }
    staying = [worker for worker in staying if worker not in gone]
    seated = staying[:size]
    seated += new[: size - len(seated)]
    seated += [worker for worker in going if now < worker.leave_at][: size - len(seated)]
    if len(seated) < least:  # rather with one whose node is about to go than not at all
        seated += [worker for worker in going if worker not in seated][: least - len(seated)]
    if not any(
        worker is source or (worker.has_state and worker.position == top) for worker in seated
    ):
        seated = [*seated[: min(size, virtual_workers - 1)], source]
    assert len(seated) >= least or not copies, (seated, least)

    chosen = set(seated)
    source = next(
        (worker for worker in seated if worker.has_state and worker.position == top), source
    )
    order = [worker for worker in stopped if worker in chosen]
    order += [worker for worker in new if worker in chosen]
    left = [worker for worker in stopped if worker not in chosen]
    return Assignment(
        order, source, left, f"{counted(len(order), 'worker')}, state from {source.id}"
    )


def membership(
    generation: int,
    seating: Assignment,
    virtual_workers: int,
    timeout_s: float,
    founded: int,
    restore: bool,
) -> Membership:
    ranges = deal([worker.virtual_s for worker in seating.seated], virtual_workers)
    new = tuple.__new__  # of thousands, `Seat(...)` takes twice as long
    seats = tuple(
        [
            new(Seat, (worker.id, first, last, worker.position, worker.has_state))
            for worker, (first, last) in zip(seating.seated, ranges, strict=True)
        ]
    )
    return Membership(generation, seats, seating.source.id, timeout_s, founded, restore)


def members_to_exclude(
    pairs: Collection[tuple[WorkerId, WorkerId]],
    members: list[WorkerState],
    initial_source: WorkerId | None,
) -> list[WorkerState]:
    """The fewest, by a greedy choice, without whom no pair of `members` is out of reach of each other.

    Void workers go before whole ones, higher ranks before lower; a pair (w, w) says that w was out of reach of
    all. One whole worker with the greatest place (or the initial_source, before anybody is whole) always stays.
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
        able = [worker for worker in degree if heads != {worker}]
        if not able:
            break
        worst = max(able, key=lambda w: (degree[w], not members[rank[w]].has_state, rank[w]))
        heads.discard(worst)
        dropped.append(members[rank[worst]])
        broken = {pair for pair in broken if worst not in pair}
    return dropped
