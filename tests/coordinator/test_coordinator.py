"""One rule of the coordinator after the other, in small scenes."""

from __future__ import annotations

import copy
import zlib

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from elastic_dp.coordinator.worker_state import Stage
from tests.coordinator.scenes import SIGNATURE, Scene, facts


def trio(**rules: object) -> Scene:
    scene = Scene(size=3, **rules)
    scene.running("w1", "w2", "w3")
    return scene


# ------------------------------------------------------------------------------ beginning


def test_the_first_to_start_is_the_source_and_the_first_group_needs_it() -> None:
    scene = Scene(size=3, standby=1)
    assert [c.worker for c in scene.ever(m.StartWorker)] == ["w1", "w2", "w3", "w4"]
    scene.tell(m.WorkerStarted("w2"))
    scene.ready("w1", "w3")
    assert m.BeginTraining("w2", True) in scene.all
    assert m.BeginTraining("w1", False) in scene.all
    assert not scene.ever(m.FormGeneration)
    scene.tell(m.WorkerReady("w2", SIGNATURE, True))
    assert sorted(scene.members) == ["w1", "w2", "w3"]
    assert scene.coordinator.membership.source == "w2"
    assert not any(member.has_state for member in scene.coordinator.membership.members)


def test_pending_workers_hold_nobody_up_and_a_burst_makes_one_change() -> None:
    scene = Scene(size=3, min_workers=1, join_window_s=0.05)
    scene.ready("w1")
    assert not scene.ever(m.FormGeneration)
    scene.ready("w2")
    scene.wait(0.1)
    assert sorted(scene.members) == ["w1", "w2"]


def test_another_founder_when_the_first_dies() -> None:
    scene = Scene(size=3, min_workers=2)
    scene.ready("w1")
    scene.ready("w2", can_source=False)
    scene.ready("w3", can_source=True)  # it never asked
    assert scene.coordinator.membership.source == "w1"  # formed with all
    late = Scene(size=3, min_workers=3)
    late.tell(m.WorkerStarted("w1"))
    late.ready("w2", can_source=False)
    late.ready("w3", can_source=True)
    late.lost("w1")
    late.ready("w4")
    assert late.coordinator.membership.source == "w3"


def test_a_fresh_worker_founds_when_all_were_told_no() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.tell(m.WorkerStarted("w1"))
    scene.ready("w2", can_source=False)
    scene.lost("w1")
    scene.ready("w3")
    assert m.BeginTraining("w3", True) in scene.all
    assert scene.coordinator.membership.source == "w3"


def test_another_founder_when_the_first_dies_as_it_gives() -> None:
    """Nobody is past forming yet, so nothing is lost that another could not give."""
    scene = Scene(size=2)
    scene.ready("w1", "w2", can_source=True)
    scene.wait(0.1)
    scene.hear("w1", phase="give")
    scene.hear("w2", phase="receive")
    assert scene.coordinator.phase == "forming"
    scene.lost("w1")
    scene.stopped("w2", has_state=False)
    assert not scene.ever(m.FailRun)
    scene.ready("w3", can_source=True)
    scene.wait(0.1, "w2")
    assert set(scene.members) == {"w2", "w3"} and scene.coordinator.membership.source == "w3"


def test_room_is_made_for_a_founder_that_does_not_come() -> None:
    scene = Scene(size=2, min_workers=2, source_timeout_s=20.0)
    scene.tell(m.WorkerStarted("w1"))
    scene.ready("w2", can_source=False)
    scene.lost("w1")
    scene.wait(25.0, "w2", phase="wait")
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w2"]


def test_who_received_a_part_cannot_found_the_run() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.ready("w1")
    scene.ready("w2", can_source=True)
    assert scene.members == ["w1", "w2"]
    scene.lost("w1")  # in the middle of the hand-over
    scene.stopped("w2", has_state=False)
    scene.ready("w3")
    assert scene.coordinator.membership.source == "w3"


@pytest.mark.parametrize("running", [False, True])
def test_layouts_that_differ_fail_the_run(running: bool) -> None:
    """All run the same function, so a layout of its own is that function's doing."""
    scene = Scene(size=2, min_workers=1 if running else 2)
    scene.ready("w1")
    if running:
        scene.wait(0.1)
        scene.hear("w1")
    scene.ready("w2", layout="other")
    assert "shapes" in scene.ever(m.FailRun)[0].error


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("weight (4,)\nbias (3,)", "'bias (3,)', not 'bias (2,)'"),
        ("weight (4,)", "'nothing', not 'bias (2,)'"),
        ("weight (4,)\nbias (2,)\nscale (1,)", "'scale (1,)', not 'nothing'"),
    ],
)
def test_what_is_the_first_to_differ_in_a_layout_is_named(lines: str, words: str) -> None:
    scene = Scene(size=2)
    scene.ready("w1", lines=zlib.compress(b"weight (4,)\nbias (2,)"))
    scene.ready("w2", layout="other", lines=zlib.compress(lines.encode()))
    assert scene.ever(m.FailRun)[0].error.endswith(words)


