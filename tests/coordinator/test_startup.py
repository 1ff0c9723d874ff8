"""Who starts the run: the source of its first state, layouts, and joiners that do not fit."""

import zlib

import pytest

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import SIGNATURE, Scenario


def test_the_first_to_start_is_the_source_and_the_first_group_needs_it():
    scenario = Scenario(size=3, standby=1)
    assert [c.worker for c in scenario.ever(m.StartWorker)] == ["w1", "w2", "w3", "w4"]
    scenario.tell(m.WorkerStarted("w2"))
    scenario.ready("w1", "w3")
    assert m.BeginTraining("w2", True) in scenario.all
    assert m.BeginTraining("w1", False) in scenario.all
    assert not scenario.ever(m.FormGeneration)
    scenario.tell(m.WorkerReady("w2", SIGNATURE, True))
    assert sorted(scenario.members) == ["w1", "w2", "w3"]
    assert scenario.coordinator.membership.source == "w2"
    assert not any(member.has_state for member in scenario.coordinator.membership.members)


def test_pending_workers_hold_nobody_up_and_a_burst_makes_one_change():
    scenario = Scenario(size=3, min_workers=1, join_window_s=0.05)
    scenario.ready("w1")
    assert not scenario.ever(m.FormGeneration)
    scenario.ready("w2")
    scenario.wait(0.1)
    assert sorted(scenario.members) == ["w1", "w2"]


def test_source_that_dies_before_forming_is_replaced():
    scenario = Scenario(size=3, min_workers=2)
    scenario.ready("w1")
    scenario.ready("w2", can_source=False)
    scenario.ready("w3", can_source=True)  # it never asked
    assert scenario.coordinator.membership.source == "w1"  # formed with all
    late = Scenario(size=3, min_workers=3)
    late.tell(m.WorkerStarted("w1"))
    late.ready("w2", can_source=False)
    late.ready("w3", can_source=True)
    late.lost("w1")
    late.ready("w4")
    assert late.coordinator.membership.source == "w3"


def test_fresh_worker_becomes_the_source_when_all_others_cannot():
    scenario = Scenario(size=2, min_workers=2)
    scenario.tell(m.WorkerStarted("w1"))
    scenario.ready("w2", can_source=False)
    scenario.lost("w1")
    scenario.ready("w3")
    assert m.BeginTraining("w3", True) in scenario.all
    assert scenario.coordinator.membership.source == "w3"


def test_source_that_dies_as_it_hands_over_is_replaced():
    """No worker is past forming yet, so any other can be the source."""
    scenario = Scenario(size=2)
    scenario.ready("w1", "w2", can_source=True)
    scenario.wait(0.1)
    scenario.hear("w1", phase="give")
    scenario.hear("w2", phase="receive")
    assert scenario.coordinator.phase == "forming"
    scenario.lost("w1")
    scenario.stopped("w2", has_state=False)
    assert not scenario.ever(m.FailRun)
    scenario.ready("w3", can_source=True)
    scenario.wait(0.1, "w2")
    assert set(scenario.members) == {"w2", "w3"} and scenario.coordinator.membership.source == "w3"


def test_worker_that_cannot_be_the_source_makes_room_for_one_that_can():
    scenario = Scenario(size=2, min_workers=2, source_timeout_s=20.0)
    scenario.tell(m.WorkerStarted("w1"))
    scenario.ready("w2", can_source=False)
    scenario.lost("w1")
    scenario.wait(25.0, "w2", phase="wait")
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w2"]


def test_worker_that_received_part_of_the_state_cannot_be_the_source():
    scenario = Scenario(size=2, min_workers=2)
    scenario.ready("w1")
    scenario.ready("w2", can_source=True)
    assert scenario.members == ["w1", "w2"]
    scenario.lost("w1")  # in the middle of the hand-over
    scenario.stopped("w2", has_state=False)
    scenario.ready("w3")
    assert scenario.coordinator.membership.source == "w3"


@pytest.mark.parametrize("running", [False, True])
def test_layouts_that_differ_fail_the_run(running):
    """All run the same function, so a layout of its own is that function's doing."""
    scenario = Scenario(size=2, min_workers=1 if running else 2)
    scenario.ready("w1")
    if running:
        scenario.wait(0.1)
        scenario.hear("w1")
    scenario.ready("w2", layout="other")
    assert "shapes" in scenario.ever(m.FailRun)[0].error


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("weight (4,)\nbias (3,)", "'bias (3,)', not 'bias (2,)'"),
        ("weight (4,)", "'nothing', not 'bias (2,)'"),
        ("weight (4,)\nbias (2,)\nscale (1,)", "'scale (1,)', not 'nothing'"),
    ],
)
def test_layout_difference_names_the_first_line_that_differs(lines, words):
    scenario = Scenario(size=2)
    scenario.ready("w1", lines=zlib.compress(b"weight (4,)\nbias (2,)"))
    scenario.ready("w2", layout="other", lines=zlib.compress(lines.encode()))
    assert scenario.ever(m.FailRun)[0].error.endswith(words)


@pytest.mark.parametrize(
    ("field", "exact", "fits"),
    [("kind", True, False), ("kind", False, True), ("data", True, False)],
)
def test_a_newcomer_must_fit(field, exact, fits):
    scenario = Scenario.training("w1", size=2, exact=exact)
    scenario.ready("w2", **{field: "other"})
    released = [c for c in scenario.said if isinstance(c, m.ReleaseWorker)]
    assert bool(released) is not fits
    assert fits or field in released[0].reason


def test_misfits_are_replaced_a_bounded_number_of_times():
    scenario = Scenario.training("w1", size=2, max_rejections=2)
    for number in range(2, 10):
        if scenario.coordinator.workers.get(f"w{number}") == "starting":
            scenario.ready(f"w{number}", kind="other")
    assert [c.worker for c in scenario.ever(m.StartWorker)] == ["w1", "w2", "w3", "w4"]


def test_slots_of_rejected_workers_are_filled_again_when_the_reference_worker_is_lost():
    """The first worker decided what fits; without it, the rejected kinds may fit."""
    scenario = Scenario(size=2, max_rejections=0)
    scenario.ready("w1")
    scenario.ready("w2", kind="another")
    scenario.wait(0.1)
    assert len(scenario.ever(m.StartWorker)) == 2
    scenario.lost("w1")
    scenario.wait(1.0)
    assert len(scenario.ever(m.StartWorker)) == 4


@pytest.mark.parametrize("exact", [True, False])
def test_joiner_with_other_software_is_refused_with_the_difference(exact):
    scenario = Scenario(size=2, exact=exact, max_rejections=1)
    scenario.running("w1", software=(("Python", "3.11"), ("torch", "2.13")))
    scenario.ready("w2", software=(("Python", "3.12"), ("torch", "2.13")))
    assert m.ReleaseWorker("w2", "does not fit this run: Python '3.12', not '3.11'") in scenario.all
    scenario.ready("w3", software=(("Python", "3.11"), ("NCCL", "2.27"), ("torch", "2.12")))
    assert [c.worker for c in scenario.ever(m.ReleaseWorker)] == ["w2", "w3"]
    assert (
        "torch '2.12', not '2.13', NCCL '2.27', not None"
        in scenario.ever(m.ReleaseWorker)[1].reason
    )
    assert scenario.members == ["w1"], "the group did not pause for them"
    assert not scenario.ever(m.EndGeneration)
