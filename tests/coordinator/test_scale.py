"""No event grows without bound: what concerns thousands is spread over several, and a change of
members costs so many messages for each of them, however many there are."""

import pytest

from benchmarks.coordinator_scale import Life
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.workers.worker_registry import MAX_RELEASED_PER_STEP
from tests.coordinator.scenarios import Scenario

# as shares of the size: members of generations that end, of those that are formed, and who comes or
# goes
CHANGES = {
    "start": (0, 1, 1),
    "kill and join": (
        1.5,
        2,
        0,
    ),  # two generations; the one with the killed worker need not be told when to end
    "drain": (1, 1, 0),
    "scale down": (1, 0.5, 0.5),
    "scale up": (0.5, 1, 0.5),
}


class Counting(Life):
    """Sees that a heartbeat renews one lease at most, and nothing else renews any."""

    heard = renewed = 0

    def tell(self, event: m.Event) -> None:
        self.heard += isinstance(event, m.HeartbeatReceived)
        super().tell(event)

    def obey(self, commands: list[m.Command]) -> None:
        self.renewed += sum(isinstance(command, m.RenewLease) for command in commands)
        assert self.renewed <= self.heard
        super().obey(commands)


@pytest.mark.parametrize("size", [500, 2000])
def test_a_change_costs_each_member_so_many_messages_however_many_there_are(size: int) -> None:
    """Two for each whose generation ends (stop after this step; stop now), one for each member, two
    for each that comes or goes."""
    life = Counting(size)
    life.run()
    for name, (messages, _) in life.changes.items():
        ended, formed, changed = (share * size for share in CHANGES[name])
        assert messages <= 2 * ended + formed + 2 * changed + 4, (name, messages)
    assert set(life.changes) == set(CHANGES)
    assert life.renewed > 10 * size


def test_thousands_that_are_not_needed_any_more_leave_over_several_steps() -> None:
    workers = [f"w{n}" for n in range(1, MAX_RELEASED_PER_STEP + 3)]
    scenario = Scenario(size=len(workers), virtual_workers=len(workers))
    scenario.running(*workers)
    scenario.tell(m.SizeRequested(1))
    for worker in workers:
        scenario.stopped(worker, step=3)
    assert scenario.members == ["w1"]
    for step, expected in (4, MAX_RELEASED_PER_STEP), (5, 1), (6, 0):
        scenario.hear("w1", step=step)
        assert len(scenario.of(m.ReleaseWorker)) == expected
