"""Draining, scaling and standbys, and a limit by other runs of the cluster."""

import pytest

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import Scenario, trio


def test_a_drained_member_leaves_when_its_replacement_is_ready():
    scenario = Scenario.training("w1", "w2", min_workers=2)
    scenario.tell(m.DrainNoticed("w2", 1000.0))
    assert [c.worker for c in scenario.of(m.StartWorker)] == ["w3"]
    assert not scenario.ever(m.EndGeneration)
    scenario.ready("w3")
    assert scenario.ever(m.EndGeneration)
    scenario.stopped("w1", "w2", step=2)
    assert scenario.members == ["w1", "w3"]
    assert not scenario.ever(m.ReleaseWorker), "kept until the others have made a step"
    scenario.hear("w1", "w3", step=2)
    assert not scenario.ever(m.ReleaseWorker)
    scenario.hear("w1", step=3)
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w2"]


def test_a_deadline_forces_it_out_unless_too_few_remain():
    scenario = Scenario.training("w1", "w2", min_workers=1, drain_margin_s=3.0)
    scenario.tell(m.DrainNoticed("w2", 10.0))
    scenario.wait(8.0, "w1", "w2")
    assert scenario.ever(m.EndGeneration)
    few = Scenario.training("w1", "w2", min_workers=2, drain_margin_s=3.0)
    few.tell(m.DrainNoticed("w2", 10.0))
    few.wait(8.0, "w1", "w2")
    assert not few.ever(m.EndGeneration)
    assert "are needed" in few.coordinator.reason


def test_departing_worker_that_alone_is_ahead_stays_for_the_hand_over():
    scenario = Scenario.training("w1", "w2")
    scenario.tell(m.DrainNoticed("w2", None))
    scenario.ready("w3")
    scenario.stopped("w1", step=4)
    scenario.stopped("w2", step=5)
    assert scenario.members == ["w1", "w2", "w3"]
    assert scenario.coordinator.membership.source == "w2"


def with_a_departing_worker(min_workers):
    """w2 drains, w3 has its place, and w2 stays for its state."""
    scenario = Scenario.training("w1", "w2", min_workers=min_workers)
    scenario.tell(m.DrainNoticed("w2", None))
    scenario.ready("w3")
    scenario.stopped("w1", "w2", step=4)
    assert scenario.members == ["w1", "w3"]
    return scenario


def test_departing_worker_is_called_back_when_the_newest_state_is_lost():
    scenario = with_a_departing_worker(min_workers=1)
    scenario.lost("w1")
    scenario.stopped("w3", has_state=False)
    assert scenario.members == ["w3", "w2"] or scenario.members == ["w2", "w3"]
    assert scenario.coordinator.membership.source == "w2"


def test_departing_worker_stays_until_the_next_generation_can_go_on_without_it():
    """The step that covers its state is heard of late, when the others are too few to go on."""
    scenario = with_a_departing_worker(min_workers=2)
    scenario.claims = False
    scenario.lost("w3")
    scenario.stopped("w1", step=5)
    scenario.hear("w1", step=5, phase="wait")
    assert not scenario.ever(m.ReleaseWorker)
    scenario.tell(m.GenerationClaimed(3))
    assert scenario.members == ["w1", "w2"]


def test_scaling_down_keeps_the_source():
    scenario = Scenario(size=2)
    scenario.tell(m.WorkerStarted("w2"))
    assert m.BeginTraining("w2", True) in scenario.said
    scenario.tell(m.SizeRequested(1))
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w1"]


def test_a_drained_bystander_goes_at_once():
    scenario = Scenario.training("w1", standby=1)
    scenario.ready("w2")
    scenario.tell(m.DrainNoticed("w2", None))
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w2"]


@pytest.mark.parametrize("size", [0, 9])
def test_sizes_out_of_bounds_are_refused(size):
    scenario = Scenario(size=2)
    scenario.tell(m.SizeRequested(size))
    assert scenario.coordinator.size == 2
    assert "refused" in scenario.of(m.Explain)[0].text


@pytest.mark.parametrize("least", [0, 3])
def test_min_workers_above_the_size_is_refused(least):
    scenario = Scenario(size=4)
    scenario.tell(m.SizeRequested(2, least))
    assert scenario.coordinator.size == 4
    assert scenario.of(m.Explain)[0].text == f"min_workers {least} refused: not within 1..2"