@pytest.mark.parametrize(
    ("field", "exact", "fits"),
    [("kind", True, False), ("kind", False, True), ("data", True, False)],
)
def test_a_newcomer_must_fit(field: str, exact: bool, fits: bool) -> None:
    scene = Scene(size=2, exact=exact)
    scene.running("w1")
    scene.ready("w2", **{field: "other"})
    released = [c for c in scene.said if isinstance(c, m.ReleaseWorker)]
    assert bool(released) is not fits
    assert fits or field in released[0].reason


def test_misfits_are_replaced_a_bounded_number_of_times() -> None:
    scene = Scene(size=2, max_rejections=2)
    scene.running("w1")
    for number in range(2, 10):
        if scene.coordinator.workers.get(f"w{number}") == "starting":
            scene.ready(f"w{number}", kind="other")
    assert [c.worker for c in scene.ever(m.StartWorker)] == ["w1", "w2", "w3", "w4"]


# ------------------------------------------------------------------------- generations


def test_a_generation_is_claimed_before_it_is_announced() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    assert scene.ever(m.ClaimGeneration) == [m.ClaimGeneration(1)]
    assert not scene.ever(m.FormGeneration)
    scene.tell(m.GenerationClaimed(2))  # not what was asked
    assert not scene.ever(m.FormGeneration)
    scene.tell(m.GenerationClaimed(1))
    assert scene.members == ["w1"]


def test_a_lost_claim_silences_for_good() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    assert scene.tell(m.GenerationClaimLost(1)) == [
        m.StandDown("generation 1 belongs to another controller")
    ]
    for event in (
        m.HeartbeatReceived("w1", 1, 1, "body"),
        m.WorkerLost("w1", ""),
        m.StopRequested(""),
    ):
        assert scene.tell(event) == []
    assert scene.coordinator.deadline is None


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


def test_void_workers_are_no_survivors() -> None:
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


def test_what_is_not_acted_on_is_repeated_seldomer_each_time() -> None:
    """A loop body may last minutes, in which its worker is heard, and need not be told every second."""
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


# --------------------------------------------------------------------- silence and leases


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
    """The founder was announced, never showed itself, and is evicted but not dead; another is ready."""
    scene = Scene(size=1, lease_s=30.0, **rules)
    scene.ready("w1")
    scene.hear("w1", phase="form")
    scene.wait(9.0)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w1"]
    scene.ready("w2")
    return scene


def test_the_next_generation_waits_for_the_lease_of_a_member_that_may_live() -> None:
    scene = alone_and_silent()
    scene.wait(15.0, "w2", phase="wait")
    assert scene.members == ["w1"], "the lease of w1 runs for 30 s"
    scene.wait(10.0, "w2", phase="wait")
    assert scene.members == ["w2"]


def test_or_for_its_death() -> None:
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


def test_a_coordinator_that_slept_confirms_by_a_claim_and_judges_nobody() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.claims = False
    scene.now += 60.0
    assert scene.hear("w1") == [m.ClaimGeneration(2)]
    assert scene.hear("w2") == []
    said = scene.tell(m.GenerationClaimed(2))
    assert {type(c) for c in said} == {m.RenewLease}
    assert len(said) == 2


def test_who_was_not_heard_while_it_slept_gets_another_timeout() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.now += 60.0
    scene.hear("w1")
    assert scene.coordinator.phase == "running"
    assert not scene.ever(m.EvictWorker)


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


def test_a_late_answer_to_a_claim_is_no_proof() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    scene.now += 60.0
    assert m.ClaimGeneration(2) in scene.tell(m.GenerationClaimed(1))
    assert not scene.ever(m.FormGeneration)


def test_claims_are_made_one_after_the_other() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    scene.now += 60.0
    assert scene.hear("w1", phase="wait") == []
    assert scene.ever(m.ClaimGeneration) == [m.ClaimGeneration(1)]


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


def test_who_fails_to_join_twice_is_replaced() -> None:
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


