"""A run that lost all state goes back to its newest checkpoint."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenarios import Scenario


def without_any_state(**config):
    """Three trained up to step 9, two more were about to join; then the three are lost."""
    scenario = Scenario.training("w1", "w2", "w3", **config)
    scenario.committed = 5
    scenario.hear("w1", "w2", "w3", step=9)
    scenario.lost("w1", "w2", "w3")
    return scenario


def test_run_without_survivors_restores_the_newest_checkpoint():
    scenario = without_any_state(min_workers=1)
    assert not scenario.ever(m.FailRun) and scenario.coordinator.step == 9
    scenario.ready("w4", "w5")
    scenario.wait(0.1)
    membership = scenario.coordinator.membership
    assert scenario.members == ["w4", "w5"] and scenario.coordinator.step == 5
    assert membership.restore and membership.source == "w4"
    assert membership.lineage_id == membership.generation > 1
    assert not any(member.has_state for member in membership.members)
    scenario.hear("w4", "w5", step=5)
    scenario.lost("w4")
    scenario.stopped("w5", 5, lineage_id=membership.lineage_id)
    scenario.wait(0.1, "w5", phase="wait")
    assert not scenario.coordinator.membership.restore
    assert scenario.coordinator.membership.source == "w5"


def test_run_without_survivors_and_checkpoint_fails():
    scenario = Scenario.training("w1", "w2")
    scenario.lost("w1", "w2")
    assert "there is no checkpoint" in scenario.ever(m.FailRun)[0].error


def test_reader_of_the_checkpoint_that_dies_is_replaced():
    """Half written or not: a checkpoint writes everything."""
    scenario = without_any_state(min_workers=1)
    scenario.ready("w4")
    scenario.ready("w5", can_source=False)
    scenario.wait(0.1)
    scenario.hear("w4", "w5", phase="receive")
    scenario.lost("w4")
    scenario.stopped("w5", has_state=False)
    scenario.wait(0.1, "w5", phase="wait")
    membership = scenario.coordinator.membership
    assert (membership.source, membership.restore) == ("w5", True)


def test_a_run_that_left_a_checkpoint_begins_with_it():
    scenario = Scenario(size=2, begin=False)
    scenario.committed = 7
    scenario.note(scenario.coordinator.start(0.0))
    scenario.tell(m.WorkerStarted("w1"))
    scenario.ready("w2", can_source=False)
    scenario.wait(0.1, "w1", "w2", phase="start")
    assert scenario.members == ["w2"]  # nobody's initial weights count, so nobody is waited for
    assert scenario.coordinator.membership.restore


def test_checkpoint_can_be_continued_on_another_kind_of_machine():
    scenario = without_any_state(min_workers=1)
    scenario.ready("w4", kind="another")
    scenario.wait(0.1)
    assert scenario.members == ["w4"]
    scenario.ready("w5")  # now it is this one that is of another kind
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w5"]


def test_slots_of_rejected_workers_are_filled_again_after_a_restore():
    """After a restore, other kinds of machine may fit."""
    scenario = Scenario(size=2, max_rejections=0)
    scenario.ready("w1")
    scenario.ready("w2", kind="another")
    scenario.wait(0.1)
    scenario.hear("w1")
    scenario.committed = 5
    assert len(scenario.ever(m.StartWorker)) == 2
    scenario.lost("w1")
    assert len(scenario.ever(m.StartWorker)) == 4


def test_the_checkpoint_waits_for_the_lease_of_whoever_may_be_alive():
    scenario = without_any_state(min_workers=1, lease_s=50.0)
    assert scenario.coordinator.phase == "gathering"
    held = Scenario.training("w1", lease_s=50.0)
    held.committed = 5
    held.wait(6.0)  # silent, evicted, perhaps alive
    assert [c.worker for c in held.ever(m.EvictWorker)] == ["w1"]
    held.ready("w2")
    held.wait(5.0, "w2", phase="wait")
    assert held.members == ["w1"]
    held.wait(50.0, "w2", phase="wait")
    assert held.members == ["w2"] and held.coordinator.membership.restore


def test_a_run_that_is_stopped_while_nobody_holds_its_state_ends_at_its_checkpoint():
    scenario = without_any_state()
    scenario.tell(m.StopRequested("enough"))
    assert scenario.ever(m.FinishRun) == [m.FinishRun(TrainingPosition(5), "", "enough")]
