"""How a run ends: finished, stopped, or out of members."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenarios import Scenario, trio


def finished(worker, digest="D", generation=1):
    return m.WorkerFinished(worker, generation, TrainingPosition(7, 1), digest)


def test_run_finishes_when_all_living_members_have():
    scenario = trio(standby=1)
    scenario.ready("w4")
    scenario.tell(finished("w1"))
    assert not scenario.ever(m.FinishRun)
    scenario.lost("w2")
    assert not scenario.ever(m.FinishRun)
    scenario.tell(finished("w3"))
    assert scenario.ever(m.FinishRun) == [
        m.FinishRun(TrainingPosition(7, 1), "D", "all members finished")
    ]
    assert {c.worker for c in scenario.ever(m.ReleaseWorker)} >= {"w1", "w3", "w4"}
    scenario.said = []
    scenario.wait(60.0)
    assert {c.worker for c in scenario.of(m.EvictWorker)} >= {"w1", "w3", "w4"}
    assert {type(c) for c in scenario.said} == {m.EvictWorker}


def test_member_that_did_not_finish_is_brought_to_the_end():
    scenario = Scenario.training("w1", "w2")
    scenario.tell(finished("w1"))
    scenario.stopped("w2", step=6)
    assert scenario.members == ["w1", "w2"]
    assert scenario.coordinator.generation == 2
    assert not scenario.ever(m.FinishRun)
    scenario.tell(finished("w2", generation=2))
    assert scenario.ever(m.FinishRun)


def test_a_member_whose_last_report_was_lost_is_asked_again():
    """What it does shows that it has left: it waits, or is done for some heartbeats."""
    for phase, beats in (("wait", 1), ("done", 4)):
        scenario = Scenario.training("w1", "w2")
        heard = [scenario.hear("w2", phase=phase, step=7) for _ in range(beats)]
        asked = [m.AbortGeneration("w2", 1) in said for said in heard]
        assert asked == [False] * (beats - 1) + [True]


def test_weights_that_differ_are_said_aloud():
    scenario = Scenario.training("w1", "w2")
    scenario.tell(finished("w1", "D"))
    scenario.tell(finished("w2", "E"))
    assert scenario.ever(m.FinishRun)[0].digests_differ


def test_a_stop_is_told_and_told_again():
    scenario = Scenario.training("w1", "w2")
    scenario.tell(m.StopRequested("enough"))
    assert len(scenario.of(m.StopTraining)) == 2
    assert m.StopTraining("w1", "enough") in scenario.hear("w1", step=1)
    scenario.lost("w2")
    scenario.stopped("w1", step=2)
    assert m.StopTraining("w1", "enough") in scenario.said, "a later generation is told as it forms"


def test_stop_with_one_survivor_ends_the_run_without_new_workers():
    scenario = Scenario.training("w1", "w2", min_workers=2)
    scenario.tell(m.StopRequested("enough"))
    scenario.lost("w2")
    scenario.stopped("w1", step=2)
    assert scenario.members == ["w1"]
    assert len(scenario.ever(m.StartWorker)) == 2, "nobody is asked for any more"


def test_a_stop_before_the_first_step():
    scenario = Scenario(size=2)
    scenario.tell(m.StopRequested("enough"))
    assert scenario.ever(m.FinishRun) == [m.FinishRun(TrainingPosition(0), "", "enough")]