def test_who_holds_the_state_is_kept_whoever_cannot_reach_it() -> None:
    scene = Scene(size=3, min_workers=1)
    scene.running("w1")
    scene.ready("w2", "w3")
    scene.stopped("w1", step=3)
    assert scene.members == ["w1", "w2", "w3"]
    scene.stopped("w2", has_state=False, unreachable=("w1",))
    scene.stopped("w3", has_state=False, unreachable=("w1",))
    scene.stopped("w1", step=3)
    assert scene.members == ["w1"]


def test_a_superseded_coordinator_finds_out_before_it_acts() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.claims = False
    scene.wait(6.0)  # the workers follow another controller
    assert scene.said == [m.ClaimGeneration(2)]
    assert [type(c) for c in scene.tell(m.GenerationClaimLost(2))] == [m.StandDown]


# -------------------------------------------------------------------------------- forming


def test_the_unreachable_join_later_and_whole_ones_get_a_second_try() -> None:
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
    """The other one fails, and is followed, by facts that were held until it was clear who leads."""
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


def test_who_never_enters_is_asked_again() -> None:
    scene = Scene(size=2, forming_timeout_s=5.0, gather_timeout_s=5.0)
    scene.ready("w1", "w2")
    scene.wait(12.0, "w1", "w2", phase="form")
    assert {c.worker for c in scene.of(m.AbortGeneration)} == {"w1", "w2"}


def test_who_never_enters_is_left_out_next_time() -> None:
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


def test_one_too_far_behind_is_replaced() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.stopped("w1", step=9)
    scene.stopped("w2", step=7)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w2"]
    assert scene.members == ["w1"]


# -------------------------------------------------------------------- leaving and scaling


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


def test_a_leaver_that_alone_is_ahead_stays_for_the_copy() -> None:
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


def test_a_leaver_is_called_back_when_the_newest_state_is_lost() -> None:
    scene = with_a_leaver(min_workers=1)
    scene.lost("w1")
    scene.stopped("w3", has_state=False)
    assert scene.members == ["w3", "w2"] or scene.members == ["w2", "w3"]
    assert scene.coordinator.membership.source == "w2"


def test_a_leaver_stays_until_the_next_generation_is_there_to_go_on_without_it() -> None:
    """The step that covers its state is heard of late, when the others are too few to go on."""
    scene = with_a_leaver(min_workers=2)
    scene.claims = False
    scene.lost("w3")
    scene.stopped("w1", step=5)
    scene.hear("w1", step=5, phase="wait")
    assert not scene.ever(m.ReleaseWorker)
    scene.tell(m.GenerationClaimed(3))
    assert scene.members == ["w1", "w2"]


def test_scaling_down_keeps_the_founder() -> None:
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
def test_nobody_may_need_more_workers_than_there_are_to_be(least: int) -> None:
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


def test_standbys_take_seats_at_once() -> None:
    scene = Scene(size=2, standby=1)
    scene.running("w1", "w2")
    scene.ready("w3")
    assert scene.members == ["w1", "w2"]
    scene.lost("w2")
    scene.stopped("w1", step=1)
    assert scene.members == ["w1", "w3"]


def test_below_the_minimum_it_waits_says_why_and_goes_on() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.running("w1", "w2")
    scene.lost("w2")
    scene.stopped("w1", step=1)
    assert scene.coordinator.reason == "1 of at least 2 workers are ready"
    scene.wait(3.0, "w1", phase="wait")
    assert not scene.of(m.Explain), "said once"
    scene.ready("w3")
    assert scene.members == ["w1", "w3"]


def test_losses_without_a_step_are_bounded() -> None:
    scene = Scene(size=1, max_losses_without_progress=3, min_workers=1)
    for number in range(1, 9):
        scene.wait(40.0)
        if scene.coordinator.phase == "over":
            break
        scene.tell(m.WorkerStarted(f"w{number}"))
        scene.lost(f"w{number}")
    assert "losses" in scene.ever(m.FailRun)[0].error
    assert number == 5


def test_fifty_lost_at_once_are_one_incident() -> None:
    scene = Scene(size=8, max_losses_without_progress=2)
    names = [f"w{n}" for n in range(1, 9)]
    scene.running(*names)
    for name in names[1:]:
        scene.lost(name)
    assert not scene.ever(m.FailRun)


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


# --------------------------------------------------------------------------- the end


def finished(worker: str, digest: str = "D", generation: int = 1) -> m.WorkerFinished:
    return m.WorkerFinished(worker, generation, TrainingPosition(7, 1), digest)


def test_finished_when_all_living_members_are() -> None:
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


def test_one_that_did_not_finish_is_brought_to_the_end() -> None:
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


