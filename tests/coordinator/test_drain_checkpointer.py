"""Scenes of checkpoints: asked for, and the last one of those who must go."""

from __future__ import annotations

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenes import Scene


def told(scene: Scene, kind: type) -> list[str]:
    return [command.worker for command in scene.of(kind)]


def falling(step: int = 4, **rules: object) -> Scene:
    """Both of two are needed, and w2 must be gone in ten seconds."""
    rules = {"size": 2, "min_workers": 2, "drain_margin_s": 3.0, "checkpointing": True} | rules
    scene = Scene(**rules)
    scene.running("w1", "w2", step=step)
    scene.tell(m.DrainNoticed("w2", scene.now + 10.0))
    return scene


def stopped(*workers: str, step: int = 6, **rules: object) -> Scene:
    scene = falling(**rules)
    scene.wait(7.1, "w1", "w2", step=step)
    assert told(scene, m.EndGeneration)[:2] == ["w1", "w2"]
    for worker in workers or ("w1", "w2"):
        scene.stopped(worker, step=step)
    return scene


def test_a_fleet_that_will_fall_is_asked_for_a_checkpoint_at_once() -> None:
    scene = falling()
    assert told(scene, m.TakeCheckpoint) == ["w1", "w2"]
    assert told(scene, m.StartWorker) == ["w3"]
    scene.wait(5.0, "w1", "w2", step=5)
    assert not scene.of(m.TakeCheckpoint) and not scene.of(m.EndGeneration), "once for a notice"


def test_the_time_that_is_left_is_for_the_checkpoint_and_not_for_further_steps() -> None:
    """Each may take as long as the notice."""
    scene = falling()
    scene.wait(7.1, "w1", "w2", step=4)
    assert {command.after_step for command in scene.of(m.EndGeneration)} == {4}


def test_drain_that_leaves_enough_workers_takes_no_checkpoint() -> None:
    scene = falling(min_workers=1)
    assert not scene.ever(m.TakeCheckpoint)
    scene.wait(7.1, "w1", "w2", step=5)
    for worker in ("w1", "w2"):
        scene.stopped(worker, step=6)
    assert scene.members == ["w1"] and not scene.ever(m.WriteDrainCheckpoint)


def test_draining_worker_leaves_when_its_state_is_committed() -> None:
    scene = stopped()
    assert scene.of(m.WriteDrainCheckpoint) == [
        m.WriteDrainCheckpoint(w, 1, ("w1", "w2")) for w in ("w1", "w2")
    ]
    scene.tell(m.CheckpointCommitted(4))
    assert not scene.ever(m.ReleaseWorker), "what is committed is not what they hold"
    scene.tell(m.CheckpointCommitted(6))
    assert told(scene, m.ReleaseWorker) == ["w2"]
    assert "1 of at least 2 workers" in scene.coordinator.reason
    scene.ready("w3")
    assert scene.members == ["w1", "w3"] and scene.coordinator.membership.source == "w1"


def test_the_last_of_all_leave_the_run_to_others() -> None:
    scene = Scene(size=1, checkpointing=True, drain_margin_s=3.0)
    scene.running("w1", step=4)
    scene.tell(m.DrainNoticed("w1", scene.now + 10.0))
    scene.wait(7.1, "w1", step=5)
    scene.stopped("w1", step=7)
    scene.committed = 7
    scene.tell(m.CheckpointCommitted(7))
    assert told(scene, m.ReleaseWorker) == ["w1"]
    scene.ready("w2")
    scene.wait(0.1, "w2", phase="wait")
    assert scene.members == ["w2"] and scene.coordinator.membership.restore
    assert not scene.ever(m.FailRun)


