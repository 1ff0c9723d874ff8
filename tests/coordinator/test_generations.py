"""How generations form, end and follow each other."""

from __future__ import annotations

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from elastic_dp.coordinator.worker_state import Stage
from tests.coordinator.scenes import Scene, trio


def test_a_loss_aborts_the_rest_and_the_most_advanced_is_the_source() -> None:
    scene = trio(min_workers=2)
    scene.lost("w2")
    assert [c.worker for c in scene.of(m.AbortGeneration)] == ["w1", "w3"]
    assert [c.worker for c in scene.of(m.StartWorker)] == ["w4"]
    scene.stopped("w1", step=4)
    assert scene.coordinator.phase == "ending"
    scene.stopped("w3", step=5)
    assert scene.members == ["w1", "w3"]
    assert scene.coordinator.membership.source == "w3"


def test_a_stop_unasked_aborts_the_rest() -> None:
    scene = trio()
    scene.stopped("w2", step=3)
    assert [c.worker for c in scene.of(m.AbortGeneration)] == ["w1", "w3"]


def test_workers_without_state_are_no_survivors() -> None:
    scene = Scene(size=2)
    scene.running("w1")
    scene.ready("w2")
    scene.stopped("w1", step=2)
    assert scene.members == ["w1", "w2"]
    scene.lost("w1")
    scene.stopped("w2", step=0, has_state=False)
    assert "lost" in scene.ever(m.FailRun)[0].error


def test_a_bystander_breaks_no_group() -> None:
    scene = Scene(size=1, standby=1)
    scene.running("w1")
    scene.ready("w2")
    scene.lost("w2")
    assert not scene.of(m.AbortGeneration)
    assert scene.coordinator.phase == "running"


def test_joins_end_a_generation_at_a_step_ahead_and_repeat_it() -> None:
    scene = Scene(size=2, steps_ahead=2)
    scene.running("w1", step=4)
    scene.ready("w2")
    ends = [c for c in scene.said if isinstance(c, m.EndGeneration)]
    assert ends and ends[0].after_step >= 6
    assert scene.hear("w1", step=5)[1:] == [ends[0]]  # the same again
    scene.stopped("w1", step=6)
    members = scene.coordinator.membership.members
    assert [(member.worker, member.has_state) for member in members] == [
        ("w1", True),
        ("w2", False),
    ]


def test_command_that_is_not_acted_on_is_repeated_at_growing_intervals() -> None:
    """A loop body may last minutes, in which its worker is heard, and need not be told every
    second."""
    scene = Scene(size=2)
    scene.running("w1")
    scene.ready("w2")
    told = len(scene.ever(m.EndGeneration))
    scene.wait(100.0, "w1", "w2", phase="body", step=1)
    assert len(scene.ever(m.EndGeneration)) - told == 8, "at heartbeats 1, 2, 4, …, 32, 64, 96"
    scene.stopped("w1", step=9)
    scene.hear("w1", "w2", step=10)
    scene.tell(m.StopRequested("enough"))
    told = len(scene.ever(m.StopTraining))
    scene.wait(10.0, "w1", "w2", phase="body", step=10)
    assert len(scene.ever(m.StopTraining)) - told == 2 * 4


def test_an_abort_is_told_at_once_however_seldom_the_end_was() -> None:
    scene = Scene(size=3)
    scene.running("w1", "w2")
    scene.ready("w3")
    scene.wait(40.0, "w1", "w2", "w3", phase="body", step=1)
    scene.lost("w2")
    assert m.AbortGeneration("w1", 1) in scene.said
    assert m.AbortGeneration("w1", 1) in scene.hear("w1", phase="body", step=1)


def test_a_source_inside_a_body_has_no_joiners() -> None:
    scene = Scene(size=2)
    scene.running("w1")
    scene.ready("w2")
    scene.stopped("w1", position=TrainingPosition(3, 0, 1), at_head=False)
    assert scene.members == ["w1"]


def test_a_planned_end_that_fails_or_lasts_becomes_an_abort() -> None:
    scene = Scene(size=3, gather_timeout_s=4.0)
    scene.running("w1", "w2")
    scene.ready("w3")
    after = scene.ever(m.EndGeneration)[-1].after_step
    scene.stopped("w1", step=after)
    assert not scene.ever(m.AbortGeneration)
    scene.wait(5.0, "w1", "w2", "w3", phase="collective")
    assert [c.worker for c in scene.ever(m.AbortGeneration)][:1] == ["w2"]
    early = Scene(size=3)
    early.running("w1", "w2")
    early.ready("w3")
    early.stopped("w1", step=0)
    assert [c.worker for c in early.of(m.AbortGeneration)] == ["w2"]


def test_stragglers_that_are_heard_are_waited_for() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.stopped("w1", step=1)
    scene.wait(600.0, "w1", "w2", phase="body")
    assert not scene.ever(m.EvictWorker)
    assert scene.coordinator.phase == "ending"


def test_joiner_that_fails_twice_is_replaced() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.ready("w1")
    scene.ready("w2")
    for _ in range(2):
        scene.stopped("w1", step=0)
        scene.stopped("w2", has_state=False, unreachable=("w1",))
        scene.wait(8.0, "w1", "w2", phase="wait")
    evicted = scene.ever(m.EvictWorker)
    assert {c.worker for c in evicted} == {"w2"}
    assert "join" in evicted[0].reason