def test_user_errors_fail_the_run_once() -> None:
    scene = trio()
    scene.tell(m.WorkerFailed("w1", "KeyError: 'x'", "tb"))
    scene.tell(m.WorkerFailed("w2", "KeyError: 'x'", "tb"))
    assert scene.ever(m.FailRun) == [m.FailRun("KeyError: 'x'", "tb", "w1")]


def test_a_user_error_is_tried_again_by_another_where_the_job_says_so() -> None:
    scene = trio(max_user_errors=1)
    scene.tell(m.WorkerFailed("w1", "KeyError: 'x'", "tb"))
    scene.tell(m.WorkerFailed("w2", "KeyError: 'x'", "tb"))  # of the same step
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w1", "w2"]
    assert not scene.ever(m.FailRun)
    scene.stopped("w3")
    scene.lost("w1")
    scene.lost("w2")
    scene.wait(1.0, "w3", phase="wait")
    assert scene.members == ["w3"]
    scene.hear("w3", step=1)
    scene.tell(m.WorkerFailed("w3", "KeyError: 'y'", "tb"))  # after a step
    scene.lost("w3")
    assert scene.ever(m.FailRun)[0] == m.FailRun("KeyError: 'y'", "tb", "w3"), "nobody is left"


def test_user_errors_have_a_budget_of_their_own() -> None:
    scene = Scene(size=2, max_user_errors=2, max_losses_without_progress=1)
    scene.running("w1", "w2")
    for number in (2, 3, 4):
        assert not scene.ever(m.FailRun)
        scene.tell(m.WorkerFailed(f"w{number}", f"KeyError: {number}", "tb"))
        if number < 4:
            scene.stopped("w1")
            scene.lost(f"w{number}")
            scene.wait(2.0, "w1", phase="wait")
            scene.ready(f"w{number + 1}")
            scene.wait(0.1)
            scene.hear(*scene.members)
    assert scene.ever(m.FailRun) == [m.FailRun("KeyError: 4", "tb", "w4")]


def test_an_error_of_ours_is_never_tried_again() -> None:
    scene = trio(max_user_errors=5)
    scene.tell(m.WorkerFailed("w1", "LossError: it is NaN", "tb", ("it is NaN",)))
    assert scene.ever(m.FailRun)[0].facts == ("it is NaN",)


def die_one_by_one(scene: Scene, times: int, *how: object, step: int = 0) -> int:
    """A worker after the other beside w1, which survives; returns how many died before the run failed."""
    scene.running("w1", "w2", step=step)
    for died in range(1, times + 1):
        scene.tell(m.WorkerLost(f"w{died + 1}", "killed", *how))
        if scene.ever(m.FailRun):
            return died
        scene.stopped("w1", step=step)
        scene.wait(40.0, "w1", phase="wait", step=step)
        scene.ready(f"w{died + 2}")
        scene.wait(0.1)
        scene.hear(*scene.members, step=step)
    return times


def test_a_preemption_is_nobody_s_fault() -> None:
    scene = Scene(size=2, max_losses_without_progress=1)
    assert die_one_by_one(scene, 5, m.Cause.PREEMPTED) == 5
    assert not scene.ever(m.FailRun)


def test_out_of_memory_has_a_budget_and_words_of_its_own() -> None:
    scene = Scene(size=2, max_out_of_memory=2)
    assert die_one_by_one(scene, 9, m.Cause.OUT_OF_MEMORY) == 3
    assert "out of memory 3 times" in scene.ever(m.FailRun)[0].error


def test_a_micro_batch_that_ends_whoever_runs_it_is_named() -> None:
    scene = Scene(size=2, max_losses_of_micro_batch=3)
    assert die_one_by_one(scene, 9, m.Cause.UNKNOWN, (8, 5), step=7) == 4
    assert (
        "4 workers died while they ran virtual worker 5 of step 8" in scene.ever(m.FailRun)[0].error
    )


def test_a_micro_batch_that_was_passed_once_is_not_blamed() -> None:
    scene = Scene(size=2, max_losses_of_micro_batch=1)
    assert die_one_by_one(scene, 4, m.Cause.UNKNOWN, (7, 5), step=7) == 4


def test_there_is_a_pause_after_running_out_of_memory() -> None:
    scene = Scene(size=2, max_out_of_memory=2)
    scene.running("w1", "w2")
    scene.tell(m.WorkerLost("w2", "killed", m.Cause.OUT_OF_MEMORY))
    assert not scene.of(m.StartWorker)
    scene.stopped("w1")
    scene.wait(1.0, "w1", phase="wait")
    assert [c.worker for c in scene.ever(m.StartWorker)][-1] == "w3"