def test_writers_are_told_again_when_one_of_them_is_lost() -> None:
    scene = stopped()
    scene.lost("w1")
    assert scene.of(m.WriteDrainCheckpoint) == [m.WriteDrainCheckpoint("w2", 1, ("w2",))]
    scene.wait(0.9, "w2", phase="wait", step=6)
    assert not scene.of(m.WriteDrainCheckpoint)
    scene.wait(0.2, "w2", phase="wait", step=6)
    assert scene.of(m.WriteDrainCheckpoint) == [m.WriteDrainCheckpoint("w2", 1, ("w2",))], (
        "a word may be lost"
    )


def test_only_those_furthest_keep_their_state() -> None:
    scene = stopped("w1")
    scene.stopped("w2", step=7)
    assert scene.of(m.WriteDrainCheckpoint) == [m.WriteDrainCheckpoint("w2", 1, ("w2",))]


def test_joiner_meanwhile_ends_the_wait_for_the_commit() -> None:
    scene = stopped()
    scene.ready("w3")
    assert scene.members == ["w1", "w3"]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_second_notice_later_lets_the_worker_with_time_left_go_on(checkpointing: bool) -> None:
    """The worker that has time left goes on alone, if one is enough."""
    scene = Scene(size=2, checkpointing=checkpointing, drain_margin_s=3.0)
    scene.running("w1", "w2", step=4)
    scene.tell(m.DrainNoticed("w2", scene.now + 10.0))
    assert not scene.of(m.TakeCheckpoint)
    scene.tell(m.DrainNoticed("w1", scene.now + 60.0))
    assert told(scene, m.TakeCheckpoint) == (["w1", "w2"] if checkpointing else [])
    scene.wait(7.1, "w1", "w2", step=5)
    assert told(scene, m.EndGeneration)[:2] == ["w1", "w2"]
    for worker in ("w1", "w2"):
        scene.stopped(worker, step=7)
    assert scene.members == ["w1"] and not scene.ever(m.WriteDrainCheckpoint)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_drain_without_a_step_or_a_storage_lets_training_go_on(checkpointing: bool) -> None:
    scene = falling(step=0 if checkpointing else 4, checkpointing=checkpointing)
    scene.wait(9.0, "w1", "w2", step=0 if checkpointing else 4)
    assert not scene.ever(m.EndGeneration)
    assert bool(scene.ever(m.TakeCheckpoint)) is checkpointing
    scene.stopped("w1", step=0 if checkpointing else 6)
    scene.stopped("w2", step=0 if checkpointing else 6)
    assert not scene.ever(m.WriteDrainCheckpoint)
    assert scene.members == ["w1", "w2"] and scene.coordinator.generation == 2


def test_drain_checkpoint_waits_for_a_worker_inside_a_loop_body() -> None:
    scene = stopped("w1")
    scene.stopped("w2", position=TrainingPosition(7), at_head=False)
    assert not scene.ever(m.WriteDrainCheckpoint)
    assert scene.members == ["w1", "w2"] and scene.coordinator.generation == 2


def test_the_end_of_the_run_is_not_held_up() -> None:
    scene = stopped("w1", step=6)
    scene.stopped("w2", position=TrainingPosition(6, 1))
    assert not scene.ever(m.WriteDrainCheckpoint)
    assert scene.members == ["w1", "w2"] and scene.coordinator.generation == 2


def test_commit_before_a_restore_does_not_count() -> None:
    """The newest one was damaged: the run goes on from the one before it, and makes the same steps
    again."""
    scene = Scene(size=1, checkpointing=True, drain_margin_s=3.0)
    scene.running("w1", step=4)
    scene.committed = 9
    scene.tell(m.CheckpointCommitted(9))
    scene.lost("w1")
    scene.ready("w2")
    scene.wait(0.1)
    scene.hear("w2", step=5)
    scene.tell(m.DrainNoticed("w2", scene.now + 10.0))
    scene.wait(7.1, "w2", step=5)
    scene.stopped("w2", step=7, lineage_id=2)
    assert told(scene, m.WriteDrainCheckpoint) == ["w2"]
    assert not scene.ever(m.ReleaseWorker)


