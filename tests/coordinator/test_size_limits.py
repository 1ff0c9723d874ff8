"""A limit by other runs of the cluster: the run shrinks to it, not below its minimum, and grows
back."""

from __future__ import annotations

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import Scenario


def limited(most: int | None) -> m.SizeLimited:
    return m.SizeLimited(most, "another run comes first")


def stopped_at(scenario: Scenario, step: int, *workers: str) -> None:
    for worker in workers:
        scenario.stopped(worker, step=step)


def test_run_shrinks_to_the_limit_at_the_end_of_a_step_and_grows_back() -> None:
    scenario = Scenario(size=3)
    scenario.running("w1", "w2", "w3")
    scenario.tell(limited(1))
    assert scenario.ever(m.EndGeneration) and not scenario.ever(m.EvictWorker)
    stopped_at(scenario, 2, "w1", "w2", "w3")
    assert scenario.members == ["w1"]
    scenario.hear("w1", step=3)
    assert {c.worker for c in scenario.of(m.ReleaseWorker)} == {"w2", "w3"}
    assert scenario.coordinator.requested_size == 3 and scenario.coordinator.size_limit == 1
    scenario.tell(limited(None))
    assert len(scenario.of(m.StartWorker)) == 2 and scenario.coordinator.size_limit is None


def test_limit_below_the_minimum_keeps_the_minimum() -> None:
    scenario = Scenario(size=3, min_workers=2)
    scenario.running("w1", "w2", "w3")
    scenario.tell(limited(0))
    stopped_at(scenario, 2, "w1", "w2", "w3")
    assert scenario.members == ["w1", "w2"]


def test_limit_above_the_requested_size_changes_nothing() -> None:
    scenario = Scenario(size=2)
    scenario.running("w1", "w2")
    assert not scenario.tell(limited(5)) and scenario.coordinator.size_limit is None


def test_operator_changes_the_requested_size_below_and_above_a_limit() -> None:
    scenario = Scenario(size=4, virtual_workers=8)
    scenario.tell(limited(2))
    scenario.tell(m.SizeRequested(6))
    assert (scenario.coordinator.size, scenario.coordinator.requested_size) == (2, 6)
    scenario.tell(m.SizeRequested(1))
    assert (scenario.coordinator.size, scenario.coordinator.size_limit) == (1, None)


def test_workers_that_wait_for_a_node_are_withdrawn_by_a_limit() -> None:
    scenario = Scenario(size=3)
    scenario.running("w1")
    scenario.tell(limited(1))
    assert {c.worker for c in scenario.of(m.ReleaseWorker)} == {"w2", "w3"}
    assert not scenario.ever(m.EndGeneration)