def test_a_stop_is_told_and_told_again() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.tell(m.StopRequested("enough"))
    assert len(scene.of(m.StopTraining)) == 2
    assert m.StopTraining("w1", "enough") in scene.hear("w1", step=1)
    scene.lost("w2")
    scene.stopped("w1", step=2)
    assert m.StopTraining("w1", "enough") in scene.said, "a later generation is told as it forms"


def test_one_is_enough_to_end_the_run() -> None:
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


# ----------------------------------------------------------------------- taking over


def report(worker: str, generation: int, step: int, **more: object) -> m.WorkerReported:
    values = {
        "has_state": True,
        "stopped": False,
        "signature": SIGNATURE,
        "can_source": False,
    } | more
    return m.WorkerReported(worker, generation, TrainingPosition(step), **values)


def test_a_take_over_ends_what_runs_and_goes_on_above_it() -> None:
    scene = Scene.recovered(["w1", "w2", "w9"], 6, size=2)
    assert [c.worker for c in scene.ever(m.ReportState)] == ["w1", "w2", "w9"]
    assert scene.ever(m.ClaimGeneration) == [m.ClaimGeneration(7)]
    assert m.AbortGeneration("w1", 6) in scene.tell(report("w1", 6, 5))
    scene.tell(report("w2", 6, 6, stopped=True))
    scene.stopped("w1", step=5)
    scene.stopped("w2", step=6)
    assert not scene.ever(m.FormGeneration), "w9 has not said where it stands"
    scene.tell(report("w9", 0, 0, has_state=False, signature=None))
    assert scene.coordinator.generation == 7
    assert scene.coordinator.membership.source == "w2"


def test_a_take_over_renews_no_lease_of_an_earlier_generation() -> None:
    """It was frozen for long, and thaws: alone, it would go on in it."""
    scene = Scene.recovered(["w1", "w2"], 7, size=2)
    assert m.RenewLease("w2", 1) in scene.hear("w2", generation=7)
    scene.hear("w1", generation=2)
    assert not scene.of(m.RenewLease)
    scene.hear("w1", phase="wait", generation=2)
    assert scene.of(m.RenewLease)


def test_a_lease_that_a_take_over_renewed_is_waited_for() -> None:
    """It hung before it could say where it stands, and may go on."""
    scene = Scene.recovered(["w1", "w2"], 1, size=1, lease_s=30.0)
    scene.tell(report("w2", 0, 0, has_state=False, can_source=True))
    scene.stopped("w2", has_state=False)
    scene.wait(10.0, "w1", "w2", phase="form")
    scene.wait(25.0, "w2", phase="wait")
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w1"]
    assert scene.members == [], "the lease of w1 runs for 30 s from its last answer"
    scene.wait(6.0, "w2", phase="wait")
    assert scene.members == ["w2"]


def test_an_answer_to_an_earlier_question_says_what_was() -> None:
    """It was building then; by now it may be the only one that holds the state."""
    scene = Scene.recovered(["w1"], 4, size=1)
    scene.tell(report("w1", 0, 0, has_state=False, signature=None, asked=3))
    assert m.AbortGeneration("w1", 4) in scene.tell(report("w1", 4, 12))
    scene.stopped("w1", step=12, generation=4)
    scene.wait(0.1, "w1", phase="wait")
    assert scene.coordinator.membership.source == "w1"
    assert scene.coordinator.membership.members[0].has_state


@pytest.mark.parametrize("lineage_id", [False, True])
def test_nobody_whole_after_a_take_over(lineage_id: bool) -> None:
    """Unless a step is known to have been made, the run may begin anew."""
    scene = Scene(begin=False, size=1)
    scene.coordinator, commands = scene.coordinator.recover(scene.rules, [], 3, 0.0, lineage_id)
    scene.note(commands)
    assert bool(scene.ever(m.FailRun)) is lineage_id
    assert scene.ever(m.StartWorker)


def test_identities_after_a_take_over_are_new() -> None:
    scene = Scene.recovered(["w1"], 6, size=2)
    assert [c.worker for c in scene.ever(m.StartWorker)] == ["w7.2"]


def test_an_unreported_worker_is_asked_until_it_answers_or_is_silent() -> None:
    scene = Scene.recovered(["w1", "w2"], 1, size=2, lease_s=4.0)
    scene.wait(3.0, "w1", "w2")
    assert {c.worker for c in scene.of(m.ReportState)} == {"w1", "w2"}
    scene.tell(report("w1", 1, 3))
    scene.stopped("w1", step=3)
    scene.wait(9.0, "w1", phase="wait", step=3)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w2"]
    assert scene.members == ["w1"]


