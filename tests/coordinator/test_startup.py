"""Who starts the run: the source of its first state, layouts, and joiners that do not fit."""

from __future__ import annotations

import zlib

import pytest

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenes import SIGNATURE, Scene


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


def test_source_that_dies_before_forming_is_replaced() -> None:
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


def test_fresh_worker_becomes_the_source_when_all_others_cannot() -> None:
    scene = Scene(size=2, min_workers=2)
    scene.tell(m.WorkerStarted("w1"))
    scene.ready("w2", can_source=False)
    scene.lost("w1")
    scene.ready("w3")
    assert m.BeginTraining("w3", True) in scene.all
    assert scene.coordinator.membership.source == "w3"


def test_source_that_dies_as_it_hands_over_is_replaced() -> None:
    """No worker is past forming yet, so any other can be the source."""
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


def test_worker_that_cannot_be_the_source_makes_room_for_one_that_can() -> None:
    scene = Scene(size=2, min_workers=2, source_timeout_s=20.0)
    scene.tell(m.WorkerStarted("w1"))
    scene.ready("w2", can_source=False)
    scene.lost("w1")
    scene.wait(25.0, "w2", phase="wait")
    assert [c.worker for c in scene.of(m.ReleaseWorker)] == ["w2"]


def test_worker_that_received_part_of_the_state_cannot_be_the_source() -> None:
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
def test_layout_difference_names_the_first_line_that_differs(lines: str, words: str) -> None:
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


def test_slots_of_rejected_workers_are_filled_again_when_the_reference_worker_is_lost() -> None:
    """The first worker decided what fits; without it, the rejected kinds may fit."""
    scene = Scene(size=2, max_rejections=0)
    scene.ready("w1")
    scene.ready("w2", kind="another")
    scene.wait(0.1)
    assert len(scene.ever(m.StartWorker)) == 2
    scene.lost("w1")
    scene.wait(1.0)
    assert len(scene.ever(m.StartWorker)) == 4


@pytest.mark.parametrize("exact", [True, False])
def test_joiner_with_other_software_is_refused_with_the_difference(exact: bool) -> None:
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
