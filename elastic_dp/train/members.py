"""Between whom state is handed over as a generation begins; all members draw the same conclusion."""

from elastic_dp.coordinator.messages import Membership, TrainingPosition


def handing_over(membership: Membership, rank: int, position: TrainingPosition) -> list[int]:
    """The ranks between which state is handed over, the source first; empty if `rank` (at `place`) is not one."""
    members = membership.members
    source = membership.rank(membership.source)
    first = not any(member.has_state for member in members)
    truth = position if first else members[source].position
    receivers = [
        r
        for r, member in enumerate(members)
        if r != source and (not member.has_state or member.position < truth)
    ]
    involved = [source, *receivers]
    return involved if receivers and rank in involved else []