def test_steps_heard_while_taking_over_are_steps() -> None:
    """The group goes on in the body it is in, so the one that is cut off lives."""
    scene = Scene.recovered(["w1", "w2"], 1, size=2, heartbeat_timeout_s=5.0)
    scene.tell(report("w1", 1, 3))
    for step in (4, 5, 6):
        scene.wait(1.0, "w1", step=step)
    scene.wait(4.0, "w1", step=6)
    assert not scene.ever(m.EvictWorker)
    scene.wait(3.0, "w1", step=6)
    assert [c.worker for c in scene.ever(m.EvictWorker)] == ["w2"]


def test_a_take_over_waits_for_a_lease_when_nobody_speaks_for_the_newest_generation() -> None:
    scene = Scene.recovered(["w1"], 4, size=1, lease_s=30.0)
    scene.tell(report("w1", 3, 3))  # generation 4 was claimed; whoever is in it, w1 is not
    scene.stopped("w1", step=3)
    scene.wait(20.0, "w1", phase="wait")
    assert scene.members == []
    scene.wait(15.0, "w1", phase="wait")
    assert scene.members == ["w1"]


def test_after_a_take_over_a_void_worker_may_found_the_run_that_nobody_holds() -> None:
    scene = Scene.recovered(["w1"], 3, size=1, lease_s=8.0)
    scene.tell(report("w1", 0, 0, has_state=False, can_source=True))
    scene.stopped("w1", has_state=False)
    scene.wait(10.0, "w1", phase="wait")
    assert scene.members == ["w1"]
    assert scene.coordinator.membership.source == "w1"


def test_after_a_take_over_who_does_not_fit_goes() -> None:
    scene = Scene.recovered(["w1", "w2"], 3, size=2)
    other = SIGNATURE._replace(kind="other")
    scene.tell(report("w2", 0, 0, has_state=False, signature=other))
    scene.tell(report("w1", 3, 5))
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w2"]


def test_after_a_take_over_who_was_building_is_asked_until_it_is_ready() -> None:
    scene = Scene.recovered(["w1", "w2"], 3, size=2)
    scene.tell(report("w1", 3, 5))
    scene.stopped("w1", step=5)
    scene.tell(report("w2", 0, 0, has_state=False, signature=None))
    assert scene.members == ["w1"]
    scene.hear("w1", step=6)
    assert "w2" in [
        c.worker
        for c in scene.hear("w2", phase="wait", generation=0)
        if isinstance(c, m.ReportState)
    ]
    scene.tell(report("w2", 0, 0, has_state=False))
    scene.wait(0.1)
    assert scene.ever(m.EndGeneration), "it joins"


def test_the_state_of_an_earlier_beginning_does_not_come_back() -> None:
    scene = Scene.recovered(["w1", "w2"], 5, size=2)
    scene.tell(report("w1", 2, 9, lineage_id=1))
    scene.tell(report("w2", 5, 3, lineage_id=4))
    scene.stopped("w1", step=9, lineage_id=1)
    scene.stopped("w2", step=3, lineage_id=4)
    assert scene.members == ["w2"]


def test_one_that_was_not_whole_when_asked_and_then_finished_hands_on_its_beginning() -> None:
    scene = Scene.recovered(["w1", "w2"], 5, size=2)
    scene.tell(report("w1", 5, 0, has_state=False))
    scene.tell(report("w2", 0, 0, has_state=False))
    scene.stopped("w2", step=0, has_state=False)
    scene.tell(m.WorkerFinished("w1", 5, TrainingPosition(9, 1), "digest", lineage_id=4))
    membership = scene.coordinator.membership
    assert membership.generation == 6
    assert membership.source == "w1"
    assert membership.lineage_id == 4


# --------------------------------------------------------------------- old generations


OLD = [
    m.WorkerStopped("w1", 1, TrainingPosition(99), True, "old"),
    m.WorkerStopped("w2", 1, TrainingPosition(0), False, "old", ("w1",)),
    m.WorkerFinished("w1", 1, TrainingPosition(99, 1), "old"),
    m.HeartbeatReceived("w1", 1, 99, "done"),
    m.HeartbeatReceived("w2", 1, 99, "wait"),
    m.GenerationClaimed(1),
    m.GenerationClaimed(2),
    m.WorkerStarted("w1"),
    m.WorkerReady("w1", SIGNATURE, True),
    m.WorkerReported("w1", 1, TrainingPosition(99), True, True, SIGNATURE, True),
    m.WorkerLost("w3", "again"),
    m.WorkerFailed("w3", "error of the dead", ""),
    m.WorkerStarted("w3"),
    m.WorkerReady("w3", SIGNATURE, True),
    m.WorkerStopped("w3", 2, TrainingPosition(99), True, "dead"),
    m.WorkerFinished("w3", 2, TrainingPosition(99, 1), "dead"),
    m.DrainNoticed("w3", 1.0),
    m.DeadlineReached(),
]


