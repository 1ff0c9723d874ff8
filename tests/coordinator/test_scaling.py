"""Draining, scaling and standbys."""

from __future__ import annotations

import pytest

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenes import Scene, trio


def test_a_drained_member_leaves_when_its_replacement_is_ready() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.running("w1", "w2")
    scene.tell(m.DrainNoticed("w2", 1000.0))
    assert [c.worker for c in scene.of(m.StartWorker)] == ["w3"]
    assert not scene.ever(m.EndGeneration)
    scene.ready("w3")
    assert scene.ever(m.EndGeneration)
    scene.stopped("w1", step=2)
    scene.stopped("w2", step=2)
    assert scene.members == ["w1", "w3"]
    assert not scene.ever(m.ReleaseWorker), "kept until the others have made a step"
    scene.hear("w1", "w3", step=2)
    assert not scene.ever(m.ReleaseWorker)
    scene.hear("w1", step=3)
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w2"]


def test_a_deadline_forces_it_out_unless_too_few_remain() -> None:
    scene = Scene(size=2, min_workers=1, drain_margin_s=3.0)
    scene.running("w1", "w2")
    scene.tell(m.DrainNoticed("w2", 10.0))
    scene.wait(8.0, "w1", "w2")
    assert scene.ever(m.EndGeneration)
    few = Scene(size=2, min_workers=2, drain_margin_s=3.0)
    few.running("w1", "w2")
    few.tell(m.DrainNoticed("w2", 10.0))
    few.wait(8.0, "w1", "w2")
    assert not few.ever(m.EndGeneration)
    assert "are needed" in few.coordinator.reason


def test_departing_worker_that_alone_is_ahead_stays_for_the_hand_over() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.tell(m.DrainNoticed("w2", None))
    scene.ready("w3")
    scene.stopped("w1", step=4)
    scene.stopped("w2", step=5)
    assert scene.members == ["w1", "w2", "w3"]
    assert scene.coordinator.membership.source == "w2"


def with_a_leaver(min_workers: int) -> Scene:
    """w2 drains, w3 has its place, and w2 stays for its state."""
    scene = Scene(size=2, min_workers=min_workers)
    scene.running("w1", "w2")
    scene.tell(m.DrainNoticed("w2", None))
    scene.ready("w3")
    scene.stopped("w1", step=4)
    scene.stopped("w2", step=4)
    assert scene.members == ["w1", "w3"]
    return scene


def test_departing_worker_is_called_back_when_the_newest_state_is_lost() -> None:
    scene = with_a_leaver(min_workers=1)
    scene.lost("w1")
    scene.stopped("w3", has_state=False)
    assert scene.members == ["w3", "w2"] or scene.members == ["w2", "w3"]
    assert scene.coordinator.membership.source == "w2"


def test_departing_worker_stays_until_the_next_generation_can_go_on_without_it() -> None:
    """The step that covers its state is heard of late, when the others are too few to go on."""
    scene = with_a_leaver(min_workers=2)
    scene.claims = False
    scene.lost("w3")
    scene.stopped("w1", step=5)
    scene.hear("w1", step=5, phase="wait")
    assert not scene.ever(m.ReleaseWorker)
    scene.tell(m.GenerationClaimed(3))
    assert scene.members == ["w1", "w2"]


def test_scaling_down_keeps_the_source() -> None:
    scene = Scene(size=2)
    scene.tell(m.WorkerStarted("w2"))
    assert m.BeginTraining("w2", True) in scene.said
    scene.tell(m.SizeRequested(1))
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w1"]


def test_a_drained_bystander_goes_at_once() -> None:
    scene = Scene(size=1, standby=1)
    scene.running("w1")
    scene.ready("w2")
    scene.tell(m.DrainNoticed("w2", None))
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w2"]


@pytest.mark.parametrize("size", [0, 9])
def test_sizes_out_of_bounds_are_refused(size: int) -> None:
    scene = Scene(size=2)
    scene.tell(m.SizeRequested(size))
    assert scene.coordinator.size == 2
    assert "refused" in scene.of(m.Explain)[0].text


@pytest.mark.parametrize("least", [0, 3])
def test_min_workers_above_the_size_is_refused(least: int) -> None:
    scene = Scene(size=4)
    scene.tell(m.SizeRequested(2, least))
    assert scene.coordinator.size == 4
    assert scene.of(m.Explain)[0].text == f"min_workers {least} refused: not within 1..2"


def test_how_many_are_needed_may_change_and_stays_changed() -> None:
    scene = Scene(size=3)
    scene.tell(m.SizeRequested(3, 2))
    scene.tell(m.SizeRequested(4))
    scene.ready("w1")
    scene.wait(1.0, "w1", phase="wait")
    assert scene.coordinator.reason == "1 of at least 2 workers are ready"
    scene.tell(m.SizeRequested(4, 1))
    assert scene.members == ["w1"]


def test_scaling_down_and_up() -> None:
    scene = trio()
    scene.tell(m.SizeRequested(2))
    assert len(scene.of(m.EndGeneration)) == 3
    for worker in ("w1", "w2", "w3"):
        scene.stopped(worker, step=3)
    assert scene.members == ["w1", "w2"]
    scene.hear("w1", "w2", step=4)
    assert [c.worker for c in scene.ever(m.ReleaseWorker)] == ["w3"]
    scene.tell(m.SizeRequested(4))
    assert [c.worker for c in scene.of(m.StartWorker)] == ["w4", "w5"]


def test_standby_replaces_a_lost_member_at_once() -> None:
    scene = Scene(size=2, standby=1)
    scene.running("w1", "w2")
    scene.ready("w3")
    assert scene.members == ["w1", "w2"]
    scene.lost("w2")
    scene.stopped("w1", step=1)
    assert scene.members == ["w1", "w3"]


def test_run_below_min_workers_waits_with_a_reason_and_goes_on() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.running("w1", "w2")
    scene.lost("w2")
    scene.stopped("w1", step=1)
    assert scene.coordinator.reason == "1 of at least 2 workers are ready"
    scene.wait(3.0, "w1", phase="wait")
    assert not scene.of(m.Explain), "said once"
    scene.ready("w3")
    assert scene.members == ["w1", "w3"]


def test_departing_workers_alone_take_over_when_the_run_is_being_stopped() -> None:
    """A run that is being stopped takes no joiner, so there is none to wait for."""
    scene = trio()
    scene.tell(m.SizeRequested(1))
    for worker in scene.members:
        scene.stopped(worker, step=4)
    assert scene.members == ["w1"]
    scene.tell(m.StopRequested("enough"))
    scene.lost("w1")
    assert scene.members == ["w2"]