def test_member_with_state_stays_though_joiners_cannot_reach_it() -> None:
    scene = Scene(size=3, min_workers=1)
    scene.running("w1")
    scene.ready("w2", "w3")
    scene.stopped("w1", step=3)
    assert scene.members == ["w1", "w2", "w3"]
    scene.stopped("w2", has_state=False, unreachable=("w1",))
    scene.stopped("w3", has_state=False, unreachable=("w1",))
    scene.stopped("w1", step=3)
    assert scene.members == ["w1"]


def test_unreachable_joiner_waits_and_unreachable_member_with_state_gets_a_second_try() -> None:
    scene = Scene(size=2, min_workers=1)
    scene.running("w1")
    scene.ready("w2")
    scene.stopped("w1", step=3)
    assert scene.members == ["w1", "w2"]
    scene.stopped("w2", has_state=False, unreachable=("w1",))
    scene.stopped("w1", step=3)
    assert scene.members == ["w1"], "void and out of reach: without it for now"
    both = Scene(size=2)
    both.running("w1", "w2")
    for expected in (["w1", "w2"], ["w1", "w2"], ["w1"]):
        both.stopped("w1", step=3, unreachable=("w2",))
        both.stopped("w2", step=3)
        assert both.members == expected


def test_a_membership_that_failed_is_tried_again_after_another_one_was() -> None:
    """The other one fails, and is followed, by facts that were held until it was clear who
    leads."""
    scene = Scene(size=3, min_workers=1)
    scene.running("w1", "w2")
    scene.ready("w3")
    for worker in ("w1", "w2"):
        scene.stopped(worker, step=3)
    all_three = scene.members
    scene.stopped("w3", has_state=False, unreachable=("w1",))
    for worker in ("w1", "w2"):
        scene.stopped(worker, step=3)
    assert all_three == ["w1", "w2", "w3"] and scene.members == ["w1", "w2"]
    scene.wait(5.5, "w1", "w2", "w3", phase="form", step=3)  # w3 may join again
    scene.claims = False
    scene.wait(3.0)
    for worker in ("w1", "w2"):
        scene.stopped(worker, step=3)
    assert not scene.said and scene.coordinator.phase == "forming"
    scene.tell(m.GenerationClaimed(4))
    assert scene.of(m.AbortGeneration) and scene.members == all_three
    scene.claims = True
    for evicted in ([], ["w3"]):
        assert scene.members == all_three
        for worker in ("w1", "w2"):
            scene.stopped(worker, step=3)
        scene.stopped("w3", has_state=False)
        assert [c.worker for c in scene.ever(m.EvictWorker)] == evicted


def test_member_that_never_enters_is_aborted_again() -> None:
    scene = Scene(size=2, forming_timeout_s=5.0, gather_timeout_s=5.0)
    scene.ready("w1", "w2")
    scene.wait(12.0, "w1", "w2", phase="form")
    assert {c.worker for c in scene.of(m.AbortGeneration)} == {"w1", "w2"}


def test_member_that_never_enters_is_left_out_of_the_next_generation() -> None:
    scene = Scene(size=2, forming_timeout_s=5.0, gather_timeout_s=5.0)
    scene.running("w1")
    scene.ready("w2")
    scene.stopped("w1", step=3)
    assert scene.members == ["w1", "w2"]
    while not scene.of(m.AbortGeneration):
        scene.wait(1.0, "w1", phase="form", step=3)
        scene.hear("w2", phase="wait", generation=0)
    scene.stopped("w1", step=3)
    scene.stopped("w2", has_state=False)
    assert scene.members == ["w1"]


def test_a_large_state_may_take_long_to_arrive() -> None:
    scene = Scene(size=2, forming_timeout_s=5.0, gather_timeout_s=5.0)
    scene.running("w1")
    scene.ready("w2")
    scene.stopped("w1", step=3)
    scene.wait(60.0, "w1", "w2", phase="receive", step=3)
    assert scene.coordinator.phase == "forming"


def test_a_death_while_forming_is_no_failure_of_the_others() -> None:
    scene = Scene(size=3, min_workers=1)
    scene.running("w1")
    scene.ready("w2", "w3")
    scene.stopped("w1", step=3)
    assert scene.members == ["w1", "w2", "w3"]
    scene.stopped("w1", step=3)
    scene.lost("w3")
    scene.stopped("w2", has_state=False)
    assert scene.members == ["w1", "w2"]
    scene.stopped("w2", has_state=False, unreachable=("w1",))
    scene.stopped("w1", step=3)
    assert scene.members == ["w1"]
    assert not scene.ever(m.EvictWorker), "it failed to join once, and may try again"


def test_a_lost_report_ends_the_generation() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    assert m.AbortGeneration("w2", 1) in scene.hear("w1", phase="wait")


def test_member_two_steps_behind_is_evicted() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.stopped("w1", step=9)
    scene.stopped("w2", step=7)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w2"]
    assert scene.members == ["w1"]


def test_workers_may_be_listed_while_one_comes() -> None:
    scene = trio()
    workers = scene.coordinator._registry.workers

    class First:
        stage = Stage.MEMBER

        @property
        def id(self) -> str:
            workers["w99"] = workers[
                "w2"
            ]  # as the controller's thread may, after the first is listed
            return "w1"

    workers["w1"] = First()  # type: ignore[assignment]
    assert {"w1", "w2", "w3"} <= set(scene.coordinator.workers)