@pytest.mark.parametrize("event", OLD, ids=repr)
@pytest.mark.parametrize("phase", ["forming", "running", "ending"])
def test_old_messages_change_nothing(event: m.Event, phase: str) -> None:
    scene = trio(min_workers=2)
    scene.lost("w3")
    scene.stopped("w1", step=4)
    scene.stopped("w2", step=4)
    assert scene.coordinator.generation == 2
    if phase != "forming":
        scene.hear("w1", "w2", step=5)
    if phase == "ending":
        scene.stopped("w1", step=5)
    assert scene.coordinator.phase == phase

    def known() -> dict[str, object]:
        state = facts(scene.coordinator)
        fence = state.pop("_generation.fence")  # but for the lease, which a heartbeat renews
        state["fence"] = fence.exit_confirmed, sorted(fence.unconfirmed_dead)
        workers = {
            w.id: (w.stage, w.position, w.has_state, w.finished)
            for w in state.pop("_registry.workers").values()
        }
        alarms = vars(state.pop("_run.timers"))
        words = {k: str(v) for k, v in (state | alarms).items()}
        return copy.deepcopy(words | {"workers": workers})

    before = known()
    answers = scene.tell(event)
    allowed = (m.RenewLease, m.AbortGeneration) if isinstance(event, m.HeartbeatReceived) else ()
    assert [c for c in answers if not isinstance(c, allowed)] == []
    after = known()
    if isinstance(event, m.HeartbeatReceived):
        for key in ("_generation.steps", "workers"):
            before.pop(key), after.pop(key)
    assert after == before


# ---------------------------------------------------------------------------- checkpoints


def bereft(**rules: object) -> Scene:
    """Three trained up to step 9, two more were about to join; then the three are lost."""
    scene = Scene(size=3, **rules)
    scene.running("w1", "w2", "w3")
    scene.committed = 5
    scene.hear("w1", "w2", "w3", step=9)
    for worker in ("w1", "w2", "w3"):
        scene.lost(worker)
    return scene


def test_who_loses_everyone_goes_back_to_the_newest_checkpoint() -> None:
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


def test_without_a_checkpoint_the_run_is_lost() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.lost("w1")
    scene.lost("w2")
    assert "there is no checkpoint" in scene.ever(m.FailRun)[0].error


def test_who_reads_the_checkpoint_may_die_and_another_does_it() -> None:
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


def test_other_machines_may_go_on_from_a_checkpoint() -> None:
    scene = bereft(min_workers=1)
    scene.ready("w4", kind="another")
    scene.wait(0.1)
    assert scene.members == ["w4"]
    scene.ready("w5")  # now it is this one that is of another kind
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w5"]


def test_places_given_up_are_filled_again_after_going_back() -> None:
    """Then others may fit."""
    scene = Scene(size=2, max_rejections=0)
    scene.ready("w1")
    scene.ready("w2", kind="another")
    scene.wait(0.1)
    scene.hear("w1")
    scene.committed = 5
    assert len(scene.ever(m.StartWorker)) == 2
    scene.lost("w1")
    assert len(scene.ever(m.StartWorker)) == 4


def test_a_controller_that_slept_over_the_search_asks_whether_it_leads() -> None:
    scene = Scene(size=1, begin=False, claims=False)
    scene.coordinator.start(0.0)
    scene.now = 60.0
    assert scene.tell(m.CheckpointFound(None)) == [m.ClaimGeneration(1)]


def test_who_decided_what_fits_is_lost_before_the_run_has_begun() -> None:
    """Then those for whom there was no place may fit."""
    scene = Scene(size=2, max_rejections=0)
    scene.ready("w1")
    scene.ready("w2", kind="another")
    scene.wait(0.1)
    assert len(scene.ever(m.StartWorker)) == 2
    scene.lost("w1")
    scene.wait(1.0)
    assert len(scene.ever(m.StartWorker)) == 4


def test_leavers_alone_wait_for_no_joiner() -> None:
    """Nobody may come any more: the run is being stopped."""
    scene = trio()
    scene.tell(m.SizeRequested(1))
    for worker in scene.members:
        scene.stopped(worker, step=4)
    assert scene.members == ["w1"]
    scene.tell(m.StopRequested("enough"))
    scene.lost("w1")
    assert scene.members == ["w2"]