def test_a_storage_that_is_away_holds_nobody_up_for_longer_than_the_notice() -> None:
    scene = stopped()
    scene.wait(2.0, "w1", "w2", phase="wait", step=6)
    scene.wait(0.95)
    assert scene.members == ["w1", "w2"] and scene.coordinator.generation == 2
    assert not scene.ever(m.ReleaseWorker)
    scene.wait(3.0, "w1", "w2", step=6)
    assert scene.coordinator.phase == "running", scene.coordinator.reason
    assert "are needed" in scene.coordinator.reason


def test_checkpoint_requested_while_no_worker_trains_is_taken_later() -> None:
    scene = Scene(size=1)
    scene.tell(m.CheckpointRequested())
    assert not scene.of(m.TakeCheckpoint)
    scene.running("w1")
    assert [c.worker for c in scene.ever(m.TakeCheckpoint)] == ["w1"]
    scene.tell(m.CheckpointRequested())
    assert told(scene, m.TakeCheckpoint) == ["w1"]


def test_a_stop_is_told_again_until_it_is_heard() -> None:
    scene = Scene(size=1)
    scene.running("w1", step=1)
    scene.tell(m.StopRequested("enough"))
    assert scene.of(m.StopTraining) == [m.StopTraining("w1", "enough")]
    scene.wait(1.0, "w1", step=1)
    assert scene.of(m.StopTraining) == [m.StopTraining("w1", "enough")]


def test_a_leaver_that_alone_holds_the_state_leaves_when_it_is_committed() -> None:
    """All who were to go on without it are lost before they made a step."""
    scene = Scene(size=2, min_workers=2, checkpointing=True)
    scene.running("w1", "w2", step=4)
    for worker in ("w1", "w2"):
        scene.tell(m.DrainNoticed(worker, scene.now + 30.0))
    scene.ready("w3", "w4")
    for worker in ("w1", "w2"):
        scene.stopped(worker, step=6)
    assert scene.members == ["w1", "w3", "w4"]
    for worker in scene.members:
        scene.lost(worker)
    scene.wait(26.0, "w2", phase="wait", step=6)
    assert told(scene, m.WriteDrainCheckpoint)[:1] == ["w2"]
    assert not scene.ever(m.ReleaseWorker)
    scene.committed = 6
    scene.tell(m.CheckpointCommitted(6))
    assert told(scene, m.ReleaseWorker) == ["w2"]


def test_many_notices_at_once_ask_two_members_once() -> None:
    workers = [f"w{n}" for n in range(1, 9)]
    scene = Scene(size=8, min_workers=8, checkpointing=True)
    scene.running(*workers, step=4)
    for worker in workers[:6]:
        scene.tell(m.DrainNoticed(worker, scene.now + 30.0))
    asked = [command.worker for command in scene.ever(m.TakeCheckpoint)]
    assert len(asked) == 2, asked
    scene.wait(1.1, *workers, step=5)
    assert told(scene, m.TakeCheckpoint) == ["w7", "w8"], "the later notices may need a later one"
    scene.wait(3.0, *workers, step=5)
    assert not scene.of(m.TakeCheckpoint)


def test_a_notice_that_comes_nearer_counts() -> None:
    scene = falling()
    scene.wait(1.0, "w1", "w2", step=5)
    scene.tell(m.DrainNoticed("w2", scene.now + 4.0))
    scene.wait(1.1, "w1", "w2", step=5)
    assert set(told(scene, m.EndGeneration)) == {"w1", "w2"}


def test_the_first_stop_counts() -> None:
    scene = Scene(size=1)
    scene.running("w1", step=1)
    scene.tell(m.StopRequested("enough"))
    assert scene.of(m.StopTraining) == [m.StopTraining("w1", "enough")]
    scene.tell(m.StopRequested("once more"))
    assert not scene.of(m.StopTraining)
