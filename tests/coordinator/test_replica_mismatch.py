"""Members whose weights differ: all who hold a state are replaced, and the run goes back to when
they agreed."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import ReplicaMismatch, TrainingPosition
from elastic_dp.coordinator.replica_mismatch import MAX_IN_A_ROW
from tests.coordinator.scenes import Scene


def differing(
    agreed: int = 10, *odd: str, committed: int | None = 12, older: int | None = 8
) -> Scene:
    """Three have found in the header of step 16 that they are not equal."""
    scene = Scene(size=3, standby=1)
    scene.committed, scene.older = None, None
    scene.running("w1", "w2", "w3")
    scene.hear("w1", "w2", "w3", step=15)
    scene.committed, scene.older = committed, older
    said = ReplicaMismatch(agreed, odd or ("w2",))
    for worker in ("w1", "w3", "w2"):
        scene.stopped(worker, step=15, generation=1, mismatch=said)
    return scene


def test_mismatched_replica_is_evicted_and_all_others_are_replaced() -> None:
    scene = differing()
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w2"]
    assert {c.worker for c in scene.ever(m.ReleaseWorker)} == {"w1", "w3"}
    assert len(scene.ever(m.StartWorker)) == 7  # three for them, and the one that waits


def test_mismatch_restores_the_newest_checkpoint_at_which_all_agreed() -> None:
    scene = differing()
    assert scene.ever(m.FindCheckpoint)[-1] == m.FindCheckpoint(10)
    scene.ready("w4", "w5", "w6")
    scene.wait(0.2)
    membership = scene.coordinator.membership
    assert membership is not None and membership.restore
    assert set(scene.members) == {"w4", "w5", "w6"}
    assert "back to step 8" in " ".join(c.text for c in scene.ever(m.Explain))
    scene.hear("w4", "w5", "w6", phase="compute", step=8)
    for worker in scene.members:  # from then on all that is committed counts
        scene.lost(worker)
    assert scene.ever(m.FindCheckpoint)[-1] == m.FindCheckpoint(None)


def test_mismatch_without_a_majority_evicts_all() -> None:
    scene = differing(10, "w1", "w2", "w3")
    assert {c.worker for c in scene.ever(m.EvictWorker)} == {"w1", "w2", "w3"}


def test_mismatch_without_an_old_enough_checkpoint_fails_the_run() -> None:
    scene = differing(older=None)
    (failed,) = scene.ever(m.FailRun)
    assert "there is no checkpoint of step 10 or earlier" in failed.error
    assert "CheckpointConfig" in failed.error


def test_mismatch_reported_by_one_member_replaces_all() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.hear("w1", "w2", step=15)
    scene.committed = 10
    scene.stopped("w1", step=15, generation=1, mismatch=ReplicaMismatch(10, ("w1", "w2")))
    scene.stopped("w2", step=15, generation=1)
    assert {c.worker for c in scene.ever(m.EvictWorker)} == {"w1", "w2"}


def test_mismatch_replaces_a_retained_worker_with_state() -> None:
    scene = Scene(size=2, min_workers=1)
    scene.running("w1", "w2")
    scene.hear("w1", "w2", step=4)
    scene.committed = 3
    scene.tell(m.SizeRequested(1))
    scene.stopped("w1", step=6)
    scene.stopped("w2", step=6)
    assert scene.coordinator.workers["w2"] == "retained"
    scene.stopped("w1", step=6, mismatch=ReplicaMismatch(3, ("w1",)))
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w1"]
    assert [c.worker for c in scene.ever(m.ReleaseWorker)] == ["w2"]


def test_mismatch_keeps_a_worker_without_state() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.hear("w1", "w2", step=15)
    scene.committed = 10
    scene.stopped("w1", step=15, generation=1, mismatch=ReplicaMismatch(10, ("w1",)))
    scene.stopped("w2", has_state=False, position=TrainingPosition(0), generation=1)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w1"]
    assert not scene.ever(m.ReleaseWorker)


def test_mismatch_again_and_again_fails_the_run() -> None:
    scene = differing()
    for round_ in range(MAX_IN_A_ROW):
        assert not scene.ever(m.FailRun), round_
        names = [w for w, stage in scene.coordinator.workers.items() if stage == "starting"]
        scene.ready(*names)
        scene.wait(40.0, *names, phase="wait")
        members = scene.members
        scene.hear(*members, step=15)
        for worker in members:
            said = ReplicaMismatch(10, (members[0],))
            scene.stopped(worker, step=15, mismatch=said)
    (failed,) = scene.ever(m.FailRun)
    assert "time 4" in failed.error
