"""Between whom state is handed over as a generation begins; all members draw the same conclusion."""

from elastic_dp.coordinator.messages import Membership, TrainingPosition


def state_transfer_ranks(membership: Membership, rank: int, place: TrainingPosition) -> list[int]:
    """The ranks between which state is handed over, the source first; empty if `rank` (at `place`) is not one."""
    seats = membership.seats
    source = membership.rank(membership.source)
    first = not any(seat.whole for seat in seats)
    truth = place if first else seats[source].place
    receivers = [
        r for r, seat in enumerate(seats) if r != source and (not seat.whole or seat.place < truth)
    ]
    involved = [source, *receivers]
    return involved if receivers and rank in involved else []