def test_going_back_is_no_progress_until_the_run_is_further_than_before() -> None:
    """A step that kills everyone, again and again, though a few steps lie between it and the checkpoint."""
    scene = Scene(size=1, max_losses_without_progress=4)
    scene.running("w1")
    scene.committed = 5
    scene.hear("w1", step=9)
    for number in range(1, 6):
        assert not scene.ever(m.FailRun)
        scene.lost(f"w{number}")
        scene.wait(60.0)
        scene.ready(f"w{number + 1}")
        scene.wait(0.1)
        for step in range(5, 10):
            scene.hear(f"w{number + 1}", step=step)
    assert scene.ever(m.FailRun)


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


def test_a_loss_that_costs_no_pause_ends_none() -> None:
    scene = Scene(size=3, max_out_of_memory=5)
    scene.running("w1", "w2", "w3")
    scene.tell(m.WorkerLost("w2", "killed", m.Cause.OUT_OF_MEMORY))
    scene.lost("w3")
    assert not scene.of(m.StartWorker)


def test_progress_that_was_heard_of_late_forgives_no_later_micro_batch() -> None:
    scene = Scene(size=3, max_losses_of_micro_batch=1)
    scene.running("w1", "w2", "w3")
    scene.tell(m.WorkerLost("w2", "killed", micro_batch=(8, 5)))
    scene.hear("w1", "w3", step=7)
    scene.tell(m.WorkerLost("w3", "killed", micro_batch=(8, 5)))
    assert "of step 8" in scene.ever(m.FailRun)[0].error


@pytest.mark.parametrize("exact", [True, False])
def test_a_joiner_with_other_software_is_refused_and_what_differs_is_named(exact: bool) -> None:
    scene = Scene(size=2, exact=exact, max_rejections=1)
    scene.running("w1", software=(("Python", "3.11"), ("torch", "2.13")))
    scene.ready("w2", software=(("Python", "3.12"), ("torch", "2.13")))
    assert m.ReleaseWorker("w2", "does not fit this run: Python '3.12', not '3.11'") in scene.all
    scene.ready("w3", software=(("Python", "3.11"), ("NCCL", "2.27"), ("torch", "2.12")))
    assert [c.worker for c in scene.ever(m.ReleaseWorker)] == ["w2", "w3"]
    assert (
        "torch '2.12', not '2.13', NCCL '2.27', not None" in scene.ever(m.ReleaseWorker)[1].reason
    )
    assert scene.members == ["w1"], "the group did not pause for them"
    assert not scene.ever(m.EndGeneration)


def held(*facts: m.Event, at_once: int = 2) -> Scene:
    """A coordinator that slept while these came, and has confirmed since that it leads."""
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.coordinator._leadership.at_once = at_once
    scene.claims = False
    scene.now += 60.0
    for fact in facts:
        scene.tell(fact)
    (claim,) = scene.ever(m.ClaimGeneration)[-1:]
    scene.tell(m.GenerationClaimed(claim.generation))
    return scene


def test_what_was_held_is_taken_in_parts_and_in_its_order() -> None:
    scene = held(*(m.SizeRequested(size) for size in (3, 4, 5)))
    assert scene.coordinator.size == 3, "the claim is the first of two"
    assert scene.coordinator.deadline == scene.now
    scene.tell(m.SizeRequested(6))
    assert scene.coordinator.size == 5
    scene.tell(m.DeadlineReached())
    assert scene.coordinator.size == 6
    assert scene.coordinator.deadline != scene.now


def test_who_slept_again_before_all_of_it_was_taken_confirms_again() -> None:
    scene = held(*(m.SizeRequested(size) for size in (3, 4, 5)))
    scene.now += 60.0
    claims = len(scene.ever(m.ClaimGeneration))
    scene.tell(m.SizeRequested(6))
    assert scene.coordinator.size == 3
    (claim,) = scene.ever(m.ClaimGeneration)[claims:]
    scene.tell(m.GenerationClaimLost(claim.generation))
    assert (scene.coordinator.phase, scene.coordinator.size) == ("over", 3)


def test_a_run_that_ends_by_what_was_held_knows_who_is_gone() -> None:
    scene = held(
        m.WorkerFailed("w1", "ValueError: no", ""), m.WorkerLost("w1", "x"), m.WorkerLost("w2", "x")
    )
    assert scene.coordinator.phase == "over"
    assert not scene.coordinator.workers