def test_how_many_are_needed_may_change_and_stays_changed():
    scenario = Scenario(size=3)
    scenario.tell(m.SizeRequested(3, 2))
    scenario.tell(m.SizeRequested(4))
    scenario.ready("w1")
    scenario.wait(1.0, "w1", phase="wait")
    assert scenario.coordinator.reason == "1 of at least 2 workers are ready"
    scenario.tell(m.SizeRequested(4, 1))
    assert scenario.members == ["w1"]


def test_scaling_down_and_up():
    scenario = trio()
    scenario.tell(m.SizeRequested(2))
    assert len(scenario.of(m.EndGeneration)) == 3
    scenario.stopped("w1", "w2", "w3", step=3)
    assert scenario.members == ["w1", "w2"]
    scenario.hear("w1", "w2", step=4)
    assert [c.worker for c in scenario.ever(m.ReleaseWorker)] == ["w3"]
    scenario.tell(m.SizeRequested(4))
    assert [c.worker for c in scenario.of(m.StartWorker)] == ["w4", "w5"]


def test_standby_replaces_a_lost_member_at_once():
    scenario = Scenario.training("w1", "w2", standby=1)
    scenario.ready("w3")
    assert scenario.members == ["w1", "w2"]
    scenario.lost("w2")
    scenario.stopped("w1", step=1)
    assert scenario.members == ["w1", "w3"]


def test_run_below_min_workers_waits_with_a_reason_and_goes_on():
    scenario = Scenario.training("w1", "w2", min_workers=2)
    scenario.lost("w2")
    scenario.stopped("w1", step=1)
    assert scenario.coordinator.reason == "1 of at least 2 workers are ready"
    scenario.wait(3.0, "w1", phase="wait")
    assert not scenario.of(m.Explain), "said once"
    scenario.ready("w3")
    assert scenario.members == ["w1", "w3"]


def test_departing_workers_alone_take_over_when_the_run_is_being_stopped():
    """A run that is being stopped takes no joiner, so there is none to wait for."""
    scenario = trio()
    scenario.tell(m.SizeRequested(1))
    scenario.stopped(*scenario.members, step=4)
    assert scenario.members == ["w1"]
    scenario.tell(m.StopRequested("enough"))
    scenario.lost("w1")
    assert scenario.members == ["w2"]


def limited(most):
    return m.SizeLimited(most, "another run comes first")


def test_run_shrinks_to_the_limit_at_the_end_of_a_step_and_grows_back():
    scenario = Scenario.training("w1", "w2", "w3")
    scenario.tell(limited(1))
    assert scenario.ever(m.EndGeneration) and not scenario.ever(m.EvictWorker)
    scenario.stopped("w1", "w2", "w3", step=2)
    assert scenario.members == ["w1"]
    scenario.hear("w1", step=3)
    assert {c.worker for c in scenario.of(m.ReleaseWorker)} == {"w2", "w3"}
    assert scenario.coordinator.requested_size == 3 and scenario.coordinator.size_limit == 1
    scenario.tell(limited(None))
    assert len(scenario.of(m.StartWorker)) == 2 and scenario.coordinator.size_limit is None


def test_limit_below_the_minimum_keeps_the_minimum():
    scenario = Scenario.training("w1", "w2", "w3", min_workers=2)
    scenario.tell(limited(0))
    scenario.stopped("w1", "w2", "w3", step=2)
    assert scenario.members == ["w1", "w2"]


def test_limit_above_the_requested_size_changes_nothing():
    scenario = Scenario.training("w1", "w2")
    assert not scenario.tell(limited(5)) and scenario.coordinator.size_limit is None


def test_operator_changes_the_requested_size_below_and_above_a_limit():
    scenario = Scenario(size=4, virtual_workers=8)
    scenario.tell(limited(2))
    scenario.tell(m.SizeRequested(6))
    assert (scenario.coordinator.size, scenario.coordinator.requested_size) == (2, 6)
    scenario.tell(m.SizeRequested(1))
    assert (scenario.coordinator.size, scenario.coordinator.size_limit) == (1, None)


def test_workers_that_wait_for_a_node_are_withdrawn_by_a_limit():
    scenario = Scenario.training("w1", size=3)
    scenario.tell(limited(1))
    assert {c.worker for c in scenario.of(m.ReleaseWorker)} == {"w2", "w3"}
    assert not scenario.ever(m.EndGeneration)
