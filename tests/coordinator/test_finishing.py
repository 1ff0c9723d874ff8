"""How a run ends: finished, stopped, or out of members."""

from __future__ import annotations

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenes import Scene, trio


def finished(worker: str, digest: str = "D", generation: int = 1) -> m.WorkerFinished:
    return m.WorkerFinished(worker, generation, TrainingPosition(7, 1), digest)


def test_run_finishes_when_all_living_members_have() -> None:
    scene = trio(standby=1)
    scene.ready("w4")
    scene.tell(finished("w1"))
    assert not scene.ever(m.FinishRun)
    scene.lost("w2")
    assert not scene.ever(m.FinishRun)
    scene.tell(finished("w3"))
    assert scene.ever(m.FinishRun) == [
        m.FinishRun(TrainingPosition(7, 1), "D", "all members finished")
    ]
    assert {c.worker for c in scene.ever(m.ReleaseWorker)} >= {"w1", "w3", "w4"}
    scene.said = []
    scene.wait(60.0)
    assert {c.worker for c in scene.of(m.EvictWorker)} >= {"w1", "w3", "w4"}
    assert {type(c) for c in scene.said} == {m.EvictWorker}


def test_member_that_did_not_finish_is_brought_to_the_end() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.tell(finished("w1"))
    scene.stopped("w2", step=6)
    assert scene.members == ["w1", "w2"]
    assert scene.coordinator.generation == 2
    assert not scene.ever(m.FinishRun)
    scene.tell(finished("w2", generation=2))
    assert scene.ever(m.FinishRun)


def test_weights_that_differ_are_said_aloud() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.tell(finished("w1", "D"))
    scene.tell(finished("w2", "E"))
    assert scene.ever(m.FinishRun)[0].digests_differ


def test_a_stop_is_told_and_told_again() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.tell(m.StopRequested("enough"))
    assert len(scene.of(m.StopTraining)) == 2
    assert m.StopTraining("w1", "enough") in scene.hear("w1", step=1)
    scene.lost("w2")
    scene.stopped("w1", step=2)
    assert m.StopTraining("w1", "enough") in scene.said, "a later generation is told as it forms"


def test_stop_with_one_survivor_ends_the_run_without_new_workers() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.running("w1", "w2")
    scene.tell(m.StopRequested("enough"))
    scene.lost("w2")
    scene.stopped("w1", step=2)
    assert scene.members == ["w1"]
    assert len(scene.ever(m.StartWorker)) == 2, "nobody is asked for any more"


def test_a_stop_before_the_first_step() -> None:
    scene = Scene(size=2)
    scene.tell(m.StopRequested("enough"))
    assert scene.ever(m.FinishRun) == [m.FinishRun(TrainingPosition(0), "", "enough")]
