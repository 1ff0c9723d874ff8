"""What concerns thousands is spread over several events."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.workers.worker_registry import MAX_RELEASED_PER_STEP
from tests.coordinator.scenarios import Scenario


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
