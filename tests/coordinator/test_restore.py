"""A run that lost all state goes back to its newest checkpoint."""

from __future__ import annotations

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenes import Scene


def bereft(**rules: object) -> Scene:
    """Three trained up to step 9, two more were about to join; then the three are lost."""
    scene = Scene(size=3, **rules)
    scene.running("w1", "w2", "w3")
    scene.committed = 5
    scene.hear("w1", "w2", "w3", step=9)
    for worker in ("w1", "w2", "w3"):
        scene.lost(worker)
    return scene


def test_run_without_survivors_restores_the_newest_checkpoint() -> None:
    scene = bereft(min_workers=1)
    assert not scene.ever(m.FailRun)
    scene.ready("w4", "w5")
    scene.wait(0.1)
    membership = scene.coordinator.membership
    assert scene.members == ["w4", "w5"]
    assert membership.restore and membership.source == "w4"
    assert membership.lineage_id == membership.generation == 2
    assert not any(member.has_state for member in membership.members)
    scene.hear("w4", "w5", step=5)
    scene.lost("w4")
    scene.stopped("w5", 5, lineage_id=2)
    scene.wait(0.1, "w5", phase="wait")
    assert not scene.coordinator.membership.restore
    assert scene.coordinator.membership.source == "w5"


def test_run_without_survivors_and_checkpoint_fails() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.lost("w1")
    scene.lost("w2")
    assert "there is no checkpoint" in scene.ever(m.FailRun)[0].error


def test_reader_of_the_checkpoint_that_dies_is_replaced() -> None:
    """Half written or not: a checkpoint writes everything."""
    scene = bereft(min_workers=1)
    scene.ready("w4")
    scene.ready("w5", can_source=False)
    scene.wait(0.1)
    scene.hear("w4", "w5", phase="receive")
    scene.lost("w4")
    scene.stopped("w5", has_state=False)
    scene.wait(0.1, "w5", phase="wait")
    membership = scene.coordinator.membership
    assert (membership.source, membership.restore) == ("w5", True)


def test_a_run_that_left_a_checkpoint_begins_with_it() -> None:
    scene = Scene(size=2, begin=False)
    scene.committed = 7
    scene.note(scene.coordinator.start(0.0))
    scene.tell(m.WorkerStarted("w1"))
    scene.ready("w2", can_source=False)
    scene.wait(0.1, "w1", "w2", phase="start")
    assert scene.members == ["w2"]  # nobody's initial weights count, so nobody is waited for
    assert scene.coordinator.membership.restore


def test_checkpoint_can_be_continued_on_another_kind_of_machine() -> None:
    scene = bereft(min_workers=1)
    scene.ready("w4", kind="another")
    scene.wait(0.1)
    assert scene.members == ["w4"]
    scene.ready("w5")  # now it is this one that is of another kind
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w5"]


def test_slots_of_rejected_workers_are_filled_again_after_a_restore() -> None:
    """After a restore, other kinds of machine may fit."""
    scene = Scene(size=2, max_rejections=0)
    scene.ready("w1")
    scene.ready("w2", kind="another")
    scene.wait(0.1)
    scene.hear("w1")
    scene.committed = 5
    assert len(scene.ever(m.StartWorker)) == 2
    scene.lost("w1")
    assert len(scene.ever(m.StartWorker)) == 4


def test_the_checkpoint_waits_for_the_lease_of_whoever_may_be_alive() -> None:
    scene = bereft(min_workers=1, lease_s=50.0)
    assert scene.coordinator.phase == "gathering"
    held = Scene(size=1, lease_s=50.0)
    held.running("w1")
    held.committed = 5
    held.wait(6.0)  # silent, evicted, perhaps alive
    assert [c.worker for c in held.ever(m.EvictWorker)] == ["w1"]
    held.ready("w2")
    held.wait(5.0, "w2", phase="wait")
    assert held.members == ["w1"]
    held.wait(50.0, "w2", phase="wait")
    assert held.members == ["w2"] and held.coordinator.membership.restore


def test_a_run_that_is_stopped_while_nobody_holds_its_state_ends_at_its_checkpoint() -> None:
    scene = bereft()
    scene.tell(m.StopRequested("enough"))
    assert scene.ever(m.FinishRun) == [m.FinishRun(TrainingPosition(5), "", "enough")]
