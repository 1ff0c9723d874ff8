"""Silence, eviction, and the leases that the next generation waits for."""

from __future__ import annotations

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenes import Scene


def test_silence_is_judged_unless_the_group_makes_steps() -> None:
    scene = Scene(size=2, heartbeat_timeout_s=5.0)
    scene.running("w1", "w2")
    for step in range(1, 20):  # w2 is silent, and yet the steps go on
        scene.wait(1.0, "w1", step=step)
    assert not scene.ever(m.EvictWorker)
    scene.wait(7.0, "w1", step=19)
    assert [c.worker for c in scene.of(m.EvictWorker)] == ["w2"]


def test_the_evicted_get_no_answer_but_an_end() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.wait(9.0, "w1")
    assert [type(c) for c in scene.hear("w2")] == [m.EvictWorker]
    assert [type(c) for c in scene.hear("w77")] == [m.EvictWorker]
    assert m.RenewLease("w1", scene.beats + 1) in scene.hear("w1")


def alone_and_silent(**rules: object) -> Scene:
    """The source was announced, never sent a heartbeat, and is evicted but not dead; another worker
    is ready."""
    scene = Scene(size=1, lease_s=30.0, **rules)
    scene.ready("w1")
    scene.hear("w1", phase="form")
    scene.wait(9.0)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w1"]
    scene.ready("w2")
    return scene


def test_next_generation_waits_for_the_lease_of_a_member_that_may_live() -> None:
    scene = alone_and_silent()
    scene.wait(15.0, "w2", phase="wait")
    assert scene.members == ["w1"], "the lease of w1 runs for 30 s"
    scene.wait(10.0, "w2", phase="wait")
    assert scene.members == ["w2"]


def test_next_generation_forms_at_once_when_the_evicted_member_is_dead() -> None:
    scene = alone_and_silent()
    scene.lost("w1")
    assert scene.members == ["w2"]


def test_a_member_that_was_answered_long_ago_still_has_its_lease() -> None:
    """Announced right after an answer: the lease counts from that answer, heard again or not."""
    scene = Scene(size=1, lease_s=30.0)
    scene.ready("w1")
    scene.wait(9.0)
    scene.ready("w2")
    scene.wait(10.0, "w2", phase="wait")
    assert scene.members == ["w1"]


def test_silence_is_not_judged_while_more_waits_to_be_read() -> None:
    scene = Scene(size=2, heartbeat_timeout_s=5.0)
    scene.running("w1", "w2")
    for _ in range(5):
        scene.now += 1.0
        scene.hear("w1")
    scene.now += 0.5
    scene.hear("w1")  # overdue, but its heartbeat is the next to be read
    scene.hear("w2")
    scene.tell(m.DeadlineReached())
    assert not scene.ever(m.EvictWorker)


def test_a_lease_counts_from_the_last_answer_inside() -> None:
    scene = Scene(size=1, lease_s=30.0)
    scene.ready("w1")
    scene.wait(4.0, "w1", phase="form")
    scene.wait(10.0)
    scene.ready("w2")
    scene.wait(18.0, "w2", phase="wait")
    assert scene.members == ["w1"], "answered last at 4 s"
    scene.wait(4.0, "w2", phase="wait")
    assert scene.members == ["w2"]
