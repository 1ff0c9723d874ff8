"""Members whose weights differ: all who hold a state are replaced, and the run goes back to when
they agreed."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import ReplicaMismatch, TrainingPosition
from elastic_dp.coordinator.planning.membership_planner import MAX_IN_A_ROW
from tests.coordinator.scenarios import Scenario


def differing(agreed=10, *odd, committed=12, older=8):
    """Three have found in the header of step 16 that they are not equal."""
    scenario = Scenario(size=3, standby=1)
    scenario.committed, scenario.older = None, None
    scenario.running("w1", "w2", "w3")
    scenario.hear("w1", "w2", "w3", step=15)
    scenario.committed, scenario.older = committed, older
    said = ReplicaMismatch(agreed, odd or ("w2",))
    scenario.stopped("w1", "w3", "w2", step=15, generation=1, mismatch=said)
    return scenario


def test_mismatched_replica_is_evicted_and_all_others_are_replaced():
    scenario = differing()
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w2"]
    assert {c.worker for c in scenario.ever(m.ReleaseWorker)} == {"w1", "w3"}
    assert len(scenario.ever(m.StartWorker)) == 7  # three for them, and the one that waits


def test_mismatch_restores_the_newest_checkpoint_at_which_all_agreed():
    scenario = differing()
    assert scenario.ever(m.FindCheckpoint)[-1] == m.FindCheckpoint(10)
    scenario.ready("w4", "w5", "w6")
    scenario.wait(0.2)
    membership = scenario.coordinator.membership
    assert membership is not None and membership.restore
    assert set(scenario.members) == {"w4", "w5", "w6"}
    assert "back to step 8" in " ".join(c.text for c in scenario.ever(m.Explain))
    scenario.hear("w4", "w5", "w6", phase="compute", step=8)
    for worker in scenario.members:  # from then on all that is committed counts
        scenario.lost(worker)
    assert scenario.ever(m.FindCheckpoint)[-1] == m.FindCheckpoint(None)


def test_mismatch_without_a_majority_evicts_all():
    scenario = differing(10, "w1", "w2", "w3")
    assert {c.worker for c in scenario.ever(m.EvictWorker)} == {"w1", "w2", "w3"}


def test_mismatch_without_an_old_enough_checkpoint_fails_the_run():
    scenario = differing(older=None)
    (failed,) = scenario.ever(m.FailRun)
    assert "there is no checkpoint of step 10 or earlier" in failed.error
    assert "CheckpointConfig" in failed.error


def test_mismatch_reported_by_one_member_replaces_all():
    scenario = Scenario.training("w1", "w2")
    scenario.hear("w1", "w2", step=15)
    scenario.committed = 10
    scenario.stopped("w1", step=15, generation=1, mismatch=ReplicaMismatch(10, ("w1", "w2")))
    scenario.stopped("w2", step=15, generation=1)
    assert {c.worker for c in scenario.ever(m.EvictWorker)} == {"w1", "w2"}


def test_mismatch_replaces_a_retained_worker_with_state():
    scenario = Scenario.training("w1", "w2", min_workers=1)
    scenario.hear("w1", "w2", step=4)
    scenario.committed = 3
    scenario.tell(m.SizeRequested(1))
    scenario.stopped("w1", "w2", step=6)
    assert scenario.coordinator.workers["w2"] == "retained"
    scenario.stopped("w1", step=6, mismatch=ReplicaMismatch(3, ("w1",)))
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w1"]
    assert [c.worker for c in scenario.ever(m.ReleaseWorker)] == ["w2"]


def test_mismatch_keeps_a_worker_without_state():
    scenario = Scenario.training("w1", "w2")
    scenario.hear("w1", "w2", step=15)
    scenario.committed = 10
    scenario.stopped("w1", step=15, generation=1, mismatch=ReplicaMismatch(10, ("w1",)))
    scenario.stopped("w2", has_state=False, position=TrainingPosition(0), generation=1)
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w1"]
    assert not scenario.ever(m.ReleaseWorker)


def test_mismatch_again_and_again_fails_the_run():
    scenario = differing()
    for round_ in range(MAX_IN_A_ROW):
        assert not scenario.ever(m.FailRun), round_
        names = [w for w, stage in scenario.coordinator.workers.items() if stage == "starting"]
        scenario.ready(*names)
        scenario.wait(40.0, *names, phase="wait")
        members = scenario.members
        scenario.hear(*members, step=15)
        for worker in members:
            said = ReplicaMismatch(10, (members[0],))
            scenario.stopped(worker, step=15, mismatch=said)
    (failed,) = scenario.ever(m.FailRun)
    assert "time 4" in failed.error
