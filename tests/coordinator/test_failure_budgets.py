"""Scenarios of losses: what is counted, again when the cause is known, and what a step forgives."""

from __future__ import annotations

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Cause
from tests.coordinator.scenarios import Scenario


def running(**config: object) -> Scenario:
    scenario = Scenario(**({"size": 2} | config))
    scenario.running("w1", "w2")
    return scenario


def counted(scenario: Scenario) -> tuple[int, int]:
    budgets = scenario.coordinator._failures.budgets
    return budgets.losses.incidents, budgets.memory.incidents


@pytest.mark.parametrize(
    ("cause", "then"), [(Cause.PREEMPTED, (1, 0)), (Cause.OUT_OF_MEMORY, (1, 1))]
)
def test_loss_is_counted_again_when_its_cause_is_known(cause: Cause, then: tuple[int, int]) -> None:
    scenario = running()
    scenario.lost("w1")
    assert counted(scenario) == (1, 0)
    scenario.tell(m.WorkerLost("w1", "node gone", cause))
    assert counted(scenario) == then
    scenario.tell(m.WorkerLost("w1", "node gone", cause))
    assert counted(scenario) == then, "once"


def test_micro_batch_reported_after_the_death_counts_once() -> None:
    """A worker's pipe may end before its last heartbeat arrives, or after; the loss counts once."""
    scenario = running(max_losses_of_micro_batch=1)
    for worker, reports in (("w1", [None, (1, 3), (1, 3)]), ("w2", [(1, 3), None])):
        assert "died while" not in scenario.coordinator.reason
        for at in reports:
            scenario.tell(m.WorkerLost(worker, "reset", micro_batch=at))
    assert (
        "2 workers died one after another while running virtual worker 3 of step 1"
        in scenario.coordinator.reason
    )


def test_a_step_ends_the_pause_after_losses() -> None:
    scenario = running()
    scenario.coordinator._failures.retry_at = scenario.now + 20.0
    scenario.hear("w1", step=1)
    scenario.lost("w1")
    assert scenario.of(m.StartWorker)
